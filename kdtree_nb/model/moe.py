"""Feed-forward blocks: dense SwiGLU, and routed experts with a shared one. Each returns its input plus its output."""

from __future__ import annotations

import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.model.ranks import ONE_RANK, Ranks
from kdtree_nb.native import ops


class DenseFeedForward:
    """x + W_down (silu(W_gate n) * W_up n), n = norm(x). norm [D], gate and up [I, D], down [D, I], I of this rank."""

    def __init__(
        self, config: ModelConfig, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
        ranks: Ranks = ONE_RANK,
    ) -> None:  # fmt: skip
        self.eps, self.norm, self.ranks, self.whole_width = config.rms_norm_eps, norm, ranks, config.intermediate_size
        self.gate_up = ops.pack_linear(torch.cat([gate, up]))
        self.down = ops.pack_linear(down)

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, D] -> [T, D]; num_rows i32 [1], the rows in use, or None."""
        h = ops.rms_norm(x, self.norm, self.eps, num_rows, self.down.settled)  # packing has waited for the norm, too
        gate_up = ops.linear(h, self.gate_up, num_rows=num_rows)
        return self.ranks.linear(ops.swiglu(gate_up, num_rows), self.down, self.whole_width, x, num_rows)


class MoeFeedForward:
    """x + the weighted sum of the chosen experts and the shared one of norm(x). norm [D], router [E, D]."""

    def __init__(
        self, config: ModelConfig, norm: torch.Tensor, router: torch.Tensor, experts: ops.PackedExperts,
        bias: torch.Tensor | None = None, ranks: Ranks = ONE_RANK,
    ) -> None:  # fmt: skip
        self.eps, self.norm, self.experts, self.bias = config.rms_norm_eps, norm, experts, bias
        self.router = ops.pack_linear(router)
        self.top_k, self.scoring = config.num_experts_per_tok, config.scoring_func
        self.n_group, self.topk_group = config.n_group, config.topk_group
        self.renormalize, self.scaling_factor = config.norm_topk_prob, config.routed_scaling_factor
        self.ranks, self.whole_widths = ranks, (config.moe_intermediate_size, config.shared_intermediate_size)

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, D] -> [T, D]; num_rows i32 [1], the rows in use, or None."""
        h, expert_id, weight = self.route(x, num_rows)
        return self.ranks.moe_experts(h, self.experts, expert_id, weight, self.whole_widths, x, num_rows)

    def route(
        self, x: torch.Tensor, num_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """norm(x) [T, D], and the experts that each row chooses: expert_id i32 [T, k] and weight f32 [T, k]."""
        h = ops.rms_norm(x, self.norm, self.eps, num_rows, self.router.settled)  # packing has waited for the norm, too
        logits = ops.linear(h, self.router, None, True, num_rows)
        expert_id, weight = ops.moe_route(
            logits, self.top_k, self.scoring, self.bias, self.renormalize, self.scaling_factor, num_rows, self.n_group,
            self.topk_group,
        )  # fmt: skip
        return h, expert_id, weight
