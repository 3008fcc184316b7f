"""What the tests of the engine share: prompts, AR results to compare with, and drafters made to provoke."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters
from kdtree_nb.drafters.base import DraftCandidates, StreamDraft, stack
from kdtree_nb.goldens import load_goldens
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.step_runner import StepRunner
from kdtree_nb.tree import DraftTree
from tests.speculate.shared import NUM_TOKENS, poisoned_model

BOTH_KINDS = (
    "test_dflash", "test_engine", "test_exactness", "test_features", "test_hard_inputs", "test_sampling",
    "test_streams", "test_streams_failing", "test_streams_interrupted", "test_streams_limits",
)  # fmt: skip
"""Modules whose tests run twice: steps led by the host, and steps that the device takes (on a CPU, without a graph)."""


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.split(".")[-1] in BOTH_KINDS:
        metafunc.parametrize("kind", ["host", "device"], indirect=True)


def pytest_collection_modifyitems(items):
    """Leave out most budgets where the device takes the steps and there is no GPU: it is the arithmetic of the host."""
    items[:] = [item for item in items if not _is_repetition(getattr(getattr(item, "callspec", None), "params", {}))]


def _is_repetition(params) -> bool:
    is_double = params.get("kind") == "device" and params.get("device") == "cpu"
    return is_double and params.get("budget", 0) not in (0, 1, 7, 33, 65)


@pytest.fixture(autouse=True)
def kind(request, monkeypatch) -> str:
    """Who takes the steps of the engines that a test makes, "host" or "device"; by default as the engine has it."""
    name = getattr(request, "param", None)
    if name:
        monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: getattr(engine_module, name.upper()))
    return name


@pytest.fixture(scope="session")
def golden_texts():
    """Model name -> 3 goldens of different prompt lengths, the longest first."""
    chosen = {}
    for name in ("tiny", "tiny2"):
        by_length = sorted(load_goldens(name), key=lambda golden: -len(golden.prompt))
        chosen[name] = [by_length[i] for i in (0, len(by_length) // 2, -1)]
        assert len({len(golden.prompt) for golden in chosen[name]}) == 3
    return chosen


@pytest.fixture(scope="session")
def prompts(golden_texts):
    """Model name -> the prompts of its `golden_texts`."""
    return {name: [golden.prompt for golden in goldens] for name, goldens in golden_texts.items()}


@pytest.fixture(scope="session")
def ar(models, prompts):
    """(model name, dtype) -> AR generations of the 3 prompts, each alone, 24 tokens with logits. Computed once.

    The host leads their steps, so that what the device does is compared with what the host does.
    """
    results = {}

    def get(name, dtype=torch.float32):
        if (name, dtype) not in results:
            engine = Engine(models(name, dtype))
            engine._kind = engine_module.HOST
            results[name, dtype] = [
                engine.generate_ar(p, NUM_TOKENS, return_logits=True, stop_token_ids=()) for p in prompts[name]
            ]
        return results[name, dtype]

    return get


@pytest.fixture
def prompt(prompts):
    """The longest prompt of tiny2."""
    return prompts["tiny2"][0]


@pytest.fixture
def want(ar):
    """What AR decoding gives for `prompt`, in FP32."""
    return ar("tiny2")[0]


@pytest.fixture
def skip_gram(prompts, ar):
    """A drafter on the device for tiny2, right now and then."""
    texts = [p + g.tokens for p, g in zip(prompts["tiny2"], ar("tiny2"), strict=True)]
    return drafters.SkipGram(sum(texts, []), 331, depth=5, min_count=2)


@pytest.fixture
def dflash():
    """A drafter on the device that sees hidden states of tiny2; untrained."""
    sizes = {"hidden_size": 192, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 331, "block_size": 8}
    return drafters.DFlash.random(drafters.DFlashConfig(**sizes, **heads, target_layer_ids=(1, 4), mask_token_id=330))


@pytest.fixture
def poisonous(want, device):
    """tiny2 whose embedding of the 6th token of `want` is NaN, and that token."""
    token = want.tokens[5]
    return poisoned_model(token, device), token


@pytest.fixture
def calls(monkeypatch):
    """ "launch" and "wait" in the order in which runners are told to."""
    seen = []
    for name in ("launch", "wait"):
        method = getattr(StepRunner, name)

        def noted(self, *args, name=name, method=method):
            seen.append(name)
            return method(self, *args)

        monkeypatch.setattr(StepRunner, name, noted)
    return seen


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
    """Answers every call with what `answer(context)` returns; CPU tensors go to the device of the context."""

    def __init__(self, answer, depth=8):
        self.answer, self.depth = answer, depth

    def draft(self, context):
        draft = self.answer(context)
        if context.device.type == "cpu" or not isinstance(draft, DraftCandidates | DraftTree):
            return draft
        fields = draft if isinstance(draft, tuple) else vars(draft).values()
        return type(draft)(*(f.to(context.device) if getattr(f, "is_cpu", False) else f for f in fields))


@pytest.fixture(scope="session")
def script():
    """The class `Script`: a drafter made from a function."""
    return Script
