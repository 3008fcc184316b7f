from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

from kdtree_nb import load_model, ops
from kdtree_nb.errors import CheckpointError, KdtrError
from kdtree_nb.kdtr import Bf16, write_kdtr
from kdtree_nb.model import build_model
from kdtree_nb.speculate.drafting import chain_trees
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

WEIGHTS = tiny2_weights()


def chain_logits(model, tokens):
    """Logits [T, V] of one text."""
    tree, prefix_len = chain_trees([tokens], model.device), torch.zeros(1, dtype=torch.int32, device=model.device)
    return model.forward(ops.tree_rows(tree, prefix_len), tree, model.new_cache(1, len(tokens)), prefix_len)


def write(path, weights, config=None):
    metadata = {"config": tiny2_config().to_dict() if config is None else config}
    write_kdtr(path, weights, metadata)
    return path


def test_a_file_gives_the_model_that_its_arrays_give(tmp_path, tiny2, device):
    model = load_model(write(tmp_path / "model.kdtr", WEIGHTS), device)
    assert model.config == tiny2_config()
    assert torch.equal(chain_logits(model, [1, 2, 3]), chain_logits(tiny2, [1, 2, 3]))


def test_bf16_tensors_are_widened_exactly(tmp_path, tiny2, device):
    rounded = {name: Bf16.round(w) for name, w in WEIGHTS.items()}
    model = load_model(write(tmp_path / "model.kdtr", rounded), device)
    assert model.dtype == torch.float32
    assert torch.equal(chain_logits(model, [1, 2, 3]), chain_logits(tiny2, [1, 2, 3]))


def test_dtype_and_device_are_what_was_asked_for(models, device):
    model = models("tiny2", torch.bfloat16)
    assert model.dtype == model.embedding.dtype == model.new_cache(1, 1).data.dtype == torch.bfloat16
    assert model.device.type == model.head.data.device.type == device.type
    assert chain_logits(model, [1, 2]).dtype == torch.float32


def test_tiny_is_a_byte_model(models):
    model = models("tiny")
    assert model.config.vocab_size == 256
    assert model.tokenizer.decode(model.tokenizer.encode("def f(x):")) == "def f(x):"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="float32 or torch.bfloat16"):
        load_model("tiny2", dtype=dtype)


def test_a_missing_file_names_the_path_and_what_is_read(tmp_path):
    with pytest.raises(CheckpointError, match="KDTR file or a checkpoint folder.*found nothing at .*absent.kdtr"):
        load_model(tmp_path / "absent.kdtr")


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(CheckpointError, match="config.json: expected a readable file"):
        load_model(tmp_path)


def test_a_damaged_file(tmp_path):
    path = write(tmp_path / "model.kdtr", WEIGHTS)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(KdtrError, match="model.kdtr"):
        load_model(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(KdtrError, match="model.kdtr"):
        load_model(path)


@pytest.mark.parametrize("config", [[1], None, {"vocab_size": 3}])
def test_a_file_without_a_usable_config(tmp_path, config):
    path = tmp_path / "model.kdtr"
    write_kdtr(path, WEIGHTS, {} if config is None else {"config": config})
    with pytest.raises(CheckpointError, match="config"):
        load_model(path)


def test_a_missing_tensor_is_named():
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    lacking = {n: w for n, w in WEIGHTS.items() if n != name}
    with pytest.raises(CheckpointError, match=name):
        build_model(tiny2_config(), lacking)


def test_a_tensor_of_another_shape_is_named():
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name}.*expected shape"):
        build_model(tiny2_config(), WEIGHTS | {name: np.zeros((3, 4), np.float32)})


def test_a_model_without_shared_expert_needs_no_tensors_of_it():
    config = dataclasses.replace(tiny2_config(), n_shared_experts=0)
    kept = {n: w for n, w in WEIGHTS.items() if "shared_experts" not in n}
    assert torch.isfinite(chain_logits(build_model(config, kept), [1, 2])).all()


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        load_model(tmp_path / "pipe")
