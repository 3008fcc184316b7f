"""moe_experts against a token-by-token sum with torch's silu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb.reference import Experts, moe_experts, round_bf16


def make(shared: bool, E=5, I=7, S=3, D=9, T=11):  # noqa: E741
    rng = np.random.default_rng(0)
    experts = Experts(rng.normal(size=(E, 2 * I, D)), rng.normal(size=(E, D, I)))
    if shared:
        experts = experts._replace(shared_gate_up=rng.normal(size=(2 * S, D)), shared_down=rng.normal(size=(D, S)))
    expert_id = np.stack([np.sort(rng.permutation(E - 1)[:2]) for _ in range(T)])  # the last expert is never chosen
    return experts, rng.normal(size=(T, D)), expert_id, rng.random((T, 2)), rng.normal(size=(T, D))


def block(x, gate_up, down):
    gate, up = torch.from_numpy(gate_up).chunk(2)
    x = torch.from_numpy(x)
    return (torch.from_numpy(down) @ (torch.nn.functional.silu(gate @ x) * (up @ x))).numpy()


@pytest.mark.parametrize("shared", [False, True])
def test_against_token_loop(shared):
    experts, x, expert_id, weight, residual = make(shared)
    out = moe_experts(x, experts, expert_id, weight)
    for t in range(len(x)):
        chosen = zip(expert_id[t], weight[t], strict=True)
        want = sum(w * block(x[t], experts.gate_up[e], experts.down[e]) for e, w in chosen)
        if shared:
            want = want + block(x[t], experts.shared_gate_up, experts.shared_down)
        assert np.abs(out[t] - want).max() <= 1e-12
    assert np.abs(moe_experts(x, experts, expert_id, weight, residual) - (out + residual)).max() <= 1e-14


def test_rounding_changes_little_and_leaves_bf16():
    experts, x, expert_id, weight, residual = (
        Experts(*(a.astype(np.float32) for a in part)) if isinstance(part, Experts) else part for part in make(True)
    )
    x, weight, residual = (round_bf16(a) for a in (x, weight, residual))
    exact = moe_experts(x, experts, expert_id, weight, residual)
    out = moe_experts(x, experts, expert_id, weight, residual, round_bf16)
    assert out.dtype == np.float32 and (out == round_bf16(out)).all()
    assert 0 < np.abs(out - exact).max() <= 0.03 * np.abs(exact).max()
    alone = moe_experts(x, experts, expert_id, weight, rounding=round_bf16)
    assert (alone == round_bf16(alone)).all() and (out == round_bf16(alone + residual)).all()


def test_no_rows():
    experts, x, expert_id, weight, _ = make(True)
    assert moe_experts(x[:0], experts, expert_id[:0], weight[:0]).shape == (0, 9)
