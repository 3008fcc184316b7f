"""One checkpoint stored in other ways: in shards, in BF16, in FP8 blocks, in INT4 groups. The logits are those of the
values that are stored."""

from __future__ import annotations

import json

import families
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file

from kdtree_nb import Engine, load_model
from kdtree_nb.drafters import NGram
from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf.dequantize import dequantize_fp8, dequantize_int4, unpack_int4
from kdtree_nb.hf.quantization import Fp8Blocks
from kdtree_nb.model import build
from tests.hf.int4_config import GROUP, QUANTIZATION

TOKENS = torch.randint(0, 331, (90,), generator=torch.Generator().manual_seed(9)).tolist()
FAMILY = "kimi-k2-thinking"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder whose inputs come in whole groups of 32 (and no power of two), and its tensors."""
    families.FAMILIES["grouped"] = {
        **families.FAMILIES[FAMILY], "hidden_size": 96, "moe_intermediate_size": 160, "intermediate_size": 160,
    }  # fmt: skip
    try:
        model = families.make_reference("grouped", 0)
    finally:
        del families.FAMILIES["grouped"]
    folder = families.save(model, tmp_path_factory.mktemp("plain"), FAMILY)
    return folder, load_file(folder / "model.safetensors")


def restore(plain, target, tensors, **config):
    """The plain folder's config with other tensors."""
    fields = json.loads((plain[0] / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    return target


def is_expert(name: str) -> bool:
    return ".experts." in name


def int4_checkpoint(plain, target):
    """Experts in INT4 as compressed-tensors packs them, and the same folder with the values they stand for."""
    tensors, values = {}, {}
    for name, weight in plain[1].items():
        if not is_expert(name):
            tensors[name] = values[name] = weight
            continue
        layer = name.removesuffix(".weight")
        scale = (weight.view(len(weight), -1, GROUP).abs().amax(2) / 7).bfloat16()
        q = (weight.view(len(weight), -1, GROUP) / scale.float().unsqueeze(2)).round().clamp(-8, 7).to(torch.int8)
        tensors[f"{layer}.weight_packed"] = pack_to_int32(q.view_as(weight), 4)
        tensors[f"{layer}.weight_scale"] = scale
        tensors[f"{layer}.weight_shape"] = torch.tensor(weight.shape)
        values[name] = (q.float() * scale.float().unsqueeze(2)).view_as(weight)
    (target / "int4").mkdir()
    (target / "values").mkdir()
    packed = restore(plain, target / "int4", tensors, quantization_config=QUANTIZATION)
    return packed, restore(plain, target / "values", values)


def test_shards_give_the_same_bits(plain, tmp_path, chain_logits):
    model = families.make_reference(FAMILY, 0)
    whole = families.save(model, tmp_path / "whole", FAMILY)
    sharded = families.save(model, tmp_path / "sharded", FAMILY, max_shard_size="300KB")
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    assert torch.equal(chain_logits(load_model(whole), TOKENS), chain_logits(load_model(sharded), TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_the_rounded_checkpoint(plain, tmp_path, chain_logits, dtype):
    (tmp_path / "bf16").mkdir()
    (tmp_path / "rounded").mkdir()
    bf16 = {n: w if n.endswith("bias") else w.bfloat16() for n, w in plain[1].items()}
    stored = load_model(restore(plain, tmp_path / "bf16", bf16, dtype="bfloat16"), dtype=dtype)
    wide = {name: weight.float() for name, weight in bf16.items()}
    widened = load_model(restore(plain, tmp_path / "rounded", wide), dtype=dtype)
    assert torch.equal(chain_logits(stored, TOKENS), chain_logits(widened, TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_dequantised(plain, tmp_path, chain_logits, dtype):
    tensors, values = {}, {}
    rows = columns = 128
    for name, weight in plain[1].items():
        tensors[name] = values[name] = weight
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            continue
        shape = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        scale = torch.rand(shape, generator=torch.Generator().manual_seed(len(name))) + 0.5
        wide = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
        tensors[name] = (weight / wide).to(torch.float8_e4m3fn)
        tensors[name.removesuffix("weight") + "weight_scale_inv"] = scale
        values[name] = tensors[name].float() * wide
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (tmp_path / "fp8").mkdir()
    (tmp_path / "values").mkdir()
    stored = load_model(restore(plain, tmp_path / "fp8", tensors, quantization_config=quantization), dtype=dtype)
    widened = load_model(restore(plain, tmp_path / "values", values), dtype=dtype)
    assert torch.equal(chain_logits(stored, TOKENS), chain_logits(widened, TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_gives_the_logits_of_its_values(plain, tmp_path, chain_logits, dtype, device):
    packed, values = int4_checkpoint(plain, tmp_path)
    stored, widened = load_model(packed, device, dtype), load_model(values, device, dtype)
    assert torch.equal(chain_logits(stored, TOKENS), chain_logits(widened, TOKENS))
    ar = Engine(stored).generate_ar(TOKENS, 40, stop_token_ids=[], return_logits=True)
    tree = Engine(stored, drafter=NGram(), budget=31).generate_ddtree(TOKENS, 40, stop_token_ids=[], return_logits=True)
    assert ar.tokens == tree.tokens and torch.equal(ar.logits, tree.logits)


def test_packed_int4_gives_the_logits_of_its_values(plain, tmp_path, chain_logits, monkeypatch, device):
    """On a CPU as well, where experts are not packed otherwise."""
    packed, values = int4_checkpoint(plain, tmp_path)
    monkeypatch.setattr(build, "_reads_packed_int4", lambda read: True)
    stored, widened = (load_model(folder, device, torch.bfloat16) for folder in (packed, values))
    experts = [layer.feed_forward.experts for layer in stored.layers if hasattr(layer.feed_forward, "experts")]
    assert experts and all(e.gate_up.dtype == torch.uint8 and e.gate_up_scale is None for e in experts)
    assert torch.equal(chain_logits(stored, TOKENS), chain_logits(widened, TOKENS))


def test_int4_scales_keep_their_values(plain, tmp_path, chain_logits):
    packed, _ = int4_checkpoint(plain, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    half = {n: t.half() if n.endswith("weight_scale") else t for n, t in tensors.items()}
    wide = {n: t.float() if n.endswith("weight_scale") else t for n, t in half.items()}
    save_file(half, packed / "model.safetensors")
    got = chain_logits(load_model(packed), TOKENS)
    save_file(wide, packed / "model.safetensors")
    assert torch.equal(got, chain_logits(load_model(packed), TOKENS))
    first = next(name for name in tensors if name.endswith("experts.0.up_proj.weight_scale"))
    save_file(wide | {first: tensors[first]}, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.0: expected scales of one dtype"):
        load_model(packed)


def test_int4_unpacks_as_compressed_tensors_does():
    generator = torch.Generator().manual_seed(1)
    value = torch.randint(-8, 8, (5, 96), generator=generator, dtype=torch.int8)
    packed = pack_to_int32(value, 4)
    assert torch.equal(unpack_int4(packed, 96), value)
    assert torch.equal(unpack_from_int32(packed, 4, value.shape), value)
    scale = torch.rand(5, 3, generator=generator).bfloat16()
    want = value.double() * scale.double().repeat_interleave(GROUP, 1)
    assert torch.equal(dequantize_int4(packed, scale, torch.float32).double(), want)


def test_fp8_blocks_at_the_edge():
    value = torch.ones(3, 5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    got = dequantize_fp8(value, scale, Fp8Blocks(2, 2), torch.float32)
    assert got.tolist() == [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]
    got = dequantize_fp8(value, scale[:1, :1] + 1, Fp8Blocks(2**63, 10**10), torch.float32)
    assert got.tolist() == [[2] * 5] * 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda q: q | {"quant_method": "gptq"}, "quant_method"),
        (lambda q: q | {"format": "naive-quantized"}, "format"),
        (lambda q: q | {"ignore": "lm_head"}, "ignore"),
        (lambda q: q | {"ignore": [r"re:.*experts.*"]}, "config and weights disagree"),
        (lambda q: q | {"ignore": ["re:("]}, "no regular expression"),
        (lambda q: q | {"config_groups": {}}, "one group"),
        (lambda q: q | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (lambda q: None, "weight_packed"),
    ],
)
def test_quantisations_that_are_not_understood(plain, tmp_path, change, expected):
    packed, _ = int4_checkpoint(plain, tmp_path)
    fields = json.loads((packed / "config.json").read_text())
    fields["quantization_config"] = change(fields["quantization_config"])
    (packed / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=expected):
        load_model(packed)
