"""What the ranks of `bench k26 --tp` compute in the tests, in small."""

from __future__ import annotations

import os
import signal

import torch

from kdtree_nb import Engine
from kdtree_nb.bench import Effort, Measurement, all_ranks, k26, run_groups
from kdtree_nb.bench.rank import Rank, Step, bushy_tree
from kdtree_nb.model.ranks import ONE_RANK

EFFORT = Effort(num_rounds=2, num_cases=20)
PREFIX_LEN = 40


def plan(num_ranks: int) -> k26.Plan:
    """Two layers, one of them with experts."""
    return k26.Plan.published(num_ranks, 2, True, rows=(1, 5), prefix_lens=(PREFIX_LEN,))


def groups(ranks) -> dict:
    """The groups of one rank."""
    return all_ranks.all_ranks_groups(k26.k26_lab("cpu", EFFORT), plan(ranks.num_ranks), ranks)


def measured(ranks, names: tuple[str, ...]) -> list[Measurement]:
    """What some of the groups find."""
    chosen = {name: group for name, group in groups(ranks).items() if name in names}
    return run_groups(chosen, EFFORT, show_progress=False)


def step_logits(ranks=ONE_RANK) -> torch.Tensor:
    """Logits [9, V] of a tree behind a prefix of random latents."""
    with torch.inference_mode():
        rank = Rank(plan(1).config, ranks.num_ranks, torch.device("cpu"), 128, ranks=ranks)
        rank.prefix_len.fill_(PREFIX_LEN)
        vocab_size = rank.model.config.vocab_size
        return ranks.all_logits(
            Step(rank, bushy_tree(9, vocab_size, rank.device), rank.model)().logits, vocab_size
        ).clone()


def held_bytes(ranks) -> int:
    """Of the weights of a rank."""
    with torch.inference_mode():
        return Rank(plan(1).config, ranks.num_ranks, torch.device("cpu"), 128, ranks=ranks).weight_bytes


def text_alone() -> tuple[list[int], torch.Tensor]:
    """Tokens and logits of the text of `k26_tp_text`, by one process that knows nothing of ranks."""
    with torch.inference_mode():
        rank = Rank(plan(1).config, 1, torch.device("cpu"), 128)
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(rank.model.config.vocab_size, (PREFIX_LEN,), generator=generator).tolist()
    text = Engine(rank.model, max_seq_len=256).generate_ar(prompt, 64, return_logits=True, stop_token_ids=())
    return text.tokens, text.logits


def killed_in_a_step(ranks) -> None:
    """Steps; rank 1 is killed in one of them."""
    steps, num_calls = Step.__call__, []

    def step(self):
        num_calls.append(1)
        if len(num_calls) == 4 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return steps(self)

    Step.__call__ = step
    measured(ranks, ("k26_tp",))
