"""kdtree_nb: exact speculative decoding with draft trees, over native kernels.

Public names: `Engine`, `Sampling`, `load_model`, `ops`, `drafters`, `speculate`, `train`, `bench`, `integrations`,
`parallel`, `reference`, `viz`. They are imported on first use, so that `import kdtree_nb` costs nothing and
`kdtree_nb.reference` works without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "Engine", "Sampling", "bench", "drafters", "integrations", "load_model", "ops", "parallel", "reference",
    "speculate", "train", "viz",
]  # fmt: skip

_MODULES = {
    "Engine": "kdtree_nb.speculate",
    "Sampling": "kdtree_nb.speculate",
    "load_model": "kdtree_nb.model",
    "ops": "kdtree_nb.native.ops",
    "drafters": "kdtree_nb.drafters",
    "speculate": "kdtree_nb.speculate",
    "train": "kdtree_nb.train",
    "bench": "kdtree_nb.bench",
    "integrations": "kdtree_nb.integrations",
    "parallel": "kdtree_nb.parallel",
    "reference": "kdtree_nb.reference",
    "viz": "kdtree_nb.viz",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kdtree_nb' has no attribute {name!r}; its public names are {sorted(_MODULES)}")
    module = importlib.import_module(_MODULES[name])
    return getattr(module, name) if name in ("Engine", "Sampling", "load_model") else module


def __dir__() -> list[str]:
    return sorted(__all__)
