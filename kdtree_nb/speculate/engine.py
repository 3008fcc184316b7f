"""Engine: generation token by token (AR) or with draft trees (DDTree). Both give the same tokens and logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kdtree_nb.drafters import AnyDrafter
from kdtree_nb.model import Model
from kdtree_nb.speculate.batch import Batch
from kdtree_nb.speculate.cost import CostModel
from kdtree_nb.speculate.device_batch import DeviceBatch
from kdtree_nb.speculate.device_forward import DeviceForward
from kdtree_nb.speculate.forward import TreeForward
from kdtree_nb.speculate.mode import AUTO, Auto, Mode, check_mode
from kdtree_nb.speculate.request import check_budgets, check_counts, check_prompts, check_stop_tokens
from kdtree_nb.speculate.sampling import Sampling, check_samplings
from kdtree_nb.speculate.stats import Generation, StepRecord
from kdtree_nb.speculate.stream import Stream

DEFAULT_MAX_SEQ_LEN = 4096

OnStep = Callable[[StepRecord], None]
Prompts = Sequence[int] | Sequence[Sequence[int]]
Samplings = Sampling | Sequence[Sampling | None] | None


class Kind(NamedTuple):
    """How steps are taken: its name, what is kept between texts, and what decodes the streams of one call."""

    name: str
    forward: type[TreeForward] | type[DeviceForward]
    batch: type[Batch]


HOST = Kind("host", TreeForward, Batch)
"""The host leads every step through its stages."""

DEVICE = Kind("device", DeviceForward, DeviceBatch)
"""The device takes whole steps; on a GPU each is a CUDA graph."""


def _kind(use_graphs: bool | None, device: torch.device) -> Kind:
    if use_graphs and device.type != "cuda":
        raise ValueError(f"Engine: use_graphs: expected a model on a GPU, got one on {device}")
    return DEVICE if device.type == "cuda" and use_graphs is not False else HOST


class Engine:
    """Decodes with `model`. A call keeps its own state: after an error the engine is as good as before.

    The cache of a finished call is kept for the next one, and what was captured on it.

    drafter:     who proposes tokens for `generate_ddtree`; its quality decides the speed, never the output
    budget:      most drafted tokens per stream and step, 0 … 1023; or "auto": in each step the number that gives the
                 most tokens per second by the cost model of this device and model (see `kdtree-nb calibrate`)
    max_seq_len: most tokens of prompt and output together; default: the model's, at most 4096
    use_graphs:  take each step as one CUDA graph, without waiting for the host; default: on a GPU
    mode:        what the budget is spent on: the heaviest "tree", or depth alone: a "chain"
    cost:        the cost model of "auto"; default: the one that was calibrated
    """

    def __init__(
        self, model: Model, drafter: AnyDrafter | None = None, budget: int | str = 16, max_seq_len: int | None = None,
        use_graphs: bool | None = None, mode: str = "tree", cost: CostModel | None = None,
    ) -> None:  # fmt: skip
        is_drafter = hasattr(drafter, "draft") or hasattr(drafter, "attach")
        if drafter is not None and (isinstance(drafter, type) or not is_drafter):
            raise ValueError(f"Engine: drafter: expected an instance with a method draft or attach, got {drafter!r}")
        self.model, self.drafter = model, drafter
        self._spares: list[TreeForward | DeviceForward] = []
        self._kind = _kind(use_graphs, model.device)
        self._is_chain, self._auto = check_mode(mode), None
        is_auto = isinstance(budget, str) and budget == AUTO
        self.budget = budget if is_auto else check_budgets("Engine", budget, 1)[0]
        if is_auto or cost is not None:
            self._auto = Auto.of(model, self._kind.name, cost)
        longest = model.config.max_position_embeddings
        wanted = min(DEFAULT_MAX_SEQ_LEN, longest) if max_seq_len is None else max_seq_len
        self.max_seq_len = check_counts("Engine: max_seq_len", wanted, 1)[0]
        if not 2 <= self.max_seq_len <= longest:
            raise ValueError(
                f"Engine: max_seq_len: expected 2 … {longest} (the model's max_position_embeddings), got {max_seq_len}"
            )

    def generate_ar(
        self, prompt_ids: Prompts, max_new_tokens: int | Sequence[int], *, return_logits: bool = False,
        stop_token_ids: Sequence[int] | None = None, on_step: OnStep | None = None, sampling: Samplings = None,
    ) -> Generation | list[Generation]:  # fmt: skip
        """One token per target forward: the DDTree loop with budget 0. Arguments and errors as `generate_ddtree`."""
        return self._generate(prompt_ids, max_new_tokens, 0, return_logits, stop_token_ids, on_step, sampling)

    def generate_ddtree(
        self, prompt_ids: Prompts, max_new_tokens: int | Sequence[int], *, return_logits: bool = False,
        stop_token_ids: Sequence[int] | None = None, on_step: OnStep | None = None,
        budget: int | str | Sequence[int] | None = None, sampling: Samplings = None,
    ) -> Generation | list[Generation]:  # fmt: skip
        """Decoding with draft trees. One list of ids gives a Generation, a list of lists a list of them.

        max_new_tokens, budget: for all streams, or one per stream (budget: default the engine's; "auto" is for all)
        stop_token_ids:         ids that end the text; default the model's eos_token_ids
        on_step:                called with a StepRecord after each step, to stream or to draw
        sampling:               a Sampling for all streams, or one per stream; None is greedy

        Raises ValueError on a bad prompt, budget, count or sampling, NonFiniteError on NaN logits, and CalibrationError
        where "auto" has no cost model.
        """
        budget = self.budget if budget is None else budget
        return self._generate(prompt_ids, max_new_tokens, budget, return_logits, stop_token_ids, on_step, sampling)

    @torch.inference_mode()
    def _generate(
        self, prompt_ids: Prompts, max_new_tokens: int | Sequence[int], budget: int | str | Sequence[int],
        return_logits: bool, stop_token_ids: Sequence[int] | None, on_step: OnStep | None, sampling: Samplings,
    ) -> Generation | list[Generation]:  # fmt: skip
        prompts, is_single = check_prompts(prompt_ids, self.model.config.vocab_size, self.max_seq_len)
        stop = self.model.config.eos_token_ids if stop_token_ids is None else stop_token_ids
        mode = self._mode(budget, len(prompts))
        budget = mode.cutter.max_budget if mode.cutter else budget
        streams = self._streams(prompts, max_new_tokens, budget, check_stop_tokens(stop))
        samplings = check_samplings(sampling, len(prompts))
        forward = self._forward_for(streams)
        forward.choose.set(samplings)
        batch = self._kind.batch(forward, self.drafter, streams, return_logits, on_step, mode)
        with contextlib.closing(batch):
            if batch.running:
                batch.prefill()
            while batch.running:
                batch.step()
        self._spares[:] = [forward]
        vocab_size, device = self.model.config.vocab_size, self.model.device
        no_logits = torch.empty(0, vocab_size, device=device) if return_logits else None
        results = [s.result(batch.seconds, no_logits) for s in streams]
        return results[0] if is_single else results

    def _mode(self, budget: int | str | Sequence[int], num_streams: int) -> Mode:
        """How the budget is spent; with a cutter where it is "auto"."""
        if not isinstance(budget, str) or budget != AUTO:
            return Mode(self._is_chain)
        if self.drafter is None:
            raise ValueError('generate_ddtree: expected a drafter for budget "auto", got none: Engine(drafter=…)')
        if self._auto is None:
            self._auto = Auto.of(self.model, self._kind.name, None)
        return Mode(self._is_chain, self._auto.cutter(self.drafter, num_streams, self._is_chain))

    def _forward_for(self, streams: list[Stream]) -> TreeForward | DeviceForward:
        """The cache and the captured forwards of the last call where they fit, else new ones."""
        num_slots = max(s.max_tokens + 1 + s.budget for s in streams)
        with contextlib.suppress(IndexError):
            spare = self._spares.pop()  # whichever thread takes it, has it alone
            if spare.fits(self.model, len(streams), num_slots):
                return spare
            del spare  # its memory goes to the next
        return self._kind.forward.allocate(self.model, len(streams), num_slots)

    def _streams(
        self, prompts: list[list[int]], max_new_tokens: int | Sequence[int], budget: int | Sequence[int],
        stop_tokens: frozenset[int],
    ) -> list[Stream]:  # fmt: skip
        counts = check_counts("max_new_tokens", max_new_tokens, len(prompts))
        budgets = check_budgets("generate", budget, len(prompts))
        if self.drafter is None and any(budgets):
            raise ValueError(f"generate_ddtree: expected a drafter for budget {budget}, got none: Engine(drafter=…)")
        streams = []
        for i, (prompt, count, nodes) in enumerate(zip(prompts, counts, budgets, strict=True)):
            wanted = len(prompt) + count
            reason = "length" if wanted <= self.max_seq_len else "max_seq_len"
            limit = min(wanted, self.max_seq_len)
            streams.append(Stream(i, prompt, len(prompt), limit, reason, stop_tokens, nodes))
        return streams
