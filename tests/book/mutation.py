"""Spoil one result at a time under a `greedy-exact` cell and see whether its assertions notice.

`exercise_cell` runs inside the kernel that has just executed the cell (prepare.py arranges that in the copies). It runs
the cell again in a copy of its namespace: once untouched, to count the calls, then once per mutation. The kinds are
described in README.md.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from tests.book.spoil import output_names, spoil_generation, spoil_in_place, spoil_output

KINDS = (
    "tokens, logits, ar_tokens, ar_logits, stream_tokens, stream_logits, kernel:<op>[:<output>], "
    "reference:<name>[:<output>], integrations:<engine>.<name>[:<output>]"
)
_GENERATE = {"": "generate_ddtree", "ar_": "generate_ar"}
_MODULES = {
    "kernel": "kdtree_nb.native.ops",
    "reference": "kdtree_nb.reference",
    "integrations": "kdtree_nb.integrations",
}


@dataclasses.dataclass
class Watch:
    """Records the results of the outermost calls of `owner.name`, and spoils that of call number `spoil_call`.

    is_generation: whether they are Generations
    """

    owner: Any
    name: str
    output: str = ""
    is_generation: bool = False
    spoil_call: int | None = None
    spoil: Callable[[Any], Any] | None = None
    calls: list[Any] = dataclasses.field(default_factory=list)
    depth: int = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Patch while the block runs. Of an engine both generate methods are patched: one may be built on the other,
        and a fault inside both would cancel out, so only the outermost call counts."""
        names = tuple(_GENERATE.values()) if self.name in _GENERATE.values() else (self.name,)
        originals = {name: getattr(self.owner, name) for name in names}
        for name, original in originals.items():
            setattr(self.owner, name, self._wrap(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(self.owner, name, original)

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            chosen = self.depth == 0 and name == self.name
            spoiling = chosen and len(self.calls) == self.spoil_call
            before = args[0].clone() if spoiling and isinstance(args[0], torch.Tensor) else None
            self.depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self.depth -= 1
            if chosen:
                self.calls.append(result)
            if spoiling and result is None:
                spoil_in_place(args[0], before)
            return self.spoil(result) if spoiling and result is not None else result

        return call


def find_target(kind: str) -> Watch:
    """What a kind watches. Raises ValueError when the kind or its callable does not exist."""
    for prefix, method in _GENERATE.items():
        if kind in (f"{prefix}tokens", f"{prefix}logits"):
            engine = importlib.import_module("kdtree_nb").Engine
            return Watch(engine, method, kind.removeprefix(prefix), is_generation=True)
    if kind in ("stream_tokens", "stream_logits"):
        handle = importlib.import_module("kdtree_nb.speculate").Handle
        return Watch(handle, "result", kind.removeprefix("stream_"), is_generation=True)
    family, _, rest = kind.partition(":")
    path, _, output = rest.partition(":")
    if family not in _MODULES or not path:
        raise ValueError(f"exactness kind: expected one of {KINDS}; got {kind!r}")
    owner: Any = importlib.import_module(_MODULES[family])
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if not callable(getattr(owner, name, None)):
        raise ValueError(f"exactness kind {kind!r}: {_MODULES[family]} has no callable {path!r}")
    return Watch(owner, name, output)


def run_cell(source: str, namespace: dict[str, Any], watch: Watch) -> str:
    """Run a cell's source in a copy of `namespace` under `watch`: "passed", "assertion failed" or the exception."""
    from IPython.core.inputtransformer2 import TransformerManager

    tree = ast.parse(TransformerManager().transform_cell(source))
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    quiet = io.StringIO()
    try:
        with watch.on(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            exec(compile(tree, "<greedy-exact cell>", "exec"), dict(namespace))
    except AssertionError:
        return "assertion failed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
    return "passed"


def exercise_kind(source: str, namespace: dict[str, Any], kind: str) -> dict[str, Any]:
    """Outcome of one kind: number of calls, outcome of every mutation, and for generations what they contained."""
    count = find_target(kind)
    clean = run_cell(source, namespace, count)
    report: dict[str, Any] = {"clean": clean, "calls": len(count.calls), "mutations": {}}
    if clean != "passed" or not count.calls:
        return report
    if count.is_generation:
        report["compared"] = _compared(count.calls)
    for label, call, spoil in _mutations(count):
        watch = dataclasses.replace(count, spoil_call=call, spoil=spoil, calls=[], depth=0)
        report["mutations"][label] = run_cell(source, namespace, watch)
    return report


def _mutations(count: Watch) -> Iterator[tuple[str, int, Callable[[Any], Any]]]:
    last_call = len(count.calls) - 1
    if count.is_generation:
        name = count.output
        yield "first", 0, lambda result: spoil_generation(result, name, last=False)
        yield "last", last_call, lambda result: spoil_generation(result, name, last=True)
        return
    if count.calls[0] is None:
        yield "in place, first call", 0, lambda result: result
        yield "in place, last call", last_call, lambda result: result
        return
    names = [n for n in output_names(count.calls[last_call]) if count.output in ("", n)]
    for number, name in enumerate(names):
        if number == 0 and last_call > 0:
            yield f"{name} first call", 0, lambda result, name=name: spoil_output(result, name, last=False)
        yield f"{name} last call", last_call, lambda result, name=name: spoil_output(result, name, last=True)


def _compared(calls: list[Any]) -> dict[str, int]:
    """How much a cell compared: totals over the generations that its calls returned."""
    generations = [g for result in calls for g in (result if isinstance(result, list) else [result])]
    tokens = [t for g in generations for t in g.tokens]
    accepted = sum(sum(g.stats.accepted_per_step) for g in generations)
    drafted = sum(n - 1 for g in generations for n in g.stats.nodes_per_step)  # without the roots
    return {"tokens": len(tokens), "distinct": len(set(tokens)), "accepted": accepted, "rejected": drafted - accepted}


def exercise_cell(namespace: dict[str, Any], notebook: str, cell_id: str, report_path: str) -> None:
    """Run every mutation of one cell of `notebook` and write the report as JSON; a test reads it."""
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    cell = next(c for c in cells if c["id"] == cell_id)
    source, kinds = "".join(cell["source"]), cell["metadata"].get("exactness", [])
    report = {}
    for kind in kinds:
        try:
            report[kind] = exercise_kind(source, namespace, kind)
        except Exception as error:
            report[kind] = {"clean": f"{type(error).__name__}: {error}", "calls": 0, "mutations": {}}
    plt.close("all")
    Path(report_path).parent.mkdir(parents=True, exist_ok=True)
    Path(report_path).write_text(json.dumps(report, indent=1), encoding="utf-8")


def faults(report: dict[str, Any]) -> list[str]:
    """What is wrong with a cell according to its report, in words; empty when every mutation was noticed."""
    found = [] if report else ["no exactness kind declared"]
    for kind, outcome in report.items():
        if outcome["clean"] != "passed":
            found.append(f"{kind}: running the cell again unspoiled: {outcome['clean']}")
        elif not outcome["mutations"]:
            found.append(f"{kind}: the cell makes no such call itself ({outcome['calls']} calls, nothing to spoil)")
        for label, result in outcome["mutations"].items():
            if result != "assertion failed":
                found.append(f"{kind}, {label} spoiled: expected an AssertionError, got: {result}")
        compared = outcome.get("compared")
        if compared and kind in ("tokens", "stream_tokens"):
            wanted = {"tokens": 64, "distinct": 8, "accepted": 1, "rejected": 1}
            found += [f"{kind}: compares {compared[k]} {k}, expected {w}" for k, w in wanted.items() if compared[k] < w]
    return found
