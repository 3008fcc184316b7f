"""Kimi K2.6 on all of its tensor-parallel ranks at once: built, compared, and measured with every exchange in place.

Each rank makes the same calls, as often: nothing here is repeated by what one rank's clock says.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kdtree_nb.bench import k26, lab
from kdtree_nb.bench.k26 import Plan
from kdtree_nb.bench.lab import Lab, dtype_name
from kdtree_nb.bench.lone_ranks import LoneGroup
from kdtree_nb.bench.rank import (
    DTYPE,
    Rank,
    Repeatable,
    Step,
    Verified,
    bushy_tree,
    captured,
    seconds_of,
    take_experts,
)
from kdtree_nb.bench.runner import Effort, Group, Measurement, Sample, clock, compete, require
from kdtree_nb.drafters import Oracle, Random
from kdtree_nb.hf.step_work import rank_config, step_work
from kdtree_nb.parallel import TensorParallel
from kdtree_nb.speculate import Engine, Generation

NUM_TOKENS, BUDGET = 64, 16
"""Of the texts that are compared."""


def all_ranks_groups(where: Lab, plan: Plan, ranks: TensorParallel) -> dict[str, Group]:
    """The groups by name. They share one model, which the first of them makes."""
    bench = _Bench(where, plan, ranks)
    functions: dict[str, Callable[..., Iterable[Measurement]]] = {
        "bandwidth": functools.partial(lab.bandwidth, where),
        "matmul": functools.partial(lab.matmul, where),
        "k26_tp_build": bench.build,
        "k26_tp_text": bench.texts,
        "k26_tp": bench.steps,
        "k26_tp_rows": bench.rows,
        "k26_tp_memory": bench.memory,
    }
    return dict(functions)


class _Bench:
    """Measures a plan on this rank, which is one of several."""

    def __init__(self, where: Lab, plan: Plan, ranks: TensorParallel) -> None:
        self.lab, self.plan, self.ranks, self.device = where, plan, ranks, ranks.device
        model = plan.config.model
        self.place = {"tp": ranks.num_ranks, "layers": model.num_hidden_layers, "hidden": model.hidden_size}

    @functools.cached_property
    def rank(self) -> Rank:
        """This rank's share."""
        k26.free(self.device)
        return Rank(self.plan.config, self.ranks.num_ranks, self.device, self.plan.num_slots, ranks=self.ranks)

    def build(self, effort: Effort) -> list[Measurement]:
        """Make the model: `random weights`, the seconds of the slowest rank."""
        seconds = max(self._of_every_rank(self.rank.build_s))
        return [Measurement("k26_tp_build/random weights", [seconds], self.place)]

    def memory(self, effort: Effort) -> list[Measurement]:
        """Bytes on each card, one sample a rank: weights, cache, the peak of torch's memory, and all that is taken."""
        sizes = {"weights": self.rank.weight_bytes, "cache": self.rank.cache.num_bytes}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            sizes |= {"peak": torch.cuda.max_memory_allocated(self.device), "card": total - free}
        return [
            Measurement(f"k26_tp_memory/{name}", self._of_every_rank(size), self.place, "byte")
            for name, size in sizes.items()
        ]

    def rows(self, effort: Effort) -> list[Measurement]:
        """Rows of trees against the same text without branches, as of one rank: `k26.exactness`."""
        return k26.exactness("k26_tp_rows", self.rank, effort)

    def _of_every_rank(self, value: float) -> list[float]:
        """What each rank has, in order of rank."""
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        return self.ranks.group.all_gather(mine).flatten().tolist()

    # --- texts -------------------------------------------------------------------------------------------------------

    def texts(self, effort: Effort) -> list[Measurement]:
        """The same text by AR and by DDTree, whose drafter knows all or guesses: bits compared, seconds of a token."""
        vocab_size, prompt_len = self.plan.config.model.vocab_size, min(self.plan.prefix_lens)
        prompt = torch.randint(vocab_size, (prompt_len,), generator=torch.Generator().manual_seed(2)).tolist()
        sizes = {"max_seq_len": prompt_len + NUM_TOKENS + 1, "budget": BUDGET}
        ar = Engine(self.rank.model, **sizes).generate_ar
        told = ar(prompt, NUM_TOKENS, return_logits=True, stop_token_ids=())
        drafters = {"oracle": Oracle(told.tokens), "random": Random()}
        trees = {name: Engine(self.rank.model, d, **sizes).generate_ddtree for name, d in drafters.items()}
        place = self.place | {"prefix_len": prompt_len, "tokens": NUM_TOKENS}
        results = []
        for name, generate in trees.items():
            text = generate(prompt, NUM_TOKENS, return_logits=True, stop_token_ids=())
            results.append(compared(f"k26_tp_text/{name}", told, text, place | {"budget": BUDGET, "drafter": name}))
        contenders = {"AR": self._of_a_token(ar, prompt), "DDTree, oracle": self._of_a_token(trees["oracle"], prompt)}
        return results + self._slowest(compete("k26_tp_text", contenders, min(3, effort.num_rounds), place))

    def _of_a_token(self, generate: Callable[..., Generation], prompt: list[int]) -> Sample:
        """Wall seconds of each token behind the first, as a user waits for it: the prefill is not counted."""

        def seconds(num_tokens: int) -> float:
            return clock(lambda: generate(prompt, num_tokens, stop_token_ids=()))

        return lambda: (seconds(NUM_TOKENS) - seconds(1)) / (NUM_TOKENS - 1)

    # --- steps -------------------------------------------------------------------------------------------------------

    def steps(self, effort: Effort) -> Iterator[Measurement]:
        """Steps of every number of rows behind every prefix: `step`, the same `without exchange`, and what a step
        exchanges by itself, `exchanges alone`. A sample is that of the slowest rank.

        Without what the others send, rows would choose other experts, and how many they wake is most of a step's time:
        so `without exchange` routes, and then takes the experts of the step.
        """
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        n, mine = self.ranks.num_ranks, self.ranks.rank
        for num_rows in effort.some(self.plan.rows):
            self.rank.prefix_len.fill_(min(self.plan.prefix_lens))
            tree = bushy_tree(num_rows, self.plan.config.model.vocab_size, self.device)
            silent = self.rank.with_ranks(TensorParallel(LoneGroup(n, self.device, mine)))
            step, alone = Step(self.rank, tree, self.rank.model), Step(self.rank, tree, silent)
            chosen = step.experts()
            take_experts(silent, chosen)
            parts = {
                "step": step.captured(pool),
                "without exchange": alone.captured(pool),
                "exchanges alone": captured(self._exchanges(num_rows), self.device, pool, only_ops=False),
            }
            for prefix_len in effort.some(self.plan.prefix_lens):
                self.rank.prefix_len.fill_(prefix_len)
                for taken, now in zip(chosen, step.experts(), strict=True):
                    taken.copy_(now)
                yield from self._cell(step, parts, prefix_len, effort)

    def _cell(
        self, step: Step, parts: dict[str, Repeatable[Any]], prefix_len: int, effort: Effort
    ) -> list[Measurement]:  # fmt: skip
        experts, repeated = step.distinct_experts(), parts["step"]
        repeated.replay()
        require(_same(repeated.result, step()), "k26_tp", "the logits of a captured and an eager step")
        work = step_work(rank_config(self.plan.config, self.ranks.num_ranks), step.num_rows, prefix_len, experts)
        place = self.place | {"rows": step.num_rows, "prefix_len": prefix_len, "distinct_experts": experts}
        place["same_experts"] = True  # by all contenders
        params = place | self.lab.work(work.num_bytes, work.flops, DTYPE)
        contenders = {name: seconds_of(part.replay, self.device) for name, part in parts.items()}
        return self._slowest(compete("k26_tp", contenders, effort.num_rounds, params))

    def _exchanges(self, num_rows: int) -> Callable[[], list[Tensor]]:
        """What the ranks send each other in a step, one after the other: two sums in each layer, and the choices."""
        model, gather = self.plan.config.model, self.ranks.group.all_gather
        part = torch.zeros(num_rows, model.hidden_size, dtype=torch.float32, device=self.device)
        words = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        return lambda: [*(gather(part) for _ in range(2 * model.num_hidden_layers)), gather(words)][-1:]

    def _slowest(self, measured: Sequence[Measurement]) -> list[Measurement]:
        """Of each sample that of the slowest rank: a step is done when all are."""
        found = []
        for m in measured:
            mine = torch.tensor(m.samples, dtype=torch.float64, device=self.device)
            found.append(Measurement(m.name, self.ranks.group.all_gather(mine).amax(0).tolist(), m.params, m.unit))
        return found


def compared(name: str, told: Generation, text: Generation, place: dict[str, Any]) -> Measurement:
    """How many tokens of a text were compared with those of another, how many differ, in the token or in any bit of
    its logits; a digest of all of these bits, and how many drafted tokens were taken."""
    rows = [a == b for a, b in zip(told.tokens, text.tokens, strict=True)]
    same = [a and torch.equal(x, y) for a, x, y in zip(rows, told.logits, text.logits, strict=True)]
    digest = hashlib.sha256(text.logits.cpu().numpy().tobytes()).hexdigest()[:16]
    params = place | {
        "changed_tokens": same.count(False), "accepted": sum(text.stats.accepted_per_step), "digest": digest,
        "dtype": dtype_name(DTYPE),
    }  # fmt: skip
    return Measurement(name, [len(same)], params, "token")


def _same(a: Verified, b: Verified) -> bool:
    return torch.equal(a.logits, b.logits) and torch.equal(a.token, b.token)
