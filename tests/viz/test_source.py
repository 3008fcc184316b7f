"""Shown source is the package's own text."""

from __future__ import annotations

import inspect

import pytest

from kdtree_nb import viz
from kdtree_nb.viz.source import ROOT


def text(shown) -> str:
    return shown.data


def test_a_function_is_shown_without_its_docstring():
    shown = text(viz.show_source(viz.speedup))
    assert shown.startswith("```python\ndef speedup(") and shown.endswith("\n```")
    assert viz.speedup.__doc__ not in shown
    body = inspect.getsource(viz.speedup).split('"""')[2].strip()
    assert body in shown


def test_the_docstring_is_kept_on_request():
    assert viz.speedup.__doc__ in text(viz.show_source(viz.speedup, docstring=True))


def test_a_part_of_a_file_is_shown():
    shown = text(viz.show_source("kernels/op_args.h", start="struct", stop="};"))
    lines = (ROOT / "kernels/op_args.h").read_text().splitlines()
    first = next(line for line in lines if "struct" in line)
    assert shown.splitlines()[:2] == ["```cpp", first]
    assert "};" not in shown


def test_a_method_is_dedented():
    assert text(viz.show_source(viz.Record.find)).splitlines()[1].startswith("def find(")


@pytest.mark.parametrize(("start", "stop"), [("no such line", None), ("struct", "no such line")])
def test_a_mark_that_is_absent_is_an_error(start, stop):
    with pytest.raises(ValueError, match="expected a line with 'no such line'"):
        viz.show_source("kernels/op_args.h", start=start, stop=stop)
