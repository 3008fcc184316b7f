"""The C library, and one small call of every operation of it."""

from __future__ import annotations

import pytest

from kdtree_nb.native import capi
from tests.capi.cases import DTYPES, Cases


@pytest.fixture(scope="session")
def library():
    return capi.load()


@pytest.fixture(params=DTYPES)
def cases(request, library):
    return Cases(library, capi.CPU, request.param)
