"""Engine: generation token by token (AR) or with draft trees (DDTree). Both give the same tokens and logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.drafters import AnyDrafter
from kdtree_nb.model import Model
from kdtree_nb.speculate.batch import Batch
from kdtree_nb.speculate.cost import CostModel
from kdtree_nb.speculate.device_batch import DeviceBatch
from kdtree_nb.speculate.device_forward import DeviceForward
from kdtree_nb.speculate.forward import TreeForward
from kdtree_nb.speculate.handle import Handle
from kdtree_nb.speculate.mode import AUTO, Auto, Mode, check_mode
from kdtree_nb.speculate.request import (
    check_budgets,
    check_counts,
    check_places,
    check_prompt,
    check_prompts,
    check_stop_tokens,
)
from kdtree_nb.speculate.sampling import Sampling, check_samplings
from kdtree_nb.speculate.stats import Generation, StepRecord
from kdtree_nb.speculate.stream import Stream
from kdtree_nb.speculate.streams import Streams

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

    `generate_*` decodes a list of prompts together and returns when all have finished. `submit` takes in a prompt while
    others are decoded and gives a handle. The engine has no thread of its own: a submitted stream moves when somebody
    reads a handle, or calls `step` or `run`. The cache of what has finished is kept for what comes next, and what was
    captured on it.

    drafter:     who proposes tokens for `generate_ddtree`; its quality decides the speed, never the output
    budget:      most drafted tokens per stream and step, 0 … 1023; or "auto": in each step the number that gives the
                 most tokens per second by the cost model of this device and model (see `kdtree-nb calibrate`)
    max_seq_len: most tokens of prompt and output together; default: the model's, at most 4096
    use_graphs:  take each step as one CUDA graph, without waiting for the host; default: on a GPU
    mode:        what the budget is spent on: the heaviest "tree", or depth alone: a "chain"
    cost:        the cost model of "auto"; default: the one that was calibrated
    max_streams: most submitted streams that are decoded together; the first takes memory for as many of max_seq_len,
                 and a seat's is its own, taken or free (DeviceMemoryError where it is too little for all seats)
    max_waiting: most submitted streams that wait for a seat among those
    """

    def __init__(
        self, model: Model, drafter: AnyDrafter | None = None, budget: int | str = 16, max_seq_len: int | None = None,
        use_graphs: bool | None = None, mode: str = "tree", cost: CostModel | None = None, max_streams: int = 10,
        max_waiting: int = 64,
    ) -> None:  # fmt: skip
        if not isinstance(model, Model):
            raise ValueError(f"Engine: model: expected what load_model gives, got {model!r:.60}; use load_model(…)")
        is_drafter = hasattr(drafter, "draft") or hasattr(drafter, "attach")
        if drafter is not None and (isinstance(drafter, type) or not is_drafter):
            raise ValueError(f"Engine: drafter: expected an instance with a method draft or attach, got {drafter!r}")
        self.model, self.drafter = model, drafter
        self._spares: list[TreeForward | DeviceForward] = []
        self._kind = _kind(use_graphs, model.device)
        self._is_chain, self._auto = check_mode(mode), None
        is_auto = isinstance(budget, str) and budget == AUTO
        if isinstance(budget, str) and not is_auto:
            raise ValueError(f'Engine: budget: expected an integer of 0 … {MAX_BUDGET} or "auto", got {budget!r}')
        self.budget = budget if is_auto else check_budgets("Engine", budget, 1)[0]
        if is_auto:
            self._check_alone()
        if is_auto or cost is not None:
            self._auto = Auto.of(model, self._kind.name, cost)
        longest = model.config.max_position_embeddings
        wanted = min(DEFAULT_MAX_SEQ_LEN, longest) if max_seq_len is None else max_seq_len
        self.max_seq_len = check_counts("Engine: max_seq_len", wanted, 1)[0]
        if not 2 <= self.max_seq_len <= longest:
            raise ValueError(
                f"Engine: max_seq_len: expected 2 … {longest} (the model's max_position_embeddings), got {max_seq_len}"
            )
        self._streams = Streams(self._open_batch, self._keep_forward, *check_places(max_streams, max_waiting))

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

    def submit(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, budget: int | None = None, return_logits: bool = False,
        stop_token_ids: Sequence[int] | None = None, sampling: Sampling | None = None,
    ) -> Handle:  # fmt: skip
        """Take in one prompt, to be decoded together with the others that are there. Its output is the same to the bit
        as alone, whoever joins and leaves meanwhile.

        budget: most drafted nodes of this stream in a step, at most the engine's, which is the default; 0 is AR
        The other arguments, and errors, as of `generate_ddtree`. Raises QueueFullError where max_waiting wait already.
        """
        prompt = check_prompt(prompt_ids, self.model.config.vocab_size, self.max_seq_len)
        count = check_counts("submit: max_new_tokens", max_new_tokens, 1)[0]
        largest = self._largest_budget()
        wanted = largest if budget is None else budget
        nodes = check_counts("submit: budget (at most the engine's)", wanted, 1, largest)[0]
        if self.drafter is None and nodes:
            raise ValueError(
                f"submit: expected a drafter for budget {nodes}, got none: Engine(drafter=…), or budget=0, which is AR"
            )
        stop = self.model.config.eos_token_ids if stop_token_ids is None else stop_token_ids
        chosen = check_samplings(sampling, 1)[0]
        self._agree("submit (prompt and options)", prompt, count, nodes, return_logits, stop, chosen)
        stream = self._stream(-1, prompt, count, nodes, chosen, check_stop_tokens(stop), return_logits)
        return self._streams.submit(stream, self._no_logits(return_logits))

    def step(self) -> bool:
        """A chunk of prefill where one is due, and one step of all submitted streams that have a place. Returns whether
        any is unfinished.

        What goes wrong with one stream its handle raises. What concerns all is raised here, as is KeyboardInterrupt:
        nothing is lost, and the next step goes on with what was emitted. ValueError where a step is in progress on this
        thread: a drafter or a signal handler may submit, cancel and close, but takes no step.
        """
        return self._streams.step()

    def run(self) -> None:
        """Take steps until all submitted streams have finished."""
        while self.step():
            pass

    def close(self) -> None:
        """End all submitted streams where they stand, take no more, and let go of the cache."""
        self._streams.close()
        self._spares.clear()

    def _largest_budget(self) -> int:
        """Most drafted nodes that a submitted stream may ask for."""
        mode = self._mode(self.budget, self._streams.max_streams)
        return mode.cutter.max_budget if mode.cutter else self.budget

    def _open_batch(self) -> Batch:
        """An empty batch for submitted streams."""
        mode = self._mode(self.budget, self._streams.max_streams)
        max_budget = 0 if self.drafter is None else self._largest_budget()
        forward = self._forward_for(self._streams.max_streams, self.max_seq_len + 1 + max_budget)
        return self._kind.batch(forward, self.drafter, max_budget, mode=mode, is_open=True)

    @torch.inference_mode()
    def _generate(
        self, prompt_ids: Prompts, max_new_tokens: int | Sequence[int], budget: int | str | Sequence[int],
        return_logits: bool, stop_token_ids: Sequence[int] | None, on_step: OnStep | None, sampling: Samplings,
    ) -> Generation | list[Generation]:  # fmt: skip
        prompts, is_single = check_prompts(prompt_ids, self.model.config.vocab_size, self.max_seq_len)
        stop = self.model.config.eos_token_ids if stop_token_ids is None else stop_token_ids
        self._agree("generate (prompts and options)", prompts, max_new_tokens, budget, return_logits, stop, sampling)
        mode = self._mode(budget, len(prompts))
        budget = mode.cutter.max_budget if mode.cutter else budget
        counts = check_counts("max_new_tokens", max_new_tokens, len(prompts))
        budgets = check_budgets("generate", budget, len(prompts))
        if self.drafter is None and any(budgets):
            raise ValueError(f"generate_ddtree: expected a drafter for budget {budget}, got none: Engine(drafter=…)")
        asked = zip(prompts, counts, budgets, check_samplings(sampling, len(prompts)), strict=True)
        stop_tokens = check_stop_tokens(stop)
        streams = [self._stream(i, *of_one, stop_tokens, return_logits) for i, of_one in enumerate(asked)]
        num_slots = max(s.max_tokens + 1 + s.budget for s in streams)
        forward = self._forward_for(len(streams), num_slots)
        batch = self._kind.batch(forward, self.drafter, max(budgets), on_step, mode)
        with contextlib.closing(batch):
            batch.join(streams)
            while batch.filling or batch.running:
                batch.advance()
        self._keep_forward(batch)
        no_logits = self._no_logits(return_logits)
        results = [s.result(batch.seconds, no_logits) for s in streams]
        return results[0] if is_single else results

    def _agree(self, what: str, *asked: object) -> None:
        """Raises RankError where another of several ranks was asked for something else."""
        if self.model.ranks.num_ranks > 1:
            drafter = type(self.drafter).__name__
            self.model.ranks.agree(what, repr((asked, drafter, self._is_chain, self._kind.name, self.max_seq_len)))

    def _mode(self, budget: int | str | Sequence[int], num_streams: int) -> Mode:
        """How the budget is spent; with a cutter where it is "auto"."""
        if not isinstance(budget, str) or budget != AUTO:
            return Mode(self._is_chain)
        self._check_alone()
        if self.drafter is None:
            raise ValueError('generate_ddtree: expected a drafter for budget "auto", got none: Engine(drafter=…)')
        if self._auto is None:
            self._auto = Auto.of(self.model, self._kind.name, None)
        return self._auto.mode(self.drafter, num_streams, self._is_chain)

    def _check_alone(self) -> None:
        """Raises ValueError where several ranks would each follow a cost model of its own."""
        if self.model.ranks.num_ranks > 1:
            raise ValueError(
                'Engine: budget: expected a number on several ranks, got "auto", by which each would follow a cost '
                "model of its own"
            )

    def _forward_for(self, num_streams: int, num_slots: int) -> TreeForward | DeviceForward:
        """The cache and the captured forwards of the last call where they fit, else new ones."""
        with contextlib.suppress(IndexError):
            spare = self._spares.pop()  # whichever thread takes it, has it alone
            if spare.fits(self.model, num_streams, num_slots):
                return spare
            del spare  # its memory goes to the next
        return self._kind.forward.allocate(self.model, num_streams, num_slots)

    def _keep_forward(self, batch: Batch) -> None:
        self._spares[:] = [batch.forward]

    def _stream(
        self, index: int, prompt: list[int], count: int, budget: int, sampling: Sampling, stop_tokens: frozenset[int],
        keeps_logits: bool,
    ) -> Stream:  # fmt: skip
        wanted = len(prompt) + count
        reason = "length" if wanted <= self.max_seq_len else "max_seq_len"
        limit = min(wanted, self.max_seq_len)
        return Stream(index, prompt, len(prompt), limit, reason, stop_tokens, budget, sampling, keeps_logits)

    def _no_logits(self, return_logits: bool) -> torch.Tensor | None:
        """f32 [0, V], what logits are put behind, where they are asked for."""
        return torch.empty(0, self.model.config.vocab_size, device=self.model.device) if return_logits else None
