"""Show code from the package's own files in a chapter, so that the text cannot drift from what runs."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LANGUAGES = {".py": "python", ".cu": "cuda", ".cpp": "cpp", ".h": "cpp", ".cuh": "cuda"}


def show_source(thing: Any, start: str | None = None, stop: str | None = None, *, docstring: bool = False) -> Any:
    """An IPython Markdown object that holds source code, to be the last expression of a cell.

    thing: a Python function, class or module; or a file by its path in the repository ("kernels/tree_build.cpp").
    start, stop: text of the first line to show and of the first line to leave out. docstring: keep a function's own.
    Raises ValueError when start or stop does not occur.
    """
    from IPython.display import Markdown

    if isinstance(thing, str | Path):
        text, language = (ROOT / thing).read_text(encoding="utf-8"), _LANGUAGES.get(Path(thing).suffix, "text")
    else:
        text, language = textwrap.dedent(inspect.getsource(thing)), "python"
        text = text if docstring else _without_docstring(text)
    return Markdown(f"```{language}\n{_cut(text, start, stop)}\n```")


def _cut(text: str, start: str | None, stop: str | None) -> str:
    lines = text.splitlines()
    first = 0 if start is None else _find(lines, start, 0)
    last = len(lines) if stop is None else _find(lines, stop, first + 1)
    return textwrap.dedent("\n".join(lines[first:last])).strip("\n")


def _find(lines: list[str], text: str, begin: int) -> int:
    for index in range(begin, len(lines)):
        if text in lines[index]:
            return index
    raise ValueError(f"show_source: expected a line with {text!r} after line {begin}, got none")


def _without_docstring(text: str) -> str:
    node = ast.parse(text).body[0]
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None or len(node.body) < 2:
        return text
    literal = node.body[0]
    lines = text.splitlines()
    return "\n".join(lines[: literal.lineno - 1] + lines[literal.end_lineno :])
