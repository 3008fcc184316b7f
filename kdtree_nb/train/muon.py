"""Muon for matrices (momentum, then an approximate orthogonalisation), AdamW for everything else.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); its quintic Newton–Schulz iteration.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def orthogonalise(matrices: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """Move the singular values of matrices [n, rows, columns], rows <= columns, towards 1. Same shape and dtype."""
    x = matrices / (matrices.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Parameters are matrices [..., rows, columns], leading dimensions being independent matrices. Those of one shape are
    handled in one batch. `compute_dtype` is that of the orthogonalisation, `momentum_dtype` that of the state kept
    between steps; the update itself sees the momentum before it is rounded to it.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
        compute_dtype: torch.dtype = torch.float32,
        momentum_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._compute_dtype, self._momentum_dtype = compute_dtype, momentum_dtype

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            batches: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    batches.setdefault(_wide(param).shape[-2:], []).append(param)
            for batch in batches.values():
                self._step_batch(batch, group["lr"], group["momentum"], group["weight_decay"])

    def _step_batch(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        """The lists go through few kernels each: a small model's update is mostly launches."""
        for param in params:
            if "average" not in self.state[param]:
                self.state[param]["average"] = torch.zeros_like(param, dtype=self._momentum_dtype)
        kept, grads = [self.state[param]["average"] for param in params], [param.grad for param in params]
        averages = torch._foreach_lerp([average.to(grads[0].dtype) for average in kept], grads, 1 - momentum)
        torch._foreach_copy_(kept, averages)
        directions = [_wide(d).flatten(0, -3) for d in torch._foreach_lerp(grads, averages, momentum)]
        updates = orthogonalise(torch.cat(directions).to(self._compute_dtype)).split([len(d) for d in directions])
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        for param, update in zip(params, updates, strict=True):
            rows, columns = param.shape[-2:]
            update = (update.mT if rows > columns else update).reshape(param.shape)
            param.add_(update, alpha=-lr * max(1, rows / columns) ** 0.5)


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns] with rows <= columns: a leading dimension for plain matrices, transposed where needed."""
    stacked = matrix if matrix.ndim > 2 else matrix[None]
    return stacked.mT if stacked.shape[-2] > stacked.shape[-1] else stacked
