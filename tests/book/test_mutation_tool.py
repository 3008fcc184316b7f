"""The mutation run itself: it catches cells that would pass with a spoiled engine."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import numpy as np
import pytest
import torch

from tests.book import mutation

GOOD = "dd = Engine().generate_ddtree(64)\nar = Engine().generate_ar(64)\nassert dd.tokens == ar.tokens"
GOOD_STREAM = (
    "a, b = Engine().generate_ar(64), Handle().result()\n"
    "assert a.tokens == b.tokens and torch.equal(a.logits, b.logits)"
)
GOOD_LOGITS = "a, b = Engine().generate_ar(64), Engine().generate_ddtree(64); assert torch.equal(a.logits, b.logits)"


@dataclasses.dataclass(frozen=True)
class Stats:
    accepted_per_step: list[int]
    nodes_per_step: list[int]


@dataclasses.dataclass(frozen=True)
class Generation:
    tokens: list[int]
    stats: Stats
    logits: torch.Tensor | None


class Engine:
    """Stands in for the engine; generate_ar is built on generate_ddtree, as the real one may be."""

    def generate_ddtree(self, num_tokens: int, *, step: int = 4) -> Generation:
        logits = torch.arange(num_tokens * 3, dtype=torch.float32).view(-1, 3)
        steps = num_tokens // step
        return Generation([(7 * i) % 31 for i in range(num_tokens)], Stats([step - 1] * steps, [9] * steps), logits)

    def generate_ar(self, num_tokens: int) -> Generation:
        return self.generate_ddtree(num_tokens, step=1)


class Handle:
    """Stands in for a submitted stream."""

    def result(self) -> Generation:
        return Engine().generate_ddtree(64)


def add_one(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values + 1, values.long()


def fill(values: torch.Tensor) -> None:
    values[1:3] = 5.0


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """A package of that name with the stand-ins above."""
    ops = types.SimpleNamespace(add_one=add_one, fill=fill)
    reference = types.SimpleNamespace(double=lambda x: 2.0 * x)
    modules = {
        "kdtree_nb": types.SimpleNamespace(Engine=Engine),
        "kdtree_nb.native.ops": ops,
        "kdtree_nb.speculate": types.SimpleNamespace(Handle=Handle),
        "kdtree_nb.reference": reference,
    }
    real = mutation.importlib.import_module
    monkeypatch.setattr(mutation.importlib, "import_module", lambda name: modules.get(name) or real(name))
    return {"Engine": Engine, "Handle": Handle, "torch": torch, "np": np, "ops": ops, "reference": reference}


def faults(source: str, namespace: dict, kind: str) -> list[str]:
    return mutation.faults({kind: mutation.exercise_kind(source, namespace, kind)})


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (GOOD, "tokens"),
        (GOOD, "ar_tokens"),
        (GOOD_LOGITS, "logits"),
        (GOOD_LOGITS, "ar_logits"),
        (GOOD_STREAM, "stream_tokens"),
        (GOOD_STREAM, "stream_logits"),
        (GOOD_STREAM, "ar_tokens"),
        ("a, b = ops.add_one(torch.ones(3))\nassert (a == 2).all() and (b == 1).all()", "kernel:add_one"),
        ("a, b = ops.add_one(torch.ones(3))\nassert (b == 1).all()", "kernel:add_one:1"),
        ("x = torch.zeros(4)\nops.fill(x)\nassert x.tolist() == [0, 5, 5, 0]", "kernel:fill"),
        ("assert np.allclose(reference.double(np.ones(2)), 2, rtol=1e-9)", "reference:double"),
    ],
)
def test_a_good_cell_has_no_faults(package, source: str, kind: str):
    assert faults(source, package, kind) == []


@pytest.mark.parametrize(
    ("source", "kind", "fault"),
    [
        ("dd = Engine().generate_ddtree(64)\nassert len(dd.tokens) == 64", "tokens", "passed"),
        (f"{GOOD.replace('dd.tokens == ar.tokens', 'dd.tokens[:60] == ar.tokens[:60]')}", "tokens", "last spoiled"),
        (f"{GOOD.replace('dd.tokens == ar.tokens', 'dd.tokens[1:] == ar.tokens[1:]')}", "tokens", "first spoiled"),
        (GOOD, "logits", "passed"),
        (GOOD_STREAM.replace("assert a.tokens == b.tokens and", "assert"), "stream_tokens", "passed"),
        ("assert len(Handle().result().tokens) == 64", "stream_logits", "passed"),
        (GOOD, "stream_tokens", "makes no such call"),
        ("a, b = Engine().generate_ar(64), Engine().generate_ddtree(64)\nassert torch.allclose(a.logits, b.logits)",
         "logits", "passed"),
        ("assert dd.tokens == ar.tokens", "tokens", "makes no such call"),
        (GOOD.replace("64", "32"), "tokens", "compares 32 tokens"),
        (GOOD.replace("ddtree(64)", "ddtree(64, step=1)"), "tokens", "compares 0 accepted"),
        ("assert undefined", "tokens", "NameError"),
        (GOOD.replace("assert dd.tokens ==", "if dd.tokens !=") + ": raise ValueError", "tokens", "ValueError"),
        ("a, b = ops.add_one(torch.ones(3))\nassert (a == 2).all()", "kernel:add_one", "1 last call spoiled"),
        ("x = torch.zeros(4)\nops.fill(x)\nassert x.sum() > 0", "kernel:fill", "in place"),
    ],
)  # fmt: skip
def test_a_bad_cell_has_its_fault(package, source: str, kind: str, fault: str):
    done = Engine().generate_ar(64)
    found = faults(source, package | {"dd": done, "ar": done}, kind)
    assert found and fault in " ".join(found)


def test_nothing_leaks_out_of_a_run(package):
    original = Engine.__dict__["generate_ddtree"], Engine.__dict__["generate_ar"]
    namespace = dict(package)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    mutation.exercise_kind(f"x = torch.rand(3)\n{GOOD}", namespace, "tokens")
    assert (Engine.__dict__["generate_ddtree"], Engine.__dict__["generate_ar"]) == original
    assert namespace.keys() == package.keys()
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_kinds_are_refused(package):
    for kind in ("token", "kernel:", "kernel:absent", "other:add_one"):
        with pytest.raises((ValueError, AttributeError)):
            mutation.find_target(kind)


def test_report_is_written(package, tmp_path):
    cell = {"id": "c1", "cell_type": "code", "source": [GOOD], "metadata": {"exactness": ["tokens", "kernel:absent"]}}
    notebook, report = tmp_path / "n.ipynb", tmp_path / "r" / "c1.json"
    notebook.write_text(json.dumps({"cells": [cell]}))
    mutation.exercise_cell(package, str(notebook), "c1", str(report))
    written = json.loads(report.read_text())
    assert [fault.split(":")[0] for fault in mutation.faults(written)] == ["kernel"]
    assert "kdtree_nb" in sys.modules or written["tokens"]["clean"] == "passed"


def test_a_cell_without_kinds_is_a_fault():
    assert mutation.faults({}) == ["no exactness kind declared"]
