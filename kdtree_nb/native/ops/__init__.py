"""Typed faces of the native operations. The first call of any compiles and loads the kernels."""

from kdtree_nb.native.ops import model_fakes as _model_fakes  # noqa: F401  registers the fake kernels
from kdtree_nb.native.ops.block_ops import block_attn, context_append
from kdtree_nb.native.ops.int4_ops import INT4_UNIT, dequantize_int4, int4_linear, pack_int4, packed_int4_linear
from kdtree_nb.native.ops.model_ops import (
    argmax,
    cache_append,
    cache_compact,
    embed,
    latent_append,
    linear,
    linear_heads,
    moe_experts,
    moe_route,
    pack_experts,
    pack_linear,
    residual_add,
    rms_norm,
    rope,
    sample,
    settle,
    swiglu,
    verify_attn,
)
from kdtree_nb.native.ops.packed import PackedExperts, PackedLinear
from kdtree_nb.native.ops.share_ops import Segments, add_partials, linear_partial, moe_experts_partial
from kdtree_nb.native.ops.stream_ops import NAN_LOGITS, NO_TREE, RECORD_FIELDS, StepRing, StreamState, step_commit
from kdtree_nb.native.ops.tree_ops import Rows, draft_topk, tree_accept, tree_build, tree_rows, tree_rows_padded
from kdtree_nb.native.ops.vocab_ops import draft_topk_merge, draft_topk_share, sample_among

__all__ = [
    "INT4_UNIT",
    "NAN_LOGITS",
    "NO_TREE",
    "PackedExperts",
    "PackedLinear",
    "RECORD_FIELDS",
    "Rows",
    "Segments",
    "StepRing",
    "StreamState",
    "add_partials",
    "argmax",
    "block_attn",
    "cache_append",
    "cache_compact",
    "context_append",
    "draft_topk",
    "draft_topk_merge",
    "draft_topk_share",
    "dequantize_int4",
    "embed",
    "int4_linear",
    "latent_append",
    "linear",
    "linear_heads",
    "linear_partial",
    "moe_experts",
    "moe_experts_partial",
    "moe_route",
    "pack_experts",
    "pack_int4",
    "pack_linear",
    "packed_int4_linear",
    "residual_add",
    "rms_norm",
    "rope",
    "sample",
    "sample_among",
    "settle",
    "step_commit",
    "swiglu",
    "tree_accept",
    "tree_build",
    "tree_rows",
    "tree_rows_padded",
    "verify_attn",
]
