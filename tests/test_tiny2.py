"""tiny2: shapes, reproducible bits, BF16 values, texts that vary."""

from __future__ import annotations

import hashlib

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights


def digest(weights: dict[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes and bits."""
    sha = hashlib.sha256()
    for name, array in weights.items():
        sha.update(f"{name}{array.shape}{array.dtype}".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def test_same_bits_for_one_seed_and_others_for_another():
    assert digest(tiny2_weights()) == digest(tiny2_weights())
    assert digest(tiny2_weights(seed=7)) != digest(tiny2_weights())


def test_every_weight_is_a_bf16_value():
    for name, array in tiny2_weights().items():
        assert array.dtype == np.float32, name
        assert not (array.view(np.uint32) & 0xFFFF).any(), name  # the half that BF16 drops


def test_scales():
    for name, array in tiny2_weights().items():
        deviation = array.std(dtype=np.float64)
        if array.ndim == 1:
            assert np.abs(array - 1).max() <= 0.25 and deviation > 0.1, name
        elif name == "model.embed_tokens.weight":
            assert 1.0 < deviation < 1.3
        else:
            assert 0.6 < deviation * np.sqrt(array.shape[1]) < 1.5, name
            assert abs(array.mean(dtype=np.float64)) < 0.1 * deviation, name


def test_sizes_differ_from_each_other_and_from_powers_of_two():
    config = tiny2_config()
    sizes = [config.vocab_size, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim]
    sizes += [config.v_head_dim, config.intermediate_size, config.moe_intermediate_size]
    assert len(set(sizes)) == len(sizes)
    assert all(size & (size - 1) for size in sizes)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_tensors_are_those_of_the_configuration():
    config, weights = tiny2_config(), tiny2_weights()
    assert weights["lm_head.weight"].shape == (config.vocab_size, config.hidden_size)
    assert weights["model.layers.5.self_attn.kv_b_proj.weight"].shape == (6 * (24 + 20), 48)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (192, 320)
    assert "model.layers.1.mlp.gate.weight" not in weights  # the first two layers are dense
    assert weights["model.layers.2.mlp.gate.weight"].shape == (6, 192)
    assert weights["model.layers.2.mlp.experts.5.up_proj.weight"].shape == (72, 192)
    assert len(weights) == 3 + 6 * 7 + 2 * 3 + 4 * (1 + 7 * 3)
