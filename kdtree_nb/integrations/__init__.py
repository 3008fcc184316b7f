"""Adapters for serving engines: our trees in their layouts, their answers in ours. Nothing here imports an engine."""

from kdtree_nb.integrations import sglang

__all__ = ["sglang"]
