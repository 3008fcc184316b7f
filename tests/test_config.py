"""ModelConfig: what a checkpoint's config may say."""

from __future__ import annotations

import math

import pytest

from kdtree_nb.config import ModelConfig, Yarn
from kdtree_nb.errors import CheckpointError
from kdtree_nb.tiny2 import tiny2_config

FIELDS = tiny2_config().to_dict()


def test_a_dictionary_gives_the_config_back():
    assert ModelConfig.from_dict(FIELDS) == tiny2_config()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [-1, "x", 1.5j, {}, [None], 10**30, math.nan])
def test_impossible_values_name_the_field(field, value):
    if field in ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "latent_norm_eps") and value == 10**30:
        return
    with pytest.raises(CheckpointError, match=f"model config: {field}: (expected|unknown fields)"):
        ModelConfig.from_dict(FIELDS | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0), ("vocab_size", True), ("n_shared_experts", None), ("n_shared_experts", 0.5),
        ("first_k_dense_replace", 7), ("num_experts_per_tok", 7), ("qk_rope_head_dim", 11), ("rms_norm_eps", 0),
        ("rope_theta", math.inf), ("norm_topk_prob", None), ("scoring_func", "top"), ("eos_token_ids", None),
        ("eos_token_ids", [331]), ("eos_token_ids", [1.5]), ("max_position_embeddings", 10**8),
        ("qk_rope_head_dim", 2**20), ("n_group", 0), ("n_group", 4), ("topk_group", 2), ("use_router_bias", 1),
        ("tie_word_embeddings", None), ("latent_norm_eps", 0.0), ("rope_scaling", 3), ("rope_theta", 1),
        ("num_hidden_layers", 2**30), ("n_routed_experts", 2**30),
        ("rope_theta", 10**400), ("rms_norm_eps", 1e-320), ("routed_scaling_factor", 1e39),
    ],
)  # fmt: skip
def test_single_values(field, value):
    with pytest.raises(CheckpointError, match=f"model config: {field}: expected"):
        ModelConfig.from_dict(FIELDS | {field: value})


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def test_yarn_comes_back_from_a_dictionary():
    config = ModelConfig.from_dict(FIELDS | {"rope_scaling": YARN})
    assert config.rope_scaling == Yarn(4.0, 64)
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [("factor", 0), ("factor", math.nan), ("original_max_position_embeddings", 1.5), ("beta_fast", -1), ("mscale", "1"),
     ("mscale_all_dim", math.inf), ("attention_factor", 0), ("other", 1), ("beta_fast", 10**400), ("beta_slow", 1e-320),
     ("mscale", 10**400), ("factor", 1e300)],
)  # fmt: skip
def test_single_values_of_yarn(field, value):
    with pytest.raises(CheckpointError, match=f"rope_scaling: ({field}: expected|unknown fields)"):
        ModelConfig.from_dict(FIELDS | {"rope_scaling": YARN | {field: value}})


def test_the_magnitudes_of_yarn():
    """Derived from the published formula: 0.1 ln 64 + 1 = 1.41589, squared 2.00474; V2-Lite's 0.707 at 40: 1.58963."""
    kimi = Yarn(64.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert kimi.amplitude == 1.0 and math.isclose(kimi.softmax_factor, 2.00474, rel_tol=1e-5)
    lite = Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert lite.amplitude == 1.0 and math.isclose(lite.softmax_factor, 1.58963, rel_tol=1e-5)
    plain = Yarn(4.0, 64)
    assert math.isclose(plain.amplitude, 0.1 * math.log(4) + 1) and plain.softmax_factor == 1.0
    assert Yarn(4.0, 64, attention_factor=1.25).amplitude == 1.25
    assert Yarn(1.0, 64).amplitude == 1.0


def test_unknown_and_missing_fields_are_named():
    lacking = {name: value for name, value in FIELDS.items() if name != "rope_theta"}
    with pytest.raises(CheckpointError, match=r"unknown fields \['extra'\], missing fields \['rope_theta'\]"):
        ModelConfig.from_dict(lacking | {"extra": 1})
