"""Checks of verify_attn on CUDA where there is one stream: its plan is begun before the previous kernel has ended."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from check_attn import Batch, Dims, attend, random_tree
from check_common import DEV, NAN, count_of, expect, poisoned, same_bits
from op_lib import run, workspace_bytes

ROW_OUTPUTS = ("row_stream", "row_node", "row_position", "row_slot", "row_token")


def check_invalid_rows_of_one(dims: Dims) -> None:
    """The same where there is one stream: its rows are planned without a look at them."""
    rng = random.Random(2)
    batch = Batch(dims, [300], [random_tree(9, rng, "mixed")], 6)
    parent = torch.tensor([batch.trees[0].parent], dtype=torch.int32, device=DEV)
    depth = torch.tensor([batch.trees[0].depth], dtype=torch.int32, device=DEV)
    stream, node = torch.zeros(9, dtype=torch.int32, device=DEV), torch.arange(9, dtype=torch.int32, device=DEV)
    prefix = torch.tensor([300], dtype=torch.int32, device=DEV)

    def call(stream=stream, node=node, depth=depth, prefix=prefix, used=None):
        return attend(
            dims, batch.q_latent, batch.q_rope, batch.cache, stream, node, parent, depth, prefix, used, workspace_rows=4
        )

    out, bad_stream, bad_node, bad_depth = call(), stream.clone(), node.clone(), depth.clone()
    bad_stream[0], bad_stream[5], bad_node[3], bad_depth[0, 8] = 1, -1, 9, -1
    bad, good = [0, 3, 5, 8], [1, 2, 4, 6, 7]
    got = call(bad_stream, bad_node, bad_depth)
    expect(got[bad].isnan().all() and same_bits(got[good], out[good]), f"{dims}: invalid rows of one stream")
    got = call(bad_stream, bad_node, bad_depth, used=5)
    expect(got[[0, 3, 5, 6, 7, 8]].isnan().all(), f"{dims}: invalid rows and rows not in use")
    expect(same_bits(got[[1, 2, 4]], out[[1, 2, 4]]), f"{dims}: rows beside invalid ones")
    for value in (-1, batch.slots + 1):
        expect(call(prefix=torch.full_like(prefix, value)).isnan().all(), f"{dims}: prefix {value} of one stream")


class Chained:
    """A tree of one stream whose rows tree_rows flattens right before verify_attn, which starts before it has ended."""

    def __init__(self, batch: Batch, capacity: int) -> None:
        self.batch, self.size = batch, batch.sizes[0]
        ints = {"dtype": torch.int32, "device": DEV}
        tree, pad = batch.trees[0], [-1] * (capacity - self.size)
        self.parent, self.depth = torch.tensor([tree.parent + pad], **ints), torch.tensor([tree.depth + pad], **ints)
        self.token = torch.zeros(1, capacity, dtype=torch.int64, device=DEV)
        self.num_nodes, self.prefix = torch.tensor([self.size], **ints), torch.tensor(batch.prefixes, **ints)
        width = {"dtype": batch.dims.dtype, "device": DEV}
        self.q_latent = torch.zeros(capacity, batch.dims.heads, batch.dims.latent, **width)
        self.q_rope = torch.zeros(capacity, batch.dims.heads, batch.dims.rope, **width)
        self.q_latent[: self.size], self.q_rope[: self.size] = batch.q_latent, batch.q_rope
        self.want = batch.run()

    def run(self, shared: dict[str, torch.Tensor]) -> None:
        """Both kernels; rows, their number, the prefix, output and workspace are `shared` by all that run in turn."""
        dims, capacity = self.batch.dims, self.parent.shape[1]
        sizes = {"num_streams": 1, "num_tree_slots": capacity}
        rows = {name: shared[name] for name in ROW_OUTPUTS}
        run(
            "tree_rows", token=self.token, depth=self.depth, num_nodes=self.num_nodes, prefix_len=self.prefix, **rows,
            row_begin=shared["row_begin"], num_rows_device=shared["num_rows"], **sizes,
        )  # fmt: skip
        run(
            "verify_attn", q_latent=self.q_latent, q_rope=self.q_rope, cache=self.batch.cache,
            stream=shared["row_stream"], node=shared["row_node"], parent=self.parent, depth=self.depth,
            prefix_len=self.prefix, out=shared["out"], num_rows=capacity, num_heads=dims.heads, latent_dim=dims.latent,
            rope_dim=dims.rope, num_slots=self.batch.cache.shape[1], scale=dims.scale, dtype=dims.dtype,
            num_rows_device=shared["num_rows"], workspace=shared["workspace"],
            workspace_bytes=shared["workspace"].numel(), **sizes,
        )  # fmt: skip


def shared_buffers(dims: Dims, capacity: int, num_slots: int) -> dict[str, torch.Tensor]:
    """What calls of one CUDA stream may have in common: poisoned rows, output and workspace."""
    rows = {name: poisoned(capacity, dtype=torch.int32) for name in ROW_OUTPUTS}
    rows["row_token"] = poisoned(capacity, dtype=torch.int64)
    sizes = {"num_rows": capacity, "num_heads": dims.heads, "latent_dim": dims.latent, "num_slots": num_slots}
    num_bytes = workspace_bytes("verify_attn", rope_dim=dims.rope, dtype=dims.dtype, **sizes)
    return rows | {
        "row_begin": poisoned(1, dtype=torch.int32),
        "num_rows": count_of(0),
        "out": poisoned(capacity, dims.heads, dims.latent, dtype=dims.dtype),
        "workspace": torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=DEV),
    }


def check_chained(dims: Dims, seed: int, rounds: int = 12, num_cuda_streams: int = 3) -> int:
    """Trees of other sizes behind other prefixes in turn, with the same buffers, so that what lies there when
    verify_attn starts is the last tree's; on several CUDA streams side by side, then by replays of a graph."""
    rng, capacity = random.Random(seed), 33
    pairs = ((0, 1), (127, 33), (300, 5), (1023, 17), (1024, 1), (2050, 33), (64, 2))
    batches = [Batch(dims, [p], [random_tree(n, rng, "mixed")], seed + i) for i, (p, n) in enumerate(pairs)]
    chains = [Chained(batch, capacity) for batch in batches]
    slots = max(batch.slots for batch in batches)
    buffers = [shared_buffers(dims, capacity, slots) for _ in range(num_cuda_streams)]
    queues = [torch.cuda.Stream() for _ in range(num_cuda_streams)]

    def turns_of(order: Iterable[int]) -> list[tuple[int, torch.Tensor]]:  # a capture may not allocate
        return [(which, poisoned(capacity, dims.heads, dims.latent, dtype=dims.dtype)) for which in order]

    def some(index: int, turns: list[tuple[int, torch.Tensor]]) -> None:
        for which, out in turns:
            chains[which].run(buffers[index])
            out.copy_(buffers[index]["out"])

    parts = [turns_of(rng.sample(range(len(chains)), 3)) for _ in range(rounds * num_cuda_streams)]
    torch.cuda.synchronize()
    for i, turns in enumerate(parts):
        with torch.cuda.stream(queues[i % num_cuda_streams]):
            some(i % num_cuda_streams, turns)
    torch.cuda.synchronize()
    results = [turn for turns in parts for turn in turns]
    compare_chained(chains, results, f"{dims} on {num_cuda_streams} CUDA streams")
    in_graph = turns_of([*range(len(chains)), *reversed(range(len(chains)))])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        some(0, in_graph)
    for name in ("out", "workspace"):
        buffers[0][name].fill_(NAN if name == "out" else 0xFF)
    for _ in range(rounds):
        graph.replay()
    torch.cuda.synchronize()
    compare_chained(chains, in_graph, f"{dims} in a graph")
    return len(results) + len(in_graph)


def compare_chained(chains: list[Chained], results: list[tuple[int, torch.Tensor]], name: str) -> None:
    """The rows in use have the bits of the tree alone."""
    for turn, (which, out) in enumerate(results):
        size = chains[which].size
        expect(same_bits(out[:size], chains[which].want), f"{name}: turn {turn}, {size} rows behind {which}")
