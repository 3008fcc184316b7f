"""What the tests of the engine share: prompts, AR results to compare with, and drafters made to provoke."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import Engine
from kdtree_nb.drafters.base import StreamDraft, stack

NUM_TOKENS = 24
TEXTS = (
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef ",
    "x = 1\n" * 12,
    "import os\n",
)


@pytest.fixture(scope="session")
def prompts():
    """Model name -> 3 prompts of different lengths; the second repeats itself."""
    rng = np.random.default_rng(11)
    odd = [rng.integers(0, 331, n).tolist() for n in (40, 17, 5)]
    odd[1] = odd[1][:8] * 9
    return {"tiny": [list(text.encode()) for text in TEXTS], "tiny2": odd}


@pytest.fixture(scope="session")
def ar(models, prompts):
    """(model name, dtype) -> AR generations of the 3 prompts, each alone, 24 tokens with logits. Computed once."""
    results = {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in results:
            engine = Engine(models(name, dtype))
            results[name, dtype] = [
                engine.generate_ar(p, NUM_TOKENS, return_logits=True, stop_token_ids=()) for p in prompts[name]
            ]
        return results[name, dtype]

    return get


class ShuffledOracle:
    """Knows the continuation, not its rank: the true token lies somewhere among random candidates of random weight."""

    def __init__(self, continuations, depth=5, num_candidates=4, seed=0):
        self.continuations, self.depth, self.width, self.seed = continuations, depth, num_candidates, seed

    def draft(self, context):
        return stack([self._draft(context, row) for row in range(len(context.tokens))], context.device)

    def _draft(self, context, row):
        rng = np.random.default_rng([self.seed, context.stream_ids[row], len(context.tokens[row])])
        done = len(context.tokens[row]) - context.num_prompt_tokens[row]
        true = self.continuations[context.stream_ids[row]][done : done + self.depth]
        ids = np.stack([rng.permutation(context.vocab_size)[: self.width] for _ in true])
        for level, token in enumerate(true):
            if token not in ids[level]:
                ids[level, rng.integers(self.width)] = token
        mass = -np.sort(-rng.dirichlet(np.ones(self.width), len(true)))
        return StreamDraft(np.log(np.maximum(mass, 1e-9)).astype(np.float32), ids)


@pytest.fixture(scope="session")
def shuffled_oracle():
    """The class `ShuffledOracle`: accepted nodes lie scattered over the tree, so that the cache must be compacted."""
    return ShuffledOracle


class Script:
    """Answers every call with what `answer(context)` returns."""

    def __init__(self, answer, depth=8):
        self.answer, self.depth = answer, depth

    def draft(self, context):
        return self.answer(context)


@pytest.fixture(scope="session")
def script():
    """The class `Script`: a drafter made from a function."""
    return Script
