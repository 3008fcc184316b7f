"""ModelConfig: what a checkpoint's config may say."""

from __future__ import annotations

import math

import pytest

from kdtree_nb.config import ModelConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.tiny2 import tiny2_config

FIELDS = tiny2_config().to_dict()


def test_a_dictionary_gives_the_config_back():
    assert ModelConfig.from_dict(FIELDS) == tiny2_config()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [-1, "x", 1.5j, {}, [None], 10**30, math.nan])
def test_impossible_values_name_the_field(field, value):
    if field in ("rms_norm_eps", "rope_theta", "routed_scaling_factor") and value == 10**30:
        return
    with pytest.raises(CheckpointError, match=f"model config: {field}: expected"):
        ModelConfig.from_dict(FIELDS | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0), ("vocab_size", True), ("n_shared_experts", None), ("n_shared_experts", 0.5),
        ("first_k_dense_replace", 7), ("num_experts_per_tok", 7), ("qk_rope_head_dim", 11), ("rms_norm_eps", 0),
        ("rope_theta", math.inf), ("norm_topk_prob", None), ("scoring_func", "top"), ("eos_token_ids", None),
        ("eos_token_ids", [331]), ("eos_token_ids", [1.5]), ("max_position_embeddings", 10**8),
        ("qk_rope_head_dim", 2**20),
    ],
)  # fmt: skip
def test_single_values(field, value):
    with pytest.raises(CheckpointError, match=f"model config: {field}: expected"):
        ModelConfig.from_dict(FIELDS | {field: value})


def test_unknown_and_missing_fields_are_named():
    lacking = {name: value for name, value in FIELDS.items() if name != "rope_theta"}
    with pytest.raises(CheckpointError, match=r"unknown fields \['extra'\], missing fields \['rope_theta'\]"):
        ModelConfig.from_dict(lacking | {"extra": 1})
