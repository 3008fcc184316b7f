"""convert: there and back again, bit for bit, and nothing is lost."""

from __future__ import annotations

import os

import numpy as np
import pytest
from safetensors import safe_open

from kdtree_nb import cli, load_model
from kdtree_nb.kdtr import Bf16, open_kdtr, write_kdtr


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.kdtr"
    tensors = {
        "w": Bf16.round(np.linspace(-3, 3, 35, dtype=np.float32).reshape(5, 7)),
        "ids": np.arange(9),
        "none": np.zeros((0, 4), np.float32),
        "nan": np.array([np.nan, -0.0]),
    }
    write_kdtr(path, tensors, {"config": {"layers": 4}, "text": "é"})
    return path


def test_there_and_back(capsys, source):
    middle, back = source.with_name("b.safetensors"), source.with_name("c.kdtr")
    assert cli.main(["convert", str(source), str(middle)]) == 0
    assert "4 tensors" in capsys.readouterr().out
    with safe_open(middle, "np") as file:
        assert np.array_equal(file.get_tensor("ids"), np.arange(9))
    assert cli.main(["convert", str(middle), str(back)]) == 0
    a, b = open_kdtr(source), open_kdtr(back)
    assert a.metadata == b.metadata and sorted(a.names) == sorted(b.names)
    for name in a.names:
        assert a.dtype(name) == b.dtype(name) and a.shape(name) == b.shape(name)
        assert a.array(name).tobytes() == b.array(name).tobytes()


def test_a_target_is_not_overwritten(capsys, source):
    target = source.with_name("b.safetensors")
    target.write_text("precious")
    assert cli.main(["convert", str(source), str(target)]) == 2
    assert "give --force to overwrite it" in capsys.readouterr().err and target.read_text() == "precious"
    assert cli.main(["convert", "--force", str(source), str(target)]) == 0
    assert target.stat().st_size > 100


@pytest.mark.parametrize("names", [("a.kdtr", "b.kdtr"), ("a.kdtr", "b.bin"), ("a", "b")])
def test_suffixes(capsys, tmp_path, names):
    assert cli.main(["convert", *(str(tmp_path / name) for name in names)]) == 2
    assert "one in .safetensors" in capsys.readouterr().err


def test_a_broken_source_leaves_nothing_behind(capsys, tmp_path):
    for name, target in (("a.kdtr", "b.safetensors"), ("a.safetensors", "b.kdtr")):
        (tmp_path / name).write_bytes(b"\xff" * 100)
        assert cli.main(["convert", str(tmp_path / name), str(tmp_path / target)]) == 2
        assert name in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kdtr", "a.safetensors"]


def test_a_missing_source(capsys, tmp_path):
    assert cli.main(["convert", str(tmp_path / "no.kdtr"), str(tmp_path / "b.safetensors")]) == 2
    assert "no.kdtr" in capsys.readouterr().err


def test_a_model_to_a_folder_and_back_gives_the_same_bits(capsys, tmp_path):
    import torch

    from kdtree_nb import Engine, load_model

    folder, back = tmp_path / "checkpoint", tmp_path / "back.kdtr"
    assert cli.main(["convert", str(load_path("tiny")), str(folder)]) == 0
    assert cli.main(["convert", str(folder), str(back)]) == 0
    assert "118 tensors" in capsys.readouterr().out
    prompt = list(b"def add(a, b):")
    runs = [
        Engine(load_model(path)).generate_ar(prompt, 32, return_logits=True) for path in ("tiny", folder, back)
    ]  # fmt: skip
    assert all(torch.equal(run.logits, runs[0].logits) for run in runs)
    source, again = open_kdtr(load_path("tiny")), open_kdtr(back)
    for name in source.names:
        assert np.array_equal(source.float32(name), again.float32(name)), name


def load_path(name):
    from kdtree_nb.model.checkpoint import DATA_DIR

    return DATA_DIR / f"{name}.kdtr"


def test_a_model_that_a_folder_cannot_express(capsys, tmp_path):
    from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

    write_kdtr(tmp_path / "a.kdtr", tiny2_weights(), {"config": tiny2_config().to_dict()})
    assert cli.main(["convert", str(tmp_path / "a.kdtr"), str(tmp_path / "folder")]) == 2
    assert "latent_norm_eps" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()


def test_a_kdtr_file_without_a_config(capsys, source, tmp_path):
    write_kdtr(tmp_path / "b.kdtr", {"w": np.zeros(3, np.float32)}, {})
    assert cli.main(["convert", str(tmp_path / "b.kdtr"), str(tmp_path / "folder")]) == 2
    assert "config" in capsys.readouterr().err


def test_a_folder_is_replaced_whole(capsys, tmp_path):
    folder = tmp_path / "Tiny2.6"
    folder.mkdir()
    for name in ("model.safetensors", "model-00001-of-00009.safetensors", "config.json", "tokenizer.json"):
        (folder / name).write_text("old")
    assert cli.main(["convert", "--force", str(load_path("tiny")), str(folder)]) == 0
    assert not (folder / "model.safetensors").exists() and (folder / "tokenizer.json").read_text() == "old"
    (folder / "tokenizer.json").unlink()
    load_model(folder)
    assert cli.main(["convert", str(load_path("tiny")), str(tmp_path / "New-2.6")]) == 0
    load_model(tmp_path / "New-2.6")


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
@pytest.mark.parametrize("target", ["full", "full.safetensors"])
def test_a_full_disk_is_named_and_leaves_no_part(capsys, tmp_path, target):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        assert cli.main(["convert", str(load_path("tiny")), str(tmp_path / target)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / target) in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
