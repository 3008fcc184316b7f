"""Which optimiser moves what, and how fast over a run of a known number of steps."""

from __future__ import annotations

import math

import torch
from torch import nn

from kdtree_nb.train.muon import Muon


def lr_share(step: int, num_steps: int, warmup_share: float, final_share: float) -> float:
    """Factor on the peak rates at `step`: linear warm-up, then a cosine down to `final_share`."""
    done = (step + 1) / num_steps
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return min(1.0, done / warmup_share) * (final_share + (1 - final_share) * cosine)


def make_optimizers(
    model: nn.Module, muon_lr: float, adam_lr: float, router_lr: float, weight_decay: float, momentum_dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers; AdamW for embedding, head and norms, and slower for routers.

    The orthogonalisation runs in bfloat16 on a GPU; Muon's momentum is kept in `momentum_dtype`.
    """
    is_cuda = next(model.parameters()).is_cuda
    routers = {name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")}
    matrices = {n for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim > 1} - routers
    groups: dict[str, list[nn.Parameter]] = {"muon": [], "router": [], "other": []}
    for name, param in model.named_parameters():
        groups["muon" if name in matrices else "router" if name in routers else "other"].append(param)
    adam = torch.optim.AdamW(
        [{"params": groups["other"], "lr": adam_lr}, {"params": groups["router"], "lr": router_lr}],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=is_cuda,
    )
    compute_dtype = torch.bfloat16 if is_cuda else torch.float32
    muon = Muon(groups["muon"], muon_lr, 0.95, weight_decay, compute_dtype, momentum_dtype)
    optimizers = [muon, adam]
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def apply_update(optimizers: list[torch.optim.Optimizer], lr_share: float) -> None:
    """One step of every optimiser at `lr_share` of its peak rates; clears the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
