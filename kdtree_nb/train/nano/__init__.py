"""The training of `nano-k2`: pinned corpus, tokenizer, target, export, and the text that its drafter learns from."""
