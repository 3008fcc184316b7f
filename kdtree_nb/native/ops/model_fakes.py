"""Fake kernels of the model's operations: the shapes and types that FakeTensor needs to know."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_nb.native.ops.namespace import native

PACKED_OUTPUTS = 16
"""Neighbouring outputs that one vector of a packed weight holds."""

PACKED_INPUTS = 32
"""Neighbouring inputs that one block of a packed weight holds on a GPU."""


@native.fake
def embed_fake(weight: Tensor, token: Tensor, num_rows: Tensor | None = None) -> Tensor:
    return weight.new_empty((token.shape[0], weight.shape[1]))


@native.fake
def rms_norm_fake(
    x: Tensor, weight: Tensor, eps: float, num_rows: Tensor | None = None, settled: bool = False
) -> Tensor:
    return x.new_empty(x.shape)


@native.fake
def pack_linear_fake(weight: Tensor) -> Tensor:
    G, N, K = weight.shape
    num_blocks = (N + PACKED_OUTPUTS - 1) // PACKED_OUTPUTS
    if weight.device.type == "cuda":
        num_units = (K + PACKED_INPUTS - 1) // PACKED_INPUTS
        return weight.new_empty((G, num_blocks, num_units, PACKED_OUTPUTS * PACKED_INPUTS))
    return weight.new_empty((G, num_blocks, K, PACKED_OUTPUTS))


@native.fake
def dequantize_int4_fake(
    weight: Tensor, scale: Tensor, bf16: bool, group_id: Tensor | None = None, num_rows: Tensor | None = None
) -> Tensor:
    G, N, num_words = weight.shape
    K, num_blocks = 8 * num_words, (N + PACKED_OUTPUTS - 1) // PACKED_OUTPUTS
    shape = (G, num_blocks, K, PACKED_OUTPUTS)
    if weight.device.type == "cuda":
        shape = (G, num_blocks, (K + PACKED_INPUTS - 1) // PACKED_INPUTS, PACKED_OUTPUTS * PACKED_INPUTS)
    return weight.new_empty(shape, dtype=torch.bfloat16 if bf16 else torch.float32)


@native.fake
def pack_int4_fake(weight: Tensor, scale: Tensor) -> Tensor:
    G, N, num_words = weight.shape
    return weight.new_empty((G, (N + 63) // 64, num_words // 4, 4, 288), dtype=torch.uint8)


@native.fake
def linear_fake(
    x: Tensor, packed: Tensor, num_out: int, residual: Tensor | None, out_f32: bool, num_rows: Tensor | None = None,
    settled: bool = False, whole_in: int = 0, first_segment: int = 0, num_segments: int = 0,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], num_out), dtype=torch.float32 if out_f32 else x.dtype)


@native.fake
def linear_heads_fake(
    x: Tensor, packed: Tensor, num_out: int, num_rows: Tensor | None = None, settled: bool = False
) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], num_out))


@native.fake
def rope_fake(x: Tensor, cos_sin: Tensor, position: Tensor, num_rows: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


@native.fake
def swiglu_fake(gate_up: Tensor, num_rows: Tensor | None = None) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@native.fake
def residual_add_fake(x: Tensor, y: Tensor, num_rows: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


@native.fake
def argmax_fake(logits: Tensor, num_rows: Tensor | None = None) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


@native.fake
def sample_fake(
    logits: Tensor, stream: Tensor, position: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor,
    num_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


@native.fake
def moe_route_fake(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: int,
    renormalize: bool,
    scaling_factor: float,
    num_rows: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


@native.fake
def moe_experts_fake(
    x: Tensor, gate_up: Tensor, down: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None,
    expert_id: Tensor, weight: Tensor, width: int, shared_width: int, residual: Tensor | None,
    num_rows: Tensor | None = None, whole_width: int = 0, whole_shared_width: int = 0, first_segment: int = 0,
    num_segments: int = 0,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape, dtype=torch.float32 if num_segments else x.dtype)


@native.fake
def cache_append_fake(
    cache: Tensor, latent: Tensor, k_rope: Tensor, stream: Tensor, slot: Tensor, num_rows: Tensor | None = None
) -> None:
    return None


@native.fake
def latent_append_fake(
    cache: Tensor, q_kv: Tensor, q_norm: Tensor | None, kv_norm: Tensor, cos_sin: Tensor, position: Tensor,
    stream: Tensor, slot: Tensor, eps: float, num_rows: Tensor | None = None, settled: bool = False,
) -> Tensor:  # fmt: skip
    return q_kv.new_empty((q_kv.shape[0], 0 if q_norm is None else q_norm.shape[0]))


@native.fake
def absorb_query_fake(
    q: Tensor, packed: Tensor, num_heads: int, latent_dim: int, cos_sin: Tensor, position: Tensor,
    num_rows: Tensor | None = None, settled: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (q.shape[0], num_heads)
    return q.new_empty((*shape, latent_dim)), q.new_empty((*shape, cos_sin.shape[1]))


@native.fake
def cache_compact_fake(cache: Tensor, prefix_len: Tensor, accepted_path: Tensor, num_accepted: Tensor) -> None:
    return None


@native.fake
def verify_attn_fake(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, stream: Tensor, node: Tensor, parent: Tensor, depth: Tensor,
    prefix_len: Tensor, scale: float, num_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q_latent.new_empty(q_latent.shape)
