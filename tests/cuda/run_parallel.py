"""Tensor parallel on GPUs, one process each: bits against one GPU, step times, and what an exchange takes.

    python -m tests.cuda.run_parallel --ranks 2 --out parallel.json

Writes a record as `kdtree-nb bench` does. Exits with 1 and the first difference where a bit differs; times are recorded
only. The parts can be asked for alone: --only bits, steps, exchange. --small: narrow layers, to try it on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

from kdtree_nb import Engine, Sampling, drafters, parallel
from kdtree_nb.bench.k26_sizes import CONFIG, single_layer, small, with_layers
from kdtree_nb.bench.random_weights import RandomSource
from kdtree_nb.bench.rank import bushy_tree
from kdtree_nb.bench.record import make_record, write_record
from kdtree_nb.bench.runner import Measurement, Sample, clock, compete
from kdtree_nb.hf.config import HfConfig, read_config
from kdtree_nb.model.build import build
from kdtree_nb.model.ranks import ONE_RANK
from kdtree_nb.native import ops, require
from kdtree_nb.native.cuda_graph import CudaGraph
from tests.parallel import programs
from tests.parallel.int4_folder import write_int4
from tests.parallel.test_tensor_parallel import assert_same

PARTS = ("bits", "steps", "exchange")
NUM_TOKENS = 64
ROWS = (1, 8, 16, 64)
PREFIX_LEN = 1024
NUM_LAYERS = 3
"""Of K2.6 that are timed: the dense one and two with experts."""

NUM_ROUNDS, REPEATS = 9, 20
"""Samples of a time, and exchanges in one captured graph."""

DIM = 7168
"""Of the rows that K2.6's ranks exchange."""


def device_of(ranks, kind: str) -> torch.device:
    """The device of this rank."""
    return ranks.device if ranks.num_ranks > 1 else torch.device(kind, 0 if kind == "cuda" else None)


# --- bits ------------------------------------------------------------------------------------------------------------


def layer_bits(ranks, device: torch.device, config: HfConfig, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of trees of several sizes behind a prefix, by one layer at true width; each row alone as well."""
    model = build(config.model, RandomSource(config, device, dtype), ranks)
    vocab_size, found = config.model.vocab_size, []
    for num_rows in (1, 5, 16, 33, 150):
        tree = bushy_tree(num_rows, vocab_size, device)
        cache = model.new_cache(1, 512)
        cache.data.normal_(generator=torch.Generator(device).manual_seed(3))
        prefix_len = torch.tensor([200], dtype=torch.int32, device=device)
        logits = model.forward(ops.tree_rows(tree, prefix_len), tree, cache, prefix_len)
        found.append(ranks.all_logits(logits, vocab_size).cpu())
    return found


def engine_bits(ranks, device: torch.device, name: str, dtype: str) -> dict:
    """Texts of an engine: AR and trees, as captured steps and led by the host, drawn, and from a DFlash."""
    model = programs.load(name, dtype, ranks, device)
    vocab_size = model.config.vocab_size
    prompts = [[token % vocab_size for token in text] for text in (programs.PROMPT, programs.PROMPT[:3])]
    dflash = drafters.DFlash.random(programs.dflash_config(model.config)) if name == "tiny" else None
    found = {}
    for use_graphs in (None, False):
        for drafter in filter(None, (drafters.NGram(), dflash)):
            engine = Engine(model, drafter=drafter, budget=12, max_seq_len=256, use_graphs=use_graphs)
            kind = f"{type(drafter).__name__}, graphs {use_graphs}"
            options = {"return_logits": True, "stop_token_ids": ()}
            found[kind, "ar"] = engine.generate_ar(prompts, NUM_TOKENS, **options)
            found[kind, "ddtree"] = engine.generate_ddtree(prompts, NUM_TOKENS, **options)
            sampling = [Sampling(0.8, seed=1), Sampling(1.0, top_k=30, top_p=0.9, seed=2)]
            found[kind, "sampled"] = engine.generate_ddtree(prompts, NUM_TOKENS, sampling=sampling)
    return {
        kind: [(text.tokens, None if text.logits is None else text.logits.cpu()) for text in texts]
        for kind, texts in found.items()
    }


def bits(ranks, kind: str, folder: str, config: HfConfig) -> dict:
    """Everything that must be the same to the bit, on the host."""
    device, found = device_of(ranks, kind), {}
    with torch.inference_mode():
        for dtype in programs.DTYPES:
            for name in ("tiny", "nano", folder):
                found["engine", Path(name).name, dtype] = engine_bits(ranks, device, name, dtype)
            for V in (331, 5000):
                choices = programs.vocabulary_choices(ranks, V, 9, V, device)
                found["vocabulary", V, dtype] = [part.cpu() for part in choices]
        found["layer, INT4 experts"] = layer_bits(ranks, device, config, torch.bfloat16)
        plain = few_experts(config)
        for dtype in programs.DTYPES:
            found["layer", dtype] = layer_bits(ranks, device, plain, programs.DTYPES[dtype])
    return found


def few_experts(config: HfConfig) -> HfConfig:
    """The same layer with 16 experts, which are not quantised: in FP32 all would not fit."""
    model = dataclasses.replace(config.model, n_routed_experts=16)
    return dataclasses.replace(config, model=model, quantization=None)


# --- times -----------------------------------------------------------------------------------------------------------


def sample_of(device: torch.device, launch: Callable[[], object], repeats: int = 1) -> Sample:
    """Samples seconds of one of `repeats` in `launch`; by events behind a run that hides the launch."""
    if device.type == "cpu":
        return lambda: clock(launch) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        torch.cuda.synchronize()
        launch()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / repeats

    return sample


def captured(device: torch.device, function: Callable[[], object]) -> Callable[[], object]:
    """A replay of what `function` launches; on a CPU `function`."""
    function()
    if device.type == "cpu":
        return function
    return CudaGraph(function, device, torch.cuda.graph_pool_handle()).replay


def steps(ranks, kind: str, config: HfConfig) -> list[Measurement]:
    """Seconds of a step of a few of K2.6's layers, with all its exchanges and the choice of tokens."""
    device, found = device_of(ranks, kind), []
    config = with_layers(config, NUM_LAYERS)
    model = build(config.model, RandomSource(config, device, torch.bfloat16), ranks)
    weight_bytes = sum(t.numel() * t.element_size() for t in model.tensors())
    cache = model.new_cache(1, PREFIX_LEN + max(ROWS))
    cache.data.normal_(generator=torch.Generator(device).manual_seed(3))
    prefix_len = torch.tensor([PREFIX_LEN], dtype=torch.int32, device=device)
    vocab_size = config.model.vocab_size
    for num_rows in ROWS:
        tree = bushy_tree(num_rows, vocab_size, device)

        def step(tree=tree) -> torch.Tensor:
            rows = ops.tree_rows_padded(tree, prefix_len)
            return ranks.argmax(model.forward(rows, tree, cache, prefix_len), vocab_size, rows.num_rows)

        params = {"tp": ranks.num_ranks, "layers": NUM_LAYERS, "hidden": config.model.hidden_size, "rows": num_rows,
                  "prefix_len": PREFIX_LEN, "weight_bytes": weight_bytes}  # fmt: skip
        contenders = {"captured": sample_of(device, captured(device, step))}
        found += compete("parallel_step", contenders, NUM_ROUNDS, params)
    return found


def exchange(ranks, kind: str, dim: int) -> list[Measurement]:
    """Seconds of one exchange of partial sums, by rows: gathered and added, in blocks of rows, and an all-reduce. All
    are captured before any is timed, and then take turns: the links are as warm for each."""
    device, found = ranks.device, []
    backend = distributed.get_backend()
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        part = torch.randn(num_rows, dim, device=device)
        residual = torch.randn(num_rows, dim, device=device).bfloat16()
        contenders = {
            "all_gather and add_partials": lambda part=part, residual=residual: ops.add_partials(
                ranks.group.all_gather(part), residual.dtype, residual
            ),
            "in blocks": lambda part=part, residual=residual: ranks.add_in_blocks(part, residual),
            f"{backend} all_gather": lambda part=part: ranks.group.all_gather(part),
            f"{backend} all_reduce": lambda part=part: distributed.all_reduce(part),
        }
        replays = {name: captured(device, functools.partial(_repeat, f, REPEATS)) for name, f in contenders.items()}
        samples = {name: sample_of(device, replay, REPEATS) for name, replay in replays.items()}
        params = {"tp": ranks.num_ranks, "rows": num_rows, "message_bytes": part.numel() * 4}
        found += compete("exchange", samples, NUM_ROUNDS, params)
    return found


def _repeat(function: Callable[[], object], count: int) -> None:
    for _ in range(count):
        function()


# --- the run ---------------------------------------------------------------------------------------------------------


def program(ranks, kind: str, parts: list[str], folder: str, is_small: bool) -> dict:
    """The parts that were asked for, on one rank."""
    config = read_config(Path(CONFIG))
    config = small(config) if is_small else config
    found: dict = {}
    if "bits" in parts:
        found["bits"] = bits(ranks, kind, folder, single_layer(config))
    if "steps" in parts:
        with torch.inference_mode():
            found["steps"] = steps(ranks, kind, config)
    if "exchange" in parts and ranks.num_ranks > 1:
        found["exchange"] = exchange(ranks, kind, 256 if is_small else DIM)
    return found


def compare(alone: dict, ranks: list[dict]) -> list[Measurement]:
    """How many results every rank has in common with one GPU. Raises AssertionError that names the first difference."""
    for rank, found in enumerate(ranks):
        assert_same(found["bits"], alone["bits"], f"rank {rank} of {len(ranks)}")
    texts = [text for key, of_kind in alone["bits"].items() if key[0] == "engine" for text in of_kind.values()]
    num_tokens = sum(len(tokens) for of_kind in texts for tokens, _ in of_kind)
    params = {"tp": len(ranks), "differences": 0, "tokens": num_tokens, "kinds": sorted(map(str, alone["bits"]))}
    return [Measurement("parallel_bits/native", [len(alone["bits"])], params, "comparison")]


def run(args: argparse.Namespace) -> list[Measurement]:
    """All measurements; one process alone first, and then the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        int4 = write_int4(Path(folder) / "int4", 288)
        start = time.perf_counter()
        require(torch.device(args.device))
        print(f"kernels: {time.perf_counter() - start:.0f} s", flush=True)
        start = time.perf_counter()
        alone = program(ONE_RANK, args.device, args.only, int4, args.small)
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(f"one process: {time.perf_counter() - start:.0f} s", flush=True)
        start = time.perf_counter()
        given = args.device, args.only, int4, args.small
        ranks = parallel.run(program, args.ranks, *given, device=args.device, timeout_s=300, num_threads=1)
        print(f"{args.ranks} ranks: {time.perf_counter() - start:.0f} s", flush=True)
    found = compare(alone, ranks) if "bits" in args.only else []
    for part in ("steps", "exchange"):
        found += alone.get(part, []) + ranks[0].get(part, [])
    return found


def main() -> int:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the record")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--small", action="store_true", help="narrow layers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    try:
        found = run(args)
    except AssertionError as error:
        print(f"DIFFERENT BITS: {error}", file=sys.stderr)
        return 1
    for m in found:
        middle = sorted(m.samples)[len(m.samples) // 2]
        shown = {k: v for k, v in m.params.items() if k in ("tp", "rows", "message_bytes", "tokens", "differences")}
        print(f"{m.name:45s} {json.dumps(shown)} {middle * 1e6 if m.unit == 's' else middle:.1f} "
              f"{'us' if m.unit == 's' else m.unit}")  # fmt: skip
    command = f"python -m tests.cuda.run_parallel --ranks {args.ranks}{' --small' if args.small else ''}"
    record = make_record(found, command, args.device)
    record["device"] = f"{args.ranks} x {record['device']}"
    print(write_record(record, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
