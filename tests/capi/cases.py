"""One small call of every operation, as keyword arguments of `capi.Library`, and what numpy says it gives. No torch."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np

from kdtree_nb import reference
from kdtree_nb.kdtr import Bf16

BATCH, DEPTH, CANDIDATES, BUDGET = 3, 5, 12, 33
NUM_SLOTS = BUDGET + 1
LATENT, ROPE, HEADS, CACHE_SLOTS = 48, 16, 3, 90
DTYPES = ("f32", "bf16")


def wide(value):
    """float64 of an array of either float type."""
    return (value.float32() if isinstance(value, Bf16) else value).astype(np.float64)


class Cases:
    """The arguments of each operation on one device: `cases[op]`, drawn again whenever they are asked for."""

    def __init__(self, library, device, dtype: str) -> None:
        self.library, self.device, self.dtype = library, device, dtype
        self.rounding = reference.exact if dtype == "f32" else reference.round_bf16
        self.tolerance = 1e-5 if dtype == "f32" else 2e-2

    def __getitem__(self, op: str) -> dict:
        self.rng = np.random.default_rng(20261)
        return getattr(self, op)()

    def floats(self, *shape: int, scale: float = 1.0):
        values = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        return values if self.dtype == "f32" else Bf16.round(values)

    def packed(self, weight):
        return self.library.pack_linear(weight=weight, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype=np.int32):
        return self.rng.integers(low, high, shape).astype(dtype)

    # --- arguments -------------------------------------------------------------------------------------------------

    def embed(self):
        return {"weight": self.floats(50, 40), "token": self.integers(0, 50, 7, dtype=np.int64)}

    def rms_norm(self):
        return {"x": self.floats(7, 40), "weight": self.floats(40), "eps": 1e-6}

    def pack_linear(self):
        return {"weight": self.floats(2, 35, 70)}

    def dequantize_int4(self):
        weight = self.integers(-(2**31), 2**31, 3, 35, 12)
        return {
            "weight": weight,
            "scale": self.floats(3, 35, 3),
            "num_in": 96,
            "group_size": 32,
            "out_dtype": self.dtype,
        }

    def pack_int4(self):
        scale = Bf16.round(self.rng.standard_normal((2, 70, 2)).astype(np.float32))
        weight = self.integers(-(2**31), 2**31, 2, 70, 16)
        return {"weight": weight, "scale": scale, "num_in": 128, "group_size": 64}

    def linear(self):
        self.weight = self.floats(2, 35, 70, scale=0.2)
        return {"x": self.floats(9, 2, 70), "packed": self.packed(self.weight), "num_out": 35,
                "residual": self.floats(9, 2, 35)}  # fmt: skip

    def rope(self):
        table = reference.rope_table(100, ROPE, 10000.0).astype(np.float32)
        return {"x": self.floats(7, HEADS, ROPE), "cos_sin": table, "position": self.integers(0, 100, 7)}

    def swiglu(self):
        return {"gate_up": self.floats(7, 2 * 33)}

    def residual_add(self):
        return {"x": self.floats(7, 40), "y": self.floats(7, 40)}

    def add_partials(self):
        return {"partials": self.rng.standard_normal((4, 7, 40)).astype(np.float32), "residual": self.floats(7, 40)}

    def argmax(self):
        logits = self.rng.standard_normal((6, 301)).astype(np.float32)
        logits[1, 5] = logits[1, 77] = 9.0
        logits[2, 3] = np.nan
        return {"logits": logits}

    def sample(self):
        f32, i32 = np.float32, np.int32
        return {"logits": self.rng.standard_normal((6, 301)).astype(f32), "stream": np.array([0, 0, 1, 1, 2, 2], i32),
                "position": np.array([0, 5, 5, 900, 1, 2], i32), "temperature": np.array([1.0, 0.7, 0.0], f32),
                "top_k": np.array([0, 20, 0], i32), "top_p": np.array([1.0, 0.9, 1.0], f32),
                "seed": np.array([1, -2, 3])}  # fmt: skip

    def sample_among(self):
        """Four words a row, of four parts of a vocabulary of 200; each row's largest logit among them."""
        arguments = {name: value for name, value in self.sample().items() if name != "logits"}
        logits = self.rng.standard_normal((6, 4)).astype(np.float32)
        ids = self.integers(0, 50, 6, 4, dtype=np.int64) + 50 * np.arange(4)
        return {"words": reference.words_of(logits, ids), "largest": logits.max(axis=1), "vocab_size": 200, **arguments}

    def moe_route(self):
        return {"logits": self.rng.standard_normal((7, 8)).astype(np.float32),
                "bias": self.rng.standard_normal(8).astype(np.float32), "top_k": 3, "scoring": "sigmoid",
                "renormalize": True, "scaling_factor": 2.5}  # fmt: skip

    def moe_experts(self):
        shapes = ((8, 2 * 40, 64), (8, 64, 40), (1, 2 * 24, 64), (1, 64, 24))
        self.experts = reference.Experts(*(self.floats(*shape, scale=0.2) for shape in shapes))
        chosen = np.sort(np.argsort(self.rng.random((7, 8)), axis=1)[:, :2], axis=1).astype(np.int32)
        return {"x": self.floats(7, 64), "expert_id": chosen, "weight": self.rng.random((7, 2)).astype(np.float32),
                **{name: self.packed(weight) for name, weight in self.experts._asdict().items()}, "num_experts": 8,
                "width": 40, "shared_width": 24, "residual": self.floats(7, 64)}  # fmt: skip

    def cache_append(self):
        slot = self.rng.permutation(CACHE_SLOTS)[:7].astype(np.int32)
        return {"cache": self.floats(BATCH, CACHE_SLOTS, LATENT + ROPE), "latent": self.floats(7, LATENT),
                "k_rope": self.floats(7, ROPE), "stream": self.integers(0, BATCH, 7), "slot": slot}  # fmt: skip

    def cache_compact(self):
        path = np.sort(np.argsort(self.rng.random((BATCH, BUDGET)), axis=1)[:, :DEPTH] + 1, axis=1).astype(np.int32)
        return {"cache": self.floats(2, BATCH, CACHE_SLOTS, 24), "prefix_len": self.integers(0, 40, BATCH),
                "accepted_path": path, "num_accepted": np.array([0, DEPTH, 2], np.int32)}  # fmt: skip

    def draft_topk(self):
        return {"logits": self.floats(BATCH * DEPTH, 300, scale=3.0), "num_candidates": CANDIDATES}

    def draft_topk_merge(self):
        """The words of two ranks that have half of 256 tokens each: candidates, then four segments."""
        self.logits = (self.rng.standard_normal((9, 256)) * 3).astype(np.float32)
        ranks = []
        for part in np.split(np.arange(256), 2):
            mine = self.logits[:, part]
            best = np.argsort(-mine, axis=1, kind="stable")[:, :CANDIDATES]
            segments = mine.reshape(9, 4, 32)
            largest = segments.max(axis=2)
            total = np.exp(segments - largest[..., None]).sum(axis=2)
            words = reference.words_of(np.take_along_axis(mine, best, 1), part[best])
            ranks.append(np.concatenate([words, reference.segment_words(largest, total)], axis=1))
        return {"words": np.stack(ranks), "num_candidates": CANDIDATES}

    def tree_build(self):
        log_probs = -np.sort(self.rng.exponential(2.0, (BATCH, DEPTH, CANDIDATES)), axis=-1).astype(np.float32)
        ids = np.argsort(self.rng.random((BATCH, DEPTH, 100)), axis=-1)[..., :CANDIDATES].astype(np.int64)
        return {"log_probs": log_probs, "token_ids": ids, "bonus": np.array([7, 0, 3]),
                "budget": np.array([BUDGET, 0, 9], np.int32), "max_budget": BUDGET}  # fmt: skip

    def tree(self):
        """The reference's tree, the same at every call."""
        return reference.tree_build(**Cases(self.library, self.device, self.dtype)["tree_build"])

    def tree_rows(self):
        tree = self.tree()
        return {"token": tree.token, "depth": tree.depth, "num_nodes": tree.num_nodes,
                "prefix_len": self.integers(0, 40, BATCH)}  # fmt: skip

    def tree_accept(self):
        tree = self.tree()
        target = np.full(tree.token.shape, 10**6)
        deepest = int(tree.depth[0].argmax())
        for node in reference.path(tree, 0, deepest)[1:]:  # the target agrees down to there
            target[0, tree.parent[0, node]] = tree.token[0, node]
        return {"token": tree.token, "parent": tree.parent, "num_nodes": tree.num_nodes, "target_token": target,
                "max_depth": DEPTH}  # fmt: skip

    def verify_attn(self):
        tree, prefix_len = self.tree(), np.array([0, 33, 50], np.int32)
        rows = reference.tree_rows(tree, prefix_len)
        num_rows = len(rows.token)
        return {"q_latent": self.floats(num_rows, HEADS, LATENT), "q_rope": self.floats(num_rows, HEADS, ROPE),
                "cache": self.floats(BATCH, CACHE_SLOTS, LATENT + ROPE), "stream": rows.stream, "node": rows.node,
                "parent": tree.parent, "depth": tree.depth, "prefix_len": prefix_len, "scale": 0.2}  # fmt: skip

    def step_commit(self):
        num_streams, depth, num_text = 3, 4, 20
        choices = np.array([[11, 12, 13, 14, 5], [21, 5, 23, 24, 25], [31, 32, 33, 34, 35]])
        path = np.array([[1, 2, -1, -1], [1, 3, 4, -1], [1, 2, 3, 4]], np.int32)
        text = np.full((num_streams, num_text), -1)
        text[:, 6] = [7, 8, 9]
        return {"accepted_path": path, "num_accepted": np.array([2, 3, 4], np.int32),
                "num_nodes": np.array([5, 5, 5], np.int32), "target_token": choices.reshape(-1),
                "row_begin": np.array([0, 5, 10], np.int32), "is_stop": np.isin(np.arange(64), [5]).astype(np.uint8),
                "prefix_len": np.full(num_streams, 6, np.int32), "bonus": np.array([7, 8, 9]),
                "remaining": np.array([9, 9, 3], np.int32), "active": np.ones(num_streams, np.int32), "text": text,
                "ring": np.full((3, 4 + 1 + depth, num_streams), -7), "step": np.array([4])}  # fmt: skip


IN_PLACE = {"cache_append": ("cache",), "cache_compact": ("cache",),
            "step_commit": ("prefix_len", "bonus", "remaining", "active", "text")}  # fmt: skip


def expected(cases: Cases, op: str, arguments: dict):
    """What the numpy reference gives: the results in order; of an operation in place the changed arrays."""
    return ORACLES[op](types.SimpleNamespace(**arguments), cases)


ORACLES: dict[str, Callable] = {}
"""By operation; all but pack_linear, which linear undoes, have one. `a` are the arguments of a case."""


def oracle(function: Callable) -> Callable:
    ORACLES[function.__name__] = function
    return function


@oracle
def embed(a, cases):
    return [reference.embed(wide(a.weight), a.token)]


@oracle
def rms_norm(a, cases):
    return [reference.rms_norm(wide(a.x), wide(a.weight), a.eps, cases.rounding)]


@oracle
def dequantize_int4(a, cases):
    value = reference.dequantize_int4(a.weight, wide(a.scale), cases.rounding).astype(np.float32)
    return [wide(cases.packed(value if cases.dtype == "f32" else Bf16.round(value)))]


@oracle
def pack_int4(a, cases):
    return [reference.pack_int4(a.weight, a.scale.bits)]


@oracle
def linear(a, cases):
    out = reference.linear_heads(wide(a.x), wide(cases.weight), cases.rounding)
    return [reference.residual_add(out, wide(a.residual), cases.rounding)]


@oracle
def rope(a, cases):
    return [reference.rope(wide(a.x), wide(a.cos_sin), a.position, cases.rounding)]


@oracle
def swiglu(a, cases):
    return [reference.swiglu(wide(a.gate_up), cases.rounding)]


@oracle
def residual_add(a, cases):
    return [reference.residual_add(wide(a.x), wide(a.y), cases.rounding)]


@oracle
def add_partials(a, cases):
    return [reference.add_partials(wide(a.partials), wide(a.residual), cases.rounding)]


@oracle
def argmax(a, cases):
    return [np.where(np.isnan(a.logits).any(axis=1), -1, np.nanargmax(a.logits, axis=1))]


@oracle
def sample(a, cases):
    return [reference.sample(a.logits, a.stream, a.position, a.temperature, a.top_k, a.top_p, a.seed)]


@oracle
def sample_among(a, cases):
    parameters = (a.temperature, a.top_k, a.top_p, a.seed, a.vocab_size)
    return [reference.sample_among(a.words, a.largest, a.stream, a.position, *parameters)]


@oracle
def moe_route(a, cases):
    return reference.moe_route(wide(a.logits), a.top_k, a.scoring, wide(a.bias), a.renormalize, a.scaling_factor)


@oracle
def moe_experts(a, cases):
    gate_up, down, shared_gate_up, shared_down = map(wide, cases.experts)
    experts = reference.Experts(gate_up, down, shared_gate_up[0], shared_down[0])
    weight, residual = wide(a.weight), wide(a.residual)
    return [reference.moe_experts(wide(a.x), experts, a.expert_id, weight, residual, cases.rounding)]


@oracle
def cache_append(a, cases):
    cache = wide(a.cache)
    reference.cache_append(cache, wide(a.latent), wide(a.k_rope), a.stream, a.slot)
    return [cache]


@oracle
def cache_compact(a, cases):
    cache = wide(a.cache)
    reference.cache_compact(cache, a.prefix_len, a.accepted_path, a.num_accepted)
    return [cache]


@oracle
def draft_topk(a, cases):
    return reference.draft_topk(wide(a.logits), a.num_candidates)


@oracle
def draft_topk_merge(a, cases):
    return reference.draft_topk(cases.logits, a.num_candidates)


@oracle
def tree_build(a, cases):
    tree = reference.tree_build(a.log_probs, a.token_ids, a.bonus, a.budget, a.max_budget)
    return [*tree, np.zeros(BATCH, np.int32)]


@oracle
def tree_rows(a, cases):
    return reference.tree_rows(cases.tree(), a.prefix_len)


@oracle
def tree_accept(a, cases):
    return reference.tree_accept(cases.tree(), a.target_token, a.max_depth)


@oracle
def verify_attn(a, cases):
    rows = types.SimpleNamespace(stream=a.stream, node=a.node)
    q_latent, q_rope, cache = wide(a.q_latent), wide(a.q_rope), wide(a.cache)
    tree = types.SimpleNamespace(parent=a.parent)
    return [reference.verify_attn(q_latent, q_rope, cache, rows, tree, a.prefix_len, a.scale, cases.rounding)]


@oracle
def step_commit(a, cases):
    state = reference.Streams(*(getattr(a, name).copy() for name in IN_PLACE["step_commit"]))
    paths = [a.accepted_path[s, :count] for s, count in enumerate(a.num_accepted)]
    stop_tokens = set(np.flatnonzero(a.is_stop).tolist())
    reference.step_commit(state, paths, a.num_nodes, a.target_token.reshape(3, 5), stop_tokens)
    return [*state]


def results_of(cases: Cases, op: str, arguments: dict) -> list[np.ndarray]:
    """What the library gives, in the form of `expected`: floats as float64."""
    out = getattr(cases.library, op)(**arguments, device=cases.device)
    if op in IN_PLACE:
        out = tuple(arguments[name] for name in IN_PLACE[op])
    results = [out] if isinstance(out, np.ndarray | Bf16) else list(out)
    return [wide(array) if isinstance(array, Bf16) or array.dtype == np.float32 else array for array in results]


def assert_matches(cases: Cases, op: str) -> None:
    """The library against the reference: integers equal, floats within the tolerance of their type; NaN fails."""
    arguments = cases[op]
    want = expected(cases, op, arguments)
    got = results_of(cases, op, arguments)
    assert len(got) == len(want), f"{op}: expected {len(want)} results, got {len(got)}"
    for i, (found, right) in enumerate(zip(got, want, strict=True)):
        right = np.asarray(right)
        assert found.shape == right.shape, f"{op}: result {i}: expected {right.shape}, got {found.shape}"
        if found.dtype.kind == "f":
            finite = np.isfinite(right)
            size = max(1.0, float(np.abs(right[finite]).max(initial=0.0)))
            assert np.array_equal(found[~finite], right[~finite]), f"{op}: result {i}: other infinities"
            error = np.abs(found[finite] - right[finite])
            assert np.all(error <= cases.tolerance * size), f"{op}: result {i}: off by {error.max()} of {size}"
        else:
            assert np.array_equal(found, right), f"{op}: result {i}: expected {right}, got {found}"
