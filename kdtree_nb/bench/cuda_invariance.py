"""Counts: are rows of trees the same bits as the same rows computed one by one, in the order of AR decoding?

Native operations, where the count of changed rows must be 0, and torch's matmuls in their place. A count is kept as a
measurement in rows (or tokens), of which `changed_rows` (or `changed_tokens`) in its params are the changed ones.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import torch
from torch import Tensor

from kdtree_nb.bench import setting
from kdtree_nb.bench.cuda_attention import KEY_UNIT, materialised
from kdtree_nb.bench.lab import Lab, dtype_name
from kdtree_nb.bench.library_matmul import LibraryModel
from kdtree_nb.bench.random_cases import SIZES, random_parents, random_path, random_prefix_len, trees_of
from kdtree_nb.bench.row_changes import changed_rows, changed_tokens, prefill, random_texts
from kdtree_nb.bench.runner import Effort, Measurement
from kdtree_nb.drafters import Random
from kdtree_nb.model import LatentCache, Model
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree

DTYPES = (torch.float32, torch.bfloat16)
MODELS = ("tiny", "tiny2")
LONGEST_TEXT = 1100
HEADS, LATENT_DIM, ROPE_DIM = (8, 64), 512, 64
LONGEST_PREFIX = 131_072
LINEAR_SHAPES = ((7168, 2048), (2048, 7168))
"""(K, N)."""

SCALE = 192**-0.5


@dataclasses.dataclass
class Count:
    """Rows compared in some cases, and how many of them differ in some bit."""

    cases: int = 0
    rows: int = 0
    changed: int = 0

    def add(self, one_by_one: Tensor, together: Tensor) -> None:
        """Rows [n, …] of one case; NaN equals nothing."""
        same = (one_by_one == together).flatten(1).all(1)
        self.rows += len(same)
        self.changed += int((~same).sum())

    def measurement(self, name: str, **params: object) -> Measurement:
        """Of all cases so far."""
        counts = {"cases": self.cases, "rows": self.rows, "changed_rows": self.changed}
        return Measurement(f"invariance/{name}", [self.rows], params | counts, "row")


def invariance(lab: Lab, effort: Effort) -> list[Measurement]:
    """Rows of random trees, prefixes and batches that differ from the same rows one by one. In forwards of the tiny
    models, and in verify_attn and linear at the dimensions of Kimi K2, where torch's matmuls are counted beside."""
    results = []
    for number, dtype in enumerate(DTYPES):
        for name in MODELS:
            results += _forwards(lab, name, dtype, effort.num_cases // 6, number)
        results += _attention(lab, dtype, effort.num_cases // 10, number)
        results += _linear(lab, dtype, effort.num_cases // 15, number)
    native = [m.params for m in results if m.name == "invariance/native"]
    total = {name: sum(p[name] for p in native) for name in ("cases", "rows", "changed_rows")}
    return [*results, Measurement("invariance_total/native", [total["rows"]], total, "row")]


def _forwards(lab: Lab, name: str, dtype: torch.dtype, num_cases: int, seed: int) -> list[Measurement]:
    model, rng, count = setting.model(name, lab.device, dtype), random.Random(seed), Count()
    longest = min(LONGEST_TEXT, model.config.max_position_embeddings - 100)
    text = model.new_cache(1, longest)
    prefill(model, text, [rng.randrange(model.config.vocab_size) for _ in range(longest)])
    for _ in range(num_cases):
        parents = [random_parents(rng, rng.choice(SIZES)) for _ in range(rng.choice((1, 1, 2, 3)))]
        prefixes = [random_prefix_len(rng, longest) for _ in parents]
        tree = trees_of(parents, rng, model.config.vocab_size, lab.device)
        cache, prefix_len = _prefixed(model, text, prefixes, tree.max_budget + 1)
        together = model.forward(ops.tree_rows(tree, prefix_len), tree, cache, prefix_len)
        first_row = 0
        for stream, parent in enumerate(parents):
            path = random_path(rng, parent)
            alone = _decoded(model, text, prefixes[stream], tree.token[stream, path])
            count.add(alone, together[[first_row + node for node in path]])
            first_row += len(parent)
        count.cases += 1
    return [count.measurement("native", what=f"forward of {name}", dtype=dtype_name(dtype))]


def _prefixed(model: Model, text: LatentCache, prefixes: list[int], room: int) -> tuple[LatentCache, Tensor]:
    """A cache whose streams hold the beginnings of the text, and their lengths i32 [S]; the rest is NaN."""
    cache = model.new_cache(len(prefixes), max(prefixes) + room)
    cache.data.fill_(torch.nan)
    for stream, length in enumerate(prefixes):
        cache.data[:, stream, :length] = text.data[:, 0, :length]
    return cache, torch.tensor(prefixes, dtype=torch.int32, device=model.device)


def _decoded(model: Model, text: LatentCache, prefix: int, tokens: Tensor) -> Tensor:
    """Logits f32 [n, V] of tokens i64 [n] decoded one by one behind the beginning of the text."""
    cache, prefix_len = _prefixed(model, text, [prefix], len(tokens))
    logits = []
    for token in tokens:
        tree = _root(token.view(1))
        logits.append(model.forward(ops.tree_rows(tree, prefix_len), tree, cache, prefix_len))
        prefix_len += 1
    return torch.cat(logits)


def _root(token: Tensor) -> DraftTree:
    nothing = torch.zeros(1, 0, 0, device=token.device)
    return ops.tree_build(nothing, nothing.long(), token, 0)


def _attention(lab: Lab, dtype: torch.dtype, num_cases: int, seed: int) -> list[Measurement]:
    rng, native, library = random.Random(seed), Count(), Count()
    streams = 3
    keys = lab.randn(streams, LONGEST_PREFIX + max(SIZES) + KEY_UNIT, LATENT_DIM + ROPE_DIM, dtype=dtype)
    moved = keys.clone()
    for case in range(num_cases):
        num_streams, heads = rng.choice((1, 1, 2, streams)), rng.choice(HEADS)
        longest = LONGEST_PREFIX if case % 8 == 0 else min(10_000, LONGEST_PREFIX)
        prefixes = [random_prefix_len(rng, longest) for _ in range(num_streams)]
        parents = [random_parents(rng, rng.choice(SIZES)) for _ in prefixes]
        batch = _AttentionBatch(lab, keys[:num_streams], heads, prefixes, parents, rng)
        together = batch.native()
        for stream in range(num_streams):
            batch.compare(stream, moved[:num_streams], together, native, library)
        native.cases, library.cases = native.cases + 1, library.cases + 1
    params = {"what": "attention", "dtype": dtype_name(dtype), "longest_prefix": LONGEST_PREFIX}
    return [native.measurement("native", **params), library.measurement("torch", **params)]


class _AttentionBatch:
    """Trees of several streams over `keys` [S, P, C+R], whose slots behind the prefixes hold the rows of the trees."""

    def __init__(
        self, lab: Lab, keys: Tensor, heads: int, prefixes: list[int], parents: list[list[int]], rng: random.Random
    ) -> None:  # fmt: skip
        self.keys, self.prefixes, self.parents, self.rng = keys, prefixes, parents, rng
        self.tree = trees_of(parents, rng, 1000, lab.device)
        self.prefix_len = torch.tensor(prefixes, dtype=torch.int32, device=lab.device)
        self.rows = ops.tree_rows(self.tree, self.prefix_len)
        num_rows, heat = sum(map(len, parents)), rng.choice((0.1, 1.0, 4.0))
        self.q_latent = lab.randn(num_rows, heads, LATENT_DIM, dtype=keys.dtype).mul_(heat)
        self.q_rope = lab.randn(num_rows, heads, ROPE_DIM, dtype=keys.dtype).mul_(heat)

    def native(self) -> Tensor:
        """[T, H, C] of all rows together."""
        return ops.verify_attn(self.q_latent, self.q_rope, self.keys, self.rows, self.tree, self.prefix_len, SCALE)

    def compare(self, stream: int, moved: Tensor, together: Tensor, native: Count, library: Count) -> None:
        """Decode one path of a stream in `moved`, which equals `keys` before and after: there its rows lie in order."""
        prefix, path = self.prefixes[stream], random_path(self.rng, self.parents[stream])
        first_row = sum(len(p) for p in self.parents[:stream])
        slots = slice(prefix, prefix + len(path))
        moved[stream, slots] = self.keys[stream, [prefix + node for node in path]]
        alone = [self._alone(moved[stream][None], prefix + i, first_row + node) for i, node in enumerate(path)]
        native.add(torch.cat(alone), together[[first_row + node for node in path]])
        one_by_one = [
            self._library(moved[stream], prefix + i, [first_row + node], torch.ones(1, 1, dtype=torch.bool))
            for i, node in enumerate(path)
        ]
        rows = list(range(first_row, first_row + len(self.parents[stream])))
        in_tree = self._library(self.keys[stream], prefix, rows, self.tree.visibility(stream))
        library.add(torch.cat(one_by_one), in_tree[path])
        moved[stream, slots] = self.keys[stream, slots]

    def _alone(self, cache: Tensor, prefix: int, row: int) -> Tensor:
        tree = _root(torch.ones(1, dtype=torch.int64, device=cache.device))
        prefix_len = torch.tensor([prefix], dtype=torch.int32, device=cache.device)
        q_latent, q_rope = self.q_latent[row : row + 1], self.q_rope[row : row + 1]
        return ops.verify_attn(q_latent, q_rope, cache, ops.tree_rows(tree, prefix_len), tree, prefix_len, SCALE)

    def _library(self, keys: Tensor, prefix: int, rows: list[int], visible: Tensor) -> Tensor:
        """[n, H, C] of rows that see the prefix and, of what lies behind, what is visible bool [n, n]."""
        heads, n = self.q_latent.shape[1], len(rows)
        slots = -(-(prefix + n) // KEY_UNIT) * KEY_UNIT
        hidden = torch.ones(n, slots - prefix, dtype=torch.bool)
        hidden[:, :n] = ~visible
        query = torch.cat([self.q_latent[rows], self.q_rope[rows]], -1) * SCALE
        out = materialised(
            query.flatten(0, 1), keys[:slots], hidden.repeat_interleave(heads, 0).to(keys.device), LATENT_DIM
        )
        return out.view(n, heads, LATENT_DIM)


def _linear(lab: Lab, dtype: torch.dtype, num_cases: int, seed: int) -> list[Measurement]:
    rng, results = random.Random(seed), []
    for K, N in LINEAR_SHAPES:
        weight = lab.randn(N, K, dtype=dtype).mul_(K**-0.5)
        packed = ops.pack_linear(weight)
        products: dict[str, Callable[[Tensor], Tensor]] = {
            "native": lambda x, p=packed: ops.linear(x, p),
            "torch": lambda x, w=weight: torch.mm(x, w.t()),
        }
        counts = {name: Count() for name in products}
        for _ in range(num_cases):
            x = lab.randn(rng.choice(SIZES[1:]), K, dtype=dtype)
            for name, product in products.items():
                counts[name].add(torch.cat([product(row[None]) for row in x]), product(x))
                counts[name].cases += 1
        params = {"what": f"linear {K} to {N}", "dtype": dtype_name(dtype)}
        results += [count.measurement(name, **params) for name, count in counts.items()]
    return results


def invariance_tokens(lab: Lab, effort: Effort) -> list[Measurement]:
    """Rows of logits, choices and generated tokens that differ between one-row forwards and trees of 17 rows. On random
    texts, in the tiny models and in the same models with torch's matmuls."""
    results = []
    num_texts, num_tokens = max(1, effort.num_tokens // 64), effort.num_tokens // 2
    for dtype in DTYPES:
        for name in MODELS:
            model = setting.model(name, lab.device, dtype)
            texts = random_texts(model, num_texts, num_tokens + 1)
            for contender, decoder in {"native": model, "torch": LibraryModel(model)}.items():
                rows = [changed_rows(decoder, text[:1], text[1:]) for text in texts]
                tokens = [changed_tokens(decoder, text[:16], num_tokens, Random(seed=1)) for text in texts]
                params = {
                    "model": name, "dtype": dtype_name(dtype), "texts": num_texts,
                    "rows": sum(r.num_rows for r in rows), "changed_rows": sum(r.num_changed for r in rows),
                    "changed_choices": sum(r.num_choices for r in rows),
                    "largest": max(r.largest for r in rows), "tokens": sum(t.num_tokens for t in tokens),
                    "changed_tokens": sum(t.num_changed for t in tokens),
                    "changed_texts": sum(t.first_changed is not None for t in tokens),
                }  # fmt: skip
                results.append(Measurement(f"invariance_tokens/{contender}", [params["tokens"]], params, "token"))
    return results
