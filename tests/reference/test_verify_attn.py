"""verify_attn against torch's dense masked attention, the cache poisoned wherever nothing may be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb.reference import chain_trees, round_bf16, tree_build, tree_rows, verify_attn, visibility

H, C, R = 3, 7, 4


def make(budget, prefix_len, seed=0):
    """Trees of two streams, queries for all nodes, a cache that holds NaN outside prefix and tree."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.exponential(size=(2, 5, 6))).astype(np.float32)
    token_ids = np.broadcast_to(np.arange(6), log_probs.shape)
    tree = tree_build(log_probs, token_ids, [1, 2], budget)
    prefix_len = np.array(prefix_len)
    rows = tree_rows(tree, prefix_len)
    cache = np.full((2, 200, C + R), np.nan)
    for s in range(2):
        cache[s, : prefix_len[s] + tree.num_nodes[s]] = rng.normal(size=(prefix_len[s] + tree.num_nodes[s], C + R))
    q_latent, q_rope = rng.normal(size=(len(rows.node), H, C)), rng.normal(size=(len(rows.node), H, R))
    return q_latent, q_rope, cache, rows, tree, prefix_len


def dense(q_latent, q_rope, cache, rows, tree, prefix_len, scale):
    """Every query of a stream against its whole prefix and tree, under a boolean mask."""
    out = np.empty_like(q_latent)
    for s in range(len(cache)):
        mine, prefix, count = rows.stream == s, prefix_len[s], tree.num_nodes[s]
        mask = np.concatenate([np.ones((count, prefix), bool), visibility(tree, s)], axis=1)
        q = torch.from_numpy(np.concatenate([q_latent[mine], q_rope[mine]], axis=-1)).transpose(0, 1)
        k = torch.from_numpy(cache[s, : prefix + count]).expand(H, -1, -1)
        attend = torch.nn.functional.scaled_dot_product_attention
        out[mine] = attend(q, k, k[..., :C], torch.from_numpy(mask), scale=scale).transpose(0, 1).numpy()
    return out


@pytest.mark.parametrize("budget", [[0, 0], [0, 5], [31, 64], [65, 1]])
@pytest.mark.parametrize("prefix_len", [[0, 0], [1, 63], [65, 2]])
def test_against_dense_attention(budget, prefix_len):
    case = make(budget, prefix_len)
    out = verify_attn(*case, 0.3)
    assert np.abs(out - dense(*case, 0.3)).max() <= 1e-13


def test_huge_scores():
    q_latent, q_rope, cache, rows, tree, prefix_len = make([3, 3], [5, 6])
    out = verify_attn(q_latent * 1e5, q_rope, cache, rows, tree, prefix_len, 1.0)
    assert np.abs(out).max() <= np.nanmax(np.abs(cache))


def test_row_is_what_decoding_its_path_alone_gives():
    """The invariant of the book: a node in a tree sees what one-token decoding at its position sees."""
    q_latent, q_rope, cache, rows, tree, prefix_len = make([40, 0], [9, 0])
    out = verify_attn(q_latent, q_rope, cache, rows, tree, prefix_len, 0.5)
    for node in (5, 17, 40):
        slots = [*range(9), *(9 + np.flatnonzero(visibility(tree, 0)[node]))]
        single = chain_trees([[0]])
        alone = cache[:1, slots]
        length = np.array([len(slots) - 1])
        row = verify_attn(
            q_latent[node : node + 1], q_rope[node : node + 1], alone, tree_rows(single, length), single, length, 0.5
        )
        assert (row[0] == out[node]).all()


def test_rounding():
    q_latent, q_rope, cache, rows, tree, prefix_len = make([10, 3], [9, 20])
    q_latent, q_rope, cache = (round_bf16(a) for a in (q_latent, q_rope, cache))
    exact = verify_attn(q_latent, q_rope, cache, rows, tree, prefix_len, 0.5)
    out = verify_attn(q_latent, q_rope, cache, rows, tree, prefix_len, 0.5, round_bf16)
    assert out.dtype == np.float32 and (out == round_bf16(out)).all()
    assert 0 < np.abs(out - exact).max() <= 0.02 * np.abs(exact).max()
    assert (out != round_bf16(exact)).any()  # P is rounded too
