"""Typed faces of the native operations. The first call of any compiles and loads the kernels."""

from kdtree_nb.native.ops import model_fakes as _model_fakes  # noqa: F401  registers the fake kernels
from kdtree_nb.native.ops.model_ops import (
    PackedExperts,
    PackedLinear,
    argmax,
    cache_append,
    cache_compact,
    embed,
    linear,
    linear_heads,
    moe_experts,
    moe_route,
    pack_experts,
    pack_linear,
    residual_add,
    rms_norm,
    rope,
    swiglu,
    verify_attn,
)
from kdtree_nb.native.ops.stream_ops import RECORD_FIELDS, StepRing, StreamState, step_commit
from kdtree_nb.native.ops.tree_ops import Rows, draft_topk, tree_accept, tree_build, tree_rows, tree_rows_padded

__all__ = [
    "PackedExperts",
    "PackedLinear",
    "RECORD_FIELDS",
    "Rows",
    "StepRing",
    "StreamState",
    "argmax",
    "cache_append",
    "cache_compact",
    "draft_topk",
    "embed",
    "linear",
    "linear_heads",
    "moe_experts",
    "moe_route",
    "pack_experts",
    "pack_linear",
    "residual_add",
    "rms_norm",
    "rope",
    "step_commit",
    "swiglu",
    "tree_accept",
    "tree_build",
    "tree_rows",
    "tree_rows_padded",
    "verify_attn",
]
