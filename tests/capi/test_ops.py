"""Operations through the C ABI: against numpy without torch, bit for bit like the torch operators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtree_nb.kdtr import Bf16
from kdtree_nb.native import capi
from kdtree_nb.native.ops.namespace import native
from tests.capi.cases import IN_PLACE, Cases
from tests.capi.oracles import OPS, ORACLES, assert_matches

HERE = Path(__file__).parent


def test_without_torch_every_operation_is_what_numpy_says(device):
    script = [sys.executable, str(HERE / "run_without_torch.py"), device.type]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "no torch" in done.stdout and f"{len(ORACLES)} operations in f32 and bf16" in done.stdout


def test_every_operation_has_a_case_and_an_oracle(library):
    assert sorted(library.ops) == OPS


def test_a_wrong_result_is_seen(library):
    cases = Cases(library, capi.CPU, "f32")
    right = cases.library
    for change in (lambda out: out + 1e-3, lambda out: np.where(np.arange(out.shape[-1]) == 1, np.nan, out)):
        cases.library = type("Wrong", (), {"swiglu": lambda self, change=change, **a: change(right.swiglu(**a))})()
        with pytest.raises(AssertionError):
            assert_matches(cases, "swiglu")


def tensor(value):
    if isinstance(value, Bf16):
        return torch.from_numpy(value.bits.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value


def flat(t, *fields):
    """Arguments in the order of a torch operator's schema; a name that is missing is None."""
    return [t.get(field) for field in fields]


TORCH = {
    "embed": lambda t: native.embed(*flat(t, "weight", "token")),
    "rms_norm": lambda t: native.rms_norm(*flat(t, "x", "weight", "eps")),
    "pack_linear": lambda t: native.pack_linear(t["weight"]),
    "dequantize_int4": lambda t: native.dequantize_int4(t["weight"], t["scale"], t["out_dtype"] == "bf16"),
    "pack_int4": lambda t: native.pack_int4(t["weight"], t["scale"]),
    "linear": lambda t: native.linear_heads(*flat(t, "x", "packed", "num_out")),
    "rope": lambda t: native.rope(*flat(t, "x", "cos_sin", "position")),
    "swiglu": lambda t: native.swiglu(t["gate_up"]),
    "residual_add": lambda t: native.residual_add(t["x"], t["y"]),
    "add_partials": lambda t: native.add_partials(t["partials"], t["residual"], t["residual"].dtype == torch.bfloat16),
    "argmax": lambda t: native.argmax(t["logits"]),
    "sample": lambda t: native.sample(
        *flat(t, "logits", "stream", "position", "temperature", "top_k", "top_p", "seed")
    ),
    "sample_among": lambda t: native.sample_among(
        *flat(t, "words", "largest", "stream", "position", "temperature", "top_k", "top_p", "seed", "vocab_size")
    ),
    "moe_route": lambda t: native.moe_route(
        *flat(t, "logits", "bias", "top_k"), 1, t["renormalize"], t["scaling_factor"]
    ),
    "moe_experts": lambda t: native.moe_experts(
        *flat(t, "x", "gate_up", "down", "shared_gate_up", "shared_down", "expert_id", "weight", "width",
              "shared_width", "residual")
    ),
    "cache_append": lambda t: native.cache_append(*flat(t, "cache", "latent", "k_rope", "stream", "slot")),
    "latent_append": lambda t: native.latent_append(
        *flat(t, "cache", "q_kv", "q_norm", "kv_norm", "cos_sin", "position", "stream", "slot", "eps")
    ),
    "absorb_query": lambda t: native.absorb_query(
        *flat(t, "q", "packed", "num_heads", "latent_dim", "cos_sin", "position")
    ),
    "cache_compact": lambda t: native.cache_compact(*flat(t, "cache", "prefix_len", "accepted_path", "num_accepted")),
    "context_append": lambda t: native.context_append(
        t["keys"], t["values"], t["kv"].flatten(1), *flat(t, "key_norm", "eps", "cos_sin", "stream", "position")
    ),
    "block_attn": lambda t: native.block_attn(
        t["qkv"].flatten(2), *flat(t, "query_norm", "key_norm", "eps", "cos_sin", "keys", "values", "layer", "stream",
                                   "prefix_len", "scale", "window", "causal")
    ),
    "draft_topk": lambda t: native.draft_topk(t["logits"][None], t["num_candidates"]),
    "draft_topk_merge": lambda t: native.draft_topk_merge(t["words"].unsqueeze(1), t["num_candidates"]),
    "tree_build": lambda t: native.tree_build(*flat(t, "log_probs", "token_ids", "bonus", "budget", "max_budget")),
    "tree_rows": lambda t: native.tree_rows(*flat(t, "token", "depth", "num_nodes", "prefix_len")),
    "tree_accept": lambda t: native.tree_accept(*flat(t, "token", "parent", "num_nodes", "target_token", "max_depth")),
    "verify_attn": lambda t: native.verify_attn(
        *flat(t, "q_latent", "q_rope", "cache", "stream", "node", "parent", "depth", "prefix_len", "scale")
    ),
    "step_commit": lambda t: native.step_commit(
        *flat(t, "accepted_path", "num_accepted", "num_nodes", "target_token", "row_begin", "is_stop", "prefix_len",
              "bonus", "remaining", "active", "text", "ring", "step")
    ),
    "accepted_features": lambda t: native.accepted_features(
        flat(t, "hidden_0", "hidden_1"),
        *flat(t, "first_row", "prefix_len", "accepted_path", "num_accepted", "active"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_gives_the_bits_of_the_torch_operator(op, cases):
    arguments = cases[op]
    if op == "linear":
        arguments.pop("residual")  # linear_heads, whose shapes these are, has none
    tensors = {name: tensor(value) for name, value in arguments.items()}
    if op == "step_commit":
        tensors["is_stop"] = tensors["is_stop"].bool()
    want = TORCH[op](tensors)
    got = getattr(cases.library, op)(**arguments)
    got = [got] if isinstance(got, np.ndarray | Bf16) else list(got or ())
    want = [want] if isinstance(want, torch.Tensor) else list(want or ())
    for name in (*IN_PLACE.get(op, ()), *(("ring", "step") if op == "step_commit" else ())):
        got.append(arguments[name])
        want.append(tensors[name])
    assert len(got) - (op == "tree_build") == len(want)  # whose status torch raises
    for found, right in zip(got, want, strict=False):
        bits = right.contiguous().view(torch.uint8).numpy()
        assert (found.bits if isinstance(found, Bf16) else found).tobytes() == bits.tobytes()
