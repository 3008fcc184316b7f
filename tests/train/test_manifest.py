"""The pinned corpus: what is read, what is held out whole, and that every difference is named."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from kdtree_nb.errors import CorpusError
from kdtree_nb.train.corpus import Document
from kdtree_nb.train.nano import documents as reading
from kdtree_nb.train.nano import manifest as module
from kdtree_nb.train.nano.manifest import (
    HELDOUT_PACKAGES,
    make_manifest,
    pinned_documents,
    read_manifest,
    role_of,
    write_manifest,
)

COMMITTED = Path(__file__).parents[2] / "data" / "nano-k2" / "corpus.json"
CODE = "x = 1  # some text\n" * 40
SHARED = "y = 2  # the same text in two packages\n" * 40


def write_package(site: Path, name: str, files: dict[str, str], version="1.0", licence="License-Expression: MIT"):
    info = site / f"{name}-{version}.dist-info"
    readme = f"# {name}\n\n" + "It does something useful.\n" * 40
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{licence}\n\n{readme}"
    everything = {f"{name}/{file}": text for file, text in files.items()} | {f"{info.name}/METADATA": metadata}
    for file, text in everything.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in everything))
    return info


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment of five packages, in place of the real one; the standard library is one file."""
    write_package(tmp_path, "alpha", {"a.py": CODE, "same.py": SHARED, "doc.md": "# words\n" * 80, "tests/t.py": CODE})
    write_package(tmp_path, "networkx", {"n.py": CODE.replace("1", "3"), "same.py": SHARED})
    write_package(tmp_path, "table", {"numbers.py": "[" + "1, " * 400 + "]\n", "good.py": CODE.replace("1", "4")})
    write_package(tmp_path, "copyleft", {"c.py": CODE}, licence="License-Expression: GPL-3.0-or-later")
    write_package(tmp_path, "silent", {"s.py": CODE}, licence="Summary: no licence")
    (tmp_path / "alpha" / "stray.py").write_text(CODE)  # in no list of files
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    only = [Document("os.py", CODE.replace("1", "5").encode())]
    monkeypatch.setattr(reading, "read_python", lambda kind: only if kind == "code" else [])
    return tmp_path


def names(kind, role):
    return [d.name for d in pinned_documents(make_manifest(), kind, role)]


def test_the_manifest_names_what_was_read(site, tmp_path):
    manifest = make_manifest()
    assert [(p.name, p.version, p.licence) for p in manifest.packages] == [
        ("alpha", "1.0", "MIT"), ("networkx", "1.0", "MIT"), ("python", reading.python_version(), "PSF-2.0"),
        ("table", "1.0", "MIT"),
    ]  # fmt: skip
    alpha = manifest.packages[0].parts["code"]
    assert (alpha.role, alpha.num_files, alpha.num_bytes) == ("train", 2, len(CODE) + len(SHARED))
    write_manifest(tmp_path / "corpus.json", manifest)
    assert read_manifest(tmp_path / "corpus.json") == manifest
    assert manifest.totals()["code"]["heldout"] == len(CODE) + len(SHARED)


def test_training_text_has_no_heldout_package_nor_its_text(site):
    assert names("code", "heldout") == ["networkx/networkx/n.py", "networkx/networkx/same.py"]
    assert names("code", "train") == ["alpha/alpha/a.py", "python/os.py", "table/table/good.py"]  # same.py is held out
    assert not any(name.startswith("networkx/") for name in names("prose", "train"))
    assert "networkx/networkx-1.0.dist-info/METADATA" in names("prose", "heldout")
    text = pinned_documents(make_manifest(), "prose", "heldout")
    assert not any(b"Metadata-Version" in d.text for d in text)


def test_a_repeated_text_is_trained_on_once(site):
    write_package(site, "beta", {"b.py": CODE})
    assert names("code", "train").count("beta/beta/b.py") == 0 < names("code", "train").count("alpha/alpha/a.py")


def test_every_difference_is_named(site):
    manifest = make_manifest()
    (site / "alpha" / "a.py").write_text(CODE + "z = 3\n")
    write_package(site, "table", {"good.py": CODE}, version="2.0")
    for path in (site / "table-1.0.dist-info").iterdir():
        path.unlink()
    (site / "table-1.0.dist-info").rmdir()
    with pytest.raises(CorpusError) as caught:
        pinned_documents(manifest, "code", "train")
    message = str(caught.value)
    assert "2 that differ" in message and "table: expected version 1.0, got 2.0" in message
    assert f"alpha 1.0: expected 2 code files, {len(CODE) + len(SHARED)} bytes" in message
    assert f"got 2 files, {len(CODE) + len(SHARED) + 6} bytes" in message and "make env" in message
    assert pinned_documents(manifest, "code", "heldout")  # what is not asked for may differ


def test_a_missing_package_is_named(site):
    manifest = make_manifest()
    for path in (site / "networkx-1.0.dist-info").iterdir():
        path.unlink()
    (site / "networkx-1.0.dist-info").rmdir()
    with pytest.raises(CorpusError, match="networkx: expected version 1.0, got none"):
        pinned_documents(manifest, "code", "heldout")


def test_of_a_large_package_a_fixed_part_is_taken(site, monkeypatch):
    write_package(site, "large", {f"m{i}.py": CODE.replace("1", str(10 + i)) for i in range(20)})
    monkeypatch.setattr(reading, "MAX_PACKAGE_BYTES", 5 * (len(CODE) + 40) + 5)
    taken = reading.read_distribution(reading.installed()["large"], "code")
    assert [d.name for d in taken] == sorted(d.name for d in taken) and len(taken) == 5
    assert taken == reading.read_distribution(reading.installed()["large"], "code")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "format"), ("[]", "corpus.json"), ("no", "Expecting value"), ('{"format": 2, "packages": []}', "format 2")],
)
def test_a_bad_manifest_is_refused(tmp_path, text, said):
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(CorpusError, match=said):
        read_manifest(tmp_path / "corpus.json")


def test_an_unknown_role_is_refused(tmp_path, site):
    text = make_manifest().to_json().replace('"role": "train"', '"role": "test"', 1)
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(CorpusError, match="unknown roles or kinds"):
        read_manifest(tmp_path / "corpus.json")


@pytest.mark.parametrize(
    ("licence", "usable"),
    [("MIT", True), ("", False), ("GPL-2.0", False), ("BSD License AND GNU General Public License (GPL)", False)],
)
def test_licences(licence, usable):
    assert reading.is_usable(licence) is usable


def test_a_third_of_the_prose_is_held_out():
    roles = [role_of(f"package-{i}", "prose") for i in range(300)]
    assert 70 < roles.count("heldout") < 130
    assert {role_of(f"package-{i}", "code") for i in range(50)} == {"train"}


def test_the_committed_manifest_is_of_locked_packages():
    """What is held out is read in evaluations, so its versions are the lock's; training text may have been older."""
    manifest = read_manifest(COMMITTED)
    assert manifest.to_json() == COMMITTED.read_text()
    lock = (COMMITTED.parents[2] / "constraints.txt").read_text().splitlines()
    locked = {reading.normalise(n): v for n, _, v in (line.partition("==") for line in lock if "==" in line)}
    assert {p.name for p in manifest.packages} <= locked.keys() | {reading.PYTHON}
    assert all(package.licence for package in manifest.packages)
    heldout = {p.name: p for p in manifest.packages if p.name in HELDOUT_PACKAGES}
    assert heldout.keys() == HELDOUT_PACKAGES
    for package in heldout.values():
        assert package.version == locked[package.name]
        assert {part.role for part in package.parts.values()} == {"heldout"}
    totals = manifest.totals()
    assert totals["code"]["train"] > 100e6 and totals["code"]["heldout"] > 5e6 and totals["prose"]["heldout"] > 4e5


def test_heldout_code_of_this_environment_is_the_pinned_one_or_named():
    manifest = read_manifest(COMMITTED)
    here = {name: distribution.version for name, distribution in reading.installed().items()}
    expected = {p.name: p.version for p in manifest.packages if p.name in HELDOUT_PACKAGES}
    differing = [name for name, version in expected.items() if here.get(name) != version]
    if differing:
        with pytest.raises(CorpusError, match=f"{differing[0]}: expected version"):
            pinned_documents(manifest, "code", "heldout")
    else:
        documents = pinned_documents(manifest, "code", "heldout")
        assert {d.name.split("/")[0] for d in documents} == HELDOUT_PACKAGES


def test_fingerprint_is_that_of_the_file():
    assert read_manifest(COMMITTED).fingerprint == hashlib.sha256(COMMITTED.read_bytes()).hexdigest()
    assert json.loads(COMMITTED.read_text())["format"] == module.FORMAT
