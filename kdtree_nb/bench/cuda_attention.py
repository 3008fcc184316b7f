"""Benchmark of verify_attn on a GPU at the dimensions of Kimi K2: heads of one rank of eight, or all 64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kdtree_nb.bench import setting
from kdtree_nb.bench.lab import Calls, Lab
from kdtree_nb.bench.runner import Effort, Measurement, require
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree

LATENT_DIM, ROPE_DIM = 512, 64
HEADS = (8, 64)
PREFIX_LENS = (1024, 8192, 32768, 131072)
NODES = (1, 8, 16, 33, 65)
KEY_UNIT = 64
"""Caches have a multiple of this many slots, so that cuBLAS is not on its unaligned path."""

ROTATED_BYTES = 170_000_000
"""Caches in turn: more than the L2 cache holds."""

MAX_COPIES = 64
SCALE = 192**-0.5
DTYPE = torch.bfloat16


def materialised(query: Tensor, cache: Tensor, hidden: Tensor, latent_dim: int, lean: bool = False) -> Tensor:
    """Attention in torch: query float [T*H, C+R] already scaled, cache [P, C+R], hidden bool [T*H, n] which of the last
    n keys are not seen -> [T*H, C]. lean: probabilities are written in the dtype at once, not in FP32 first."""
    scores = torch.mm(query, cache.t())
    scores[:, -hidden.shape[1] :].masked_fill_(hidden, -torch.inf)
    probability = scores.softmax(-1) if lean else scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.mm(probability, cache[:, :latent_dim])


class Cell:
    """One tree of `nodes` nodes behind `prefix_len` cached tokens, and several caches of random keys."""

    def __init__(self, lab: Lab, heads: int, nodes: int, prefix_len: int, keys: Tensor) -> None:
        self.heads, self.nodes, self.prefix_len = heads, nodes, prefix_len
        slots = -(-(prefix_len + nodes) // KEY_UNIT) * KEY_UNIT
        num_copies = min(MAX_COPIES, math.ceil(ROTATED_BYTES / (slots * keys.shape[1] * keys.element_size())))
        num_copies = max(1, min(num_copies, len(keys) // slots))
        self.caches = [keys[i * slots : (i + 1) * slots][None] for i in range(num_copies)]
        tree = setting.random_tree(nodes, torch.tensor([1]), 4096)
        self.mean_depth = float(tree.depth.double().mean())
        self.hidden = self._hidden(tree, slots).to(lab.device)
        fields = (tree.token, tree.parent, tree.depth, tree.log_prob, tree.ancestor_bits, tree.num_nodes)
        self.tree = DraftTree(*(f.to(lab.device) for f in fields))
        self.prefix = torch.tensor([prefix_len], dtype=torch.int32, device=lab.device)
        self.rows = ops.tree_rows(self.tree, self.prefix)
        self.q_latent = lab.randn(nodes, heads, LATENT_DIM, dtype=DTYPE)
        self.q_rope = lab.randn(nodes, heads, ROPE_DIM, dtype=DTYPE)
        self.query = (torch.cat([self.q_latent, self.q_rope], -1).float() * SCALE).to(DTYPE).flatten(0, 1)

    def _hidden(self, tree: DraftTree, slots: int) -> Tensor:
        visible = torch.zeros(self.nodes, slots - self.prefix_len, dtype=torch.bool)
        visible[:, : self.nodes] = tree.visibility(0)
        return ~visible.repeat_interleave(self.heads, 0)

    def native(self, cache: Tensor) -> Tensor:
        """The operation."""
        return ops.verify_attn(self.q_latent, self.q_rope, cache, self.rows, self.tree, self.prefix, SCALE)

    def torch(self, cache: Tensor, lean: bool) -> Tensor:
        """The peers."""
        return materialised(self.query, cache[0], self.hidden, LATENT_DIM, lean)

    def contenders(self) -> dict[str, Calls]:
        """All over all caches, after a check that they agree."""
        want, got = self.torch(self.caches[0], False), self.native(self.caches[0]).flatten(0, 1)
        agree = (want - got).abs().max() <= 3e-2 * want.abs().max()
        require(bool(agree), "verify_attn_sweep", "the attended latents to 3 % of the largest value")
        return {
            "torch masked": [lambda c=c: self.torch(c, False) for c in self.caches],
            "torch lean": [lambda c=c: self.torch(c, True) for c in self.caches],
            "native": [lambda c=c: self.native(c) for c in self.caches],
        }

    def params(self, lab: Lab) -> dict[str, object]:
        """Of the measurements: bytes are the keys that are seen, once; flops those of the keys that each row sees."""
        width = LATENT_DIM + ROPE_DIM
        flops = 2 * self.nodes * self.heads * (self.prefix_len + self.mean_depth + 1) * (width + LATENT_DIM)
        num_bytes = (self.prefix_len + self.nodes) * width + self.nodes * self.heads * (width + LATENT_DIM)
        sizes = {"heads": self.heads, "rows": self.nodes, "prefix_len": self.prefix_len}
        dims = {"latent_dim": LATENT_DIM, "rope_dim": ROPE_DIM}
        return sizes | dims | lab.work(num_bytes * DTYPE.itemsize, flops, DTYPE)


def verify_attn_sweep(lab: Lab, effort: Effort) -> list[Measurement]:
    """Attention of tree rows over long prefixes in BF16, by graph replays over caches in turn. Contenders: matmul,
    masked softmax and matmul in torch with probabilities in FP32 before they are rounded, or rounded at once
    (lean), and the native operation."""
    longest = max(PREFIX_LENS) + max(NODES) + KEY_UNIT
    keys = lab.randn(2 * longest, LATENT_DIM + ROPE_DIM, dtype=DTYPE).mul_(0.7)
    results = []
    for prefix_len in effort.some(PREFIX_LENS[::-1]):
        for heads in HEADS:
            for nodes in effort.some(NODES):
                cell = Cell(lab, heads, nodes, prefix_len, keys)
                results += lab.compete("verify_attn_sweep", cell.contenders(), effort, cell.params(lab))
    return results
