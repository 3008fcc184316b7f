"""plan: what a checkpoint needs, from config.json alone."""

from __future__ import annotations

import json

import pytest

from kdtree_nb import cli
from kdtree_nb.hf.config import parse_config
from kdtree_nb.hf.plan import PARTS, make_plan
from kdtree_nb.hf.tensors import weights

K26 = {
    "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 262144,
    "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""The published dimensions of Kimi K2.6's text model."""

INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(K26 | {"quantization_config": INT4}))
    return tmp_path


def run(capsys, *args):
    status = cli.main(["plan", *map(str, args)])
    return status, capsys.readouterr()


def test_kimi_k26(capsys, folder):
    status, out = run(capsys, folder, "--json", "--memory-gib", 141, "--tokens", 1000)
    fields = json.loads(out.out)
    assert status == 0
    assert 1.02e12 < fields["parameters"] < 1.03e12  # published: 1 T
    assert 550 < fields["bytes"] / 2**30 < 555  # published: 554.27 GiB with the vision tower
    assert fields["cache_bytes_per_token"] == 61 * 576 * 2
    assert fields["tensor_parallel_size"] == 8
    experts = next(part for part in fields["parts"] if part["part"] == "routed experts")
    assert experts["dtype"] == "int4" and experts["parameters"] == 60 * 384 * 3 * 7168 * 2048
    assert sum(part["bytes"] for part in fields["parts"]) == fields["bytes"]
    assert {part["part"] for part in fields["parts"]} == set(PARTS)


def test_every_tensor_is_counted_once():
    config = parse_config(K26, "here")
    plan = make_plan(config, 2)
    total = 0
    for _, shape in weights(config.model):
        size = 1
        for n in shape:
            size *= n
        total += size
    assert plan.num_parameters == total


def test_ranks_and_room():
    plan = make_plan(parse_config(K26 | {"quantization_config": INT4}, "here"), 2)
    one, eight = plan.bytes_per_rank(1, 0), plan.bytes_per_rank(8, 0)
    assert one == plan.num_bytes and one / 8 < eight < one / 6
    assert plan.num_ranks(one, 0, 64) == 1
    assert plan.num_ranks(one - 1, 0, 64) == 2
    assert plan.num_ranks(eight - 1, 0, 64) is None
    assert plan.num_ranks(eight, 0, 4) is None  # eight ranks need a multiple of eight heads
    room = plan.max_tokens(eight + 10 * plan.cache_bytes_per_token, 8)
    assert room == 10
    assert plan.max_tokens(1, 8) == 0


def test_text(capsys, folder):
    status, out = run(capsys, folder, "--memory-gib", 8)
    assert status == 0 and "routed experts" in out.out and "does not fit" in out.out
    status, out = run(capsys, folder)
    assert status == 0 and "latent cache" in out.out


@pytest.mark.parametrize("args", [("--tokens", 0), ("--memory-gib", 0), ("--memory-gib", "nan")])
def test_bad_options(capsys, folder, args):
    status, out = run(capsys, folder, *args)
    assert status == 2 and args[0] in out.err


def test_no_folder(capsys, tmp_path):
    status, out = run(capsys, tmp_path / "none")
    assert status == 2 and "config.json" in out.err


def test_int4_experts_as_floats_are_named(capsys, folder):
    status, out = run(capsys, folder, "--json")
    assert status == 0 and json.loads(out.out)["int4_layer_bytes"] == 384 * 3 * 7168 * 2048 * 2
    status, out = run(capsys, folder)
    assert "not counted below" in out.out
    assert make_plan(parse_config(K26, "here"), 2).int4_layer_bytes == 0


def test_only_routed_experts_stay_int4():
    """A checkpoint that quantises everything: what the engine loads as floats is planned as floats."""
    plan = make_plan(parse_config(K26 | {"quantization_config": INT4 | {"ignore": []}}, "here"), 2)
    assert {part.name for part in plan.parts if part.dtype == "int4"} == {"routed experts"}
