"""Checks and times decode_layers on this machine's GPU: `python tests/cuda/run_decode.py [check] [time]`.

Layers of one rank of eight of Kimi K2.6 with random weights, each phase and whole layers compared bit by bit with the
operations one by one; then a step of several layers by turns in both forms. Writes $OUT/decode.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import check_common
from decode_lib import Decode, Phase
from check_common import expect
from timing import graph_times

from kdtree_nb.bench.k26_sizes import CONFIG, with_layers
from kdtree_nb.bench.rank import Rank, bushy_tree
from kdtree_nb.hf.config import read_config
from kdtree_nb.native import ops

DEVICE = torch.device("cuda")
ROWS = (1, 2, 3, 4)
PREFIXES = (0, 1, 127, 128, 500, 1024, 2047, 2048, 5000)
record: dict[str, Any] = {"failures": check_common.failures}


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, without NaN."""
    return bool(torch.equal(a, b)) and not bool(torch.isnan(a.float()).any())


def differing(a: Tensor, b: Tensor) -> str:
    """How many values differ, and where first."""
    wrong = (a != b) | torch.isnan(a.float())
    first = wrong.nonzero()[:1].tolist()
    return f"{int(wrong.sum())} of {wrong.numel()} differ, first at {first}: {a[wrong][:3].tolist()} {b[wrong][:3].tolist()}"


def make_rank(num_layers: int, num_slots: int, tp: int = 8) -> Rank:
    """A rank whose norms and biases are random, too."""
    rank = Rank(with_layers(read_config(Path(CONFIG)), num_layers), tp, DEVICE, num_slots)
    generator = torch.Generator(DEVICE).manual_seed(3)
    for layer in rank.alone.layers:
        attention, moe = layer.attention, layer.feed_forward
        for norm in (attention.norm, attention.kv_norm, attention.q_norm, moe.norm):
            norm.uniform_(0.5, 1.5, generator=generator)
        if getattr(moe, "bias", None) is not None:
            moe.bias.uniform_(-0.1, 0.1, generator=generator)
    return rank


class Reference:
    """A layer by the operations one by one; what they leave between them."""

    def __init__(self, rank: Rank, index: int, rows: ops.Rows, tree: Any) -> None:
        self.rank, self.rows, self.tree = rank, rows, tree
        self.attention = rank.alone.layers[index].attention
        self.moe = rank.alone.layers[index].feed_forward

    def run(self, x: Tensor) -> dict[str, Tensor]:
        at, moe, rows, rank = self.attention, self.moe, self.rows, self.rank
        used, cache = rows.num_rows, rank.cache.layers[at.layer]
        q_kv = ops.linear(ops.rms_norm(x, at.norm, at.eps, used, at.settled), at.q_kv_a, num_rows=used)
        q, joint = at.split(q_kv)
        q_a = ops.latent_append(cache, joint, at.q_norm, at.kv_norm, at.cos_sin, rows, at.latent_eps, at.settled)
        q = ops.linear(q_a, at.q_b, num_rows=used)
        q_latent, q_rope = ops.absorb_query(q, at.w_kc, at.cos_sin, rows.position, used)
        attended = ops.verify_attn(q_latent, q_rope, cache, rows, self.tree, rank.prefix_len, at.scale)
        value = ops.linear_heads(attended, at.w_vc, used)
        between = at.ranks.linear(value.view(-1, at.value_dim), at.o_proj, at.whole_value_dim, x, used)
        _, expert_id, weight = moe.route(between, used)
        out = moe(between, used)
        return {"q_kv": q_kv, "q": q, "q_latent": q_latent, "q_rope": q_rope, "value": value, "between": between,
                "expert_id": expert_id, "weight": weight, "out": out}  # fmt: skip


def check_layer(rank: Rank, num_rows: int, prefix: int, seed: int, stages: bool) -> None:
    """One layer, by parts and whole."""
    name = f"rows {num_rows} prefix {prefix} seed {seed}"
    rank.prefix_len.fill_(prefix)
    tree = bushy_tree(num_rows, rank.model.config.vocab_size, DEVICE, seed)
    rows = ops.tree_rows_padded(tree, rank.prefix_len)
    x = torch.randn(num_rows, rank.model.config.hidden_size, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).bfloat16()
    slots = rows.slot.long()
    cache = rank.cache.layers[1][0]
    cache[slots] = float("nan")
    ref = Reference(rank, 1, rows, tree).run(x)
    appended = cache[slots].clone()
    if stages:
        decode = Decode(rank, [1], rows, tree, x)
        cache[slots] = float("nan")
        decode.run(Phase.JOINT, Phase.LEAVES)
        for part in ("q_kv", "q", "q_latent", "q_rope"):
            got = decode.part(part, ref[part].shape)
            expect(same(got, ref[part]), f"{name}: {part}: {differing(got, ref[part])}")
        expect(same(cache[slots], appended), f"{name}: cache: {differing(cache[slots], appended)}")
        decode.attend_by_operation()
        decode.run(Phase.VALUES, Phase.OUTPUT)
        got = decode.part("value", ref["value"].shape)
        expect(same(got, ref["value"]), f"{name}: value: {differing(got, ref['value'])}")
        decode.run(Phase.OUTPUT, Phase.ROUTER)
        expect(same(decode.x, ref["between"]), f"{name}: between: {differing(decode.x, ref['between'])}")
        decode.x.copy_(ref["between"])
        decode.run(Phase.ROUTER, Phase.ALL)
        expect(same(decode.x, ref["out"]), f"{name}: out: {differing(decode.x, ref['out'])}")
    decode = Decode(rank, [1], rows, tree, x)
    cache[slots] = float("nan")
    decode.run()
    expect(same(decode.x, ref["out"]), f"{name}: layer: {differing(decode.x, ref['out'])}")
    expect(same(cache[slots], appended), f"{name}: cache of the layer: {differing(cache[slots], appended)}")
    check_all_layers(rank, rows, tree, x, name)


def check_all_layers(rank: Rank, rows: ops.Rows, tree: Any, x: Tensor, name: str) -> None:
    """All layers with experts, twice, one launch after the other."""
    layers, want = range(1, len(rank.alone.layers)), x
    for i in layers:
        want = Reference(rank, i, rows, tree).run(want)["out"]
    decode = Decode(rank, layers, rows, tree, x)
    for _ in range(2):
        decode.x.copy_(x)
        decode.run()
        expect(same(decode.x, want), f"{name}: {len(layers)} layers: {differing(decode.x, want)}")


def check(rank: Rank) -> None:
    for num_rows in ROWS:
        for i, prefix in enumerate(PREFIXES):
            check_layer(rank, num_rows, prefix, 7 * num_rows + i, stages=True)
    print(f"check: {check_common.num_checks} checks, {len(check_common.failures)} failed", flush=True)


RANGES = {"nothing": (3, 3), "leaves": (3, 4), "joint": (0, 1), "queries": (1, 2), "absorb": (2, 3), "values": (4, 5),
          "output": (5, 6), "router": (6, 7), "router, up": (6, 8), "router, up, down": (6, 9), "values": (4, 5), "absorb, leaves": (2, 4),
          "before attention": (0, 3), "behind attention": (4, 9), "all": (0, 9)}  # fmt: skip
"""Phases that are timed together."""


def times(rank: Rank) -> None:
    """Microseconds of a layer, of some phases of all layers but the dense one."""
    layers = range(1, len(rank.alone.layers))
    for num_rows in (1, 4):
        rank.prefix_len.fill_(1024)
        tree = bushy_tree(num_rows, rank.model.config.vocab_size, DEVICE, 1)
        rows = ops.tree_rows_padded(tree, rank.prefix_len)
        decode = Decode(rank, layers, rows, tree, torch.randn(num_rows, 7168, device=DEVICE).bfloat16())
        decode.run(Phase.JOINT, Phase.LEAVES)
        decode.attend_by_operation()
        before = decode.x.clone()
        for name, (first, end) in RANGES.items():
            if os.environ.get("NO_LEAVES") and first <= Phase.LEAVES < end:
                continue
            decode.x.copy_(before)
            found = graph_times([lambda f=first, e=end: decode.run(f, e)] * 4, 5)
            us = sorted(found)[len(found) // 2] * 1e6
            print(f"rows {num_rows} {name:20s} {us:9.2f} us a launch, {us / len(layers):7.2f} us a layer", flush=True)
            record.setdefault("times", []).append({"rows": num_rows, "phases": name, "us": us, "layers": len(layers)})


def main() -> None:
    wanted = sys.argv[1:] or ["check", "time"]
    rank = make_rank(int(os.environ.get("LAYERS", "7")), 8192)
    print("rank made", flush=True)
    if "check" in wanted:
        check(rank)
    if "time" in wanted:
        times(rank)
    Path(os.environ.get("OUT", "."), "decode.json").write_text(json.dumps(record))
    sys.exit(bool(check_common.failures))


if __name__ == "__main__":
    main()
