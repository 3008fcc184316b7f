"""The same model with a library's matmuls in place of ours: what every serving engine starts from.

    model = load_model("tiny")                        # any device, either dtype
    library = LibraryModel(model)                     # shares its weights; everything but the matmuls is our operations
    for text in random_texts(model, 4, 200):          # about 0.2 s each on a CPU with model "tiny"
        changed_rows(library, text[:1], text[1:])     # RowChanges(num_rows=199, num_changed=…, num_choices=…, …)
        changed_tokens(library, text[:16], 128, drafters.Random())  # TokenChanges(num_tokens=128, num_changed=…, …)

The functions are in `kdtree_nb.bench.row_changes`. They take a Model or a LibraryModel, and find no change in a Model.
With "tiny2" in BF16 about 1 choice in 1,000 changes on random texts, so that a few thousand tokens show some.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kdtree_nb.bench.peers import masked_attention, tree_mask
from kdtree_nb.model import LatentCache, Model
from kdtree_nb.model.mla import Attention
from kdtree_nb.model.moe import DenseFeedForward, MoeFeedForward
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree

KEY_UNIT = 64
"""The number of keys in an attention is rounded up to a multiple of this, as a library wants it."""


def unpacked(packed: ops.PackedLinear) -> Tensor:
    """The weights float [G, N, K] before `pack_linear`: the products of the unit vectors are exact."""
    unit = torch.eye(packed.num_in, dtype=packed.data.dtype, device=packed.data.device)
    rows = unit[:, None].expand(-1, packed.num_groups, -1).contiguous()
    return ops.linear_heads(rows, packed).permute(1, 2, 0).contiguous()


def product_f32(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ with a result that is not rounded: x float [T, K], weight float [N, K] -> f32 [T, N]."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


class LibraryModel:
    """`model` with torch's matmuls in linear layers, experts and attention; for one stream. Use it like a Model."""

    def __init__(self, model: Model) -> None:
        self.model, self.config, self.dtype, self.device = model, model.config, model.dtype, model.device
        self.attention = [_Attention(layer.attention) for layer in model.layers]
        self.feed_forward = [_feed_forward(layer.feed_forward) for layer in model.layers]
        self.head = unpacked(model.head)[0]

    def new_cache(self, num_streams: int, num_slots: int) -> LatentCache:
        """A cache of zeros: a matmul multiplies what the mask hides by 0, so it must be finite."""
        cache = self.model.new_cache(num_streams, num_slots)
        cache.data.zero_()
        return cache

    def forward(
        self, rows: ops.Rows, tree: DraftTree, cache: LatentCache, prefix_len: Tensor, need_logits: bool = True
    ) -> Tensor | None:
        """As Model.forward, for one stream."""
        x = ops.embed(self.model.embedding, rows.token)
        mask = _padded(tree_mask(tree, 0, int(prefix_len)), cache.num_slots).to(self.device)
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = attention(x, rows, cache, mask)
            x = feed_forward(x)
        if not need_logits:
            return None
        return product_f32(ops.rms_norm(x, self.model.norm, self.config.rms_norm_eps), self.head)


def _padded(mask: Tensor, num_slots: int) -> Tensor:
    """mask bool [n, keys] with hidden keys up to a multiple of KEY_UNIT, as far as the cache goes."""
    num_keys = mask.shape[1]
    return functional.pad(mask, (0, min(-(-num_keys // KEY_UNIT) * KEY_UNIT, num_slots) - num_keys))


class _Attention:
    def __init__(self, attention: Attention) -> None:
        self.ours = attention
        self.q_kv_a, self.o_proj = unpacked(attention.q_kv_a)[0], unpacked(attention.o_proj)[0]
        self.q_b = None if attention.q_b is None else unpacked(attention.q_b)[0]
        self.w_kc, self.w_vc = unpacked(attention.w_kc), unpacked(attention.w_vc)

    def __call__(self, x: Tensor, rows: ops.Rows, cache: LatentCache, mask: Tensor) -> Tensor:
        a = self.ours
        q_kv = functional.linear(ops.rms_norm(x, a.norm, a.eps, settled=a.settled), self.q_kv_a)
        layer, norms = cache.layers[a.layer], (a.q_norm, a.kv_norm, a.cos_sin)
        q, joint = a.split(q_kv)
        q_a = ops.latent_append(layer, joint, *norms, rows, a.latent_eps, a.settled)
        if self.q_b is not None:
            q = functional.linear(q_a, self.q_b)
        H = a.num_heads
        widths = H * a.nope_dim, H * a.rope_dim
        q_nope, q_rope = (part.unflatten(1, (H, -1)) for part in q.split_with_sizes(widths, 1))
        q = torch.cat([_per_head(q_nope, self.w_kc), ops.rope(q_rope, a.cos_sin, rows.position)], -1)
        attended = masked_attention(q, layer[0, : mask.shape[1]], mask, a.latent_dim, a.scale)
        value = _per_head(attended, self.w_vc).reshape(-1, a.value_dim)
        return ops.residual_add(x, functional.linear(value, self.o_proj))


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x float [T, H, K], weight float [H, N, K] -> float [T, H, N]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()


def _feed_forward(part: DenseFeedForward | MoeFeedForward) -> _Dense | _Moe:
    return _Dense(part) if isinstance(part, DenseFeedForward) else _Moe(part)


class _Dense:
    def __init__(self, part: DenseFeedForward) -> None:
        self.ours, self.gate_up, self.down = part, unpacked(part.gate_up)[0], unpacked(part.down)[0]

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = functional.linear(ops.rms_norm(x, self.ours.norm, self.ours.eps), self.gate_up)
        return ops.residual_add(x, functional.linear(ops.swiglu(gate_up), self.down))


class _Moe:
    def __init__(self, part: MoeFeedForward) -> None:
        self.ours, self.router = part, unpacked(part.router)[0]
        e, dim = part.experts, part.norm.shape[0]
        self.routed = _experts(e.gate_up, e.down, e.width, dim)
        has_shared = e.shared_gate_up is not None
        self.shared = _experts(e.shared_gate_up, e.shared_down, e.shared_width, dim)[0] if has_shared else None

    def __call__(self, x: Tensor) -> Tensor:
        o = self.ours
        h = ops.rms_norm(x, o.norm, o.eps)
        logits = product_f32(h, self.router)
        expert_id, weight = ops.moe_route(
            logits, o.top_k, o.scoring, o.bias, o.renormalize, o.scaling_factor, None, o.n_group, o.topk_group
        )
        total = torch.zeros(x.shape, device=x.device)
        chosen = expert_id.tolist()
        for expert in sorted({e for row in chosen for e in row}):
            places = [(row, ids.index(expert)) for row, ids in enumerate(chosen) if expert in ids]
            row, place = torch.tensor(places, device=x.device).t()
            total[row] += weight[row, place, None] * _gated(h[row], self.routed[expert])
        if self.shared is not None:
            total += _gated(h, self.shared)
        return ops.residual_add(x, total.to(x.dtype))


def _experts(gate_up: Tensor, down: Tensor, width: int, dim: int) -> list[tuple[Tensor, Tensor]]:
    """Per expert, gate and up float [2I, D] and down float [D, I]."""
    up, out = (
        [unpacked(ops.PackedLinear(data[e : e + 1], num_out, num_in, 1))[0] for e in range(data.shape[0])]
        for data, num_out, num_in in ((gate_up, 2 * width, dim), (down, dim, width))
    )
    return list(zip(up, out, strict=True))


def _gated(h: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    gate_up, down = weights
    return product_f32(ops.swiglu(functional.linear(h, gate_up)), down)
