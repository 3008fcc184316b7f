"""Benchmarks of whole generations and of AR steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kdtree_nb import reference
from kdtree_nb.bench import setting
from kdtree_nb.bench.eager_torch import EagerModel
from kdtree_nb.bench.peers import FirstCandidateOnly
from kdtree_nb.bench.runner import Effort, Measurement, clock, compete, once, require
from kdtree_nb.config import ModelConfig
from kdtree_nb.drafters import Drafter, NGram
from kdtree_nb.goldens import load_goldens
from kdtree_nb.kdtr import open_kdtr
from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.speculate import Engine, Generation, StepRecord

Runs = Mapping[str, Callable[..., Generation]]
"""Contender -> `generate_ar` or `generate_ddtree` of an engine."""

BUDGET = 16
NUM_SLOTS = 1024


def ngram_ddtree(effort: Effort) -> list[Measurement]:
    """NGram DDTree against AR on repetitive real text, whole calls with prefill: all prompts, then each by itself."""
    engine = Engine(setting.model("tiny"), drafter=NGram(), budget=BUDGET)
    return repetitive_runs("ngram_ddtree", {"AR": engine.generate_ar, "DDTree": engine.generate_ddtree}, effort)


def repetitive_runs(group: str, runs: Runs, effort: Effort, **params: Any) -> list[Measurement]:
    """Whole calls of tiny on the repetitive prompts: over all of them, and in `<group>_prompt` on each."""
    params = {"model": "tiny", "budget": BUDGET, "num_tokens": effort.num_tokens} | params
    single = []
    for name, prompt in setting.prompts("repetitive").items():
        single += _one_prompt(f"{group}_prompt", runs, prompt, effort, {"prompt": name, **params})
    return _added(group, single, params) + single


def ngram_chain(effort: Effort) -> list[Measurement]:
    """The same drafter drafting one chain, or a tree: whole calls over all repetitive prompts."""
    model = setting.model("tiny")
    drafters: dict[str, Drafter] = {"chain": FirstCandidateOnly(NGram()), "tree": NGram()}
    runs = {name: Engine(model, drafter=d, budget=BUDGET).generate_ddtree for name, d in drafters.items()}
    params = {"model": "tiny", "budget": BUDGET, "num_tokens": effort.num_tokens}
    return all_prompts("ngram_chain", runs, setting.prompts("repetitive").values(), effort, params)


def models(effort: Effort) -> list[Measurement]:
    """NGram DDTree against AR on tiny (the repetitive prompts) and on tiny2 (random weights, so its golden prompts)."""
    tiny2 = [golden.prompt for golden in load_goldens("tiny2")]
    results = []
    for name, prompts in (("tiny", setting.prompts("repetitive").values()), ("tiny2", tiny2)):
        engine = Engine(setting.model(name), drafter=NGram(), budget=BUDGET)
        runs = {"AR": engine.generate_ar, "DDTree": engine.generate_ddtree}
        params = {"model": name, "budget": BUDGET, "num_tokens": effort.num_tokens}
        results += all_prompts("models", runs, prompts, effort, params)
    return results


def ar_step(effort: Effort) -> list[Measurement]:
    """One token of tiny in FP32: numpy reference, eager torch, engine; then eager torch and engine in BF16."""
    golden = load_goldens("tiny")[0]
    num_steps = effort.num_tokens // 2
    config, weights = tiny_weights()
    results = []
    for dtype, group in ((torch.float32, "ar_step"), (torch.bfloat16, "ar_step_bf16")):
        texts: dict[str, list[int]] = {}
        contenders = {
            "eager torch": eager_steps(EagerModel(config, weights, NUM_SLOTS, dtype), golden.prompt, num_steps, texts),
            "native": engine_steps(Engine(setting.model("tiny", dtype=dtype)), golden.prompt, num_steps, texts),
        }
        if dtype == torch.float32:  # the reference's bf16 mode emulates rounding and is no peer for speed
            numpy_model = reference.ReferenceModel(config, weights, "float32")
            contenders = {"numpy": _numpy_steps(numpy_model, golden.prompt, num_steps, texts)} | contenders
        params = {"model": "tiny", "dtype": str(dtype).removeprefix("torch."), "prompt_tokens": len(golden.prompt)}
        results += compete(group, contenders, effort.num_rounds, params)
        if dtype == torch.float32:  # in BF16 eager torch rounds elsewhere, so that its text may differ
            require(all(text == golden.tokens[:num_steps] for text in texts.values()), group, "the golden tokens")
    return results


def tiny_weights() -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Configuration and float32 arrays of tiny, for models that are not ours."""
    file = open_kdtr(DATA_DIR / "tiny.kdtr")
    return ModelConfig.from_dict(file.metadata["config"]), {name: file.float32(name) for name in file.names}


def _numpy_steps(
    model: reference.ReferenceModel, prompt: list[int], num_steps: int, texts: dict[str, list[int]]
) -> Callable[[], float]:
    state = model.prefill([prompt], NUM_SLOTS)
    start_len = state.prefix_len.copy()

    def decode() -> None:
        state.prefix_len[:] = start_len
        token, tokens = np.array(prompt[-1:]), []
        for _ in range(num_steps):
            token = reference.argmax(model.step(state, token))
            tokens.append(int(token[0]))
        texts["numpy"] = tokens

    return lambda: clock(decode) / num_steps


def eager_steps(
    model: EagerModel, prompt: list[int], num_steps: int, texts: dict[str, list[int]], name: str = "eager torch"
) -> Callable[[], float]:
    """Seconds per token of greedy decoding; the tokens go to texts[name]."""
    model.prefill(prompt)

    def decode() -> None:
        model.length = len(prompt) - 1
        texts[name] = model.decode(prompt[-1], num_steps)

    return lambda: clock(decode) / num_steps


def engine_steps(
    engine: Engine, prompt: list[int], num_steps: int, texts: dict[str, list[int]], name: str = "native"
) -> Callable[[], float]:
    """Wall time between the ends of the first and the last step of a generation, per step; tokens to texts[name]."""

    def sample() -> float:
        ends: list[float] = []

        def stamp(step: StepRecord) -> None:
            ends.append(time.perf_counter())

        run = engine.generate_ar(prompt, num_steps + 1, stop_token_ids=(), on_step=stamp)
        texts[name] = run.tokens[:num_steps]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    return sample


def ar_steps(name: str, dtype: torch.dtype, num_steps: int) -> Callable[[], float]:
    """Samples the seconds of an AR step of the engine on a golden prompt of the model."""
    return engine_steps(Engine(setting.model(name, dtype=dtype)), load_goldens(name)[0].prompt, num_steps, {})


def _one_prompt(
    group: str, runs: Runs, prompt: list[int], effort: Effort, params: Mapping[str, Any]
) -> list[Measurement]:  # fmt: skip
    """Whole calls on one prompt, after a check that all give the same tokens."""
    calls = {
        name: functools.partial(run, prompt, effort.num_tokens, stop_token_ids=()) for name, run in runs.items()
    }  # fmt: skip
    texts = [call().tokens for call in calls.values()]
    require(all(text == texts[0] for text in texts), group, "the tokens")
    return compete(group, {name: once(call) for name, call in calls.items()}, effort.num_rounds, params)


def all_prompts(
    group: str, runs: Runs, prompts: Iterable[list[int]], effort: Effort, params: Mapping[str, Any]
) -> list[Measurement]:
    """Whole calls, summed over the prompts."""
    return _added(group, [m for p in prompts for m in _one_prompt(group, runs, p, effort, params)], params)


def _added(group: str, single: Sequence[Measurement], params: Mapping[str, Any]) -> list[Measurement]:
    """Per contender, the samples of one round summed over what was measured one by one."""
    contenders = dict.fromkeys(m.name.partition("/")[2] for m in single)
    parts = {c: [m.samples for m in single if m.name.endswith(f"/{c}")] for c in contenders}
    return [Measurement(f"{group}/{c}", [sum(r) for r in zip(*p, strict=True)], params) for c, p in parts.items()]
