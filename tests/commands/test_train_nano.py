"""train-nano: every step from the command line, on small text."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from kdtree_nb import Engine, load_model
from kdtree_nb.cli import main
from kdtree_nb.commands.train_nano import STEPS
from kdtree_nb.drafters import DFlash
from kdtree_nb.train.nano import cli_corpus
from kdtree_nb.train.nano.manifest import Manifest, Package, Part, make_manifest, write_manifest
from kdtree_nb.train.nano.tokenizer import TOKENIZER_PATH


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*words) -> int:
    return main(["train-nano", *map(str, words)])


def test_help_names_every_step(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"  {step} " in out for step in STEPS)
    assert run("targets") == 2 and "got 'targets'" in capsys.readouterr().err


@pytest.mark.parametrize("step", STEPS)
def test_every_step_has_help(step, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(step, "--help")
    assert stopped.value.code == 0 and f"kdtree-nb train-nano {step}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--threads", 0), "--threads: expected an integer of 1 … 2^31 - 1, got 0"),
        (("--seed", -1), "--seed: expected an integer of 0 …"),
        (("--seed", 2**40), "--seed: expected an integer of 0 …"),
        (("--checkpoints", "c", "--stop-at", 0), "--stop-at: expected an integer of 1 …"),
        (("--checkpoint-every", -1), "--checkpoint-every: expected an integer of 0 …"),
    ],
)
@pytest.mark.parametrize("step", ["target", "drafter"])
def test_bad_options_of_a_run(step, options, error, capsys):
    places = ("--out", "x") if step == "target" else ("--out", "x", "--target", "y", "--texts", "z")
    with pytest.raises(SystemExit) as stopped:
        run(step, *places, *options)
    assert stopped.value.code == 2 and error in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_found_before_the_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kdtree_nb.train.nano.cli_target.read_corpus", lambda *args: pytest.fail("began"))
    (tmp_path / "file").touch()
    assert run("target", "--out", tmp_path / "file", "--steps", 1) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]"])
def test_a_damaged_tokenizer_is_named(data, tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    assert run("target", "--out", tmp_path / "out", "--steps", 1, "--tokenizer", path) == 2
    assert f"tokenizer: {path}: expected a tokenizer.json, got" in capsys.readouterr().err


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """The part of this environment's manifest that a test can read in a second."""
    everything = {package.name: package for package in make_manifest().packages}
    names = [n for n in ("click", "anyio", "attrs", "httpx", "jsonschema", "rich") if n in everything]
    path = tmp_path_factory.mktemp("manifest") / "corpus.json"
    write_manifest(path, Manifest(tuple(everything[name] for name in sorted(names))))
    return path


def test_from_text_to_tokens_of_the_drafter(manifest, tmp_path, capsys):
    tokenizer, pack, out = tmp_path / "tokenizer.json", tmp_path / "tokens.pack", tmp_path / "target"
    assert run("tokenizer", "--manifest", manifest, "--out", tokenizer, "--vocab", 4096) == 0
    assert run("pack", "--manifest", manifest, "--tokenizer", tokenizer, "--out", pack) == 0
    target = ("target", "--out", out, "--corpus", pack, "--tokenizer", tokenizer, "--steps", 3, "--batch-tokens", 128)
    assert run(*target, "--checkpoints", tmp_path / "c", "--stop-at", 2) == 0
    assert "stopped at step 2 of 3" in capsys.readouterr().out and not any(out.iterdir())
    assert run(*target, "--checkpoints", tmp_path / "c") == 0
    assert "going on from step 2" in capsys.readouterr().out
    record = json.loads((out / "training.json").read_text())
    assert record["corpus"]["source"] == "packages of the manifest" and "--steps 3" in record["command"]
    assert [point["step"] for point in record["train_curve"]] == [1, 2, 3]
    assert record["final"]["bits_per_byte"].keys() == {"train", "code", "prose"}
    text = ("--texts", 4, "--part-texts", 2, "--total-len", 24, "--prompt-lens", 8, 12)
    assert run("generate", "--target", out, "--corpus", pack, "--out", tmp_path / "texts", *text) == 0
    assert len(list((tmp_path / "texts").iterdir())) == 2


def test_compare_says_how_far_two_runs_lie_apart(tmp_path, capsys):
    for name, values in {"a": (8.0, 5.0, 4.0), "b": (8.0, 5.25), "none": ()}.items():
        (tmp_path / name).mkdir()
        curve = [{"step": 10 * i, "nats_per_token": value} for i, value in enumerate(values, 1)]
        if name != "none":
            (tmp_path / name / "training.json").write_text(json.dumps({"train_curve": curve}))
    assert run("compare", tmp_path / "a", tmp_path / "b", "--tolerance", 0.25) == 0
    assert "2 points of both, up to step 20: at most 0.250000 nats per token apart (step 20)" in capsys.readouterr().out
    assert run("compare", tmp_path / "a", tmp_path / "b", "--tolerance", 0.2) == 2
    assert "expected differences of at most 0.2 nats per token, got 0.25" in capsys.readouterr().err
    assert run("compare", tmp_path / "a", tmp_path / "none") == 2
    assert "expected training.json or checkpoints" in capsys.readouterr().err


def test_compare_reads_checkpoints(tmp_path):
    words = (
        "--tokenizer",
        TOKENIZER_PATH,
        "--steps",
        4,
        "--batch-tokens",
        128,
        "--stop-at",
        2,
        "--out",
        tmp_path / "x",
    )
    for name in "ab":
        assert run("target", *words, "--checkpoints", tmp_path / name) == 0
    assert run("compare", tmp_path / "a", tmp_path / "b") == 0


def test_manifest_is_written(monkeypatch, tmp_path, capsys):
    one = Package("alpha", "1.0", "MIT", {"code": Part("train", 1, 5, "0" * 64)})
    monkeypatch.setattr(cli_corpus, "make_manifest", lambda: Manifest((one,)))
    assert run("manifest", "--out", tmp_path / "corpus.json") == 0
    assert "1 packages" in capsys.readouterr().out and "alpha" in (tmp_path / "corpus.json").read_text()


def test_differing_packages_are_an_error_in_one_line(tmp_path, capsys):
    gone = Package("no-such-package", "1.0", "MIT", {"code": Part("train", 1, 5, "0" * 64)})
    write_manifest(tmp_path / "corpus.json", Manifest((gone,)))
    assert run("tokenizer", "--manifest", tmp_path / "corpus.json", "--out", tmp_path / "t.json") == 2
    err = capsys.readouterr().err
    assert "no-such-package: expected version 1.0, got none" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--stop-at", "3"), "expected --checkpoints FOLDER"), (("--preset", "large"), "invalid choice")],
)
def test_bad_options_of_target(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("target", "--out", tmp_path / "x", *words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "step", [("target",), ("generate", "--target", "x"), ("drafter", "--target", "x", "--texts", "x")]
)
def test_a_gpu_that_is_not_there(step, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run(*step, "--out", tmp_path / "x", "--device", "cuda")
    assert "--device cuda: expected a GPU that torch can use, found none" in capsys.readouterr().err


def test_bad_sizes_and_files_of_target(tmp_path, capsys):
    assert run("target", "--out", tmp_path / "x", "--steps", 0) == 2
    assert "recipe: num_steps: expected at least 1, got 0" in capsys.readouterr().err
    assert run("target", "--out", tmp_path / "x", "--corpus", TOKENIZER_PATH) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.fixture(scope="module")
def target_and_texts(tmp_path_factory):
    """A target after 2 steps, and 4 texts that it wrote."""
    folder = tmp_path_factory.mktemp("drafter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdtree_nb.train.nano.cli_target.MAX_STANDARD_LIBRARY_BYTES", 100_000)
        _write_target_and_texts(folder)
    return folder / "target", folder / "texts"


def _write_target_and_texts(folder):
    size = ("--steps", 2, "--batch-tokens", 128, "--tokenizer", TOKENIZER_PATH)
    assert run("target", "--out", folder / "target", *size) == 0
    text = ("--texts", 4, "--part-texts", 2, "--total-len", 32, "--prompt-lens", 8, 12)
    assert run("generate", "--target", folder / "target", "--out", folder / "texts", *text) == 0


def test_drafter_is_trained_stopped_and_resumed(target_and_texts, tmp_path, capsys):
    target, texts = target_and_texts
    words = ("drafter", "--target", target, "--texts", texts, "--out", tmp_path / "drafter", "--steps", 3,
             "--batch-texts", 2, "--anchors", 4, "--checkpoints", tmp_path / "steps")  # fmt: skip
    assert run(*words, "--stop-at", 2) == 0
    assert "stopped at step 2 of 3" in capsys.readouterr().out and not any((tmp_path / "drafter").iterdir())
    assert run(*words, "--recompute") == 0
    assert "going on from step 2" in capsys.readouterr().out
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert record["num_blocks"] == 24 and [point["step"] for point in record["train_curve"]] == [1, 2, 3]
    assert record["files"].keys() == {"config.json", "model.safetensors"}
    model, drafter = load_model(target), DFlash.load(tmp_path / "drafter")
    assert drafter.config.mask_token_id == 1 and drafter.block_size == 8
    want = Engine(model).generate_ar([5, 6, 7], 12).tokens
    assert Engine(model, drafter).generate_ddtree([5, 6, 7], 12).tokens == want
    assert run("compare", tmp_path / "drafter", tmp_path / "steps") == 0


def test_texts_of_another_target(target_and_texts, tmp_path, capsys):
    target, texts = target_and_texts
    shutil.copytree(target, tmp_path / "target")
    shard = next((tmp_path / "target").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    words = ("--target", tmp_path / "target", "--texts", texts, "--out", tmp_path / "drafter")
    assert run("drafter", *words) == 2
    assert "expected texts of the target" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("drafter", *words, "--stop-at", 3)
    assert "expected --checkpoints FOLDER" in capsys.readouterr().err
