"""Bad checkpoint folders: each an error that names file, tensor or field, found and expected."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdtree_nb import Engine, load_model
from kdtree_nb.errors import CheckpointError

FAMILY = "deepseek-v3"


NORM = "model.norm.weight"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 96}


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
        ({"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}}, ["rope_type", "['yarn']"]),
        ({"rope_parameters": {"rope_type": "default", "type": None, "rope_theta": 1e4}}, ["rope_type", "None"]),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e4}, ["rope_theta", "10000.0", "50000.0"]),
        ({"rope_scaling": {"type": "default"}}, ["rope_parameters, rope_scaling", "agree"]),
        ({"rope_parameters": YARN | {"factor": None}}, ["missing fields ['factor']"]),
        ({"rope_parameters": YARN | {"mscale_all_dim": 0.7}}, ["mscale, mscale_all_dim", "None and 0.7"]),
        ({"rope_parameters": YARN | {"mscale": 0.7}}, ["mscale, mscale_all_dim", "0.7 and None"]),
        ({"rope_parameters": YARN | {"truncate": False}}, ["truncate", "True", "False"]),
        ({"rope_interleave": None}, ["rope_interleave", "true or false"]),
        ({"rope_interleave": False, "model_type": "kimi_k2"}, ["rope_interleave", "kimi_k2"]),
        ({"num_nextn_predict_layers": "1"}, ["num_nextn_predict_layers", "'1'"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers", "-1"]),
        ({"topk_method": ["noaux_tc"]}, ["topk_method"]),
        ({"scoring_func": {}}, ["scoring_func"]),
        ({"n_group": None}, ["n_group"]),
        ({"topk_group": 0}, ["topk_group"]),
        ({"quantization_config": {"quant_method": []}}, ["quant_method"]),
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


@pytest.mark.parametrize(
    ("text", "piece"),
    [(b"[" * 10**5, "nesting"), (b'{"a": 1, "a": 2}', "'a' twice"), (b"", "JSON"), (b"\xff", "JSON")],
)
def test_json_that_readers_disagree_on_or_cannot_read(folder, text, piece):
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_bytes(text)
        fails(folder, name, piece)


def test_tokens_that_end_a_text_may_stand_in_generation_config(folder):
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": [1, 7]}')
    assert load_model(folder).config.eos_token_ids == (1, 7)
    for ids in ("331", "[331]", '"x"', "[true]", "{}"):
        path.write_text('{"eos_token_id": ' + ids + "}")
        fails(folder, "generation_config.json", "eos_token_ids", "inside the vocabulary")
    path.unlink()
    assert load_model(folder).config.eos_token_ids == (1,)


def test_a_pipe_in_place_of_a_file(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    fails(folder, "config.json", "regular file")


def test_a_byte_order_mark(folder):
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    load_model(folder)


@pytest.mark.parametrize("name", ["n_group", "topk_group"])
def test_groups_of_experts_are_not_guessed(folder, name):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    del fields[name]
    path.write_text(json.dumps(fields))
    fails(folder, "config.json", name, "got none")


def test_a_model_does_not_need_its_folder(folder):
    model = load_model(folder)
    before = Engine(model).generate_ar([5, 6, 7], 8, return_logits=True)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(0)  # reading what is still mapped would end the process
    shutil.rmtree(folder)
    after = Engine(model).generate_ar([5, 6, 7], 8, return_logits=True)
    assert after.tokens == before.tokens and torch.equal(after.logits, before.logits)


def test_many_layers_for_further_tokens_take_no_time(folder):
    set_field(folder, num_hidden_layers=2, num_nextn_predict_layers=10**18)
    load_model(folder, report=lambda message: None)


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
        (lambda t: t.update({NORM: torch.zeros(108).to(torch.float8_e4m3fn)}), [NORM, "F8_E4M3"]),
        (lambda t: t.update({NORM + "_packed": t.pop(NORM).int()}), [NORM, "none of that name"]),
        (lambda t: t["model.layers.1.mlp.gate.e_score_correction_bias"].fill_(float("nan")), ["e_score", "finite"]),
    ],
)
def test_tensors(folder, change, pieces):
    change_tensors(folder, change)
    names_file = not {"none of that name", "fp8", "finite"} & set(pieces)
    fails(folder, "model.safetensors" if names_file else "load_model", *pieces)


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
    "name",
    [
        "../other.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "x.bin",
        "..\\x.safetensors",
        "x" * 5000 + ".safetensors",
    ],
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
    tokenizer = model.tokenizer
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([1]), tokenizer.stream,
                 lambda: tokenizer.apply_chat_template([])):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"tokenizer\.json or tiktoken\.model"):
            call()


def test_damaged_tokenizers(folder):
    (folder / "tokenizer.json").write_text("{}")
    fails(folder, "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    for text in ("", "no-rank\n", "YQ== 1\n", "YQ== 0\nYg== 0\n", "YQ== 0\nYQ== 0\n", "YQ== 0\n"):
        (folder / "tiktoken.model").write_text(text)
        fails(folder, "tiktoken.model")
