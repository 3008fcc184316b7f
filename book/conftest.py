"""pytest --nbmake: let notebooks show what native code prints.

A Jupyter kernel does not capture C and C++ output while PYTEST_CURRENT_TEST is set, and it inherits that variable from
pytest; so take it away while a notebook runs.
"""

from __future__ import annotations

import os
from typing import Any


def pytest_itemcollected(item: Any) -> None:
    """Wrap the run of every notebook."""
    if not getattr(item, "nbmake", False):
        return
    run = item.runtest

    def run_with_native_output() -> None:
        current = os.environ.pop("PYTEST_CURRENT_TEST", None)
        try:
            run()
        finally:
            if current is not None:
                os.environ["PYTEST_CURRENT_TEST"] = current

    item.runtest = run_with_native_output
