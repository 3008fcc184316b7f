"""The training run of a target: scheduled by steps, seeded, resumed from a checkpoint as if it had not stopped."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm.auto import tqdm

from kdtree_nb.config import ModelConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.train.nano.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from kdtree_nb.train.nano.recipe import Recipe
from kdtree_nb.train.nano.tokens import TokenCorpus
from kdtree_nb.train.optimizers import apply_update, lr_share, make_optimizers
from kdtree_nb.train.plain_model import PlainModel
from kdtree_nb.train.streams import measure, sample_windows

NUM_CURVE_POINTS = 200
NUM_EVALUATIONS = 10
MAX_COMPILED_FORMS = 64
"""Of one function: kinds of layers times window lengths. Beyond the library's own limit, 8, it would stop compiling."""


def token_loss(hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood in nats of target [batch, positions]; hidden [.., .., D], head [V, D]."""
    logits = functional.linear(hidden, head.to(hidden.dtype)).float()
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Trainer:
    """A model on its way. `step` steps are done; the curves hold what was seen so far.

    train_curve:   {"step", "nats_per_token"}, means over the steps since the point before
    heldout_curve: {"step", "bits_per_byte", "min_load", "max_load"}: held-out code; loads relative to an even one
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, corpus: TokenCorpus, device: torch.device) -> None:
        self.config, self.recipe, self.corpus, self.device = config, recipe, corpus, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.stream = torch.from_numpy(corpus.streams["train"]).to(device)
        torch.manual_seed(recipe.seed)
        self.model = PlainModel(config).to(device)
        self.optimizers = make_optimizers(
            self.model, recipe.muon_lr, recipe.adam_lr, recipe.router_lr, recipe.weight_decay,
            momentum_dtype=torch.bfloat16,
        )  # fmt: skip
        self.biases = [b for name, b in self.model.named_buffers() if name.endswith("e_score_correction_bias")]
        self.layers: list[Callable] | None = None
        self.loss: Callable = token_loss
        self.step, self.train_s = 0, 0.0
        self.train_curve: list[dict[str, float]] = []
        self.heldout_curve: list[dict[str, float]] = []
        self._losses: list[torch.Tensor | float] = []

    def compile(self) -> None:
        """Compile the layers and the loss; worth it for runs of minutes on a GPU."""
        torch._dynamo.config.recompile_limit = MAX_COMPILED_FORMS
        self.layers = [torch.compile(layer, dynamic=False) for layer in self.model.layers]
        self.loss = torch.compile(token_loss, dynamic=False)

    def run(self, until: int, checkpoints: Path | None = None, every: int = 0) -> None:
        """Train up to step `until`, with a checkpoint every `every` steps and at the end, where a folder is given."""
        progress = tqdm(initial=self.step, total=self.recipe.num_steps, desc="train", unit="step", mininterval=1.0)
        with progress:
            while self.step < until:
                start_s = time.perf_counter()
                self.advance()
                self._note(progress)
                self.train_s += time.perf_counter() - start_s
                if checkpoints is not None and (self.step == until or (every and self.step % every == 0)):
                    self.save(checkpoints)

    def advance(self) -> None:
        """One step. Its windows depend on the seed and the step alone."""
        recipe = self.recipe
        context = recipe.context_cycle[self.step % len(recipe.context_cycle)]
        generator = torch.Generator().manual_seed((recipe.seed << 32) + self.step)
        window = sample_windows(self.stream, max(1, recipe.batch_tokens // context), context + 1, generator)
        hidden = self.model.hidden(window[:, :-1], self.dtype, self.layers)
        loss = self.loss(hidden.last, self.model.head_weight, window[:, 1:])
        loss.backward()
        apply_update(self.optimizers, lr_share(self.step, recipe.num_steps, recipe.warmup_share, recipe.final_lr_share))
        with torch.no_grad():
            for bias, load in zip(self.biases, hidden.loads, strict=True):
                bias += recipe.bias_rate_at(self.step) * torch.sign(1 / len(load) - load)
        self._losses.append(loss.detach())
        self.step += 1

    def evaluate(self, stream: str, num_windows: int, dtype: torch.dtype | None = None) -> tuple[float, torch.Tensor]:
        """(bits per byte, loads [MoE layers, experts] relative to an even one) on a stream of the corpus."""
        tokens = torch.from_numpy(self.corpus.streams[stream]).to(self.device)
        context = min(self.recipe.eval_context, len(tokens) - 1)
        bits, loads = measure(self.model, tokens, dtype or self.dtype, num_windows, context)
        return bits / self.corpus.bytes_per_token(stream), torch.tensor(loads) * self.config.n_routed_experts

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of this moment."""
        self._losses = [float(loss) for loss in self._losses]
        state = {"step": self.step, "train_s": self.train_s, "train_curve": self.train_curve,
                 "heldout_curve": self.heldout_curve, "losses": self._losses, **self._identity()}  # fmt: skip
        return save_checkpoint(folder, self.step, dict(self._tensors()), state)

    def resume(self, folder: Path) -> bool:
        """Go on from the latest checkpoint below `folder`; False when there is none.

        Raises CheckpointError, naming the field, when it belongs to another run, model or corpus.
        """
        place = latest_checkpoint(folder)
        if place is None:
            return False
        tensors, state = load_checkpoint(place)
        for field, mine in self._identity().items():
            if state[field] != mine:
                raise CheckpointError(f"resume: {place}: {field}: expected {mine}, got {state[field]}")
        self._restore(tensors)
        self.step, self.train_s, self._losses = state["step"], state["train_s"], state["losses"]
        self.train_curve, self.heldout_curve = state["train_curve"], state["heldout_curve"]
        return True

    def _identity(self) -> dict[str, Any]:
        recipe = dataclasses.asdict(self.recipe)
        return {"config": self.config.to_dict(), "recipe": recipe | {"context_cycle": list(self.recipe.context_cycle)},
                "corpus": self.corpus.record, "device": self.device.type}  # fmt: skip

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found = [(f"model.{name}", value) for name, value in self.model.state_dict().items()]
        names = {param: name for name, param in self.model.named_parameters()}
        for index, optimizer in enumerate(self.optimizers):
            for param, state in optimizer.state.items():
                found += [(f"optimizer.{index}.{names[param]}:{key}", value) for key, value in state.items()]
        return found

    def _restore(self, tensors: dict[str, torch.Tensor]) -> None:
        weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        self.model.load_state_dict(weights)
        params = dict(self.model.named_parameters())
        for name in tensors.keys() - {f"model.{weight}" for weight in weights}:
            _, index, rest = name.split(".", 2)
            param = params[rest.partition(":")[0]]
            state = self.optimizers[int(index)].state[param]
            state[rest.partition(":")[2]] = tensors[name].to(param.device)

    def _note(self, progress: tqdm) -> None:
        num_steps = self.recipe.num_steps
        if self.step % max(1, num_steps // NUM_CURVE_POINTS) == 0 or self.step == num_steps:
            nats = statistics.fmean(float(loss) for loss in self._losses)
            if not math.isfinite(nats):
                raise FloatingPointError(f"train: expected a finite loss, got {nats} at step {self.step}")
            self.train_curve.append({"step": self.step, "nats_per_token": nats})
            self._losses = []
            progress.set_postfix(nats_per_token=f"{nats:.3f}")
        progress.update()
        if self.step % max(1, num_steps // NUM_EVALUATIONS) == 0:
            bits, loads = self.evaluate("code", self.recipe.num_eval_windows)
            spread = {"min_load": loads.min().item(), "max_load": loads.max().item()}
            self.heldout_curve.append({"step": self.step, "bits_per_byte": bits, **spread})
