"""The training run of a drafter: scheduled by steps, seeded, resumed from a checkpoint as if it had not stopped."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from tqdm.auto import tqdm

from kdtree_nb.drafters import DFlash, DFlashConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.train.drafter.network import DrafterNetwork
from kdtree_nb.train.drafter.recipe import Recipe
from kdtree_nb.train.drafter.target import FrozenTarget
from kdtree_nb.train.muon import Muon
from kdtree_nb.train.nano.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from kdtree_nb.train.optimizers import apply_update, lr_share
from kdtree_nb.train.streams import upload

NUM_CURVE_POINTS = 200


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


class Trainer:
    """A drafter on its way. `step` steps are done.

    train_curve: {"step", "nats_per_token", "by_depth"}, means over the steps since the point before: weighted as the
    loss is, and for each depth of whole blocks (None where there were none)
    """

    def __init__(
        self, config: DFlashConfig, recipe: Recipe, target: FrozenTarget, texts: Texts, keep_features: bool = True
    ) -> None:
        self.config, self.recipe, self.target, self.texts = config, recipe, target, texts
        device = target.device
        self.tokens, self.prompt_len = texts.tokens.to(device), texts.prompt_len.to(device)
        _check_texts(self.tokens, self.prompt_len)
        torch.manual_seed(recipe.seed)
        self.network = DrafterNetwork(config).to(device)
        self.optimizers = drafter_optimizers(self.network, recipe, target.embedding.dtype)
        self.forward: Callable = self.network
        self.loss: Callable = block_loss
        self.step, self.train_s = 0, 0.0
        self.train_curve: list[dict[str, Any]] = []
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

    def run(self, until: int, checkpoints: Path | None = None, every: int = 0) -> None:
        """Train up to step `until`, with a checkpoint every `every` steps and at the end, where a folder is given."""
        total = self.recipe.num_steps
        with tqdm(initial=self.step, total=total, desc="train the drafter", unit="step", mininterval=1.0) as progress:
            while self.step < until:
                start_s = time.perf_counter()
                self.advance()
                self._note(progress)
                self.train_s += time.perf_counter() - start_s
                if checkpoints is not None and (self.step == until or (every and self.step % every == 0)):
                    self.save(checkpoints)

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

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of this moment, in files of at most 16 MiB."""
        self._seen = [(loss.cpu(), nats.cpu()) for loss, nats in self._seen]
        seen = [(loss.item(), nats.tolist()) for loss, nats in self._seen]
        state = {
            "step": self.step,
            "train_s": self.train_s,
            "train_curve": self.train_curve,
            "seen": seen,
            **self._identity(),
        }
        return save_checkpoint(folder, self.step, dict(self._tensors()), state)

    def resume(self, folder: Path) -> bool:
        """Go on from the latest checkpoint below `folder`; False when there is none.

        Raises CheckpointError, naming the field, when it belongs to another run, drafter or texts.
        """
        place = latest_checkpoint(folder)
        if place is None:
            return False
        tensors, state = load_checkpoint(place)
        for field, mine in self._identity().items():
            if state.get(field) != mine:
                raise CheckpointError(f"resume: {place}: {field}: expected {mine}, got {state.get(field)}")
        self._restore(tensors)
        self.step, self.train_s, self.train_curve = state["step"], state["train_s"], state["train_curve"]
        self._seen = [(torch.tensor(loss), torch.tensor(nats)) for loss, nats in state["seen"]]
        return True

    def _identity(self) -> dict[str, Any]:
        recipe = dataclasses.asdict(self.recipe) | {"block_sizes": list(self.recipe.block_sizes)}
        place = {"device": self.target.device.type, "dtype": str(self.target.embedding.dtype)}
        return {"config": self.config.to_fields(), "recipe": recipe, "texts": self.texts.digest, **place}

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found = [(f"model.{name}", value) for name, value in self.network.state_dict().items()]
        names = {param: name for name, param in self.network.named_parameters()}
        for index, optimizer in enumerate(self.optimizers):
            for param, state in optimizer.state.items():
                found += [(f"optimizer.{index}.{names[param]}:{key}", value) for key, value in state.items()]
        return found

    def _restore(self, tensors: dict[str, torch.Tensor]) -> None:
        weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        self.network.load_state_dict(weights)
        params = dict(self.network.named_parameters())
        for name in tensors.keys() - {f"model.{weight}" for weight in weights}:
            _, index, rest = name.split(".", 2)
            param, key = params[rest.partition(":")[0]], rest.partition(":")[2]
            self.optimizers[int(index)].state[param][key] = tensors[name].to(param.device)

    def _note(self, progress: tqdm) -> None:
        num_steps = self.recipe.num_steps
        if self.step % max(1, num_steps // NUM_CURVE_POINTS) == 0 or self.step == num_steps:
            loss = statistics.fmean(loss.item() for loss, _ in self._seen)
            if not math.isfinite(loss):
                raise FloatingPointError(f"train: expected a finite loss, got {loss} at step {self.step}")
            nats = torch.stack([nats.cpu() for _, nats in self._seen]).nanmean(0)
            by_depth = [None if math.isnan(value) else round(value, 4) for value in nats.tolist()]
            self.train_curve.append({"step": self.step, "nats_per_token": loss, "by_depth": by_depth})
            self._seen = []
            progress.set_postfix(nats_per_token=f"{loss:.3f}")
        progress.update()


def _check_texts(tokens: torch.Tensor, prompt_len: torch.Tensor) -> None:
    N, T = tokens.shape
    if N < 1 or prompt_len.shape != (N,) or prompt_len.min() < 1 or prompt_len.max() >= T:
        raise ValueError(
            f"train: expected texts [N, T] with prompts of 1 … T - 1 tokens, got {N} of {T} tokens and prompts of "
            f"{prompt_len.tolist()!s:.60}"
        )
