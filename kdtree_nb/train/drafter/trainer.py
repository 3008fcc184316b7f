"""The training run of a drafter: scheduled by steps, seeded, resumed from a checkpoint as if it had not stopped."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from kdtree_nb.drafters import DFlash, DFlashConfig
from kdtree_nb.train.drafter.network import DrafterNetwork
from kdtree_nb.train.drafter.recipe import Recipe
from kdtree_nb.train.drafter.target import FrozenTarget
from kdtree_nb.train.muon import Muon
from kdtree_nb.train.optimizers import apply_update, lr_share
from kdtree_nb.train.run import TrainingRun
from kdtree_nb.train.streams import upload


class Texts(NamedTuple):
    """tokens int [N, T], prompt_len int [N]: what follows the prompt is the target's own. digest: names them."""

    tokens: torch.Tensor
    prompt_len: torch.Tensor
    digest: str


class Blocks(NamedTuple):
    """Blocks of a step, i64 [B, A] each but target [B, A, b - 1] and its weight f32: see DrafterNetwork."""

    bonus: torch.Tensor
    anchor: torch.Tensor
    size: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor


def block_loss(
    hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted mean of the cross-entropies in nats [], the cross-entropies [B, A, b - 1])."""
    logits = functional.linear(hidden, head.to(hidden.dtype)).float()
    nats = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view(weight.shape)
    return (nats * weight).sum() / weight.sum(), nats


def sample_blocks(
    tokens: torch.Tensor, prompt_len: torch.Tensor, recipe: Recipe, block_size: int, generator: torch.Generator
) -> Blocks:
    """Blocks at random places of the texts i64 [B, T], whose first token is the prompt's last one or stands behind it.

    Tokens behind a block's size or the text's end have weight 0.
    """
    B, T = tokens.shape
    chance = upload(torch.rand(B, recipe.anchors, generator=generator), tokens.device)
    first = prompt_len[:, None].long() - 1
    anchor = first + (chance * (T - 1 - first)).long().clamp(max=T - 2)
    which = torch.randint(0, len(recipe.block_sizes), (B, recipe.anchors), generator=generator)
    size = upload(torch.tensor(recipe.block_sizes)[which].clamp(max=block_size), tokens.device)
    depth = torch.arange(1, block_size, device=tokens.device)
    place = anchor[..., None] + depth
    target = tokens.gather(1, place.clamp(max=T - 1).flatten(1)).view(place.shape)
    weight = torch.exp(-(depth - 1) / recipe.gamma) * (depth < size[..., None]) * (place < T)
    return Blocks(tokens.gather(1, anchor), anchor, size, target, weight)


def drafter_optimizers(network: nn.Module, recipe: Recipe, compute_dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Muon, which orthogonalises in compute_dtype, for the matrices; AdamW for the norms."""
    is_cuda = next(network.parameters()).is_cuda
    matrices = [p for p in network.parameters() if p.ndim > 1]
    norms = [p for p in network.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(norms, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=is_cuda)
    optimizers = [Muon(matrices, recipe.muon_lr, 0.95, recipe.weight_decay, compute_dtype), adam]
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


class Trainer(TrainingRun):
    """A drafter on its way. `step` steps are done.

    train_curve: {"step", "nats_per_token", "by_depth"}: weighted as the loss is, and for each depth of whole blocks
    (None where there were none)
    """

    description = "train the drafter"

    def __init__(
        self, config: DFlashConfig, recipe: Recipe, target: FrozenTarget, texts: Texts, keep_features: bool = True
    ) -> None:
        super().__init__(recipe.num_steps)
        self.config, self.recipe, self.target, self.texts = config, recipe, target, texts
        device = target.device
        self.tokens, self.prompt_len = texts.tokens.to(device), texts.prompt_len.to(device)
        _check_texts(self.tokens, self.prompt_len)
        torch.manual_seed(recipe.seed)
        self.network = self.module = DrafterNetwork(config).to(device)
        self.optimizers = drafter_optimizers(self.network, recipe, target.embedding.dtype)
        self.forward: Callable = self.network
        self.loss: Callable = block_loss
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._features = self._all_features() if keep_features else None

    def _all_features(self, num_at_once: int = 256) -> torch.Tensor:
        """Of all texts [N, T, nD], written in place: they can be most of the memory there is."""
        first = self.target.features(self.tokens[:1].long())
        features = first.new_empty(len(self.tokens), *first.shape[1:])
        for part, place in zip(self.tokens.split(num_at_once), features.split(num_at_once), strict=True):
            place.copy_(self.target.features(part.long()))
        return features

    def compile(self) -> None:
        """Compile the layers and the loss; worth it for runs of minutes on a GPU."""
        for layer in self.network.layers:
            layer.compile(dynamic=False)
        self.loss = torch.compile(block_loss, dynamic=False)

    def advance(self) -> None:
        """One step. Its texts and blocks depend on the seed and the step alone."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed((recipe.seed << 32) + self.step)
        place = torch.randint(0, len(self.tokens), (recipe.batch_texts,), generator=generator)
        place = upload(place, self.tokens.device)
        tokens = self.tokens[place].long()
        features = self.target.features(tokens) if self._features is None else self._features[place]
        blocks = sample_blocks(tokens, self.prompt_len[place], recipe, self.config.block_size, generator)
        hidden = self.forward(features, self.target.embedding, blocks.bonus, blocks.anchor, blocks.size)
        loss, nats = self.loss(hidden, self.target.head, blocks.target, blocks.weight)
        loss.backward()
        apply_update(self.optimizers, lr_share(self.step, recipe.num_steps, recipe.warmup_share, recipe.final_lr_share))
        whole = (blocks.weight > 0).all(-1, keepdim=True)
        by_depth = (nats.detach() * whole).sum((0, 1)) / whole.sum()  # NaN where no block is whole
        self._seen.append((loss.detach(), by_depth))
        self.step += 1

    def drafter(self) -> DFlash:
        """What there is by now."""
        return DFlash(self.config, {name: value.detach() for name, value in self.network.state_dict().items()})

    def point(self) -> dict[str, Any]:
        """The mean loss, and by depth."""
        loss = statistics.fmean(loss.item() for loss, _ in self._seen)
        nats = torch.stack([nats.cpu() for _, nats in self._seen]).nanmean(0)
        self._seen = []
        return {
            "nats_per_token": loss,
            "by_depth": [None if math.isnan(value) else round(value, 4) for value in nats.tolist()],
        }

    def identity(self) -> dict[str, Any]:
        """Drafter, recipe, texts and where it is trained."""
        recipe = dataclasses.asdict(self.recipe) | {"block_sizes": list(self.recipe.block_sizes)}
        place = {"device": self.target.device.type, "dtype": str(self.target.embedding.dtype)}
        return {"config": self.config.to_fields(), "recipe": recipe, "texts": self.texts.digest, **place}

    def state(self) -> dict[str, Any]:
        """What was seen since the last point."""
        self._seen = [(loss.cpu(), nats.cpu()) for loss, nats in self._seen]
        return {"seen": [(loss.item(), nats.tolist()) for loss, nats in self._seen]}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._seen = [(torch.tensor(loss), torch.tensor(nats)) for loss, nats in state["seen"]]


def _check_texts(tokens: torch.Tensor, prompt_len: torch.Tensor) -> None:
    N, T = tokens.shape
    if N < 1 or prompt_len.shape != (N,) or prompt_len.min() < 1 or prompt_len.max() >= T:
        raise ValueError(
            f"train: expected texts [N, T] with prompts of 1 … T - 1 tokens, got {N} of {T} tokens and prompts of "
            f"{prompt_len.tolist()!s:.60}"
        )
