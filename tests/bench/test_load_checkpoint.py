"""A small checkpoint of the same form: written, loaded, decoded; what is recorded has its sizes."""

from __future__ import annotations

import dataclasses

import torch

from kdtree_nb.bench.load_checkpoint import MOONLIGHT, measure
from kdtree_nb.hf.tensors import weights

SMALL = dataclasses.replace(
    MOONLIGHT, vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, intermediate_size=96, moe_intermediate_size=32,
    n_routed_experts=8, max_position_embeddings=256,
)  # fmt: skip


def test_measure(device):
    found = {m.name: m for m in measure(SMALL, "small", device, torch.bfloat16, 24, 2)}
    assert set(found) == {f"load_checkpoint/{part}" for part in ("write", "load", "AR", "DDTree with an oracle")}
    assert all(sample > 0 for m in found.values() for sample in m.samples)
    assert found["load_checkpoint/load"].params["bytes"] > 10_000
    assert len(found["load_checkpoint/AR"].samples) == 2


def test_moonlight_has_the_published_size():
    total = 0
    for _, shape in weights(MOONLIGHT):
        size = 1
        for n in shape:
            size *= n
        total += size
    assert 15.5e9 < total < 16.5e9
