"""The targets of drafting for nano-k2, in the records of `kdtree-nb evaluate`: what is accepted, and how fast it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdtree_nb.bench.targets import Cell, Figure, Target

MIN_TEXTS = 128
"""Prompts of a set, below which its tokens per forward are left to chance and not judged."""


def _of(kind: str, budget: int | str | None = None) -> Any:
    """Whether params are those of nano-k2's own drafter on one set of prompts, with one budget or any."""

    def applies(params: Mapping[str, Any]) -> bool:
        is_budget = budget is None or params["budget"] == budget
        return params["model"] == "nano-k2" and params["set"] == kind and params["num_texts"] >= MIN_TEXTS and is_budget

    return applies


def _tau(cell: Cell) -> float | None:
    return cell["DFlash"].median if "DFlash" in cell else None


def _tau_less_repetitive(cell: Cell) -> float | None:
    return float(cell["DFlash"].params["tau_less_repetitive"]) if "DFlash" in cell else None


def _miscalibration(cell: Cell) -> float | None:
    """By how many percent what the tree expects is off what is accepted."""
    if "DFlash" not in cell:
        return None
    params = cell["DFlash"].params
    return 100 * abs(params["expected"] / params["accepted"] - 1)


def _accepted(claim: str, budget: int | str, bound: float, figure: Figure = _tau, reason: str = "") -> Target:
    where = f"budget {budget}" if budget != "chain" else "chain"
    return Target("cpu", "acceptance", f"tokens per forward on held-out code, {where}{claim}", figure, bound,
                  unit="tokens", applies=_of("code", budget), open=reason)  # fmt: skip


def _best_tree(cell: Cell) -> float | None:
    """Seconds of the fastest fixed budget."""
    trees = [m.median for name, m in cell.items() if name.startswith("tree ") and name != "tree auto"]
    return min(trees) if trees else None


def _against(contender: str) -> Figure:
    """How much faster the best tree is."""

    def figure(cell: Cell) -> float | None:
        best = _best_tree(cell)
        return cell[contender].median / best if best and contender in cell else None

    return figure


def _auto(cell: Cell) -> float | None:
    """Of the speed of the best tree."""
    best = _best_tree(cell)
    return best / cell["tree auto"].median if best and "tree auto" in cell else None


def _on_code(params: Mapping[str, Any]) -> bool:
    return params["model"] == "nano-k2" and params["set"] == "code" and params["drafter"] == "DFlash"


def _on_any(params: Mapping[str, Any]) -> bool:
    return params["model"] == "nano-k2" and params["drafter"] == "DFlash"


_LESS = "the bound is that of a target whose texts repeat themselves more: prompt lookup reaches much less on this one"
_DEPTH = "one temperature for all depths cannot bring the chain and the largest trees together on both kinds of text"

DRAFT_TARGETS = (
    _accepted("", "chain", 4.5),
    _accepted("", 64, 6.0),
    _accepted(", less repetitive half", "chain", 4.0, _tau_less_repetitive, _LESS),
    _accepted(", less repetitive half", 64, 5.5, _tau_less_repetitive, _LESS),
    Target("cpu", "acceptance", "expected against accepted tokens on code, every budget", _miscalibration, 3, False,
           "%", _of("code")),
    Target("cpu", "acceptance", "expected against accepted tokens on prose, every budget", _miscalibration, 6, False,
           "%", _of("prose"), _DEPTH),
    Target("cuda", "budget_sweep", "the best tree against the chain, on code", _against("chain"), 1.15,
           applies=_on_code),
    Target("cuda", "budget_sweep", "the best tree against AR, on code", _against("AR"), 3.0, applies=_on_code),
    Target("cuda", "budget_sweep", "auto against the best fixed budget, each set", _auto, 0.97, applies=_on_any),
)  # fmt: skip
