"""Multi-head latent attention in absorbed form: all heads attend to one latent per token."""

from __future__ import annotations

import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.model.latent_cache import LatentCache
from kdtree_nb.model.ranks import ONE_RANK, Ranks
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree


class Attention:
    """x + W_o attention(norm(x)). With kv_b split into W_kc and W_vc per head, scores and values live in latent space:
    q_latent = W_kc^T q_nope, score = q_latent . latent + q_rope . k_rope, value = W_vc (sum p latent).

    norm [D], kv_norm [C]:                    RMSNorm weights
    q_proj [H*(nope+rope), D], kv_a [C+R, D]: stored as one matrix whose rows are H*nope | H*rope | C | R
    kv_b [H*(nope+v), C], o_proj [D, H*v]

    With a query latent (q_lora_rank Q), q_a [Q, D] takes the place of q_proj in that matrix, rows Q | C | R, and
    q_proj [H*(nope+rope), Q] is applied to norm(q_a x), with q_norm [Q].

    num_heads: H, the heads that this rank has; default: all
    """

    def __init__(
        self, config: ModelConfig, layer: int, norm: torch.Tensor, q_proj: torch.Tensor, kv_a: torch.Tensor,
        kv_norm: torch.Tensor, kv_b: torch.Tensor, o_proj: torch.Tensor, cos_sin: torch.Tensor,
        q_a: torch.Tensor | None = None, q_norm: torch.Tensor | None = None, num_heads: int | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:  # fmt: skip
        H = config.num_attention_heads if num_heads is None else num_heads
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        C, v = config.kv_lora_rank, config.v_head_dim
        self.layer = layer
        self.eps, self.latent_eps, self.scale = config.rms_norm_eps, config.attention_eps, config.softmax_scale
        self.norm, self.kv_norm, self.q_norm, self.cos_sin = norm, kv_norm, q_norm, cos_sin
        q_nope, q_rope = q_proj.view(H, nope + rope, -1).split([nope, rope], dim=1)
        q_proj = torch.cat([q_nope.flatten(0, 1), q_rope.flatten(0, 1)])
        self.q_b = None if q_a is None else ops.pack_linear(q_proj)
        self.q_dim = q_proj.shape[0] if q_a is None else q_a.shape[0]
        self.q_kv_a = ops.pack_linear(torch.cat([q_proj if q_a is None else q_a, kv_a]))
        w_kc, w_vc = kv_b.view(H, nope + v, C).split([nope, v], dim=1)
        self.w_kc = ops.pack_linear(w_kc.transpose(1, 2).contiguous())
        self.w_vc = ops.pack_linear(w_vc.contiguous())
        self.o_proj = ops.pack_linear(o_proj)
        self.num_heads, self.nope_dim, self.rope_dim, self.latent_dim = H, nope, rope, C
        self.value_dim, self.whole_value_dim, self.ranks = H * v, config.num_attention_heads * v, ranks
        self.settled = self.o_proj.settled  # packing it has waited for the norms as well

    def __call__(
        self, x: torch.Tensor, rows: ops.Rows, tree: DraftTree, cache: LatentCache, prefix_len: torch.Tensor
    ) -> torch.Tensor:
        """x [T, D] -> [T, D]. Each row sees its stream's prefix, its ancestors and itself, so it is cached first."""
        used, layer = rows.num_rows, cache.layers[self.layer]
        q_kv = ops.linear(ops.rms_norm(x, self.norm, self.eps, used, self.settled), self.q_kv_a, num_rows=used)
        q, joint = self.split(q_kv)
        norms = self.q_norm, self.kv_norm, self.cos_sin
        q_a = ops.latent_append(layer, joint, *norms, rows, self.latent_eps, self.settled)
        if self.q_b is not None:
            q = ops.linear(q_a, self.q_b, num_rows=used)
        q_latent, q_rope = ops.absorb_query(q, self.w_kc, self.cos_sin, rows.position, used)
        attended = ops.verify_attn(q_latent, q_rope, layer, rows, tree, prefix_len, self.scale)
        value = ops.linear_heads(attended, self.w_vc, used)
        return self.ranks.linear(value.view(-1, self.value_dim), self.o_proj, self.whole_value_dim, x, used)

    def split(self, q_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the joint rows: queries [T, H*(nope+R)] or their latents [T, Q], and what is normed or cached, the
        columns behind the queries, [T, C+R], or all, [T, Q+C+R]."""
        T, width = q_kv.shape
        q = q_kv.as_strided((T, self.q_dim), (width, 1))
        if self.q_b is not None:
            return q, q_kv
        return q, q_kv.as_strided((T, self.latent_dim + self.rope_dim), (width, 1), self.q_dim)
