from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.model.moe import DenseFeedForward, MoeFeedForward
from kdtree_nb.tiny2 import tiny2_config

CONFIG = tiny2_config()
D, EXPERTS, WIDTH = CONFIG.hidden_size, CONFIG.n_routed_experts, 37


def arrays(rng, *shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def close(got, want):
    return np.abs(got.numpy() - want).max() <= 1e-5 * max(1.0, np.abs(want).max())


def test_dense_block_equals_the_reference():
    rng = np.random.default_rng(0)
    norm, x = rng.uniform(0.5, 1.5, D).astype(np.float32), rng.standard_normal((5, D)).astype(np.float32)
    gate, up, down = arrays(rng, 75, D), arrays(rng, 75, D), arrays(rng, D, 75)
    got = DenseFeedForward(CONFIG, *map(torch.from_numpy, (norm, gate, up, down)))(torch.from_numpy(x))
    h = reference.rms_norm(x.astype(np.float64), norm, CONFIG.rms_norm_eps)
    weights = reference.Dense(np.concatenate([gate, up]).astype(np.float64), down.astype(np.float64))
    assert close(got, reference.feed_forward(h, weights, CONFIG, x.astype(np.float64), reference.exact))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_moe_block_equals_the_reference(scoring, renormalize, shared):
    config = dataclasses.replace(CONFIG, scoring_func=scoring, norm_topk_prob=renormalize)
    rng = np.random.default_rng(1)
    norm, x = rng.uniform(0.5, 1.5, D).astype(np.float32), rng.standard_normal((9, D)).astype(np.float32)
    router, gate, up = arrays(rng, EXPERTS, D), arrays(rng, EXPERTS, WIDTH, D), arrays(rng, EXPERTS, WIDTH, D)
    down = arrays(rng, EXPERTS, D, WIDTH)
    extra = (arrays(rng, 40, D), arrays(rng, 40, D), arrays(rng, D, 40)) if shared else (None, None, None)
    packed = ops.pack_experts(*(w if w is None else torch.from_numpy(w) for w in (gate, up, down, *extra)))
    got = MoeFeedForward(config, torch.from_numpy(norm), torch.from_numpy(router), packed)(torch.from_numpy(x))
    experts = reference.Experts(
        np.concatenate([gate, up], axis=1).astype(np.float64), down.astype(np.float64),
        *((np.concatenate(extra[:2]).astype(np.float64), extra[2].astype(np.float64)) if shared else ()),
    )  # fmt: skip
    h = reference.rms_norm(x.astype(np.float64), norm, config.rms_norm_eps)
    weights = reference.Moe(router.astype(np.float64), experts)
    assert close(got, reference.feed_forward(h, weights, config, x.astype(np.float64), reference.exact))
