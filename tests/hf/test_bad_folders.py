"""Bad checkpoint folders: each an error that names file, tensor or field, found and expected."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdtree_nb import load_model
from kdtree_nb.errors import CheckpointError

FAMILY = "deepseek-v3"


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint(FAMILY)[1], tmp_path / "model")


@pytest.fixture
def sharded(checkpoint, tmp_path):
    checkpoint(FAMILY)[0].save_pretrained(tmp_path / "sharded", max_shard_size="400KB")
    return tmp_path / "sharded"


def fails(folder, *pieces):
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    for piece in pieces:
        assert piece in str(caught.value)


def set_field(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("fields", "pieces"),
    [
        ({"model_type": "llama"}, ["model_type", "'llama'", "latent attention"]),
        ({"model_type": None}, ["model_type"]),
        ({"surprise_factor": 2}, ["surprise_factor", "silently"]),
        ({"kv_lora_rank": None}, ["kv_lora_rank"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'silu'", "'gelu'"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"num_key_value_heads": 1}, ["num_key_value_heads"]),
        ({"scoring_func": "softmax"}, ["scoring_func"]),
        ({"topk_method": "group_limited_greedy"}, ["topk_method"]),
        ({"n_group": 5}, ["n_group"]),
        ({"topk_group": 9}, ["topk_group"]),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["rope_type", "longrope"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}, ["original_max_position"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_theta"]),
        ({"rope_parameters": {"rope_theta": 1e4, "slope": 3}}, ["slope"]),
        ({"rope_parameters": "yarn"}, ["rope_parameters"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quant_method", "'awq'"]),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}, ["weight_block_size"]),
        ({"hidden_size": 96}, ["model.embed_tokens", "(331, 96)", "(331, 108)"]),
        ({"num_hidden_layers": 4}, ["model.layers.3", "none of that name"]),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 0}, ["model.layers.2", "disagree"]),
        ({"q_lora_rank": None}, ["q_proj"]),
        ({"n_shared_experts": 2}, ["shared_experts"]),
        ({"vocab_size": "many"}, ["vocab_size"]),
    ],
)
def test_config(folder, fields, pieces):
    set_field(folder, **fields)
    is_about_weights = any("model." in piece or "_experts" in piece or "proj" in piece for piece in pieces)
    fails(folder, str(folder) if is_about_weights else "config.json", *pieces)


def test_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    fails(folder, "config.json", "JSON")
    (folder / "config.json").write_text("[1]")
    fails(folder, "config.json", "object")
    (folder / "config.json").unlink()
    fails(folder, "config.json", "No such file")


def test_a_layer_for_further_tokens_is_left_aside(folder):
    set_field(folder, num_hidden_layers=2, num_nextn_predict_layers=1)
    said = []
    load_model(folder, report=said.append)
    assert len(said) == 1 and "model.layers.2.*" in said[0]


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        (lambda t: t.pop("model.norm.weight"), ["model.norm.weight", "none of that name"]),
        (lambda t: t.update(extra=torch.zeros(1)), ["'extra'", "disagree"]),
        (lambda t: t.update({"lm_head.weight": torch.zeros(331, 7)}), ["lm_head.weight", "(331, 108)", "(331, 7)"]),
        (lambda t: t.update({"model.norm.weight": torch.zeros(108, dtype=torch.int64)}), ["model.norm.weight", "I64"]),
        (lambda t: t.update({"lm_head.weight_scale_inv": torch.zeros(3, 1)}), ["lm_head.weight", "fp8"]),
    ],
)
def test_tensors(folder, change, pieces):
    change_tensors(folder, change)
    fails(folder, "model.safetensors" if "none" not in pieces[-1] and "fp8" not in pieces else str(folder), *pieces)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    fails(folder, "model.safetensors", "whole safetensors file")


def index_of(folder):
    return folder / "model.safetensors.index.json"


def test_a_missing_shard(sharded):
    lost = sorted(sharded.glob("model-*.safetensors"))[1]
    lost.unlink()
    fails(sharded, lost.name, "fetch the missing shard")


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "..\\x.safetensors"]
)
def test_shards_outside_the_folder_are_not_read(sharded, name):
    fields = json.loads(index_of(sharded).read_text())
    fields["weight_map"]["lm_head.weight"] = name
    index_of(sharded).write_text(json.dumps(fields))
    fails(sharded, "index.json", "outside the folder")


def test_an_index_that_disagrees_with_its_shards(sharded):
    fields = json.loads(index_of(sharded).read_text())
    placed = fields["weight_map"]
    other = next(shard for shard in placed.values() if shard != placed["lm_head.weight"])
    index_of(sharded).write_text(json.dumps({"weight_map": placed | {"lm_head.weight": other}}))
    fails(sharded, other, "lm_head.weight")
    index_of(sharded).write_text(json.dumps({"weight_map": {n: s for n, s in placed.items() if n != "lm_head.weight"}}))
    fails(sharded, "lm_head.weight", "too")
    index_of(sharded).write_text(json.dumps({"weight_map": {}}))
    fails(sharded, "weight_map")
    index_of(sharded).write_text("no")
    fails(sharded, "index.json", "JSON")


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    fails(folder, "pytorch_model.bin", "can run code")
    (folder / "pytorch_model.bin").unlink()
    fails(folder, "model.safetensors", "config.json")


def test_without_tokenizer_text_is_an_error_and_ids_work(folder):
    model = load_model(folder)
    for call in (lambda: model.tokenizer.encode("x"), lambda: model.tokenizer.decode([1]), model.tokenizer.stream):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json or tiktoken\.model"):
            call()


def test_damaged_tokenizers(folder):
    (folder / "tokenizer.json").write_text("{}")
    fails(folder, "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    for text in ("", "no-rank\n", "YQ== 1\n", "YQ== 0\nYg== 0\n"):
        (folder / "tiktoken.model").write_text(text)
        fails(folder, "tiktoken.model")
