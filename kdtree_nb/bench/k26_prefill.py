"""Prefill of Kimi K2.6: how near its dense products come to the matmul rate, and that its rows have decoding's bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kdtree_nb.bench.k26_cell import SHARE
from kdtree_nb.bench.lab import Lab, dtype_name
from kdtree_nb.bench.lone_ranks import LoneShare
from kdtree_nb.bench.rank import DTYPE, Rank
from kdtree_nb.bench.runner import Effort, Measurement, compete, require
from kdtree_nb.config import ModelConfig
from kdtree_nb.hf.config import HfConfig
from kdtree_nb.hf.step_work import rank_config, step_work
from kdtree_nb.model import Model
from kdtree_nb.native import ops
from kdtree_nb.speculate.batch import PREFILL_CHUNK_TOKENS
from kdtree_nb.speculate.drafting import chain_trees

PREFILL_TOKENS = 8192
"""Length of the text."""

TOLERANCE = 2e-2
"""Largest difference of two BF16 products over the largest value."""

NUM_SAMPLED = 16
"""Rows that are compared with steps of one row, besides the first and the last of some chunks."""

MAX_ROUNDS = 5
"""Samples of a whole prefill, which takes seconds."""


class Product(NamedTuple):
    """A dense product of a layer: its part, and its sizes."""

    part: str
    num_in: int
    num_out: int


def dense_products(config: ModelConfig) -> list[Product]:
    """Those of a layer that every token takes: the latents, queries, attention's output, and dense and shared MLP."""
    D, H, S = config.hidden_size, config.num_attention_heads, config.shared_intermediate_size
    rows = config.qk_nope_head_dim + config.qk_rope_head_dim
    queries = [Product("q_b", config.q_lora_rank, H * rows)] if config.q_lora_rank else []
    first = config.q_lora_rank or H * rows
    return [
        Product("q_kv_a", D, first + config.kv_lora_rank + config.qk_rope_head_dim),
        *queries,
        Product("o_proj", H * config.v_head_dim, D),
        Product("dense gate_up", D, 2 * config.intermediate_size),
        Product("dense down", config.intermediate_size, D),
        Product("shared gate_up", D, 2 * S),
        Product("shared down", S, D),
    ]


def products(lab: Lab, config: HfConfig, num_ranks: int, num_tokens: int, effort: Effort) -> list[Measurement]:
    """`k26_prefill_product/native` and `…/torch`: each dense product of a whole layer and of one rank's share, of all
    tokens at once and of as many as the engine takes at a time. matmul_s of the params: at the measured matmul rate."""
    results = []
    for tp in dict.fromkeys((1, num_ranks)):
        for product in dense_products(rank_config(config, tp).model):
            weight = lab.randn(product.num_out, product.num_in, dtype=DTYPE).mul_(product.num_in**-0.5)
            packed = ops.pack_linear(weight)
            for rows in dict.fromkeys((num_tokens, min(num_tokens, PREFILL_CHUNK_TOKENS))):
                results += _product(lab, product, weight, packed, rows, tp, effort)
            del weight, packed
    return results


def _product(
    lab: Lab, product: Product, weight: torch.Tensor, packed: ops.PackedLinear, rows: int, tp: int, effort: Effort
) -> list[Measurement]:  # fmt: skip
    inputs = [lab.randn(rows, product.num_in, dtype=DTYPE) for _ in range(2)]
    want, got = torch.mm(inputs[0], weight.t()), ops.linear(inputs[0], packed)
    agree = (want - got).abs().max() <= TOLERANCE * want.abs().max()
    require(bool(agree), "k26_prefill_product", f"{product.part} to {TOLERANCE} of the largest value")
    contenders = {
        "torch": [lambda x=x: torch.mm(x, weight.t(), out=want) for x in inputs],
        "native": [lambda x=x: ops.linear(x, packed) for x in inputs],
    }
    flops = 2 * rows * product.num_in * product.num_out
    num_bytes = 2 * (product.num_in * product.num_out + rows * (product.num_in + product.num_out))
    place = {"tp": tp, "part": product.part, "rows": rows, "N": product.num_out, "K": product.num_in}
    work = lab.work(num_bytes, flops, DTYPE) | {"matmul_s": flops / lab.matmuls[DTYPE].median}
    return lab.compete("k26_prefill_product", contenders, effort, place | work)


class Prefill:
    """The prefill of a random text by one rank, cut as the engine cuts it; fewer tokens where the cache has no room.

    model: of the rank, default: `alone`
    """

    def __init__(self, rank: Rank, num_tokens: int = PREFILL_TOKENS, model: Model | None = None) -> None:
        self.rank, self.num_tokens = rank, min(num_tokens, rank.cache.num_slots - 1)
        self.model = model or rank.alone
        self.chunk = min(PREFILL_CHUNK_TOKENS, math.ceil(self.num_tokens / 3))
        vocab_size, generator = rank.model.config.vocab_size, torch.Generator().manual_seed(3)
        self.tokens = torch.randint(vocab_size, (self.num_tokens,), generator=generator).tolist()
        self.begins = range(0, self.num_tokens, self.chunk)
        self.trees = [chain_trees([self.tokens[b : b + self.chunk]], rank.device) for b in self.begins]

    def forward(self, index: int, need_logits: bool = False) -> torch.Tensor | None:
        """A chunk into the cache, behind those before it."""
        rank, tree = self.rank, self.trees[index]
        rank.prefix_len.fill_(self.begins[index])
        rows = ops.tree_rows_padded(tree, rank.prefix_len)
        return self.model.forward(rows, tree, rank.cache, rank.prefix_len, need_logits=need_logits)

    def __call__(self) -> None:
        for index in range(len(self.begins)):
            self.forward(index)

    def measure(self, lab: Lab, effort: Effort) -> list[Measurement]:
        """`k26_prefill/native`: wall seconds of all of it, launched chunk by chunk; of several ranks also `…/share`."""
        config, model = self.rank.config, self.rank.config.model
        num_bytes = flops = floor_s = 0.0
        for begin, tree in zip(self.begins, self.trees, strict=True):
            rows = tree.token.shape[1]
            work = step_work(config, rows, begin)
            read = work.num_bytes - work.bytes_by_part["head"]  # no logits
            done = work.flops - 2.0 * rows * model.hidden_size * model.vocab_size
            num_bytes, flops, floor_s = num_bytes + read, flops + done, floor_s + lab.floor_s(read, done, DTYPE)
        params = {
            "tp": self.rank.num_ranks, "layers": model.num_hidden_layers, "hidden": model.hidden_size,
            "tokens": self.num_tokens, "chunk": self.chunk, "dtype": dtype_name(DTYPE), "bytes": int(num_bytes),
            "flops": int(flops), "floor_s": floor_s, "matmul_s": flops / lab.matmuls[DTYPE].median,
        }  # fmt: skip
        rounds = min(effort.num_rounds, MAX_ROUNDS)
        contenders = {"native": lab.wall(self)}
        if self.rank.num_ranks > 1:
            share = self.rank.with_ranks(LoneShare(self.rank.num_ranks, self.rank.model.ranks.rank))
            contenders[SHARE] = lab.wall(Prefill(self.rank, self.num_tokens, share))
        return compete("k26_prefill", contenders, rounds, params)

    def exactness(self) -> list[Measurement]:
        """`k26_prefill_rows/native`: of sampled rows, how many differ in a bit from a step of that row alone, in their
        logits or in what they leave in the cache of any layer."""
        sampled, changed = self._sampled(), 0
        logits, cached = {}, self.rank.cache.data[:, 0]
        for index, begin in enumerate(self.begins):
            of_chunk = self.forward(index, need_logits=True)
            for position in (p for p in sampled if begin <= p < begin + self.chunk):
                logits[position] = of_chunk[position - begin].clone()
        for position in sampled:
            filled = cached[:, position].clone()
            tree = chain_trees([self.tokens[position : position + 1]], self.rank.device)
            self.rank.prefix_len.fill_(position)
            rows = ops.tree_rows_padded(tree, self.rank.prefix_len)
            alone = self.model.forward(rows, tree, self.rank.cache, self.rank.prefix_len)
            same = torch.equal(alone[0], logits[position]) and torch.equal(cached[:, position], filled)
            changed += not same
            cached[:, position] = filled
        params = {"tp": self.rank.num_ranks, "tokens": self.num_tokens, "rows": len(sampled), "changed_rows": changed,
                  "dtype": dtype_name(DTYPE)}  # fmt: skip
        return [Measurement("k26_prefill_rows/native", [len(sampled)], params, "row")]

    def _sampled(self) -> Sequence[int]:
        """Positions: the ends of the first, a middle and the last chunk, and random ones."""
        edges = {0, self.begins[len(self.begins) // 2], self.num_tokens - 1}
        edges |= {position - 1 for position in edges if position}
        drawn = torch.randint(self.num_tokens, (NUM_SAMPLED,), generator=torch.Generator().manual_seed(4))
        return sorted(edges | set(drawn.tolist()))
