"""Times `sample` on this machine's GPU beside argmax and torch: `python time_sample.py`. Writes $OUT/sample.json.

Graph replays over logits that rotate past the L2 cache. torch's way (softmax over the vocabulary, topk, cumulative sum,
multinomial) waits for the host, so it is timed by events around many eager calls.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import torch
from timing import graph_times

from kdtree_nb import ops

VOCAB = 163_840
MODES = {
    "full": (0, 1.0),
    "top_k 50": (50, 1.0),
    "top_k 50, top_p 0.9": (50, 0.9),
    "top_k 1024, top_p 0.95": (1024, 0.95),
}


def target_logits(rows: int) -> torch.Tensor:
    """Logits like a language model's: a few likely tokens over a flat rest."""
    x = torch.randn(rows, VOCAB, device="cuda") * 2
    likely = torch.rand(rows, VOCAB, device="cuda").topk(200, -1).indices
    peak = 16 - 1.6 * torch.arange(1, 201, device="cuda").log()
    return x.scatter(-1, likely, peak + torch.randn(rows, 200, device="cuda"))


def arguments(rows: int, top_k: int, top_p: float, temperature: float = 0.8) -> list[torch.Tensor]:
    stream = torch.zeros(rows, dtype=torch.int32, device="cuda")
    position = torch.arange(rows, dtype=torch.int32, device="cuda")
    values = ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32), (5, torch.int64))
    return [stream, position, *(torch.tensor([value], dtype=dtype, device="cuda") for value, dtype in values)]


def torch_sample(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The usual way: softmax, topk, cut where the sum reaches top_p, multinomial."""
    probabilities = (logits / 0.8).softmax(-1)
    if top_k == 0:
        return probabilities.multinomial(1)[:, 0]
    values, ids = probabilities.topk(top_k)
    if top_p < 1:
        total = values.sum(-1, keepdim=True)
        values = values.masked_fill(values.cumsum(-1) - values >= top_p * total, 0.0)
    return ids.gather(1, values.multinomial(1))[:, 0]


def eager_times(calls: list, repeats: int = 7) -> list[float]:
    """Seconds of one call, by events around all of them."""
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    return times[1:]


def main() -> None:
    start, record = time.time(), {"device": torch.cuda.get_device_name(), "vocab_size": VOCAB, "seconds": {}}
    for rows in (1, 17, 64):
        copies = [target_logits(rows) for _ in range(max(2, 160 // rows))]
        flat = [torch.zeros(rows, VOCAB, device="cuda")] * 2
        cases = {"argmax": [lambda x=x: ops.argmax(x) for x in copies]}
        for mode, (top_k, top_p) in MODES.items():
            given = arguments(rows, top_k, top_p)
            cases[f"sample {mode}"] = [lambda x=x, given=given: ops.sample(x, *given) for x in copies]
        given = arguments(rows, 50, 0.9)
        cases["sample of equal logits, top_k 50, top_p 0.9"] = [lambda x=x, g=given: ops.sample(x, *g) for x in flat]
        greedy = arguments(rows, 0, 1.0, temperature=0.0)
        cases["sample temperature 0"] = [lambda x=x, g=greedy: ops.sample(x, *g) for x in copies]
        for name, calls in cases.items():
            record["seconds"][f"{name}, {rows} rows"] = graph_times(calls)
        for mode, (top_k, top_p) in MODES.items():
            calls = [lambda x=x, k=top_k, p=top_p: torch_sample(x, k, p) for x in copies]
            record["seconds"][f"torch {mode}, {rows} rows"] = eager_times(calls)
    for name, times in record["seconds"].items():
        print(f"{name:58s} {statistics.median(times) * 1e6:8.1f} us", flush=True)
    (Path(os.environ.get("OUT", ".")) / "sample.json").write_text(json.dumps(record))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
