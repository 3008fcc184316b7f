"""Typed faces of the native operations. The first call of any compiles and loads the kernels."""

from kdtree_nb.native.ops.tree_ops import Rows, draft_topk, tree_accept, tree_build, tree_rows

__all__ = [
    "Rows",
    "draft_topk",
    "tree_accept",
    "tree_build",
    "tree_rows",
]
