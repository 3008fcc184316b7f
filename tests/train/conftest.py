"""Small models and corpora for the tests of nano-k2's training."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb.train.corpus import Document
from kdtree_nb.train.nano.recipe import CPU_CONFIG, Recipe
from kdtree_nb.train.nano.tokenizer import save_tokenizer, train_bpe
from kdtree_nb.train.nano.tokens import encode_corpus

VOCAB_SIZE = 280


@pytest.fixture(autouse=True)
def single_thread():
    """Small matrices are faster on one thread, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def toy_documents() -> dict[str, list[Document]]:
    """A little text for every stream."""
    rng = np.random.default_rng(0)

    def text(words: str) -> bytes:
        return "".join(
            f"    {w} = {w}_{i % 7} + self.{w}\n" for i, w in enumerate(rng.choice(words.split(), 400))
        ).encode()

    return {
        "train": [Document(f"a/{i}.py", text("value index total node")) for i in range(6)],
        "code": [Document("b/0.py", text("value other"))],
        "prose": [Document("c/0.rst", text("some prose"))],
    }


@pytest.fixture(scope="session")
def toy_tokenizer(tmp_path_factory, toy_documents):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(path, train_bpe(toy_documents["train"], VOCAB_SIZE))
    return path


@pytest.fixture(scope="session")
def toy_corpus(toy_documents, toy_tokenizer):
    return encode_corpus(toy_documents, toy_tokenizer, "toy", "")


@pytest.fixture(scope="session")
def toy_config():
    """K2's structure in its smallest useful size."""
    return dataclasses.replace(
        CPU_CONFIG, vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=32,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=2,
        max_position_embeddings=128,
    )  # fmt: skip


@pytest.fixture(scope="session")
def toy_recipe() -> Recipe:
    return Recipe(num_steps=24, batch_tokens=128, context_cycle=(32, 32, 64), num_eval_windows=2, eval_context=32)
