"""Benchmarks of sampling on a GPU: the operation at the vocabulary of Kimi K2, and what it costs in generations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kdtree_nb.bench import setting
from kdtree_nb.bench.lab import Lab
from kdtree_nb.bench.runner import Effort, Measurement, compete, once, require
from kdtree_nb.goldens import load_goldens
from kdtree_nb.native import ops
from kdtree_nb.speculate import Engine
from kdtree_nb.speculate.sampling import Sampling

VOCAB_SIZE = 163_840
ROWS = (1, 17, 64)
MODES = ((0, 1.0), (50, 0.9), (1024, 0.95))
"""(top_k, top_p); (0, 1.0) keeps all."""

TEMPERATURE = 0.8
ROTATED_BYTES = 105_000_000
"""Logits in turn: more than the L2 cache holds."""

MAX_TOKENS, MAX_ROUNDS = 64, 9


def target_logits(lab: Lab, num_rows: int) -> Tensor:
    """f32 [T, V] like a language model's: a few likely tokens over a flat rest."""
    num_likely = min(200, VOCAB_SIZE)
    logits = lab.randn(num_rows, VOCAB_SIZE).mul_(2)
    likely = torch.rand(logits.shape, device=lab.device).topk(num_likely, -1).indices
    peak = 16 - 1.6 * torch.arange(1, num_likely + 1, device=lab.device).log()
    return logits.scatter_(-1, likely, peak + lab.randn(num_rows, num_likely))


def torch_sample(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The usual way without waiting for the host: the largest quotient of probability and exponential noise."""
    probability, ids = (logits / TEMPERATURE).softmax(-1), None
    if top_k:
        probability, ids = probability.topk(top_k)
        if top_p < 1:
            before = probability.cumsum(-1) - probability
            probability = probability.masked_fill(before >= top_p * probability.sum(-1, keepdim=True), 0.0)
    chosen = (probability / torch.empty_like(probability).exponential_()).argmax(-1)
    return chosen if ids is None else ids.gather(1, chosen[:, None])[:, 0]


def sample(lab: Lab, effort: Effort) -> list[Measurement]:
    """A random token of each row, by graph replays over logits in turn: torch, the native operation, and argmax. Drawn
    from all tokens, and from those that top_k and top_p keep."""
    results = []
    for num_rows in effort.some(ROWS):
        num_copies = max(2, math.ceil(ROTATED_BYTES / (num_rows * VOCAB_SIZE * 4)))
        logits = [target_logits(lab, num_rows) for _ in range(num_copies)]
        likeliest = ops.sample(logits[0], *_parameters(lab, num_rows, 1, 1.0))
        require(torch.equal(likeliest, torch_sample(logits[0], 1, 1.0)), "sample", "the token of top_k 1")
        for top_k, top_p in MODES:
            given = _parameters(lab, num_rows, min(top_k, VOCAB_SIZE), top_p)
            contenders = {
                "torch": [lambda x=x, k=top_k, p=top_p: torch_sample(x, min(k, VOCAB_SIZE), p) for x in logits],
                "native": [lambda x=x, g=given: ops.sample(x, *g) for x in logits],
                "argmax": [lambda x=x: ops.argmax(x) for x in logits],
            }
            num_values = num_rows * VOCAB_SIZE
            params = {"rows": num_rows, "V": VOCAB_SIZE, "top_k": top_k, "top_p": top_p}
            params |= lab.work(4 * num_values, 4 * num_values, torch.float32)
            results += lab.compete("sample", contenders, effort, params)
    return results


def _parameters(lab: Lab, num_rows: int, top_k: int, top_p: float) -> list[Tensor]:
    """stream, position, temperature, top_k, top_p, seed."""
    per_row = [torch.zeros(num_rows, dtype=torch.int32), torch.arange(num_rows, dtype=torch.int32)]
    per_stream = ((TEMPERATURE, torch.float32), (top_k, torch.int32), (top_p, torch.float32), (5, torch.int64))
    return [t.to(lab.device) for t in (*per_row, *(torch.tensor([v], dtype=d) for v, d in per_stream))]


def sampling_cost(lab: Lab, effort: Effort) -> list[Measurement]:
    """Whole AR generations of tiny: greedy, and with sampling at temperature 0.8, top_k 50 and top_p 0.9; wall time."""
    engine, prompt = Engine(setting.model("tiny", lab.device)), load_goldens("tiny")[0].prompt
    num_tokens, num_rounds = min(effort.num_tokens, MAX_TOKENS), min(effort.num_rounds, MAX_ROUNDS)
    sampling = Sampling(temperature=TEMPERATURE, top_k=50, top_p=0.9, seed=1)

    def generate(how: Sampling | None) -> None:
        engine.generate_ar(prompt, num_tokens, stop_token_ids=(), sampling=how)

    contenders = {"greedy": once(lambda: generate(None)), "sampling": once(lambda: generate(sampling))}
    params = {"model": "tiny", "num_tokens": num_tokens, "prompt_tokens": len(prompt)}
    return compete("sampling_cost", contenders, num_rounds, params)
