"""Random trees and prefix lengths, for benchmarks that count what changes."""

from __future__ import annotations

import random

import torch

from kdtree_nb.tree import DraftTree

BORDERS = (0, 1, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024)
"""Where tiles and chunks begin; a case lies near one of them or anywhere."""

LONG_BORDERS = (2047, 2048, 4096, 8191, 8192, 16384, 32767, 32768, 65536, 131071)
SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 33, 64, 65)
KINDS = ("mixed", "bushy", "chain")


def random_prefix_len(rng: random.Random, longest: int) -> int:
    """0 … longest, in two cases of three within 2 of a border."""
    borders = [b for b in BORDERS + LONG_BORDERS if b <= longest]
    near = rng.choice(borders) + rng.randint(-2, 2) if rng.random() < 2 / 3 else rng.randint(0, longest)
    return min(max(near, 0), longest)


def random_parents(rng: random.Random, num_nodes: int, longest_chain: int = 17) -> list[int]:
    """Parents of a tree of some kind; the root's is -1, every other is below its node."""
    kind = rng.choice(KINDS)
    if kind == "chain":
        return [max(-1, i - 1) if i <= longest_chain else rng.randrange(i) for i in range(num_nodes)]
    lowest = {"mixed": lambda i: rng.randrange(i), "bushy": lambda i: rng.randrange(max(1, i // 4))}[kind]
    return [-1, *(lowest(i) for i in range(1, num_nodes))]


def trees_of(
    parents: list[list[int]], rng: random.Random, vocab_size: int, device: torch.device
) -> DraftTree:  # fmt: skip
    """A batch of trees with these parents and random tokens; fillers behind each."""
    num_slots, num_words = max(map(len, parents)), -(-max(map(len, parents)) // 64)
    fields: dict[str, list] = {name: [] for name in ("token", "parent", "depth", "log_prob", "bits")}
    for parent in parents:
        depth, bits = [], []
        for node, above in enumerate(parent):
            depth.append(depth[above] + 1 if node else 0)
            bits.append((bits[above] if node else 0) | 1 << node)
        fill = num_slots - len(parent)
        fields["token"].append([rng.randrange(vocab_size) for _ in parent] + [-1] * fill)
        fields["parent"].append(parent + [-1] * fill)
        fields["depth"].append(depth + [-1] * fill)
        fields["log_prob"].append([-float(d) for d in depth] + [float("-inf")] * fill)
        fields["bits"].append([_words(b, num_words) for b in bits] + [[0] * num_words] * fill)
    types = (torch.int64, torch.int32, torch.int32, torch.float64, torch.int64)
    tensors = [torch.tensor(f, dtype=t, device=device) for f, t in zip(fields.values(), types, strict=True)]
    return DraftTree(*tensors, torch.tensor([len(p) for p in parents], dtype=torch.int32, device=device))


def _words(bits: int, num_words: int) -> list[int]:
    """The bits in signed 64-bit words."""
    words = [bits >> (64 * i) & (2**64 - 1) for i in range(num_words)]
    return [w - 2**64 if w >> 63 else w for w in words]


def random_path(rng: random.Random, parent: list[int]) -> list[int]:
    """The nodes from the root to a random node."""
    node, path = rng.randrange(len(parent)), []
    while node >= 0:
        path.append(node)
        node = parent[node]
    return path[::-1]
