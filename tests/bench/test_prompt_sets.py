"""Held-out prompts of nano-k2's corpus: pieces of the packages that the manifest holds out, pinned."""

from __future__ import annotations

import pytest

from kdtree_nb.bench.prompt_sets import pinned_prompts
from kdtree_nb.errors import CorpusError
from kdtree_nb.train.nano.manifest import Manifest, Package, Part, make_manifest, pinned_documents


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """That of this environment, whatever it is."""
    return make_manifest()


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_prompts_are_pieces_of_heldout_documents(manifest, kind):
    found = pinned_prompts(manifest, encode, kind, 12, lengths=(20, 40), seed=1)
    texts = [document.text for document in pinned_documents(manifest, kind, "heldout")]
    assert len(found.prompts) == 12 == len({tuple(p) for p in found.prompts})
    assert all(20 <= len(p) <= 40 and any(bytes(p) in text for text in texts) for p in found.prompts)
    assert found.source["packages"]["networkx"] and len(found.source["sha256"]) == 64
    assert found == pinned_prompts(manifest, encode, kind, 12, lengths=(20, 40), seed=1)


def test_packages_that_differ_are_refused():
    gone = Package("no-such-package", "1.0", "MIT", {"code": Part("heldout", 1, 5, "0" * 64)})
    with pytest.raises(CorpusError, match="no-such-package: expected version 1.0, got none"):
        pinned_prompts(Manifest((gone,)), encode, "code", 3)
