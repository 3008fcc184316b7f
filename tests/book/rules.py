"""The rules of README.md, as functions from a notebook (nbformat 4 JSON) to a list of problems in words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

PUBLIC_NAMES = {
    "Engine", "Sampling", "load_model", "ops", "drafters", "speculate", "train", "bench", "integrations", "parallel",
    "reference", "viz",
}  # fmt: skip
HIDING_TAGS = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
HEADINGS = ("Predict", "What surprised us", "Exercises", "Summary")
MAX_CODE_CELLS = 25
MAX_VISIBLE_LINES = 12
MAX_COLUMNS = 88
MIN_ASSERTS = 5
FIGURES = (4, 8)
WORDS = (1200, 3000)
MAX_SECONDS = 60
_FIGURE_TYPES = ("image/png", "image/svg+xml", "image/jpeg")
_MEASURED = re.compile(
    r"(?<![\w.])\d+(?:[.,]\d+)?\s?(?:×|x\b|ms\b|µs\b|ns\b|%|[GMT]B/s|[GT]FLOPS?|tokens?/s|times (?:as|faster))"
)
_MARKDOWN_CODE = re.compile(r"(```+|~~~+).*?\1|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$", re.DOTALL)

Cell = dict[str, Any]
Notebook = dict[str, Any]


def source_text(cell: Cell) -> str:
    """A cell's source as one string."""
    return "".join(cell["source"])


def tags(cell: Cell) -> set[str]:
    """A cell's tags."""
    return set(cell["metadata"].get("tags", []))


def code_cells(notebook: Notebook) -> list[Cell]:
    """The code cells, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _parse(cell: Cell) -> ast.Module:
    """Syntax tree of a code cell, IPython magics left out."""
    lines = (line for line in source_text(cell).split("\n") if not line.lstrip().startswith(("%", "!")))
    return ast.parse("\n".join(lines))


def source_problems(notebook: Notebook) -> list[str]:
    """What is wrong with a committed chapter, before it runs."""
    return [
        *_prose_problems(notebook),
        *_size_problems(notebook),
        *_import_problems(notebook),
        *_tag_problems(notebook),
        *_exercise_problems(notebook),
    ]


def _prose_problems(notebook: Notebook) -> Iterator[str]:
    texts = [source_text(c) for c in notebook["cells"] if c["cell_type"] == "markdown"]
    titles = [line for text in texts for line in text.split("\n") if line.startswith("# ")]
    if not texts or not texts[0].startswith("# ") or len(titles) != 1:
        yield f"expected one title ('# NN · Topic') at the very top, got {titles}"
    headings = {line.lstrip("# ").strip().lower() for t in texts for line in t.split("\n") if line.startswith("##")}
    for heading in HEADINGS:
        if heading.lower() not in headings:
            yield f"heading '## {heading}' is missing"
    words = sum(len(_words(text)) for text in texts)
    if not WORDS[0] <= words <= WORDS[1]:
        yield f"{words} words of prose, expected {WORDS[0]} to {WORDS[1]}"
    for text in texts:
        for match in _MEASURED.finditer(_MARKDOWN_CODE.sub(" ", text)):
            yield f"a figure typed into prose: {match.group()!r}; print it in a cell or glue it"


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_][\w'’-]*", _MARKDOWN_CODE.sub(" ", text))


def _size_problems(notebook: Notebook) -> Iterator[str]:
    cells = code_cells(notebook)
    if len(cells) > MAX_CODE_CELLS:
        yield f"{len(cells)} code cells, expected at most {MAX_CODE_CELLS}"
    for cell in cells:
        lines = len(source_text(cell).split("\n"))
        if lines > MAX_VISIBLE_LINES and not tags(cell) & HIDING_TAGS:
            yield f"cell {cell['id']}: {lines} lines, expected at most {MAX_VISIBLE_LINES} or the tag hide-input"
        columns = max(len(line) for line in source_text(cell).split("\n"))
        if columns > MAX_COLUMNS and not tags(cell) & HIDING_TAGS:
            yield f"cell {cell['id']}: {columns} columns, expected at most {MAX_COLUMNS}"
    if not any(_calls(cell, "use_theme") for cell in cells):
        yield "viz.use_theme() is never called"


def _import_problems(notebook: Notebook) -> Iterator[str]:
    for cell in code_cells(notebook):
        for node in ast.walk(_parse(cell)):
            if isinstance(node, ast.Import):
                bad = [a.name for a in node.names if a.name.split(".")[0] == "kdtree_nb" and a.name != "kdtree_nb"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kdtree_nb":
                bad = [a.name for a in node.names if node.module != "kdtree_nb" or a.name not in PUBLIC_NAMES]
            else:
                bad = [f"{node.value.id}.{node.attr}"] if _is_private(node) else []
            for name in bad:
                yield f"cell {cell['id']}: {name} is not public; expected one of {sorted(PUBLIC_NAMES)}"


def _is_private(node: ast.AST) -> bool:
    """Whether a node reads an underscored attribute of a public name."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return node.value.id in PUBLIC_NAMES and node.attr.startswith("_")


def _tag_problems(notebook: Notebook) -> Iterator[str]:
    cells = code_cells(notebook)
    for tag in ("greedy-exact", "speedup"):
        if not any(tag in tags(cell) for cell in cells):
            yield f"no code cell is tagged {tag}"
    for cell in cells:
        exact = "greedy-exact" in tags(cell)
        if exact and not _num_asserts(_parse(cell)):
            yield f"cell {cell['id']}: greedy-exact without an assert"
        if exact != bool(cell["metadata"].get("exactness")):
            yield f"cell {cell['id']}: the tag greedy-exact and the metadata exactness belong together"
        if "speedup" in tags(cell) and not _calls(cell, "plot_speedup"):
            yield f"cell {cell['id']}: tagged speedup without viz.plot_speedup"
        if tags(cell) & {"skip-execution", "raises-exception"}:
            yield f"cell {cell['id']}: no cell is skipped or allowed to fail"


def _exercise_problems(notebook: Notebook) -> Iterator[str]:
    text = "\n".join(source_text(c) for c in notebook["cells"] if c["cell_type"] == "markdown")
    exercises, solutions = text.count("{exercise}"), text.count("{solution-start}") + text.count("{solution}")
    if exercises == 0 or exercises != solutions:
        yield f"{exercises} exercises and {solutions} solutions, expected a solution for each and at least one"
    if not any(_calls(cell, "rejects") for cell in code_cells(notebook)):
        yield "no exercise shows that its checker rejects planted wrong answers (viz.exercise.rejects)"


def _calls(cell: Cell, name: str) -> bool:
    calls = (node.func for node in ast.walk(_parse(cell)) if isinstance(node, ast.Call))
    return any(getattr(f, "attr", getattr(f, "id", None)) == name for f in calls)


def _num_asserts(node: ast.AST) -> int:
    """Assertions that run with the cell: those inside functions, which may never be called, do not count."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return 0
    return isinstance(node, ast.Assert) + sum(_num_asserts(child) for child in ast.iter_child_nodes(node))


def executed_problems(notebook: Notebook) -> list[str]:
    """What is wrong with the executed copy of a chapter."""
    cells = code_cells(notebook)
    return [*_run_problems(cells), *_figure_problems(cells), *_time_problems(cells)]


def _run_problems(cells: list[Cell]) -> Iterator[str]:
    asserts = 0
    for cell in cells:
        if source_text(cell).strip() and cell["execution_count"] is None:
            yield f"cell {cell['id']}: not executed"
            continue
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield f"cell {cell['id']}: ended in {output['ename']}: {output['evalue']}"
        asserts += _num_asserts(_parse(cell))
    if asserts < MIN_ASSERTS:
        yield f"{asserts} assertions executed, expected at least {MIN_ASSERTS}"
    for cell in cells:
        if "speedup" in tags(cell) and not _num_figures(cell):
            yield f"cell {cell['id']}: tagged speedup, but its output holds no picture"


def _num_figures(cell: Cell) -> int:
    data = [o.get("data", {}) for o in cell["outputs"] if o["output_type"] in ("display_data", "execute_result")]
    return sum(any(kind in d for kind in _FIGURE_TYPES) for d in data)


def _shows_value(output: dict[str, Any]) -> bool:
    """Whether an output is a value other than a picture; what `glue` stores without showing it does not count."""
    kinds = [kind for kind in output.get("data", {}) if not kind.startswith("application/papermill.record/")]
    return bool(kinds) and not any(kind in kinds for kind in _FIGURE_TYPES)


def _figure_problems(cells: list[Cell]) -> Iterator[str]:
    total = 0
    names: set[str] = set()
    for cell in cells:
        count = _num_figures(cell)
        total += count
        if count == 0:
            continue
        settings = cell["metadata"].get("mystnb", {})
        figure = settings.get("figure", {})
        if count > 1:
            yield f"cell {cell['id']}: {count} figures, expected one per cell"
        if any(_shows_value(output) for output in cell["outputs"]):
            yield f"cell {cell['id']}: shows a value beside its figure, with a caption: end it with the figure"
        if len(str(settings.get("image", {}).get("alt", "")).split()) < 4:
            yield f"cell {cell['id']}: mystnb.image.alt: expected a sentence, got {settings.get('image')}"
        if len(str(figure.get("caption", "")).split()) < 4:
            yield f"cell {cell['id']}: mystnb.figure.caption: expected a sentence, got {figure}"
        if not re.fullmatch(r"fig-[a-z0-9-]+", str(figure.get("name", ""))) or figure.get("name") in names:
            yield f"cell {cell['id']}: mystnb.figure.name: expected a unique 'fig-...', got {figure.get('name')!r}"
        names.add(figure.get("name"))
    if not FIGURES[0] <= total <= FIGURES[1]:
        yield f"{total} figures, expected {FIGURES[0]} to {FIGURES[1]}"


def _time_problems(cells: list[Cell]) -> Iterator[str]:
    seconds = sum(cell_seconds(cell) for cell in cells)
    if seconds > MAX_SECONDS:
        yield f"{seconds:.0f} s to execute, expected at most {MAX_SECONDS}"


def cell_seconds(cell: Cell) -> float:
    """How long a code cell ran, from the times that nbclient noted; 0 when it noted none."""
    times = cell["metadata"].get("execution", {})
    if "iopub.execute_input" not in times or "shell.execute_reply" not in times:
        return 0.0
    start, end = (datetime.fromisoformat(times[k]) for k in ("iopub.execute_input", "shell.execute_reply"))
    return (end - start).total_seconds()
