"""Multi-head latent attention in absorbed form: all heads attend to one latent per token."""

from __future__ import annotations

import numpy as np
import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.model.latent_cache import LatentCache
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree


def rope_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """f32 [P, R]: R/2 cosines, then R/2 sines, of every absolute position; computed in float64 and rounded once."""
    half = config.qk_rope_head_dim // 2
    frequency = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angle = np.arange(config.max_position_embeddings, dtype=np.float64)[:, None] * frequency
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    return torch.from_numpy(table).to(device)


class Attention:
    """x + W_o attention(norm(x)). With kv_b split into W_kc and W_vc per head, scores and values live in latent space:
    q_latent = W_kc^T q_nope, score = q_latent . latent + q_rope . k_rope, value = W_vc (sum p latent).

    norm [D], kv_norm [C]:           RMSNorm weights
    q_proj [H*(nope+rope), D], kv_a [C+R, D]: stored as one matrix whose rows are H*nope | H*rope | C | R
    kv_b [H*(nope+v), C], o_proj [D, H*v]
    """

    def __init__(
        self, config: ModelConfig, layer: int, norm: torch.Tensor, q_proj: torch.Tensor, kv_a: torch.Tensor,
        kv_norm: torch.Tensor, kv_b: torch.Tensor, o_proj: torch.Tensor, cos_sin: torch.Tensor,
    ) -> None:  # fmt: skip
        H, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        C, v = config.kv_lora_rank, config.v_head_dim
        self.layer = layer
        self.eps, self.scale = config.rms_norm_eps, config.softmax_scale
        self.norm, self.kv_norm, self.cos_sin = norm, kv_norm, cos_sin
        q_nope, q_rope = q_proj.view(H, nope + rope, -1).split([nope, rope], dim=1)
        self.q_kv_a = ops.pack_linear(torch.cat([q_nope.flatten(0, 1), q_rope.flatten(0, 1), kv_a]))
        w_kc, w_vc = kv_b.view(H, nope + v, C).split([nope, v], dim=1)
        self.w_kc = ops.pack_linear(w_kc.transpose(1, 2).contiguous())
        self.w_vc = ops.pack_linear(w_vc.contiguous())
        self.o_proj = ops.pack_linear(o_proj)
        self.num_heads, self.nope_dim, self.rope_dim, self.latent_dim = H, nope, rope, C
        self.value_dim = H * v

    def __call__(
        self, x: torch.Tensor, rows: ops.Rows, tree: DraftTree, cache: LatentCache, prefix_len: torch.Tensor
    ) -> torch.Tensor:
        """x [T, D] -> [T, D]. Each row sees its stream's prefix, its ancestors and itself, so it is cached first."""
        used = rows.num_rows
        q_kv = ops.linear(ops.rms_norm(x, self.norm, self.eps, used), self.q_kv_a, num_rows=used)
        q_nope, q_rope, latent, k_rope = self.split(q_kv)
        q_latent = ops.linear_heads(q_nope, self.w_kc, used)
        q_rope = ops.rope(q_rope, self.cos_sin, rows.position, used)
        latent = ops.rms_norm(latent, self.kv_norm, self.eps, used)
        k_rope = ops.rope(k_rope, self.cos_sin, rows.position, used)
        cache.append(self.layer, latent, k_rope.squeeze(1), rows)
        attended = ops.verify_attn(q_latent, q_rope, cache.layers[self.layer], rows, tree, prefix_len, self.scale)
        value = ops.linear_heads(attended, self.w_vc, used)
        return ops.linear(value.view(-1, self.value_dim), self.o_proj, x, num_rows=used)

    def split(self, q_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the T joint rows: q_nope [T, H, nope], q_rope [T, H, R], latent [T, C], k_rope [T, 1, R]."""
        T, width = q_kv.shape
        H, nope, R, C = self.num_heads, self.nope_dim, self.rope_dim, self.latent_dim
        view = q_kv.as_strided
        return (
            view((T, H, nope), (width, nope, 1)),
            view((T, H, R), (width, R, 1), H * nope),
            view((T, C), (width, 1), H * (nope + R)),
            view((T, 1, R), (width, R, 1), H * (nope + R) + C),
        )
