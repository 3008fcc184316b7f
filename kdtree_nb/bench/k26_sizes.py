"""The published dimensions of Kimi K2.6, and the same structure in small, with fewer layers, or one."""

from __future__ import annotations

import dataclasses

from kdtree_nb.hf.config import HfConfig
from kdtree_nb.model.checkpoint import DATA_DIR

CONFIG = DATA_DIR / "kimi-k2.6"
"""The folder of the published dimensions."""

LAYER_VOCAB = 1024
"""Vocabulary beside the single layer, whose embedding and head are left out of the account."""

_SMALL_SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 512,
    "moe_intermediate_size": 256, "max_position_embeddings": 8192,
}  # fmt: skip


def small(config: HfConfig) -> HfConfig:
    """The same structure in small: as many experts, of which a token takes as many, in narrow layers."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, eos_token_ids=(), **_SMALL_SIZES))


def with_layers(config: HfConfig, num_layers: int) -> HfConfig:
    """The first num_layers layers. Raises ValueError for more than there are."""
    if not 1 <= num_layers <= config.model.num_hidden_layers:
        raise ValueError(f"--layers: expected 1 … {config.model.num_hidden_layers}, got {num_layers}")
    first_dense = min(config.model.first_k_dense_replace, num_layers)
    fields = {"num_hidden_layers": num_layers, "first_k_dense_replace": first_dense}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))


def single_layer(config: HfConfig) -> HfConfig:
    """One layer with experts, between an embedding and a head of few tokens."""
    vocab_size = min(LAYER_VOCAB, config.model.vocab_size)
    fields = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": vocab_size, "eos_token_ids": ()}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **fields))
