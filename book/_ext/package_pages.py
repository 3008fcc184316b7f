"""Sphinx directives that fill the appendices from the package itself.

`{api} module` lists a module's public names with signatures and docstrings, `{docstring} module` shows one docstring,
`{records} folder` tabulates recorded benchmarks, `{machine}` names the machine that builds the pages. Docstrings are
plain text, so they are shown as they stand.
"""

from __future__ import annotations

import importlib
import inspect
import json
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def public_names(module: Any) -> list[str]:
    """Names in `__all__`, or else the functions and classes that the module itself defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__, key=str.lower)
    own = [
        n
        for n, v in vars(module).items()
        if getattr(v, "__module__", None) == module.__name__
    ]
    return sorted(n for n in own if not n.startswith("_"))


def _signature(name: str, thing: Any) -> str:
    try:
        text = f"{name}{inspect.signature(thing)}"
    except (TypeError, ValueError):
        return name
    return (
        text.replace("(self, ", "(")
        .replace("(self)", "()")
        .replace("torch.Tensor", "Tensor")
        .replace("'", "")
    )


def _text_block(text: str) -> nodes.literal_block:
    block = nodes.literal_block(text, text, classes=["docstring"])
    block["language"] = "none"
    return block


class Api(SphinxDirective):
    """`{api} kdtree_nb.ops`: each public function and class, signature and docstring."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Build the definition list."""
        module = importlib.import_module(self.arguments[0])
        result: list[nodes.Node] = []
        for name in public_names(module):
            thing = getattr(module, name)
            if inspect.ismodule(thing) or not callable(thing):
                continue
            result += self._entry(name, thing)
            if inspect.isclass(thing):
                result += self._methods(name, thing)
        return result

    def _entry(self, name: str, thing: Any) -> list[nodes.Node]:
        signature = _signature(name, thing)
        title = nodes.literal_block(signature, signature, classes=["signature"])
        title["language"] = "python"
        identity = nodes.make_id(f"{self.arguments[0]}.{name}")
        return [
            nodes.target("", "", ids=[identity]),
            title,
            _text_block(inspect.getdoc(thing) or ""),
        ]

    def _methods(self, name: str, thing: type) -> list[nodes.Node]:
        result: list[nodes.Node] = []
        for method, value in vars(thing).items():
            if (
                not method.startswith("_")
                and inspect.isfunction(value)
                and value.__doc__
            ):
                result += self._entry(f"{name}.{method}", value)
        return result


class Docstring(SphinxDirective):
    """`{docstring} kdtree_nb.kdtr`: the docstring of a module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Show it as it stands."""
        return [
            _text_block(
                inspect.getdoc(importlib.import_module(self.arguments[0])) or ""
            )
        ]


class Records(SphinxDirective):
    """`{records} ../data/benchmarks`: a table of recorded benchmarks, relative to the book's folder."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Build the table, a row per record."""
        folder = Path(self.env.srcdir) / self.arguments[0]
        paths = sorted(folder.glob("*.json"))
        for path in paths:
            self.env.note_dependency(str(path.resolve()))
        rows = [["record", "device", "date", "versions", "command"]]
        for path in paths:
            record = json.loads(path.read_text(encoding="utf-8"))
            versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
            rows.append(
                [
                    path.stem,
                    record["device"],
                    record["date"][:10],
                    versions,
                    record["command"],
                ]
            )
        return (
            [_table(rows)]
            if paths
            else [nodes.paragraph("", "No benchmark has been recorded yet.")]
        )


class Machine(SphinxDirective):
    """`{machine}`: what these pages were built on."""

    def run(self) -> list[nodes.Node]:
        """Build the table: hardware and versions."""
        from kdtree_nb.viz import device_label

        versions = [
            [name, metadata.version(name)]
            for name in ("torch", "numpy", "jupyter-book")
        ]
        rows = [
            ["", "these pages"],
            ["hardware", device_label()],
            ["Python", platform.python_version()],
            *versions,
        ]
        return [_table(rows)]


def _table(rows: list[list[str]]) -> nodes.table:
    group = nodes.tgroup(cols=len(rows[0]))
    group += [nodes.colspec(colwidth=1) for _ in rows[0]]
    head, body = nodes.thead(), nodes.tbody()
    for number, cells in enumerate(rows):
        row = nodes.row()
        for column, text in enumerate(cells):
            inner = (
                nodes.literal("", text)
                if number and column == len(cells) - 1
                else nodes.Text(text)
            )
            row += nodes.entry("", nodes.paragraph("", "", inner))
        (body if number else head).append(row)
    group += [head, body]
    return nodes.table("", group, classes=["records"])


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Put the parts of MathJax that the pages load beside them, so that formulas need no network."""
    if error is not None or app.builder.format != "html":
        return
    script = next(
        f
        for f in metadata.files("sphinx-mathjax-offline") or ()
        if f.name == "tex-chtml.js"
    )
    source = Path(script.locate()).parent
    for part in (
        "tex-chtml.js",
        "a11y/assistive-mml.js",
        "input/tex/extensions",
        "output/chtml/fonts",
    ):
        target = Path(app.outdir) / "_static" / "mathjax" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            shutil.copytree(source / part, target, dirs_exist_ok=True)
        else:
            shutil.copy(source / part, target)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives and the copy of MathJax."""
    app.connect("build-finished", copy_mathjax)
    app.add_directive("api", Api)
    app.add_directive("docstring", Docstring)
    app.add_directive("records", Records)
    app.add_directive("machine", Machine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
