"""train-nano temper: from a drafter's folder to the same folder with a temperature, on small text."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from kdtree_nb import load_model
from kdtree_nb.bench import acceptance
from kdtree_nb.bench.prompt_sets import packed_prompts
from kdtree_nb.cli import main
from kdtree_nb.drafters import DFlash
from kdtree_nb.train.drafter import temper
from kdtree_nb.train.nano.cli_target import STANDARD_LIBRARY, read_corpus
from kdtree_nb.train.nano.tokenizer import TOKENIZER_PATH

SIZE = ("--texts", 6, "--max-new-tokens", 32, "--budgets", 4, 16)
BUDGETS = ("chain", 4, 16)


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_library(monkeypatch):
    monkeypatch.setattr("kdtree_nb.train.nano.cli_target.MAX_STANDARD_LIBRARY_BYTES", 100_000)


def run(*words) -> int:
    return main(["train-nano", *map(str, words)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(target, drafter), trained for some seconds."""
    folder = tmp_path_factory.mktemp("temper")
    target, texts, drafter = (folder / name for name in ("target", "texts", "drafter"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdtree_nb.train.nano.cli_target.MAX_STANDARD_LIBRARY_BYTES", 100_000)
        size = ("--steps", 40, "--batch-tokens", 512, "--tokenizer", TOKENIZER_PATH)
        assert run("target", "--out", target, *size) == 0
        text = ("--texts", 24, "--part-texts", 12, "--total-len", 64, "--prompt-lens", 24, 32)
        assert run("generate", "--target", target, "--out", texts, *text) == 0
        words = ("--steps", 60, "--batch-texts", 8, "--anchors", 8)
        assert run("drafter", "--target", target, "--texts", texts, "--out", drafter, *words) == 0
    return target, drafter


@pytest.fixture
def folders(made, tmp_path):
    """A drafter that may be changed."""
    target, drafter = made
    return target, shutil.copytree(drafter, tmp_path / "drafter")


def temper_words(target, drafter, *more):
    return ("temper", "--target", target, "--drafter", drafter, "--corpus", STANDARD_LIBRARY, *SIZE, *more)


def sums_of(target, drafter, seed):
    """Of every budget, per step, along the texts that the step takes: measured anew."""
    model, corpus = load_model(target), read_corpus(STANDARD_LIBRARY, target / "tokenizer.json")
    prompts = packed_prompts(corpus, "train", 6, seed=seed).prompts
    texts = acceptance.decode_texts(model, prompts, 32)
    found = acceptance.measure_acceptance(model, DFlash.load(drafter), prompts, texts, BUDGETS[1:])
    return [(budget, *found.calibration(budget), found.tau(budget)) for budget in BUDGETS]


def test_a_drafter_is_tempered_to_expect_what_it_gets(folders, capsys):
    target, drafter = folders
    before = json.loads((drafter / "training.json").read_text())
    untempered = sums_of(target, drafter, 5)
    assert run(*temper_words(target, drafter, "--seed", 5)) == 0
    out = capsys.readouterr().out
    record = json.loads((drafter / "training.json").read_text())
    entry = record.pop("temper")
    for told, measured in ((entry["before"], untempered), (entry["after"], sums_of(target, drafter, 5))):
        assert [tuple(sums[k] for k in ("budget", "expected", "accepted", "tau")) for sums in told] == measured
    assert abs(temper.mean_excess(entry["after"])) < 0.01 < abs(temper.mean_excess(entry["before"]))
    assert entry["excess"][f"{entry['temperature']:.6f}"] == temper.mean_excess(entry["after"])
    assert (entry["num_texts"], entry["num_tokens"], entry["seed"]) == (6, 32, 5)
    assert entry["corpus"] == before["texts"]["corpus"] and "train-nano temper" in entry["command"]
    assert f"tempered with {entry['temperature']:.4f}" in out and "   chain" in out
    assert record.pop("files")["config.json"] == before.pop("files")["config.json"] and record == before


def test_what_is_tempered_is_refused(folders, capsys):
    target, drafter = folders
    record = json.loads((drafter / "training.json").read_text())
    (drafter / "training.json").write_text(json.dumps(record | {"temper": {"temperature": 0.9}}))
    weights = (drafter / "model.safetensors").read_bytes()
    assert run(*temper_words(target, drafter)) == 2
    assert "got one tempered with 0.9000; to begin anew" in capsys.readouterr().err
    assert (drafter / "model.safetensors").read_bytes() == weights


def test_a_corpus_that_the_drafter_was_not_trained_on_is_refused(folders, capsys, monkeypatch):
    monkeypatch.setattr("kdtree_nb.train.nano.cli_target.MAX_STANDARD_LIBRARY_BYTES", 60_000)
    assert run(*temper_words(*folders)) == 2
    assert "temper: stdlib: expected the training stream of the drafter's texts" in capsys.readouterr().err


def test_a_temperature_out_of_range_leaves_the_folder_as_it_was(folders, capsys, monkeypatch):
    target, drafter = folders
    monkeypatch.setattr(temper, "RANGE", (0.999, 1.001))
    files = {path.name: path.read_bytes() for path in drafter.iterdir()}
    assert run(*temper_words(target, drafter)) == 2
    assert "expected a temperature of 0.999 … 1.001" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in drafter.iterdir()} == files


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--texts", 0), "--texts: expected an integer of 1 … 4096, got 0"),
        (("--texts", 10**9), "--texts: expected an integer of 1 … 4096, got 1000000000"),
        (("--max-new-tokens", 1), "--max-new-tokens: expected an integer of 2 …"),
        (("--seed", -1), "--seed: expected an integer of 0 …"),
        (("--budgets", 0), "--budgets: expected different numbers of 1 … 1023, got [0]"),
        (("--budgets", 8, 8), "--budgets: expected different numbers"),
    ],
)
def test_bad_options(options, error, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*temper_words("x", "y"), *options)
    assert stopped.value.code == 2 and error in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run(*temper_words("x", "y"), "--device", "cuda")
    assert "--device cuda: expected a GPU that torch can use, found none" in capsys.readouterr().err


def test_more_texts_than_the_stream_has_places_for(folders, capsys, monkeypatch):
    monkeypatch.setattr("kdtree_nb.bench.prompt_sets.MAX_TRIES", 0)
    assert run(*temper_words(*folders)) == 2
    assert "packed_prompts: expected 6 places" in capsys.readouterr().err
