"""Checks of verify_attn on CUDA: against float64, and the same bits for a position in any tree, batch, chunk of a
prefill or one-token decode, with any tiling. Unused slots, outputs and workspace are NaN before every launch."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass

import torch
from check_common import BF16, DEV, F32, NAN, count_of, expect, failures, poisoned, same_bits
from op_lib import library, run, workspace_bytes


def tune(log2_rows: int = 0, item_cost: float = -1.0, blocks: int = 1 << 30, uses_wgmma: bool = True) -> None:
    """Replaces the choices of the tensor-core kernels; without arguments, restores them."""
    library().tune_attn(log2_rows, ctypes.c_float(item_cost), blocks, int(uses_wgmma))


@dataclass
class Dims:
    """Heads, latent and rope length, type of queries and cache."""

    heads: int
    latent: int
    rope: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return (self.latent + self.rope) ** -0.5


@dataclass
class Tree:
    """parent[i] < i of one stream's tree."""

    parent: list[int]

    @property
    def depth(self) -> list[int]:
        depth = [0]
        for p in self.parent[1:]:
            depth.append(depth[p] + 1)
        return depth

    def path(self, node: int) -> list[int]:
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]


def random_tree(size: int, rng: random.Random, kind: str) -> Tree:
    """A tree of `size` nodes: a chain, bushy, or mixed; no deeper than 32 unless it is a chain."""
    parent, depth = [-1], [0]
    for i in range(1, size):
        near = [j for j in range(i) if depth[j] < 31]
        parent.append(
            i - 1 if kind == "chain" else rng.choice(near[-5:] if kind == "mixed" and rng.random() < 0.7 else near)
        )
        depth.append(depth[parent[-1]] + 1)
    return Tree(parent)


class Batch:
    """Streams with their caches and queries. cache [S, P, C+R] is NaN wherever no stream may read."""

    def __init__(self, dims: Dims, prefixes: list[int], trees: list[Tree], seed: int, heat: float = 1.0) -> None:
        self.dims, self.prefixes, self.trees = dims, prefixes, trees
        generator = torch.Generator(DEV).manual_seed(seed)
        self.sizes = [len(t.parent) for t in trees]
        self.slots = max(p + n for p, n in zip(prefixes, self.sizes, strict=True)) + 3
        width, rows = dims.latent + dims.rope, sum(self.sizes)
        self.cache = poisoned(len(trees), self.slots, width, dtype=dims.dtype)
        for s, (prefix, size) in enumerate(zip(prefixes, self.sizes, strict=True)):
            keys = torch.randn(prefix + size, width, device=DEV, generator=generator)
            keys *= heat * torch.rand(prefix + size, 1, device=DEV, generator=generator) + 0.3
            self.cache[s, : prefix + size] = keys.to(dims.dtype)
        query = torch.randn(rows, dims.heads, width, device=DEV, generator=generator).to(dims.dtype)
        self.q_latent = query[..., : dims.latent].contiguous()
        self.q_rope = query[..., dims.latent :].contiguous()

    def run(self, used: int | None = None, workspace_rows: int | None = None) -> torch.Tensor:
        """All rows -> out [T, H, C]; `used` rows by a count on the device; a workspace for so many rows."""
        slots = max(self.sizes)
        pad = [[-1] * (slots - n) for n in self.sizes]
        parent = torch.tensor(
            [t.parent + p for t, p in zip(self.trees, pad, strict=True)], dtype=torch.int32, device=DEV
        )
        depth = torch.tensor([t.depth + p for t, p in zip(self.trees, pad, strict=True)], dtype=torch.int32, device=DEV)
        rows = [(s, n) for s, size in enumerate(self.sizes) for n in range(size)]
        stream, node = (torch.tensor(x, dtype=torch.int32, device=DEV) for x in zip(*rows, strict=True))
        prefix = torch.tensor(self.prefixes, dtype=torch.int32, device=DEV)
        return attend(
            self.dims, self.q_latent, self.q_rope, self.cache, stream, node, parent, depth, prefix, used, workspace_rows
        )

    def first_row(self, stream: int) -> int:
        return sum(self.sizes[:stream])

    def part(self, prefix: int, stream: int, slots: list[int], rows: list[int], tree: Tree) -> Batch:
        """One stream whose tree rows are the cache rows `slots` of a stream here; `rows` are the queries."""
        other = Batch.__new__(Batch)
        other.dims, other.prefixes, other.trees, other.sizes = self.dims, [prefix], [tree], [len(slots)]
        other.slots = prefix + len(slots) + 1
        other.cache = poisoned(1, other.slots, self.cache.shape[2], dtype=self.dims.dtype)
        other.cache[0, :prefix] = self.cache[stream, :prefix]
        other.cache[0, prefix : prefix + len(slots)] = self.cache[stream, slots]
        other.q_latent, other.q_rope = self.q_latent[rows].contiguous(), self.q_rope[rows].contiguous()
        return other

    def reference(self) -> torch.Tensor:
        """Dense masked softmax in float64, [T, H, C]."""
        outs = []
        for s, (prefix, tree) in enumerate(zip(self.prefixes, self.trees, strict=True)):
            size, first = len(tree.parent), self.first_row(s)
            keys = self.cache[s, : prefix + size].double()
            mask = torch.full((size, prefix + size), -float("inf"), dtype=torch.float64, device=DEV)
            mask[:, :prefix] = 0
            for i in range(size):
                mask[i, [prefix + j for j in tree.path(i)]] = 0
            query = torch.cat([self.q_latent, self.q_rope], -1)[first : first + size].double()
            scores = torch.einsum("nhd,kd->nhk", query, keys) * self.dims.scale + mask[:, None]
            outs.append(torch.softmax(scores, -1) @ keys[:, : self.dims.latent])
        return torch.cat(outs)


def attend(dims, q_latent, q_rope, cache, stream, node, parent, depth, prefix, used=None, workspace_rows=None):
    """One call of verify_attn with a poisoned output and workspace."""
    out = poisoned(len(stream), dims.heads, dims.latent, dtype=dims.dtype)
    fields = {
        "q_latent": q_latent,
        "q_rope": q_rope,
        "cache": cache,
        "stream": stream,
        "node": node,
        "parent": parent,
        "depth": depth,
        "prefix_len": prefix,
        "out": out,
        "num_rows": len(stream),
        "num_heads": dims.heads,
        "latent_dim": dims.latent,
        "rope_dim": dims.rope,
        "num_streams": cache.shape[0],
        "num_slots": cache.shape[1],
        "num_tree_slots": parent.shape[1],
        "scale": dims.scale,
        "dtype": dims.dtype,
    }
    size = workspace_bytes("verify_attn", **(fields | {"num_rows": workspace_rows or len(stream)}))
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEV)
    count = None if used is None else count_of(used)
    run("verify_attn", **fields, workspace=workspace, workspace_bytes=size, num_rows_device=count)
    return out


def replay(batch: Batch, stream: int, nodes: list[int], out: torch.Tensor, start: int, name: str) -> int:
    """The path `nodes` as one-token decoding, as a prefill, and as one that begins `start` positions earlier."""
    prefix, first = batch.prefixes[stream], batch.first_row(stream)
    want, slots = out[[first + n for n in nodes]], [prefix + n for n in nodes]
    for d, node in enumerate(nodes):
        alone = batch.part(prefix, stream, slots[: d + 1], [first + node], Tree([-1]))
        alone.prefixes, alone.sizes = [prefix + d], [1]  # the path so far has become prefix
        expect(same_bits(alone.run()[0], want[d]), f"{name}: one-token decoding, depth {d}")
    start = min(start, prefix, 1000)
    for begin, rows in (
        (prefix, [first + n for n in nodes]),
        (prefix - start, [first] * start + [first + n for n in nodes]),
    ):
        chain = Tree(list(range(-1, len(rows) - 1)))
        prefill = batch.part(begin, stream, list(range(begin, prefix)) + slots, rows, chain)
        expect(same_bits(prefill.run()[-len(nodes) :], want), f"{name}: prefill from {begin}")
    return len(nodes) * 3


def check_batch(
    batch: Batch, name: str, rng: random.Random, paths: int = 2, variants: bool = True, uses_wgmma: bool = True
) -> tuple[float, int]:
    """All invariances of one batch -> (largest row error, positions compared bit by bit)."""
    out = batch.run()
    error = ((out.double() - (ref := batch.reference())).norm(dim=-1) / ref.norm(dim=-1)).max().item()
    expect(error < (1e-2 if batch.dims.dtype == BF16 else 2e-5), f"{name}: error {error:.1e}")
    compared = 0
    for s, tree in enumerate(batch.trees):
        leaves = sorted(set(range(len(tree.parent))) - set(tree.parent))
        for leaf in rng.sample(leaves, min(paths, len(leaves))):
            compared += replay(
                batch,
                s,
                tree.path(leaf)[-40:] if tree.depth[leaf] < 40 else tree.path(leaf)[:40],
                out,
                rng.choice([1, 7, 40, 300]),
                f"{name} stream {s}",
            )
        if len(batch.trees) > 1:
            first = batch.first_row(s)
            rows, prefix = list(range(first, first + batch.sizes[s])), batch.prefixes[s]
            alone = batch.part(prefix, s, list(range(prefix, prefix + batch.sizes[s])), rows, tree)
            expect(same_bits(alone.run(), out[rows]), f"{name}: stream {s} alone")
            compared += len(rows)
    used = rng.randrange(len(out) + 1)
    partly = batch.run(used=used)
    expect(same_bits(partly[:used], out[:used]) and partly[used:].isnan().all(), f"{name}: {used} rows in use")
    expect(same_bits(batch.run(workspace_rows=max(1, len(out) // 3)), out), f"{name}: smaller workspace")
    if variants:
        check_tilings(batch, out, name, uses_wgmma)
    return error, compared + 2 * len(out)


def check_tilings(batch: Batch, out: torch.Tensor, name: str, uses_wgmma: bool = True) -> None:
    """Every query tile, short and long runs, few blocks: the same bits."""
    for log2_rows in (4, 5, 6):
        for item_cost, blocks in ((0.0, 1 << 30), (1e6, 1 << 30), (3.0, 3), (1e6, 2)):
            tune(log2_rows, item_cost, blocks, uses_wgmma)
            expect(same_bits(batch.run(), out), f"{name}: tile 2^{log2_rows}, item cost {item_cost}, {blocks} blocks")
    tune(uses_wgmma=uses_wgmma)


def check_invalid_rows(dims: Dims) -> None:
    """A row whose stream, node or slot lies outside becomes NaN; the others keep their bits."""
    rng = random.Random(1)
    batch = Batch(dims, [40, 300], [random_tree(9, rng, "mixed"), random_tree(9, rng, "mixed")], 5)
    parent = torch.tensor([t.parent for t in batch.trees], dtype=torch.int32, device=DEV)
    depth = torch.tensor([t.depth for t in batch.trees], dtype=torch.int32, device=DEV)
    stream = torch.arange(2, dtype=torch.int32, device=DEV).repeat_interleave(9)
    node = torch.arange(9, dtype=torch.int32, device=DEV).repeat(2)
    prefix = torch.tensor(batch.prefixes, dtype=torch.int32, device=DEV)

    def call(node=node, stream=stream, prefix=prefix, depth=depth):
        return attend(dims, batch.q_latent, batch.q_rope, batch.cache, stream, node, parent, depth, prefix)

    out, bad_node, bad_depth, bad_prefix = call(), node.clone(), depth.clone(), prefix.clone()
    bad_node[3], bad_depth[1, 4], bad_prefix[1] = 9, -1, batch.slots + 1
    keep = [i for i in range(18) if i not in (3, 13)]
    got = call(node=bad_node, depth=bad_depth)
    expect(got[[3, 13]].isnan().all() and same_bits(got[keep], out[keep]), f"{dims}: invalid node and depth")
    got = call(prefix=bad_prefix)
    expect(got[9:].isnan().all() and same_bits(got[:9], out[:9]), f"{dims}: invalid prefix")
    expect(call(stream=stream.flip(0)).isnan().all(), f"{dims}: rows in no order must not give numbers")


__all__ = [
    "BF16",
    "F32",
    "NAN",
    "Batch",
    "Dims",
    "Tree",
    "check_batch",
    "check_invalid_rows",
    "check_tilings",
    "failures",
    "random_tree",
    "tune",
]
