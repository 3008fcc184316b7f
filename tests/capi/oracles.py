"""What numpy says that the calls of `cases.py` give, and the comparison with what the library gives. No torch."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np

from kdtree_nb import reference
from kdtree_nb.kdtr import Bf16
from tests.capi.cases import BATCH, IN_PLACE, Cases, wide

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
def latent_append(a, cases):
    cache, joint = wide(a.cache), (wide(a.q_kv), wide(a.q_norm), wide(a.kv_norm), wide(a.cos_sin))
    return [reference.latent_append(cache, *joint, a.position, a.stream, a.slot, a.eps, cases.rounding), cache]


@oracle
def absorb_query(a, cases):
    return reference.absorb_query(wide(a.q), wide(cases.w_kc), wide(a.cos_sin), a.position, cases.rounding)


@oracle
def cache_compact(a, cases):
    cache = wide(a.cache)
    reference.cache_compact(cache, a.prefix_len, a.accepted_path, a.num_accepted)
    return [cache]


@oracle
def context_append(a, cases):
    keys, values = wide(a.keys), wide(a.values)
    kv, key_norm, table = wide(a.kv), wide(a.key_norm), wide(a.cos_sin)
    reference.context_append(keys, values, kv, key_norm, a.eps, table, a.stream, a.position, cases.rounding)
    return [keys, values]


@oracle
def block_attn(a, cases):
    qkv, *norms, table = map(wide, (a.qkv, a.query_norm, a.key_norm, a.cos_sin))
    place = (a.layer, a.stream, a.prefix_len, a.scale, a.window, a.causal, cases.rounding)
    out = reference.block_attn(qkv, *norms, a.eps, table, wide(a.keys), wide(a.values), *place)
    return [out.reshape(3, 5, 4, -1)]


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


@oracle
def accepted_features(a, cases):
    hidden = [wide(a.hidden_0), wide(a.hidden_1)]
    return reference.accepted_features(hidden, a.first_row, a.prefix_len, a.accepted_path, a.num_accepted, a.active)


OPS = sorted([*ORACLES, "pack_linear"])
"""All operations of the C ABI."""


def expected(cases: Cases, op: str, arguments: dict):
    """What the numpy reference gives: the results in order, then the arrays that are changed in place."""
    return ORACLES[op](types.SimpleNamespace(**arguments), cases)


def results_of(cases: Cases, op: str, arguments: dict) -> list[np.ndarray]:
    """What the library gives, in the form of `expected`: floats as float64."""
    out = getattr(cases.library, op)(**arguments, device=cases.device)
    results = [out] if isinstance(out, np.ndarray | Bf16) else list(out or ())
    results += [arguments[name] for name in IN_PLACE.get(op, ())]
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
