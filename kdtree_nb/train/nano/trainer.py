"""The training run of a target: scheduled by steps, seeded, resumed from a checkpoint as if it had not stopped."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kdtree_nb.config import ModelConfig
from kdtree_nb.train.nano.recipe import Recipe
from kdtree_nb.train.nano.tokens import TokenCorpus
from kdtree_nb.train.optimizers import apply_update, lr_share, make_optimizers
from kdtree_nb.train.plain_model import PlainModel
from kdtree_nb.train.run import TrainingRun
from kdtree_nb.train.streams import measure, sample_windows

NUM_EVALUATIONS = 10
MAX_COMPILED_FORMS = 64
"""Of one function: kinds of layers times window lengths. Beyond the library's own limit, 8, it would stop compiling."""


def token_loss(hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood in nats of target [batch, positions]; hidden [.., .., D], head [V, D]."""
    logits = functional.linear(hidden, head.to(hidden.dtype)).float()
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Trainer(TrainingRun):
    """A model on its way. `step` steps are done; the curves hold what was seen so far.

    train_curve:   {"step", "nats_per_token"}
    heldout_curve: {"step", "bits_per_byte", "min_load", "max_load"}: held-out code; loads relative to an even one
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, corpus: TokenCorpus, device: torch.device) -> None:
        super().__init__(recipe.num_steps)
        self.config, self.recipe, self.corpus, self.device = config, recipe, corpus, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.stream = torch.from_numpy(corpus.streams["train"]).to(device)
        torch.manual_seed(recipe.seed)
        self.model = self.module = PlainModel(config).to(device)
        self.optimizers = make_optimizers(
            self.model, recipe.muon_lr, recipe.adam_lr, recipe.router_lr, recipe.weight_decay,
            momentum_dtype=torch.bfloat16,
        )  # fmt: skip
        self.biases = [b for name, b in self.model.named_buffers() if name.endswith("e_score_correction_bias")]
        self.layers: list[Callable] | None = None
        self.loss: Callable = token_loss
        self.heldout_curve: list[dict[str, float]] = []
        self._losses: list[torch.Tensor | float] = []

    def compile(self) -> None:
        """Compile the layers and the loss; worth it for runs of minutes on a GPU."""
        torch._dynamo.config.recompile_limit = MAX_COMPILED_FORMS
        self.layers = [torch.compile(layer, dynamic=False) for layer in self.model.layers]
        self.loss = torch.compile(token_loss, dynamic=False)

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

    def point(self) -> dict[str, float]:
        """The mean loss."""
        nats = statistics.fmean(float(loss) for loss in self._losses)
        self._losses = []
        return {"nats_per_token": nats}

    def after_step(self) -> None:
        """Look at held-out code a few times."""
        if self.is_due(NUM_EVALUATIONS):
            bits, loads = self.evaluate("code", self.recipe.num_eval_windows)
            spread = {"min_load": loads.min().item(), "max_load": loads.max().item()}
            self.heldout_curve.append({"step": self.step, "bits_per_byte": bits, **spread})

    def identity(self) -> dict[str, Any]:
        """Model, recipe, corpus and kind of device."""
        recipe = dataclasses.asdict(self.recipe)
        return {"config": self.config.to_dict(), "recipe": recipe | {"context_cycle": list(self.recipe.context_cycle)},
                "corpus": self.corpus.record, "device": self.device.type}  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The other curve, and the losses since the last point."""
        self._losses = [float(loss) for loss in self._losses]
        return {"heldout_curve": self.heldout_curve, "losses": self._losses}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._losses, self.heldout_curve = state["losses"], state["heldout_curve"]
