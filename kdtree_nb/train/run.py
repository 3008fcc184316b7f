"""TrainingRun: what every training run has: a schedule in steps, a curve, and checkpoints from which it goes on as if
it had not stopped."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from kdtree_nb.errors import CheckpointError
from kdtree_nb.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

NUM_CURVE_POINTS = 200
"""Of a whole run."""


class TrainingRun:
    """A module on its way; `step` of `num_steps` steps are done, in train_s seconds.

    A subclass has `module`, what is trained, and `optimizers`, and says what a step is (`advance`), what the curve gets
    (`point`, `after_step`), and what tells this run from others (`identity`). train_curve holds its points so far.
    """

    description = "train"
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.step, self.train_s = num_steps, 0, 0.0
        self.train_curve: list[dict[str, Any]] = []

    def advance(self) -> None:
        """One step, which depends on the seed and the step alone; raises `step` by one."""
        raise NotImplementedError

    def compile(self) -> None:
        """Compile what `advance` calls; worth it for runs of minutes on a GPU."""
        raise NotImplementedError

    def point(self) -> dict[str, float]:
        """Means over the steps since the last call; nats_per_token is one of them."""
        raise NotImplementedError

    def after_step(self) -> None:
        """What else is looked at on the way."""

    def identity(self) -> dict[str, Any]:
        """JSON-ready fields that a checkpoint must share with the run that goes on from it."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """JSON-ready: what else a checkpoint holds."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""

    def run(self, until: int, checkpoints: Path | None = None, every: int = 0) -> None:
        """Train up to step `until`, with a checkpoint every `every` steps and at the end, where a folder is given.

        Raises FloatingPointError when the loss is no longer finite.
        """
        total = self.num_steps
        with tqdm(initial=self.step, total=total, desc=self.description, unit="step", mininterval=1.0) as progress:
            while self.step < until:
                start_s = time.perf_counter()
                self.advance()
                if self.is_due(NUM_CURVE_POINTS) or self.step == total:
                    self._note(progress)
                progress.update()
                self.after_step()
                self.train_s += time.perf_counter() - start_s
                if checkpoints is not None and (self.step == until or (every and self.step % every == 0)):
                    self.save(checkpoints)

    def is_due(self, times: int) -> bool:
        """Whether something that happens `times` times in a run happens behind this step."""
        return self.step % max(1, self.num_steps // times) == 0

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of this moment, in files of at most 16 MiB."""
        state = {"step": self.step, "train_s": self.train_s, "train_curve": self.train_curve, **self.state()}
        return save_checkpoint(folder, self.step, dict(self._tensors()), state | self.identity())

    def resume(self, folder: Path) -> bool:
        """Go on from the latest checkpoint below `folder`; False when there is none.

        Raises CheckpointError, naming the field, when it belongs to another run.
        """
        place = latest_checkpoint(folder)
        if place is None:
            return False
        tensors, state = load_checkpoint(place)
        for field, mine in self.identity().items():
            if state.get(field) != mine:
                raise CheckpointError(f"resume: {place}: {field}: expected {mine}, got {state.get(field)}")
        self._restore(tensors)
        self.step, self.train_s, self.train_curve = state["step"], state["train_s"], state["train_curve"]
        self.set_state(state)
        return True

    def _note(self, progress: tqdm) -> None:
        found = self.point()
        if not math.isfinite(found["nats_per_token"]):
            nats = found["nats_per_token"]
            raise FloatingPointError(f"train: expected a finite loss, got {nats} at step {self.step}")
        self.train_curve.append({"step": self.step, **found})
        progress.set_postfix(nats_per_token=f"{found['nats_per_token']:.3f}")

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found = [(f"model.{name}", value) for name, value in self.module.state_dict().items()]
        names = {param: name for name, param in self.module.named_parameters()}
        for index, optimizer in enumerate(self.optimizers):
            for param, state in optimizer.state.items():
                found += [(f"optimizer.{index}.{names[param]}:{key}", value) for key, value in state.items()]
        return found

    def _restore(self, tensors: dict[str, torch.Tensor]) -> None:
        weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        self.module.load_state_dict(weights)
        params = dict(self.module.named_parameters())
        for name in tensors.keys() - {f"model.{weight}" for weight in weights}:
            _, index, rest = name.split(".", 2)
            param, key = params[rest.partition(":")[0]], rest.partition(":")[2]
            self.optimizers[int(index)].state[param][key] = tensors[name].to(param.device)
