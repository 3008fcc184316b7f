"""generate: what it prints is what the engine says, piece by piece, in whole characters."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest
import torch

from kdtree_nb import Engine, Sampling, cli
from kdtree_nb.commands import common
from kdtree_nb.commands import generate as command
from kdtree_nb.commands.generate import TextPrinter, print_text
from kdtree_nb.drafters import DFlash, DFlashConfig
from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.speculate import StepRecord

PROMPT = "def add(a, b):\n    "


def expected(models, num_tokens: int) -> str:
    model = models("tiny")
    tokens = Engine(model).generate_ar(model.tokenizer.encode(PROMPT), num_tokens).tokens
    return model.tokenizer.decode(tokens)


def test_a_drafter_from_a_folder(capsys, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 256}
    config = DFlashConfig(**sizes, **heads, target_layer_ids=(1,), mask_token_id=255, block_size=4)
    DFlash.random(config).save(tmp_path / "drafter")
    texts = []
    for drafter in (str(tmp_path / "drafter"), "none"):
        assert cli.main(["generate", "--prompt", "def ", "--max-new-tokens", "12", "--drafter", drafter]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    assert cli.main(["generate", "--prompt", "def ", "--drafter", str(tmp_path)]) == 2
    assert "DFlash: " in capsys.readouterr().err
    assert cli.main(["generate", "--prompt", "def ", "--drafter", "nobody"]) == 2
    assert "--drafter: expected one of ngram, none, random, or a folder, got 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--ar"], ["--drafter", "none"], ["--drafter", "random", "--budget", "3"]])
def test_every_way_prints_the_same_text(capsys, models, options):
    assert cli.main(["generate", "--prompt", PROMPT, "--max-new-tokens", "40", *options]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == expected(models, 40).rstrip("\n")
    assert err.startswith("[40 tokens in ")


def test_the_prompt_may_come_from_standard_input(capsys, models, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert cli.main(["generate", "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out == expected(models, 12) + "\n"


def test_json(capsys, models):
    assert cli.main(["generate", "--prompt", PROMPT, "--max-new-tokens", "24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == expected(models, 24) and found["finish_reason"] == "length"
    assert len(found["tokens"]) == 24 == found["num_target_forwards"] + sum(found["accepted_per_step"])


SAMPLED = ["generate", "--prompt", PROMPT, "--max-new-tokens", "40", "--temperature", "0.9"]


@pytest.mark.parametrize("options", [[], ["--ar"], ["--drafter", "random", "--budget", "3"]])
def test_a_seed_names_a_text(capsys, models, options):
    model = models("tiny")
    sampling = Sampling(0.9, top_k=40, top_p=0.95, seed=6)
    tokens = Engine(model).generate_ar(model.tokenizer.encode(PROMPT), 40, sampling=sampling).tokens
    assert cli.main([*SAMPLED, "--top-k", "40", "--top-p", "0.95", "--seed", "6", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == tokens
    assert cli.main([*SAMPLED, "--top-k", "40", "--top-p", "0.95", "--seed", "7", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] != tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "Sampling: temperature: expected 0 (greedy) or a finite FP32 number"),
        (["--temperature", "nan"], "Sampling: temperature: expected"),
        (["--temperature", "1", "--top-k", "1025"], "Sampling: top_k: expected an integer of 0 (all) … 1024, got 1025"),
        (["--temperature", "1", "--top-p", "0"], "Sampling: top_p: expected a number above 0 and at most 1, got 0"),
        (["--top-k", "5", "--seed", "3"], "--top-k, --seed: expected --temperature above 0 beside it, got greedy"),
    ],
)
def test_bad_sampling(capsys, options, message):
    assert cli.main(["generate", "--prompt", PROMPT, "--max-new-tokens", "4", *options]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ar", "--budget", "8"], "--budget 8: expected a drafter, got --ar, which drafts nothing"),
        (["--budget", "auto", "--ar"], "--budget auto: expected a drafter, got --ar"),
        (["--ar", "--mode", "chain"], "--mode chain: expected a drafter, got --ar"),
        (["--ar", "--drafter", "ngram", "--budget", "3"], "--drafter ngram, --budget 3: expected a drafter, got --ar"),
        (["--ar", "--drafter", "nobody"], "--drafter nobody: expected a drafter, got --ar"),
        (["--drafter", "none", "--budget", "8"], "--budget 8: expected a drafter, got --drafter none"),
        (["--drafter", "none", "--mode", "tree"], "--mode tree: expected a drafter, got --drafter none"),
    ],
)
def test_options_of_a_draft_without_one(capsys, options, message):
    assert cli.main(["generate", "--prompt", "x", "--max-new-tokens", "4", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"kdtree-nb generate: {message}") and err.count("\n") == 1


def test_options_that_agree_may_stand_together(capsys):
    options = ["--ar", "--drafter", "none", "--budget", "0"]
    assert cli.main(["generate", "--prompt", "x", "--max-new-tokens", "4", *options]) == 0
    assert capsys.readouterr().err.startswith("[4 tokens in 4 target forwards")


def test_nothing_to_generate(capsys):
    assert cli.main(["generate", "--prompt", "x", "--max-new-tokens", "0"]) == 0
    assert capsys.readouterr().err == "[0 tokens in 0 target forwards, stopped by length]\n"


def step(emitted: list[int]) -> StepRecord:
    return StepRecord(0, [0], None, torch.empty(0), [[]], [emitted])


def test_characters_are_printed_whole(capsys, models):
    printer, shown = TextPrinter(models("tiny")), []
    for byte in "aé€\N{GRINNING FACE}".encode():
        printer(step([byte]))
        shown.append(capsys.readouterr().out)
    assert shown == ["a", "", "é", "", "", "€", "", "", "", "\N{GRINNING FACE}"]
    printer(step([0xE2, 0x82]))
    printer.finish()
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"


def test_an_end_of_text_token_is_not_printed(capsys, models):
    printer = TextPrinter(models("tiny"))
    printer(step([65, 10, 0]))
    printer.finish()
    assert capsys.readouterr().out == "A\n"


def emit(*texts: str):
    """Stands for an engine that emits these texts, one a step."""

    def generate(on_step) -> str:
        for text in texts:
            on_step(step(list(text.encode())))
        return "the result"

    return generate


class Interrupt:
    """A trace function: KeyboardInterrupt in front of the bytecode number `place` of what prints, as Ctrl-C may."""

    def __init__(self, place: int) -> None:
        self.place, self.files = place, (command.__file__, common.__file__)

    def __call__(self, frame, event, value):
        if frame.f_code.co_filename not in self.files or frame.f_code.co_name == "__init__":
            return None  # nothing was printed before the printer is there
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.place -= 1
            if self.place == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("texts", [("a",), ("a", "\n"), ("a\n", "b"), ("\n", "\n", "a")])
def test_an_interrupt_at_any_place_ends_the_line(capsys, models, texts):
    model, before = models("tiny"), sys.gettrace()
    place, result = 0, None
    while result is None:
        place, trace = place + 1, Interrupt(place + 1)
        sys._getframe().f_trace_opcodes = True  # Python 3.12 reports opcodes only if a frame wants them by now
        sys.settrace(trace)
        try:
            result = print_text(model, emit(*texts))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        out = capsys.readouterr().out
        assert out.endswith("\n") or out == "", place
        assert out.strip("\n") in ("", "".join(texts).strip("\n"), texts[0].strip("\n")), place
    assert place > 100 and out == "".join(texts) + "\n" * (texts[-1][-1] != "\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "--prompt: expected at least one character"),
        (["--prompt", "\udcff"], "--prompt: expected UTF-8 text"),
        (["--prompt", "x" * 5000], "expected at most 4095 tokens, got 5000"),
        (["--prompt", "x", "--budget", "-1"], "budget: expected an integer of 0 … 1023, got -1"),
        (["--prompt", "x", "--budget", "1024"], "budget: expected an integer of 0 … 1023, got 1024"),
        (["--prompt", "x", "--max-new-tokens", "-1"], "max_new_tokens: expected an integer of at least 0, got -1"),
        (["--prompt", "x", "--max-seq-len", "9999"], "max_seq_len: expected 2 … 4096"),
        (["--prompt", "x", "--model", "none.kdtr"], "found nothing at none.kdtr"),
    ],
)
def test_bad_input(capsys, options, message):
    assert cli.main(["generate", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kdtree-nb generate: ") and message in err and err.count("\n") == 1


def test_a_broken_model_file(capsys, tmp_path):
    (tmp_path / "broken.kdtr").write_bytes(b"KDTR" + bytes(60))
    assert cli.main(["generate", "--prompt", "x", "--model", str(tmp_path / "broken.kdtr")]) == 2
    assert "broken.kdtr" in capsys.readouterr().err


def test_bytes_that_are_no_text(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert cli.main(["generate"]) == 2
    assert "standard input: expected UTF-8 text, got other bytes at offset 2" in capsys.readouterr().err


def test_text_stops_cleanly_at_the_longest_sequence(capsys):
    assert cli.main(["generate", "--prompt", "abcd", "--max-seq-len", "10"]) == 0
    assert capsys.readouterr().err.startswith("[6 tokens in")


def test_a_converted_folder_generates_the_same_text(capsys, tmp_path):
    pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    folder = tmp_path / "model"
    assert cli.main(["convert", str(DATA_DIR / "tiny.kdtr"), str(folder)]) == 0
    args = ["--prompt", "def naïve(x):\n", "--max-new-tokens", "40", "--json"]
    capsys.readouterr()
    assert cli.main(["generate", "--model", str(folder), *args]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert cli.main(["generate", *args]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == ours["text"]
    assert cli.main(["generate", "--model", str(folder), "--chat", *args]) == 2
    assert "chat template" in capsys.readouterr().err
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}\n")
    assert cli.main(["generate", "--model", str(folder), "--chat", *args]) == 0
    assert json.loads(capsys.readouterr().out)["text"]
    assert all(path.stat().st_mode & 0o044 == 0o044 & ~umask() for path in folder.iterdir())


def umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--device", "abacus"], "--device"), (["--device", "meta"], "native kernels"), (["--chat"], "--chat")],
)
def test_what_a_model_cannot_do(capsys, args, message):
    assert cli.main(["generate", "--prompt", "x", *args]) == 2
    assert message in capsys.readouterr().err
