"""Random schedules of streams that join, leave and are cancelled, compared bit for bit with each text decoded alone.

`python -m tests.speculate.schedules --count 200` runs many of them; on a GPU with `--device cuda`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from tqdm import tqdm

from kdtree_nb import Engine, Sampling, drafters, load_model
from kdtree_nb.drafters.base import StreamDraft, stack
from kdtree_nb.errors import QueueFullError
from kdtree_nb.speculate import engine as engine_module

LENGTH = 40
SAMPLINGS = (None, Sampling(0.8, seed=3), Sampling(1.3, top_k=20, top_p=0.9, seed=2**40))
KINDS = ("none", "foresight", "ngram", "skip gram", "dflash")


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt, how its tokens are drawn, and what AR decoding alone gives for it: LENGTH tokens with logits."""

    prompt: list[int]
    sampling: Sampling | None
    tokens: list[int]
    logits: torch.Tensor


def solo_texts(model, num_prompts: int = 10) -> list[Text]:
    """Texts of prompts of 1 … 300 tokens, led by the host, each with every kind of sampling."""
    rng, V = np.random.default_rng(0), model.config.vocab_size
    lengths = [1, 2, 300, *rng.integers(3, 40, num_prompts - 3)]
    prompts = [rng.integers(0, V, length).tolist() for length in lengths]
    engine, texts = Engine(model, use_graphs=False), []
    for prompt in prompts:
        for sampling in SAMPLINGS:
            got = engine.generate_ar(prompt, LENGTH, sampling=sampling, stop_token_ids=(), return_logits=True)
            texts.append(Text(prompt, sampling, got.tokens, got.logits))
    return texts


class Foresight:
    """Knows the texts that may come, but mixes other tokens in, and now and then is wrong from some depth on."""

    depth = 5

    def __init__(self, texts: Sequence[Text], seed: int) -> None:
        self.texts = collections.defaultdict(list)
        for text in texts:
            self.texts[tuple(text.prompt)].append(text.tokens)
        self.random = np.random.default_rng(seed)

    def draft(self, context):
        rows = zip(context.tokens, context.num_prompt_tokens, strict=True)
        return stack([self._draft(tokens, count, context) for tokens, count in rows], context.device)

    def _draft(self, tokens, num_prompt_tokens, context):
        width, emitted = min(4, context.vocab_size), tokens[num_prompt_tokens:]
        known = self.texts[tuple(tokens[:num_prompt_tokens])]
        text = next(text for text in known if text[: len(emitted)] == emitted)
        ahead = text[len(emitted) : len(emitted) + self.depth]
        ids = np.stack([self.random.permutation(context.vocab_size)[:width] for _ in range(self.depth)])
        for level, token in enumerate(ahead):
            if token not in ids[level] and self.random.random() < 0.9:
                ids[level, self.random.integers(width)] = token
        mass = -np.sort(-self.random.dirichlet(np.ones(width), self.depth))
        return StreamDraft(np.log(np.maximum(mass, 1e-9)).astype(np.float32), ids)


def make_drafter(kind: str, model, texts: Sequence[Text], seed: int):
    """A drafter of one of KINDS: none, on the host, on the device, on the device with hidden states (for tiny2)."""
    V = model.config.vocab_size
    if kind == "foresight":
        return Foresight(texts, seed)
    if kind == "skip gram":
        return drafters.SkipGram(sum((t.prompt + t.tokens for t in texts), []), V, depth=5, min_count=2)
    if kind == "dflash":
        sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        dims = {"hidden_size": model.config.hidden_size, "head_dim": 16, "vocab_size": V, "block_size": 5}
        config = drafters.DFlashConfig(**sizes, **dims, target_layer_ids=(0, 2), mask_token_id=V - 1)
        return drafters.DFlash.random(config)
    return drafters.NGram() if kind == "ngram" else None


@dataclasses.dataclass
class Tally:
    """What happened, so that a run can say that it saw what it was made for."""

    streams: int = 0
    cancelled: int = 0
    refused: int = 0
    joined_others: int = 0
    sampled: int = 0
    accepted: int = 0
    tokens: int = 0


@dataclasses.dataclass
class Schedule:
    """One engine and a random order of events. `run` raises AssertionError on the first bit that differs."""

    model: object
    texts: Sequence[Text]
    seed: int
    tally: Tally = dataclasses.field(default_factory=Tally)
    steps: str | None = None

    def __post_init__(self) -> None:
        self.random = rng = random.Random(self.seed)
        kind = rng.choice(KINDS)
        drafter = make_drafter(kind, self.model, self.texts, self.seed)
        self.budget = 0 if drafter is None else rng.choice([1, 3, 8, 16, 33])
        places = {"max_streams": rng.choice([1, 2, 3, 10]), "max_waiting": rng.choice([0, 2, 20])}
        self.engine = Engine(self.model, drafter, self.budget, mode=rng.choice(["tree", "tree", "chain"]), **places)
        if self.steps:
            self.engine._kind = getattr(engine_module, self.steps.upper())
        self.limit = sum(places.values())
        self.submitted = []

    def run(self) -> None:
        """Events until all streams have finished; then everything is compared."""
        left = self.random.randrange(2, 20)
        while left or not all(handle.is_finished for handle, *_ in self.submitted):
            for _ in range(self.random.choice([0, 0, 1, 1, 4])):
                left -= left > 0 and self._submit()
            self.random.choice([self.engine.step] * 6 + [self._read, self._cancel])()
        assert not self.engine.step()
        for submitted in self.submitted:
            self._compare(*submitted)

    def _submit(self) -> bool:
        rng, text = self.random, self.random.choice(self.texts)
        count = rng.choice([0, 1, 2, 7, 20, LENGTH, LENGTH])
        stop = [rng.choice(text.tokens[3:])] if rng.random() < 0.3 else []
        options = {"budget": rng.choice([None, None, 0, rng.randrange(self.budget + 1)]), "stop_token_ids": stop}
        options |= {"return_logits": rng.random() < 0.3, "sampling": text.sampling}
        unfinished = [handle for handle, *_ in self.submitted if not handle.is_finished]
        try:
            handle = self.engine.submit(text.prompt, count, **options)
        except QueueFullError:
            assert len(unfinished) == self.limit
            self.tally.refused += 1
            return False
        assert len(unfinished) < self.limit
        self.tally.joined_others += bool(unfinished)
        self.submitted.append((handle, text, count, stop))
        return True

    def _read(self) -> None:
        for handle, *_ in self.random.sample(self.submitted, min(1, len(self.submitted))):
            for place, _token in zip(range(self.random.randrange(1, 9)), handle, strict=False):
                assert len(handle.tokens) > place

    def _cancel(self) -> None:
        unfinished = [handle for handle, *_ in self.submitted if not handle.is_finished]
        if unfinished and self.random.random() < 0.3:
            assert self.random.choice(unfinished).cancel()

    def _compare(self, handle, text, count, stop) -> None:
        got, want, reason = handle.result(), text.tokens[:count], "length"
        ends = [place for place, token in enumerate(want) if token in stop]
        if ends:
            want, reason = want[: ends[0] + 1], "eos"
        if got.finish_reason == "cancelled":
            want, reason = want[: len(got.tokens)], "cancelled"
        told = f"schedule {self.seed}, stream {handle.index}"
        assert got.tokens == want == list(handle) == handle.tokens, f"{told}: expected {want}, got {got.tokens}"
        assert got.finish_reason == reason, f"{told}: expected {reason}, got {got.finish_reason}"
        assert got.logits is None or torch.equal(got.logits, text.logits[: len(want)]), f"{told}: logits differ"
        assert len(handle.latency.token_s) == len(want) == got.stats.num_tokens, told
        cut_short = sum(got.stats.accepted_per_step) + got.stats.num_target_forwards - len(want)
        assert cut_short in (0, 1), told  # the end may lie inside an accepted path
        self.tally.streams += 1
        self.tally.cancelled += reason == "cancelled"
        self.tally.sampled += text.sampling is not None
        self.tally.accepted += sum(got.stats.accepted_per_step)
        self.tally.tokens += len(want)


def main() -> int:
    """Many schedules, of both models; prints what they saw, or the first difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--steps", choices=["host", "device"], help="who leads the steps; default: as the engine has it"
    )
    args = parser.parse_args()
    for name in ("tiny", "tiny2"):
        model = load_model(name, args.device, getattr(torch, args.dtype))
        texts, tally, start = solo_texts(model), Tally(), time.perf_counter()
        for seed in tqdm(range(args.first, args.first + args.count), desc=name, file=sys.stderr):
            Schedule(model, texts, seed, tally, args.steps).run()
        seconds = time.perf_counter() - start
        print(f"{name} {args.dtype} on {args.device}: {args.count} schedules in {seconds:.0f} s, all equal: {tally}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
