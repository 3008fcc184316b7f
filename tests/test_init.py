from __future__ import annotations

import subprocess
import sys

import pytest

import kdtree_nb


def test_importing_the_package_and_its_reference_does_not_import_torch():
    code = "import sys, kdtree_nb; kdtree_nb.reference; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", kdtree_nb.__all__)
def test_public_names_are_found_on_first_use(name):
    assert getattr(kdtree_nb, name).__name__.split(".")[-1] == name
    assert name in dir(kdtree_nb)


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match="nothing.*Engine.*load_model"):
        kdtree_nb.nothing  # noqa: B018
