"""Operations of the target model: thin typed faces over the native operators.

Wrong types, shapes and values raise ValueError in the native binding; a face only orders arguments. On a GPU values
are not looked at, since the host would have to wait for them: a token, position, expert or row outside its array gives
a row of NaN, and nothing is written or moved outside a cache. "float" below is f32 or bf16, the same for all float
arguments of a call. T rows of one forward pass, D hidden size, H heads,
C kv_lora_rank, R qk_rope_head_dim, E experts, I expert width, V vocabulary, S streams, P slots, N tree slots,
L draft depth.
A row of a result has the same bits whatever other rows it is computed beside, and on any number of threads.

num_rows, i32 [1] on the same device or None: only so many of the T rows are in use. Nothing of the others is read, no
cache is written for them, and their results are whatever the memory held. So a forward pass of a fixed shape serves
any smaller number of rows, which the host need not know (`tree_rows_padded`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_nb.native.ops.namespace import native
from kdtree_nb.native.ops.packed import PackedExperts, PackedLinear, dequantized, expect_inputs, floats_of
from kdtree_nb.native.ops.tree_ops import Rows
from kdtree_nb.tree import DraftTree

_SCORINGS = {"softmax": 0, "sigmoid": 1}


def embed(weight: Tensor, token: Tensor, num_rows: Tensor | None = None) -> Tensor:
    """Rows `weight[token]`: weight float [V, D], token i64 [T] -> float [T, D]. Raises ValueError for ids outside."""
    return native.embed(weight, token, num_rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float, num_rows: Tensor | None = None, settled: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight: x float [T, D] (rows may be strided), weight float [D] -> float [T, D].

    settled: the weight was complete before the host came here (`PackedLinear.settled`); a GPU then reads it earlier.
    """
    return native.rms_norm(x, weight, eps, num_rows, settled)


def pack_linear(weight: Tensor) -> PackedLinear:
    """Pack weights once at load: float [N, K], or [G, N, K] for `linear_heads`. Waits for the GPU."""
    if weight.dim() == 2:
        weight = weight.unsqueeze(0)
    data = native.pack_linear(weight)
    num_groups, num_out, num_in = weight.shape
    return PackedLinear(data, num_out, num_in, num_groups, settle(data))


def settle(data: Tensor) -> bool:
    """Wait until a GPU has written `data`; False where nobody can wait, while a graph is captured."""
    if not data.is_cuda or torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.current_stream(data.device).synchronize()
    return True


def linear(
    x: Tensor,
    packed: PackedLinear,
    residual: Tensor | None = None,
    out_f32: bool = False,
    num_rows: Tensor | None = None,
) -> Tensor:
    """W x (+ residual) per row: x float [T, K] (rows may be strided), residual float [T, N] -> [T, N].

    The product is rounded once; the residual is added with a rounding of its own. out_f32 keeps bf16 products in f32
    (and then takes no residual).
    """
    if x.is_cuda:
        expect_inputs("linear", x, packed)
    return native.linear(x, floats_of(packed, x.dtype), packed.num_out, residual, out_f32, num_rows, packed.settled)


def linear_heads(x: Tensor, packed: PackedLinear, num_rows: Tensor | None = None) -> Tensor:
    """One matrix per head: x float [T, G, K] (rows and heads may be strided) -> float [T, G, N]."""
    if x.is_cuda:
        expect_inputs("linear_heads", x, packed)
    return native.linear_heads(x, floats_of(packed, x.dtype), packed.num_out, num_rows, packed.settled)


def rope(x: Tensor, cos_sin: Tensor, position: Tensor, num_rows: Tensor | None = None) -> Tensor:
    """Rotate pairs (i, i + R/2) by the angle of the row's position.

    x float [T, H, R] (rows and heads may be strided), cos_sin f32 [P, R] (R/2 cosines, then R/2 sines),
    position i32 [T] -> float [T, H, R]. Raises ValueError for a position outside the table.
    """
    return native.rope(x, cos_sin, position, num_rows)


def swiglu(gate_up: Tensor, num_rows: Tensor | None = None) -> Tensor:
    """silu(gate) · up: float [T, 2I], I gates then I ups -> float [T, I]."""
    return native.swiglu(gate_up, num_rows)


def residual_add(x: Tensor, y: Tensor, num_rows: Tensor | None = None) -> Tensor:
    """x + y, rounded: two float [T, D] -> float [T, D]."""
    return native.residual_add(x, y, num_rows)


def argmax(logits: Tensor, num_rows: Tensor | None = None) -> Tensor:
    """Id of the largest logit, the lower id on ties, -1 for a row with a NaN: f32 [T, V] -> i64 [T]."""
    return native.argmax(logits, num_rows)


def sample(
    logits: Tensor, stream: Tensor, position: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor,
    num_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A random token of each row: f32 [T, V], stream and position i32 [T] as in Rows -> i64 [T].

    Per stream: temperature f32 [S], top_k i32 [S], top_p f32 [S], seed i64 [S]. The token is a draw from
    softmax(logits / temperature) over those that top_k (0: all, up to 1024) and top_p keep: the argmax of logit /
    temperature + noise, where the noise of a token is a function of (seed, position + 1, token id) and of nothing else.
    Temperature 0 is the argmax. -1 for a row that holds a NaN.

    top_p below 1 keeps the fewest of the top_k (0: 1024) most likely tokens whose probabilities, among these, add up to
    top_p; at least one, the lower id first on ties. The noise has 32 bits: what is less likely than another token by
    2^-33 is never chosen. The same logits give the same tokens on a CPU and on a GPU. Raises ValueError for a stream or
    parameter out of range; on a GPU such a row gives -1.
    """
    return native.sample(logits, stream, position, temperature, top_k, top_p, seed, num_rows)


def moe_route(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    renormalize: bool = False,
    scaling_factor: float = 1.0,
    num_rows: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The top_k experts of each row: logits f32 [T, E], bias f32 [E] -> (expert_id i32, weight f32), both [T, top_k].

    Ids ascend. Scores are the softmax over all experts or each logit's sigmoid; the bias takes part in the selection
    only. Weights are the scores, divided by (sum + 1e-20) if `renormalize`, times scaling_factor. Equal scores: the
    lower id first. With several groups of neighbouring experts, only those of the topk_groups groups take part whose
    two best score + bias have the largest sum (equal: the lower group). Raises ValueError for another scoring, a top_k
    outside 1 … E, and groups that do not divide the experts or hold too few of them.
    """
    code = _SCORINGS.get(scoring)
    if code is None:
        raise ValueError(f"moe_route: scoring: expected one of {list(_SCORINGS)}, got {scoring!r}")
    return native.moe_route(logits, bias, top_k, code, renormalize, scaling_factor, num_rows, num_groups, topk_groups)


def pack_experts(
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> PackedExperts:
    """Pack experts once at load: gate and up float [E, I, D], down [E, D, I].

    The shared expert: shared_gate and shared_up float [S, D], shared_down [D, S]. Raises ValueError unless it has all
    three or none.
    """
    shared = (shared_gate, shared_up, shared_down)
    if any(part is None for part in shared) and any(part is not None for part in shared):
        raise ValueError("pack_experts: expected shared_gate, shared_up and shared_down together or none, got some")
    gate_up = native.pack_linear(torch.cat([gate, up], dim=1))
    packed_down = native.pack_linear(down)
    if shared_gate is None:
        return PackedExperts(gate_up, packed_down, None, None, gate.shape[1], 0)
    shared_gate_up = native.pack_linear(torch.cat([shared_gate, shared_up]).unsqueeze(0))
    packed_shared_down = native.pack_linear(shared_down.unsqueeze(0))
    return PackedExperts(gate_up, packed_down, shared_gate_up, packed_shared_down, gate.shape[1], shared_gate.shape[0])


def moe_experts(
    x: Tensor,
    experts: PackedExperts,
    expert_id: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Σ weight · expert(x) + shared(x) (+ residual): x, residual float [T, D] -> float [T, D].

    expert_id i32 and weight f32 [T, top_k], as `moe_route` returns them. Experts are added in order of id, the shared
    one last. Raises ValueError for an expert id outside 0 … E-1.
    """
    gate_up, down = dequantized(experts, x.dtype, expert_id, num_rows)
    shared, widths = (experts.shared_gate_up, experts.shared_down), (experts.width, experts.shared_width)
    return native.moe_experts(x, gate_up, down, *shared, expert_id, weight, *widths, residual, num_rows)


def cache_append(
    cache: Tensor, latent: Tensor, k_rope: Tensor, stream: Tensor, slot: Tensor, num_rows: Tensor | None = None
) -> None:
    """cache[stream[t], slot[t]] = [latent[t], k_rope[t]] in place.

    cache float [S, P, C+R] of one layer, latent float [T, C], k_rope float [T, R], stream and slot i32 [T]. Raises
    ValueError for a stream or slot outside the cache, before anything is written.
    """
    native.cache_append(cache, latent, k_rope, stream, slot, num_rows)


def latent_append(
    cache: Tensor, q_kv: Tensor, q_norm: Tensor | None, kv_norm: Tensor, cos_sin: Tensor, rows: Rows, eps: float,
    settled: bool = False,
) -> Tensor:  # fmt: skip
    """What MLA does with the joint rows of its first product: `rms_norm`, `rope` and `cache_append` in one, their bits.

    q_kv float [T, Q+C+R] (rows may be strided): the first Q columns are normed by q_norm float [Q] -> float [T, Q]. The
    next C are normed by kv_norm float [C] and the last R rotated by cos_sin f32 [positions, R], into
    cache[stream, slot], float [S, P, C+R] of one layer. Without q_norm Q is 0. settled: see `rms_norm`, of both norms.
    Raises ValueError for a position outside the table and a stream or slot outside the cache, before anything is
    written; on a GPU such a position gives a key of NaN.
    """
    places = rows.position, rows.stream, rows.slot
    return native.latent_append(cache, q_kv, q_norm, kv_norm, cos_sin, *places, eps, rows.num_rows, settled)


def absorb_query(
    q: Tensor, packed: PackedLinear, cos_sin: Tensor, position: Tensor, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Queries as `verify_attn` takes them: `linear_heads` and `rope` at once, their bits.

    q float [T, H*(K+R)] (rows may be strided): the H*K columns of q_nope, then the H*R of q_rope. packed of [H, C, K];
    cos_sin f32 [positions, R], position i32 [T] -> q_latent float [T, H, C], q_rope float [T, H, R]. Raises ValueError
    for a position outside the table; on a GPU it gives a q_rope of NaN.
    """
    H, C, K = packed.num_groups, packed.num_out, packed.num_in
    if q.shape[-1] != H * (K + cos_sin.shape[-1]):  # the binding cannot tell one K from the next
        raise ValueError(
            f"absorb_query: q: expected {H} * ({K} + {cos_sin.shape[-1]}) columns for packed weights of K = {K}, got "
            f"{q.shape[-1]}"
        )
    data = floats_of(packed, q.dtype)
    return native.absorb_query(q, data, H, C, cos_sin, position, num_rows, packed.settled)


def cache_compact(cache: Tensor, prefix_len: Tensor, accepted_path: Tensor, num_accepted: Tensor) -> None:
    """Move the accepted nodes' rows of every layer to directly behind the root, in place.

    Slot prefix_len + 1 + j receives slot prefix_len + accepted_path[j] for j < num_accepted. cache float
    [layers, S, P, C+R], prefix_len and num_accepted i32 [S], accepted_path i32 [S, L] node indices without the root.
    Raises ValueError for indices that do not ascend from 1 or leave the cache, before anything is moved.
    """
    native.cache_compact(cache, prefix_len, accepted_path, num_accepted)


def verify_attn(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, rows: Rows, tree: DraftTree, prefix_len: Tensor, scale: float
) -> Tensor:
    """Attention of tree nodes: each row sees the prefix of its stream, its ancestors and itself.

    softmax(scale · (q_latent · latent + q_rope · k_rope)) · latent. q_latent float [T, H, C], q_rope float [T, H, R],
    cache float [S, P, C+R] of one layer, prefix_len i32 [S] -> float [T, H, C]. Slots that a row does not see are not
    read. Raises ValueError for streams, nodes or slots outside their arrays and for invalid parents.
    """
    return native.verify_attn(
        q_latent, q_rope, cache, rows.stream, rows.node, tree.parent, tree.depth, prefix_len, scale, rows.num_rows
    )
