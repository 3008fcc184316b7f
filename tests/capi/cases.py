"""One small call of every operation, as keyword arguments of `capi.Library`. No torch."""

from __future__ import annotations

import numpy as np

from kdtree_nb import reference
from kdtree_nb.kdtr import Bf16

BATCH, DEPTH, CANDIDATES, BUDGET = 3, 5, 12, 33
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
        return {"weight": weight, "scale": self.floats(3, 35, 3), "num_in": 96, "group_size": 32,
                "out_dtype": self.dtype}  # fmt: skip

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

    def latent_append(self):
        table = reference.rope_table(100, ROPE, 10000.0).astype(np.float32)
        return {"q_kv": self.floats(7, 24 + LATENT + ROPE), "q_norm": self.floats(24), "kv_norm": self.floats(LATENT),
                "cos_sin": table, "position": self.integers(0, 100, 7), "eps": 1e-6,
                **{name: self.cache_append()[name] for name in ("cache", "stream", "slot")}}  # fmt: skip

    def absorb_query(self):
        table, self.w_kc = reference.rope_table(100, ROPE, 10000.0).astype(np.float32), self.floats(HEADS, 35, 24)
        return {"q": self.floats(7, HEADS * (24 + ROPE)), "packed": self.packed(self.w_kc), "cos_sin": table,
                "position": self.integers(0, 100, 7), "num_heads": HEADS, "latent_dim": 35, "nope_dim": 24}  # fmt: skip

    def cache_compact(self):
        path = np.sort(np.argsort(self.rng.random((BATCH, BUDGET)), axis=1)[:, :DEPTH] + 1, axis=1).astype(np.int32)
        return {"cache": self.floats(2, BATCH, CACHE_SLOTS, 24), "prefix_len": self.integers(0, 40, BATCH),
                "accepted_path": path, "num_accepted": np.array([0, DEPTH, 2], np.int32)}  # fmt: skip

    def context_append(self):
        table = reference.rope_table(CACHE_SLOTS, ROPE, 10000.0).astype(np.float32)
        position = self.rng.permutation(CACHE_SLOTS)[:7].astype(np.int32)
        position[2] = -1
        return {"kv": self.floats(7, 2, 3, 2, ROPE), "key_norm": self.floats(3, ROPE), "cos_sin": table,
                "stream": self.integers(0, BATCH, 7), "position": position, "eps": 1e-6,
                "keys": self.floats(BATCH, CACHE_SLOTS, 3, 2, ROPE),
                "values": self.floats(BATCH, CACHE_SLOTS, 3, 2, ROPE)}  # fmt: skip

    def block_attn(self):
        table = reference.rope_table(CACHE_SLOTS, ROPE, 10000.0).astype(np.float32)
        return {"qkv": self.floats(3, 5, 4 + 2 * 2, ROPE), "query_norm": self.floats(ROPE),
                "key_norm": self.floats(ROPE), "cos_sin": table, "keys": self.floats(2, CACHE_SLOTS, 3, 2, ROPE),
                "values": self.floats(2, CACHE_SLOTS, 3, 2, ROPE), "stream": np.array([1, 0, 1], np.int32),
                "prefix_len": np.array([40, 0, 85], np.int32), "num_heads": 4, "layer": 1, "window": 30,
                "causal": True, "eps": 1e-6, "scale": 0.25}  # fmt: skip

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

    def accepted_features(self):
        """Of two layers; the third stream is not active, and the row of its root outside."""
        return {"hidden_0": self.floats(9, 40), "hidden_1": self.floats(9, 40), "num_layers": 2,
                "first_row": np.array([0, 4, 70], np.int32), "prefix_len": np.array([6, 0, 3], np.int32),
                "accepted_path": np.array([[2, 3, -1], [-1, -1, -1], [1, 2, 3]], np.int32),
                "num_accepted": np.array([2, 0, 3], np.int32), "active": np.array([1, 1, 0], np.int32)}  # fmt: skip


IN_PLACE = {"cache_append": ("cache",), "latent_append": ("cache",), "cache_compact": ("cache",),
            "context_append": ("keys", "values"),
            "step_commit": ("prefix_len", "bonus", "remaining", "active", "text")}  # fmt: skip
