"""DFlash: checkpoint folders written and read, and configurations that are refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdtree_nb import Engine
from kdtree_nb.config import Yarn
from kdtree_nb.drafters import DFlash, FeatureDrafter
from kdtree_nb.drafters.dflash.config import parse_config
from kdtree_nb.drafters.dflash.weights import shapes
from kdtree_nb.errors import CheckpointError
from tests.drafters.dflash_models import KINDS, TEXT, config_for, noisy_weights


@pytest.mark.parametrize("changes", [{}, KINDS["window"], {"rope_scaling": Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0)}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded(tmp_path, target, changes, dtype):
    config = config_for(**changes)
    drafter = DFlash(config, noisy_weights(config))
    drafter.save(tmp_path / "drafter", dtype)
    loaded = DFlash.load(tmp_path / "drafter")
    assert loaded.config == config and loaded.depth == 5 and set(loaded.weights) == set(shapes(config))
    for name, value in drafter.weights.items():
        assert torch.equal(loaded.weights[name], value.to(dtype))
    fields = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert fields["architectures"] == ["DFlashDraftModel"]
    assert fields["dflash_config"] == {"block_size": 6, "mask_token_id": 330, "target_layer_ids": [3, 0]}


def test_one_window_only_can_be_saved(tmp_path):
    with pytest.raises(CheckpointError, match="expected one window and one kind of block"):
        DFlash.random(config_for(windows=(5, None, 7))).save(tmp_path / "drafter")
    with pytest.raises(CheckpointError, match="expected one window and one kind of block"):
        DFlash.random(config_for(**KINDS["sliding"])).save(tmp_path / "drafter")


KIMI = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 8,
    "bos_token_id": 163584, "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    "dtype": "bfloat16", "eos_token_id": 163586, "head_dim": 128, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "layer_types": ["full_attention"] * 6,
    "max_position_embeddings": 262144, "max_window_layers": 6, "model_type": "qwen3", "num_attention_heads": 64,
    "num_hidden_layers": 6, "num_key_value_heads": 8, "num_target_layers": 61, "rms_norm_eps": 1e-5,
    "rope_scaling": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "rope_theta": 50000.0, "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.57.1",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 163840,
}  # fmt: skip
"""A config.json with what is publicly known of the one of Kimi K2.5's and K2.6's drafter; intermediate_size is ours."""


def test_a_config_like_that_of_a_kimi_drafter():
    config = parse_config(KIMI, "config.json")
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58) and config.mask_token_id == 163838
    assert config.block_size == 8 and config.windows == (None,) * 6 and config.causal == (False,) * 6
    assert config.rope_scaling.factor == 64.0 and config.rope_scaling.amplitude == 1.0
    window = parse_config(KIMI | {"layer_types": ["sliding_attention"] * 6, "sliding_window": 4096}, "config.json")
    assert window.windows == (4096,) * 6 and window.causal == (True,) * 6
    both_ways = {"layer_types": ["sliding_attention"] * 6, "sliding_window": 4096, "is_causal": False}
    assert parse_config(KIMI | both_ways, "config.json").causal == (False,) * 6
    own = KIMI["dflash_config"] | {"sliding_window": 4096}
    untyped = {name: value for name, value in KIMI.items() if name != "layer_types"} | {"dflash_config": own}
    assert parse_config(untyped, "config.json").windows == (4096,) * 6


def small_kimi() -> dict:
    """The same layout, for tiny2."""
    own = {"mask_token_id": 330, "target_layer_ids": [0, 2, 4]}
    sizes = {"head_dim": 16, "hidden_size": 192, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 331,
             "num_key_value_heads": 2, "num_target_layers": 6, "dflash_config": own}  # fmt: skip
    return KIMI | sizes


def write(folder, fields, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: value.bfloat16() for name, value in weights.items()}, folder / "model.safetensors")


def test_a_small_drafter_in_the_published_layout_drafts(tmp_path, target):
    fields, model = small_kimi(), target[0]
    D, q, kv, d, width = 192, 64, 32, 16, 96
    expected = {"fc.weight": (D, 3 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(6):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (D,), f"layers.{i}.post_attention_layernorm.weight": (D,),
            f"layers.{i}.self_attn.q_proj.weight": (q, D), f"layers.{i}.self_attn.k_proj.weight": (kv, D),
            f"layers.{i}.self_attn.v_proj.weight": (kv, D), f"layers.{i}.self_attn.o_proj.weight": (D, q),
            f"layers.{i}.self_attn.q_norm.weight": (d,), f"layers.{i}.self_attn.k_norm.weight": (d,),
            f"layers.{i}.mlp.gate_proj.weight": (width, D), f"layers.{i}.mlp.up_proj.weight": (width, D),
            f"layers.{i}.mlp.down_proj.weight": (D, width),
        }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    write(tmp_path, fields, {name: torch.randn(shape, generator=generator) / 9 for name, shape in expected.items()})
    drafter = DFlash.load(tmp_path)
    assert isinstance(drafter, FeatureDrafter) and drafter.depth == 7
    want = Engine(model).generate_ar(TEXT[:20], 12).tokens
    assert Engine(model, drafter, budget=9).generate_ddtree(TEXT[:20], 12).tokens == want


BAD = {
    "dflash_config": (None, "dflash_config: expected an object, got None"),
    "dflash_config ": ({"mask_token_id": 330}, r"expected fields \['target_layer_ids'\]"),
    "dflash_config  ": ({"target_layer_ids": [0]}, r"expected fields \['mask_token_id'\]"),
    "dflash_config   ": ({"mask_token_id": 331, "target_layer_ids": [0]}, "mask_token_id: expected an id of 0 … vocab"),
    "dflash_config    ": ({"mask_token_id": 0, "target_layer_ids": [0, 0]}, "target_layer_ids: expected different"),
    "dflash_config     ": ({"mask_token_id": 0, "target_layer_ids": 3}, "target_layer_ids: expected different"),
    "dflash_config      ": ({"mask_token_id": 0, "target_layer_ids": []}, "target_layer_ids: expected different"),
    "dflash_config       ": ({"mask_token_id": 0, "target_layer_ids": [0], "selector_rank": 2}, "selector_rank"),
    "block_size": (1, "block_size: expected an integer of 2 … "),
    "head_dim": (15, "head_dim: expected an even number"),
    "num_key_value_heads": (3, "num_key_value_heads: expected a divisor of num_attention_heads"),
    "num_hidden_layers": ("six", "num_hidden_layers: expected an integer"),
    "layer_types": (["full_attention"], "layer_types: expected 'sliding_attention' or 'full_attention' for each of 6"),
    "layer_types ": (["sliding_attention"] * 6, "sliding_window: expected a number of tokens"),
    "hidden_act": ("gelu", "hidden_act: expected 'silu', got 'gelu'"),
    "model_type": ("llama", "model_type: expected 'qwen3'"),
    "attention_bias": (True, "attention_bias: expected False"),
    "rms_norm_eps": (0, "rms_norm_eps: expected a positive"),
    "new_norm": (True, r"that this package understands, got \['new_norm'\]"),
    "rope_scaling": ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling: rope_type: expected 'default' or 'yarn'"),
    "final_logit_softcapping": (20.0, "final_logit_softcapping: expected 0"),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_config_names_the_field(tmp_path, field):
    value, message = BAD[field]
    write(tmp_path, small_kimi() | {field.strip(): value}, {"fc.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=message) as caught:
        DFlash.load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_bad_folders(tmp_path):
    with pytest.raises(CheckpointError, match="config.json: expected a readable file"):
        DFlash.load(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(CheckpointError, match="config.json: expected JSON"):
        DFlash.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="config.json: expected an object"):
        DFlash.load(tmp_path)
    DFlash.random(config_for()).save(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    for name, change, message in (
        ("norm.weight", None, "expected a tensor 'norm.weight', got none of that name"),
        ("fc.weight", torch.zeros(192, 192), r"tensor 'fc.weight': expected shape \(192, 384\), got \(192, 192\)"),
        ("embed_tokens.weight", torch.zeros(1), "expected the tensors of its config only, got 'embed_tokens.weight'"),
    ):
        weights = {n: v for n, v in (good | {name: change}).items() if v is not None}
        write(tmp_path, fields, weights)
        with pytest.raises(CheckpointError, match=message):
            DFlash.load(tmp_path)


def test_the_drafter_of_nano_k2(tmp_path, monkeypatch):
    monkeypatch.setattr("kdtree_nb.drafters.dflash.DATA_DIR", tmp_path)
    with pytest.raises(CheckpointError, match="expected the trained drafter of 'nano-k2' at .*; train it: kdtree-nb"):
        DFlash.load("nano-k2")
    DFlash.random(config_for()).save(tmp_path / "nano-k2-dflash")
    assert DFlash.load("nano-k2", depth=2).config == config_for()
