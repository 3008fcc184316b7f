"""Each rule for chapters is broken once, and the break is reported; a chapter that keeps them all gives no report."""

from __future__ import annotations

import copy

import pytest

from tests.book import rules

PROSE = "A draft tree holds several continuations at once and the target checks them all in a single forward. " * 90
TIMES = {"iopub.execute_input": "2026-01-01T00:00:00.000000Z", "shell.execute_reply": "2026-01-01T00:00:02.000000Z"}


def markdown(text: str) -> dict:
    return {"cell_type": "markdown", "id": f"m{abs(hash(text))}", "metadata": {}, "source": text.splitlines(True)}


def code(identity: str, source: str, *, num_figures: int = 0, **metadata) -> dict:
    outputs = [{"output_type": "display_data", "data": {"image/svg+xml": "<svg/>"}, "metadata": {}}] * num_figures
    metadata.setdefault("execution", TIMES)
    return {"cell_type": "code", "id": identity, "metadata": metadata, "source": source.splitlines(True),
            "outputs": outputs, "execution_count": 1}  # fmt: skip


def picture(name: str) -> dict:
    caption = {"caption": "A caption of enough words.", "name": f"fig-{name}"}
    return {"mystnb": {"image": {"alt": "What there is to see."}, "figure": caption}}


@pytest.fixture
def chapter() -> dict:
    """A chapter that keeps every rule."""
    cells = [
        markdown("# 03 · Draft trees\n\nHow many?"),
        code("c0", "from kdtree_nb import Engine, viz\nviz.use_theme()"),
        markdown("## Predict\n\n" + PROSE),
        code("c1", "a = engine.generate_ddtree(p)\nassert a == b", tags=["greedy-exact"], exactness=["tokens"]),
        code("c2", "for i in range(3):\n    assert i >= 0\nassert 1\nassert 2\nassert 3"),
        *[code(f"f{i}", "viz.draw_tree(tree);", num_figures=1, **picture(str(i))) for i in range(3)],
        code("s", "viz.plot_speedup(t, baseline='a');", num_figures=1, tags=["speedup"], **picture("s")),
        markdown("## What surprised us\n\nMuch."),
        markdown("## Exercises\n\n```{exercise}\n:label: x\n```\n\n```{solution} x\n```"),
        code("e", "viz.exercise.rejects(check, [a, b])"),
        markdown("## Summary\n\nShort."),
    ]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def cell(notebook: dict, identity: str) -> dict:
    return next(c for c in notebook["cells"] if c["id"] == identity)


def set_source(identity: str, source: str):
    return lambda n: cell(n, identity).update(source=source.splitlines(True))


def set_metadata(identity: str, **metadata):
    return lambda n: cell(n, identity)["metadata"].update(metadata)


def replace_prose(old: str, new: str):
    def change(notebook: dict) -> None:
        for c in notebook["cells"]:
            if c["cell_type"] == "markdown":
                c["source"] = "".join(c["source"]).replace(old, new).splitlines(True)

    return change


SOURCE = {
    "no title": (replace_prose("# 03 ·", "03 ·"), "title"),
    "two titles": (replace_prose("Much.", "\n# Again"), "title"),
    "heading": (replace_prose("## Predict", "## Foresee"), "Predict"),
    "too short": (replace_prose(PROSE, "short"), "words of prose"),
    "too long": (replace_prose(PROSE, PROSE * 3), "words of prose"),
    "typed ratio": (replace_prose("Much.", "It is 3.1× faster."), "3.1×"),
    "typed time": (replace_prose("Much.", "It took 12 ms."), "12 ms"),
    "typed share": (replace_prose("Much.", "That is 40 % of it."), "40 %"),
    "too many cells": (lambda n: n["cells"].extend(code(f"x{i}", "1") for i in range(25)), "code cells"),
    "long cell": (set_source("c2", "assert 1\n" * 13), "lines"),
    "wide cell": (set_source("c2", "assert " + "1" * 88), "columns"),
    "no theme": (set_source("c0", "from kdtree_nb import viz"), "use_theme"),
    "private module": (set_source("c2", "from kdtree_nb.native import ops"), "not public"),
    "private import": (set_source("c2", "import kdtree_nb.native.ops"), "not public"),
    "private name": (set_source("c2", "from kdtree_nb import errors"), "not public"),
    "private attribute": (set_source("c2", "viz._x"), "not public"),
    "no exactness": (lambda n: n["cells"].remove(cell(n, "c1")), "greedy-exact"),
    "exactness without kinds": (set_metadata("c1", exactness=[]), "belong together"),
    "kinds without tag": (set_metadata("c1", tags=[]), "belong together"),
    "exactness without assert": (set_source("c1", "a == b"), "without an assert"),
    "assert only in a function": (set_source("c1", "def f():\n    assert a"), "without an assert"),
    "no speedup": (set_metadata("s", tags=[]), "no code cell is tagged speedup"),
    "speedup without its plot": (set_source("s", "plt.plot(x)"), "plot_speedup"),
    "allowed to fail": (set_metadata("c2", tags=["raises-exception"]), "skipped or allowed to fail"),
    "no exercise": (replace_prose("{exercise}", "{note}"), "exercises"),
    "no solution": (replace_prose("{solution} x", "{note}"), "solutions"),
    "checker never tried": (set_source("e", "check(a)"), "rejects"),
}

EXECUTED = {
    "not executed": (lambda n: cell(n, "c1").update(execution_count=None), "not executed"),
    "error": (
        lambda n: cell(n, "c1").update(outputs=[{"output_type": "error", "ename": "E", "evalue": "x"}]),
        "ended in E",
    ),
    "few assertions": (set_source("c2", "assert 1"), "assertions executed"),
    "speedup without picture": (lambda n: cell(n, "s").update(outputs=[]), "no picture"),
    "few figures": (lambda n: cell(n, "f1").update(outputs=[]), "figures"),
    "many figures": (
        lambda n: n["cells"].extend(code(f"g{i}", "1", num_figures=1, **picture(f"g{i}")) for i in range(5)),
        "figures",
    ),
    "two in a cell": (lambda n: cell(n, "f1").update(outputs=cell(n, "f1")["outputs"] * 2), "one per cell"),
    "no alt": (lambda n: cell(n, "f1")["metadata"]["mystnb"].pop("image"), "image.alt"),
    "no caption": (lambda n: cell(n, "f1")["metadata"]["mystnb"]["figure"].pop("caption"), "caption"),
    "name used twice": (set_metadata("f1", **picture("0")), "unique"),
    "slow": (
        set_metadata("c1", execution=TIMES | {"shell.execute_reply": "2026-01-01T00:01:02.000000Z"}),
        "s to execute",
    ),
}


def test_a_good_chapter_has_no_problems(chapter: dict):
    assert rules.source_problems(chapter) == []
    assert rules.executed_problems(chapter) == []


@pytest.mark.parametrize("name", SOURCE)
def test_each_source_rule_is_enforced(chapter: dict, name: str):
    change, problem = SOURCE[name]
    before = copy.deepcopy(chapter)
    change(chapter)
    assert chapter != before
    assert problem in " ".join(rules.source_problems(chapter))


@pytest.mark.parametrize("name", EXECUTED)
def test_each_executed_rule_is_enforced(chapter: dict, name: str):
    change, problem = EXECUTED[name]
    before = copy.deepcopy(chapter)
    change(chapter)
    assert chapter != before
    assert problem in " ".join(rules.executed_problems(chapter))


def test_code_and_mathematics_are_no_prose(chapter: dict):
    replace_prose("Much.", "```\n3.1× in 12 ms\n```\nand $40 \\%$ or `9 ms`")(chapter)
    assert rules.source_problems(chapter) == []


def test_a_glued_number_may_stand_beside_a_figure(chapter: dict):
    glued = {"output_type": "display_data", "data": {"application/papermill.record/text/plain": "2.5"}, "metadata": {}}
    cell(chapter, "s")["outputs"].append(glued)
    assert rules.executed_problems(chapter) == []
