"""DeviceBatch: S streams decoded by steps that the device takes, while the host launches ahead and reads along."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kdtree_nb.drafters import AnyDrafter, DeviceDrafter, DraftCandidates
from kdtree_nb.drafters.base import likeliest
from kdtree_nb.native import ops
from kdtree_nb.speculate.batch import Batch
from kdtree_nb.speculate.device_forward import DeviceForward
from kdtree_nb.speculate.drafting import candidates_error, check_tokens
from kdtree_nb.speculate.mode import TREE, Mode
from kdtree_nb.speculate.stats import StepRecord, timed
from kdtree_nb.speculate.step_runner import RING_SIZE, StepRunner
from kdtree_nb.speculate.stream import Stream
from kdtree_nb.tree import DraftTree

LOOKAHEAD = 4
"""Steps in flight while the host reads the record of an earlier one. More are taken in vain when a text ends early."""

PACE_WEIGHT = 0.25
"""Of the last step in the mean of the tokens that a stream emits in one."""

NUM_EMITTED = ops.RECORD_FIELDS.index("num_emitted")

assert LOOKAHEAD <= RING_SIZE


class InFlight(NamedTuple):
    """A step that was launched: its runner, the place of its record, the streams that ran as far as was known, and
    whether the scores of its trees come along."""

    runner: StepRunner
    place: int
    streams: list[Stream]
    with_scores: bool


class DeviceBatch(Batch):
    """A Batch whose state lies on the device; `running` and the streams follow it, a few steps behind.

    Without a drafter and with a drafter on the device, steps are launched ahead of the records that are read. A drafter
    on the host needs the tokens of a step before it can draft for the next: then there is one wait per step.
    """

    def __init__(
        self, forward: DeviceForward, drafter: AnyDrafter | None, max_budget: int,
        on_step: Callable[[StepRecord], None] | None = None, mode: Mode = TREE, is_open: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(forward, drafter, max_budget, on_step, mode, is_open)
        self._in_flight: deque[InFlight] = deque()
        self._pace: float | None = None
        self._on_device = self.max_budget == 0 or isinstance(self.drafter, DeviceDrafter)
        forward.begin()

    def _load(self, streams: Sequence[Stream]) -> None:
        """Bring the state of the seats of `streams` to a text's beginning, behind the steps in flight."""
        self.forward.load(streams)
        present = [s.stop_tokens for s in self.streams if s.finish_reason is None]
        self.forward.stop_at(frozenset.intersection(*present) if present else frozenset())  # the host knows the others
        self._activate(streams)

    def _activate(self, streams: Sequence[Stream]) -> None:
        """Have those of `streams` that are filled take part in the steps from now on."""
        ready = [s.seat for s in streams if s.num_unfilled == 0 and s.finish_reason is None]
        self.forward.set_active(ready, True)

    def prefill(self) -> None:
        """As the host's; who is filled takes part in the steps that are launched from now on."""
        filling = self.filling
        super().prefill()
        self._activate(filling)

    def leave(self, streams: Sequence[Stream]) -> None:
        """Free the seats of `streams`; steps in flight may still go on with them, and are not listened to."""
        self.forward.set_active([s.seat for s in streams], False)
        super().leave(streams)

    def step(self) -> None:
        """Take in one step of all running streams; each emits at least one token, unless the step was launched before
        it joined."""
        tree = None
        if self._on_device:
            self.launch_ahead()
        else:
            tree = self.build(self.draft())
            self.launch(tree)
        runner, record, streams = self.wait()
        self.emit(runner, record, [s for s in streams if s.finish_reason is None], tree)

    @timed("verify")
    def launch_ahead(self) -> None:
        """Start as many steps as may be in flight, but none that is likely to come behind the end of all texts.

        What a watched step leaves on the device is gone after the next one: it is read before that is launched.
        """
        is_watched = self.on_step is not None or any(s.keeps_logits for s in self.running)
        most, longest = 1 if is_watched else LOOKAHEAD, max(s.num_remaining for s in self.running)
        while len(self._in_flight) < most and longest > self._likely_tokens(len(self._in_flight)):
            self._launch(*self._device_runner())

    def _likely_tokens(self, num_steps: int) -> float:
        """What a stream emits in so many steps, rather too many: a step taken in vain takes longer than a late launch.
        At least one each; without a draft no more. With drafts about as many as the mean of the last steps says, which
        they differ from by about as much as it is."""
        if self.max_budget == 0 or self._pace is None:
            return num_steps
        return max(num_steps, self._pace * (num_steps + math.sqrt(num_steps)))

    def _launch(self, runner: StepRunner, with_scores: bool = False) -> None:
        self._in_flight.append(InFlight(runner, runner.launch(with_scores), self.running, with_scores))

    def _device_runner(self) -> tuple[StepRunner, bool]:
        """What the next step runs, and whether the host wants to see the scores of its trees."""
        if all(s.budget == 0 for s in self.running):
            return self.forward.root_runner(), False
        mode = self.mode
        if mode.sizer is None:
            return self.forward.drafting_runner(self.drafter, self.max_budget, mode), False
        size, with_scores = mode.sizer.choose(len(self.running), self._mean_prefix_len(self.running))
        if size.num_slots == 1:
            return self.forward.root_runner(), False
        of_size = Mode(mode.is_chain, mode.sizer.cutters[size.num_slots] if size.is_cut else None)
        return self.forward.drafting_runner(self.drafter, size.num_slots - 1, of_size), with_scores

    @staticmethod
    def _mean_prefix_len(streams: Sequence[Stream]) -> float:
        return sum(len(s.tokens) - 1 for s in streams) / len(streams)

    def build(self, draft: DraftCandidates | DraftTree | None) -> DraftTree:
        """The trees of all S streams, on the host. Raises ValueError for a token outside the vocabulary."""
        tree = super().build(draft)
        if isinstance(draft, DraftTree) or tree.token.max() >= self.model.config.vocab_size:
            check_tokens(self, tree)
        return tree

    @timed("verify")
    def launch(self, tree: DraftTree) -> None:
        """Start the step over `tree`."""
        num_nodes = int(tree.num_nodes.max())
        if num_nodes == 1:
            runner = self.forward.root_runner()
        else:
            runner = self.forward.tree_runner(num_nodes)
            runner.buffer.put(tree)
        self._launch(runner)

    @timed("verify")
    def wait(self) -> tuple[StepRunner, list[list[int]], list[Stream]]:
        """The oldest step in flight, what its record holds, per seat the fields and the emitted tokens, and the streams
        that it was launched for."""
        runner, place, streams, with_scores = self._in_flight.popleft()
        record = runner.wait(place)
        num_nodes, num_emitted = record[0], record[NUM_EMITTED]
        took_part = num_nodes > 0
        if took_part.any():
            pace = num_emitted.sum() / took_part.sum()
            self._pace = pace if self._pace is None else (1 - PACE_WEIGHT) * self._pace + PACE_WEIGHT * pace
            if with_scores:
                self.mode.sizer.learn(runner.scores(place)[took_part], self._mean_prefix_len(streams))
        used = len(ops.RECORD_FIELDS) + int(num_emitted.max())
        return runner, record[:used].T.tolist(), streams

    @timed("accept")
    def emit(
        self, runner: StepRunner, record: list[list[int]], streams: list[Stream], tree: DraftTree | None
    ) -> None:  # fmt: skip
        """Give `streams` the tokens of a step. Raises NonFiniteError where its logits, or those of its
        drafter, held a NaN; it is the error of the first such stream."""
        bonus = [s.tokens[-1] for s in self.streams]
        emitted = [self._emit(stream, *record[stream.seat]) for stream in streams]
        if self.on_step or any(s.keeps_logits for s in streams):
            self._watch(runner, record, streams, emitted, tree, bonus)
        self.num_steps += 1
        if any(stream.finish_reason for stream in streams):
            self._select()
        if not self._on_device:
            self.bonus = torch.tensor([s.tokens[-1] for s in self.streams])

    def _emit(
        self, stream: Stream, num_nodes: int, num_accepted: int, num_emitted: int, status: int, *tokens: int
    ) -> list[int]:
        if status == ops.NO_TREE:
            raise self._draft_error(stream)
        chosen = [*tokens[:num_emitted], -1] if status == ops.NAN_LOGITS else tokens[:num_emitted]
        emitted = stream.emit(chosen)
        stream.record_step(num_nodes, num_accepted, len(emitted))
        return emitted

    def _draft_error(self, stream: Stream) -> Exception:
        """Why the stream's tree was refused: what the drafter says again, now looked at. Since then the steps have left
        the stream as it was. The error is the stream's own: submitted ones beside it go on."""
        logits, vocab_size = self.drafter.draft_on_device(self.forward.state), self.model.config.vocab_size
        num_candidates = self.mode.num_candidates(self.max_budget, vocab_size)
        drafts = likeliest(self.model.ranks, logits, vocab_size, num_candidates)
        of_stream = DraftCandidates(*(values[stream.seat, None] for values in drafts))
        error = ValueError(f"stream {stream.index}: expected candidates of a tree, got others")
        return stream.fail(candidates_error(self, [stream], of_stream, error))

    def _watch(
        self, runner: StepRunner, record: list[list[int]], streams: list[Stream], emitted: list[list[int]],
        tree: DraftTree | None, bonus: list[int],
    ) -> None:  # fmt: skip
        """Keep the logits and call on_step, while the step's tensors are still there."""
        result, num_nodes = runner.result, [fields[0] for fields in record]
        begin = [0, *itertools.accumulate(num_nodes)]
        all_paths = result.path.tolist()
        paths = [all_paths[s.seat][: record[s.seat][1]] for s in streams]
        for stream, path, tokens in zip(streams, paths, emitted, strict=True):
            if stream.keeps_logits:
                rows = [begin[stream.seat] + node for node in (0, *path)]
                stream.logits.append(self.all_logits(result.logits[rows[: len(tokens)]]))
        if self.on_step:
            tree = tree or self._step_tree(runner, num_nodes, bonus)
            target_token = torch.full_like(tree.token, -1)
            flat = result.target_token.to(target_token.device)
            for row, first, count in zip(target_token, begin, num_nodes, strict=False):
                row[:count] = flat[first : first + count]
            seats = [s.seat for s in streams]
            self.on_step(StepRecord(self.num_steps, seats, tree, target_token, paths, emitted))

    def _step_tree(self, runner: StepRunner, num_nodes: list[int], bonus: list[int]) -> DraftTree:
        """The trees of a step on the device, which the next step overwrites."""
        if runner.result.tree.max_budget > 0:
            return DraftTree(*(field.clone() for field in vars(runner.result.tree).values()))
        r = self.roots
        counts = torch.tensor(num_nodes, dtype=torch.int32)
        return DraftTree(torch.tensor(bonus)[:, None], r.parent, r.depth, r.log_prob, r.ancestor_bits, counts)

    def close(self) -> None:
        """Wait for what is still in flight, so that the memory may be used again; an interrupt may have come before it
        was noted."""
        while self._in_flight:
            self.wait()
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()
