"""pyproject.toml, constraints.txt and environment.yml agree, and what runs is what is locked."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def lock() -> dict[str, str]:
    """Pins of constraints.txt, canonical name -> version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def requirements() -> list[Requirement]:
    """Every requirement of pyproject.toml, extras included, the project's own extras left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    return [r for r in map(Requirement, texts) if r.name != "kdtree_nb"]


def conda_pins() -> list[str]:
    """The pip requirements of environment.yml that pin a version."""
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in dependencies if isinstance(entry, dict))
    return [line for line in pip if not line.startswith("-")]


def test_lock_pins_every_line_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    bad = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)]
    assert not bad
    assert len({canonicalize_name(line.split("==")[0]) for line in lines}) == len(lines)


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_lock_satisfies_the_project(requirement: Requirement):
    pins = lock()
    assert canonicalize_name(requirement.name) in pins
    assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_conda_environment_pins_equal_the_lock():
    pins = lock()
    conda = {canonicalize_name(p.split("==")[0]): p.split("==")[1] for p in conda_pins()}
    assert conda == {name: pins[name] for name in conda}
    assert set(conda) == {canonicalize_name(r.name) for r in requirements()}


def test_conda_python_is_supported():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python = next(d for d in dependencies if isinstance(d, str) and d.startswith("python="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert Requirement(f"python{project['requires-python']}").specifier.contains(python.split("=")[1])


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_installed_version_is_the_locked_one(requirement: Requirement):
    installed = metadata.version(requirement.name).split("+")[0]
    assert installed == lock()[canonicalize_name(requirement.name)]


def test_torch_and_jupyter_book_are_the_promised_ones():
    pins = lock()
    assert pins["torch"] == "2.13.0"
    assert Requirement("jupyter-book>=1.0.4,<2").specifier.contains(pins["jupyter-book"])


@pytest.mark.parametrize("name", sorted(lock()))
def test_locked_packages_run_on_the_oldest_supported_python(name: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    assert Requirement(f"{name}{metadata.metadata(name)['Requires-Python'] or ''}").specifier.contains(oldest)
