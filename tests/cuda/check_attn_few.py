"""Checks of verify_attn on Hopper where there are few queries: the kernel for them has the bits of the one for many."""

from __future__ import annotations

import random

import torch
from check_attn import Batch, Dims, Tree, attend, check_few_tilings, random_tree, tune
from check_common import DEV, expect, same_bits


def check_few(heads: int, prefix: int, rows: int, kind: str, seed: int) -> int:
    """One tree behind a prefix by both kernels, all of its rows and some -> positions compared."""
    dims = Dims(heads, 512, 64, torch.bfloat16)
    rng = random.Random(seed)
    batch = Batch(dims, [prefix], [random_tree(rows, rng, kind)], seed, heat=rng.choice([0.1, 1.0, 4.0]))
    name = f"{heads} heads, prefix {prefix}, {rows} rows, {kind}"
    tune(uses_few=False)
    want = batch.run(expect_few=False)
    tune(uses_few=True)
    expect(not want.isnan().any() and same_bits(batch.run(expect_few=True), want), f"{name}: few queries, or many")
    used = rng.randrange(rows + 1)
    partly = batch.run(used=used, expect_few=True)
    expect(same_bits(partly[:used], want[:used]) and partly[used:].isnan().all(), f"{name}: {used} rows in use")
    expect(same_bits(batch.run(workspace_rows=(rows + 1) // 2, expect_few=True), want), f"{name}: smaller workspace")
    check_few_tilings(batch, want, name)
    tune()
    return 4 * rows


def check_few_deep(prefix: int, seed: int) -> int:
    """The last node of a chain, and of a tree that is almost one, as the only row: its path passes leaves."""
    compared = 0
    for parent in (list(range(-1, 127)), [-1, 0, 0, *range(2, 127)]):
        whole = Batch(Dims(8, 512, 64, torch.bfloat16), [prefix], [Tree(parent)], seed)
        tune(uses_few=False)
        want = whole.run(expect_few=False)
        tune(uses_few=True)
        expect(same_bits(whole.run(expect_few=True), want), f"prefix {prefix}: 128 rows of a deep tree")
        ints = {"dtype": torch.int32, "device": DEV}
        fields = [torch.tensor(x, **ints) for x in ([0], [127], [parent], [whole.trees[0].depth], [prefix])]
        queries = [q[-1:].contiguous() for q in (whole.q_latent, whole.q_rope)]
        last = attend(whole.dims, *queries, whole.cache, *fields, expect_few=True)
        expect(same_bits(last, want[-1:]), f"prefix {prefix}: the last row of a deep tree alone")
        compared += 129
    tune()
    return compared


def check_few_invalid(heads: int, seed: int) -> None:
    """Rows that are not valid become NaN, the others keep their bits; so does everything where the prefix is not."""
    rng = random.Random(seed)
    batch = Batch(Dims(heads, 512, 64, torch.bfloat16), [300], [random_tree(8, rng, "mixed")], seed)
    parent = torch.tensor([batch.trees[0].parent], dtype=torch.int32, device=DEV)
    depth = torch.tensor([batch.trees[0].depth], dtype=torch.int32, device=DEV)
    stream, node = torch.zeros(8, dtype=torch.int32, device=DEV), torch.arange(8, dtype=torch.int32, device=DEV)
    prefix = torch.tensor([300], dtype=torch.int32, device=DEV)

    def call(stream=stream, node=node, depth=depth, prefix=prefix, used=None):
        queries = (batch.q_latent, batch.q_rope, batch.cache)
        return attend(batch.dims, *queries, stream, node, parent, depth, prefix, used, expect_few=True)

    tune(uses_few=True)
    out, bad_stream, bad_node, bad_depth = call(), stream.clone(), node.clone(), depth.clone()
    bad_stream[0], bad_stream[5], bad_node[3], bad_depth[0, 7] = 1, -1, 8, -1
    bad, good = [0, 3, 5, 7], [1, 2, 4, 6]
    got = call(bad_stream, bad_node, bad_depth)
    expect(got[bad].isnan().all() and same_bits(got[good], out[good]), f"{heads} heads: few queries, invalid rows")
    got = call(bad_stream, bad_node, bad_depth, used=5)
    expect(got[[0, 3, 5, 6, 7]].isnan().all(), f"{heads} heads: few queries, invalid rows and rows not in use")
    expect(same_bits(got[[1, 2, 4]], out[[1, 2, 4]]), f"{heads} heads: few queries, rows beside invalid ones")
    for value in (-1, batch.slots + 1):
        bad_prefix = torch.full_like(prefix, value)
        expect(call(prefix=bad_prefix).isnan().all(), f"{heads} heads: few queries, prefix {value}")
    tune()


def check_few_all(prefixes: list[int], seed: int) -> int:
    """Rows 1 to 8 behind each prefix, deep trees behind some -> positions compared. Nothing is done off Hopper."""
    if torch.cuda.get_device_capability()[0] != 9:
        return 0
    compared = 0
    for i, prefix in enumerate(prefixes):
        for rows in range(1, 9):
            heads = (8, 64, 8, 16, 3)[(i + rows) % 5]
            compared += check_few(heads, prefix, rows, ("mixed", "chain", "bushy")[(i + rows) % 3], seed + 8 * i + rows)
    for heads in (8, 64):
        check_few_invalid(heads, seed)
    for prefix in prefixes[::5]:
        compared += check_few_deep(prefix, seed)
    return compared
