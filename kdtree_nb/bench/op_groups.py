"""Benchmarks of single operations and of verify forwards, each against a named peer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from kdtree_nb.bench import setting
from kdtree_nb.bench.engine_groups import ar_steps
from kdtree_nb.bench.peers import accept_python, compact_python, masked_attention, tree_mask
from kdtree_nb.bench.runner import Effort, Measurement, clock, compete, per_call, require
from kdtree_nb.bench.tree_heapq import build_tree_heapq
from kdtree_nb.native import ops
from kdtree_nb.speculate.forward import TreeForward
from kdtree_nb.tree import DraftTree

PREFIX_LEN = 256
NUM_STEPS = 32
SWEEP_ROWS = (1, 2, 4, 8, 16, 17, 32, 64)
LINEAR_SHAPES = ((256, 512), (1024, 256), (1024, 1024), (2048, 2048))
"""(N, K) of the linear layers that are timed, with 1, 17 and 64 rows."""


def linear(effort: Effort) -> list[Measurement]:
    """x Wᵀ for M rows: numpy and torch call their matmuls, the native one keeps its order of additions."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for N, K in LINEAR_SHAPES:
            weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype) / K**0.5
            packed = ops.pack_linear(weight)
            for M in (1, 17, 64):
                x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)
                params = {"M": M, "N": N, "K": K, "dtype": str(dtype).removeprefix("torch.")}
                results += compete("linear", _linear_contenders(x, weight, packed), effort.num_rounds, params)
    return results


def _linear_contenders(
    x: torch.Tensor, weight: torch.Tensor, packed: ops.PackedLinear
) -> dict[str, Callable[[], float]]:
    functions: dict[str, Callable[[], object]] = {
        "torch": lambda: functional.linear(x, weight),
        "native": lambda: ops.linear(x, packed),
    }
    tolerance = 1e-4 if x.dtype == torch.float32 else 5e-2
    agree = torch.allclose(functions["torch"](), functions["native"](), rtol=tolerance, atol=tolerance)
    require(agree, "linear", f"the product to {tolerance}")
    if x.dtype == torch.float32:  # numpy has no BF16
        x_numpy, weight_t = x.numpy(), weight.numpy().T
        functions = {"numpy": lambda: x_numpy @ weight_t} | functions
    return {name: per_call(function) for name, function in functions.items()}


def dense_block(effort: Effort) -> list[Measurement]:
    """One row through a dense feed-forward block of tiny: eager torch against the native operations."""
    config, generator = setting.model("tiny").config, torch.Generator().manual_seed(0)
    D, width, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    gate_up = torch.randn(2 * width, D, generator=generator) / D**0.5
    down = torch.randn(D, width, generator=generator) / width**0.5
    norm, x = torch.ones(D), torch.randn(1, D, generator=generator)
    packed_gate_up, packed_down = ops.pack_linear(gate_up), ops.pack_linear(down)

    def eager() -> torch.Tensor:
        gate, up = functional.linear(functional.rms_norm(x, (D,), norm, eps), gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, down)

    def native() -> torch.Tensor:
        return ops.linear(ops.swiglu(ops.linear(ops.rms_norm(x, norm, eps), packed_gate_up)), packed_down, x)

    require(torch.allclose(eager(), native(), rtol=1e-4, atol=1e-4), "dense_block", "the output to 1e-4")
    contenders = {"eager torch": per_call(eager), "native": per_call(native)}
    return compete("dense_block", contenders, effort.num_rounds, {"model": "tiny", "rows": 1, "dtype": "float32"})


def tree_build(effort: Effort) -> list[Measurement]:
    """A tree of budget 64 over 15 depths: the published algorithm in Python against the native one."""
    budget, depth, num_candidates = 64, 15, 64
    log_probs, ids = map(torch.from_numpy, setting.random_candidates(depth, num_candidates, vocab_size=4096))
    tensors = log_probs[None], ids[None], torch.tensor([1])
    published, tree = build_tree_heapq(log_probs, ids, budget), ops.tree_build(*tensors, budget)
    require(tree.parent[0].tolist() == published.parent, "tree_build", "parents")
    require(torch.equal(tree.token[0, 1:], published.token), "tree_build", "tokens")
    require(torch.equal(tree.visibility(0), published.visibility), "tree_build", "visibility")
    contenders = {
        "heapq": per_call(lambda: build_tree_heapq(log_probs, ids, budget)),
        "native": per_call(lambda: ops.tree_build(*tensors, budget)),
    }
    params = {"budget": budget, "depth": depth, "num_candidates": num_candidates}
    with torch.inference_mode():  # as in the engine
        return compete("tree_build", contenders, effort.num_rounds, params)


def verify_rows(effort: Effort) -> list[Measurement]:
    """A verify of 17 rows (root and budget 16) against 17 forwards of one row, and against 4 steps of the engine.

    Each is the mean over many of its kind, as in decoding: caches and threads are warm.
    """
    single, verify = _verify(1), _verify(17)
    ar_step = ar_steps("tiny", torch.float32, NUM_STEPS)

    def seventeen_steps() -> None:
        for _ in range(17):
            single()

    contenders = {
        "17 single-row steps": lambda: clock(seventeen_steps, NUM_STEPS),
        "4 AR steps": lambda: 4 * ar_step(),
        "one 17-row verify": lambda: clock(verify, NUM_STEPS),
    }
    return compete("verify_rows", contenders, effort.num_rounds, {"model": "tiny", "prefix_len": PREFIX_LEN})


def verify_sweep(effort: Effort) -> list[Measurement]:
    """One verify forward over 1 … 64 rows."""
    results = []
    for rows in SWEEP_ROWS:
        params = {"model": "tiny", "prefix_len": PREFIX_LEN, "rows": rows}
        results += compete("verify_sweep", {"native": per_call(_verify(rows))}, effort.num_rounds, params)
    return results


def _verify(num_rows: int) -> Callable[[], torch.Tensor]:
    """What the engine does with a ready tree: one target forward over its rows, and their greedy choices."""
    model = setting.model("tiny")
    cache, prefix_len, bonus = setting.scene(model, PREFIX_LEN)
    tree = setting.random_tree(num_rows, bonus, model.config.vocab_size)
    forward = TreeForward(model, cache, prefix_len)

    @torch.inference_mode()
    def verify() -> torch.Tensor:
        return forward(tree, num_rows)[1]

    return verify


def verify_attn(effort: Effort) -> list[Measurement]:
    """Attention of 17 tree rows: dense torch attention under the tree's mask against the native operation."""
    config, num_rows = setting.model("tiny").config, 17
    H, C, R = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    generator = torch.Generator().manual_seed(0)
    tree = setting.random_tree(num_rows, torch.tensor([1]), config.vocab_size)
    prefix_len = torch.tensor([PREFIX_LEN], dtype=torch.int32)
    rows = ops.tree_rows(tree, prefix_len)
    q = torch.randn(num_rows, H, C + R, generator=generator)
    cache = torch.randn(1, PREFIX_LEN + num_rows, C + R, generator=generator)
    mask, scale = tree_mask(tree, 0, PREFIX_LEN), config.softmax_scale
    q_latent, q_rope = q[..., :C].contiguous(), q[..., C:].contiguous()
    functions = {
        "torch masked": lambda: masked_attention(q, cache[0], mask, C, scale),
        "native": lambda: ops.verify_attn(q_latent, q_rope, cache, rows, tree, prefix_len, scale),
    }
    agree = torch.allclose(functions["torch masked"](), functions["native"](), rtol=1e-4, atol=1e-5)
    require(agree, "verify_attn", "the attended latents to 1e-4")
    params = {"rows": num_rows, "heads": H, "latent_dim": C, "rope_dim": R, "prefix_len": PREFIX_LEN}
    return compete("verify_attn", {n: per_call(f) for n, f in functions.items()}, effort.num_rounds, params)


def accept_compact(effort: Effort) -> list[Measurement]:
    """Accept a path of a 65-node tree and gather its rows: dictionaries and indexing against the native operations."""
    model = setting.model("tiny")
    cache, prefix_len, bonus = setting.scene(model, PREFIX_LEN)
    tree = setting.random_tree(65, bonus, model.config.vocab_size)
    target, path = _target_of_deepest(tree)

    def native() -> tuple[list[int], int]:
        accepted_path, num_accepted, next_token = ops.tree_accept(tree, target, tree.max_budget)
        ops.cache_compact(cache.data, prefix_len, accepted_path, num_accepted)
        return accepted_path[0, : int(num_accepted)].tolist(), int(next_token)

    def python() -> tuple[list[int], int]:
        accepted, next_token = accept_python(tree, 0, target)
        compact_python(cache.data, 0, int(prefix_len), accepted)
        return accepted, next_token

    require(native() == python() and native()[0] == path, "accept_compact", "path and next token")
    params = {"model": "tiny", "nodes": 65, "accepted": len(path), "prefix_len": PREFIX_LEN}
    contenders = {"python": per_call(python), "native": per_call(native)}
    return compete("accept_compact", contenders, effort.num_rounds, params)


def _target_of_deepest(tree: DraftTree) -> tuple[torch.Tensor, list[int]]:
    """A target's choices i64 [1, N] that accept the path to the deepest node, and that path without the root."""
    nodes = tree.path(0, int(tree.depth[0].argmax()))
    target = torch.zeros_like(tree.token)
    for node, below in zip(nodes, nodes[1:], strict=False):
        target[0, node] = tree.token[0, below]
    target[0, nodes[-1]] = int(tree.token[0].max()) + 1  # drafted nowhere
    return target, nodes[1:]
