"""draft_topk against the reference: ids exactly, log-probs to the error of FP32 sums; ties, -inf, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")

VOCAB_SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 256, 257, 331, 1023, 4099)


@pytest.fixture
def most(device):
    """The most candidates that the device's kernel can give."""
    return 1024 if device.type == "cuda" else 2**30


def check(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, ids = ops.draft_topk(logits, num_candidates)
    want_log_probs, want_ids = reference.draft_topk(logits.double().numpy(), num_candidates)
    assert log_probs.dtype == torch.float32 and ids.dtype == torch.int64
    assert np.array_equal(ids.numpy(), want_ids)
    finite = np.isfinite(want_log_probs)
    assert np.array_equal(np.isneginf(log_probs.numpy()), ~finite)
    error = np.abs(log_probs.numpy()[finite] - want_log_probs[finite])
    assert (error <= 1e-6 + 2e-7 * np.abs(want_log_probs[finite])).all(), error.max()
    assert (log_probs <= 0).all() and (log_probs[..., 1:] <= log_probs[..., :-1]).all()
    return log_probs, ids


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equals_the_reference(vocab_size, normal, most):
    for scale in (0.0, 0.1, 3.0, 40.0):
        logits = normal(2, 3, vocab_size, scale=scale)
        for num_candidates in sorted({1, min(7, vocab_size), -(-vocab_size // 2), vocab_size}):
            check(logits, min(num_candidates, most))


@pytest.mark.parametrize("vocab_size", [33, 1000, 4099])
def test_ties_and_impossible_tokens(vocab_size, rng, dtype, most):
    logits = torch.from_numpy(rng.integers(-2, 3, (3, 2, vocab_size)) * 0.5).to(dtype)
    logits[torch.from_numpy(rng.random(logits.shape) < 0.4)] = -torch.inf
    logits[2, 1] = -torch.inf
    logits[2, 0] = -torch.inf
    logits[2, 0, -1] = 1.5
    for num_candidates in (1, 5, min(vocab_size, most)):
        log_probs, ids = check(logits, num_candidates)
        assert torch.isneginf(log_probs[2, 1]).all() and ids[2, 1].tolist() == list(range(num_candidates))
        assert log_probs[2, 0, 0] == 0


def test_many_equal_logits(dtype):
    vocab_size = 40_000
    logits = torch.zeros(1, 2, vocab_size, dtype=dtype)
    logits[0, 1, 100:] = 1.0
    log_probs, ids = check(logits, 64)
    assert ids[0, 0].tolist() == list(range(64)) and ids[0, 1].tolist() == list(range(100, 164))


def test_zero_has_no_sign():
    logits = torch.tensor([[[-0.0, 0.0, -0.0, 0.0, -1.0]]])
    assert ops.draft_topk(logits, 4)[1].tolist() == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_true_vocabulary(order, dtype):
    vocab_size, num_candidates = 163_840, 1023
    logits = torch.linspace(-30, 5, vocab_size)
    if order == "falling":
        logits = logits.flip(0)
    if order == "shuffled":
        logits = logits[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))]
    check(logits.reshape(1, 1, -1).to(dtype), num_candidates)


def test_a_row_is_the_same_bits_alone_in_a_batch_and_on_any_threads(normal, assert_same_bits, num_threads):
    logits = normal(2, 9, 5003, scale=4.0)
    with num_threads(1):
        whole = ops.draft_topk(logits, 70)
    with num_threads(2):
        again = ops.draft_topk(logits, 70)
    for got, want in zip(again, whole, strict=True):
        assert_same_bits(got, want)
    for b, d in ((0, 0), (1, 4), (1, 8)):
        alone = ops.draft_topk(logits[b : b + 1, d : d + 1].contiguous(), 70)
        for got, want in zip(alone, whole, strict=True):
            assert_same_bits(got[0, 0], want[b, d])


def test_fewer_candidates_are_the_first_of_more(normal, assert_same_bits, most):
    logits = normal(1, 2, 3001)
    log_probs, ids = ops.draft_topk(logits, min(3001, most))
    for num_candidates in (1, 47, 48, 1023):  # 3001 logits are 47 blocks of 64
        few = ops.draft_topk(logits, num_candidates)
        assert_same_bits(few[0], log_probs[..., :num_candidates].contiguous())
        assert torch.equal(few[1], ids[..., :num_candidates])


def test_large_logits_do_not_overflow(dtype):
    logits = torch.tensor([[[3e38, -3e38, 3e38, 0.0, 1e38]]], dtype=dtype)
    log_probs, ids = ops.draft_topk(logits, 3)
    assert ids.tolist() == [[[0, 2, 4]]]
    assert log_probs[0, 0, :2].tolist() == pytest.approx([-np.log(2)] * 2) and log_probs[0, 0, 2] < -1e38


@BY_VALUE
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 15, 16, 63, 100])
def test_nan_and_inf_are_named(value, position, dtype):
    logits = torch.zeros(3, 4, 101, dtype=dtype)
    logits[1, 2, position] = value
    with pytest.raises(ValueError, match="draft_topk: logits of stream 1, depth 3: expected logits below"):
        ops.draft_topk(logits, 5)


def test_no_rows():
    for shape in ((0, 3, 10), (2, 0, 10)):
        log_probs, ids = ops.draft_topk(torch.zeros(shape), 4)
        assert log_probs.shape == ids.shape == (*shape[:2], 4)


def test_wrong_arguments():
    logits = torch.zeros(1, 2, 10)
    for num_candidates in (0, -1, 11):
        with pytest.raises(ValueError, match=f"draft_topk: num_candidates: expected 1 … 10, got {num_candidates}"):
            ops.draft_topk(logits, num_candidates)
    with pytest.raises(ValueError, match=r"draft_topk: logits: expected 3 dimensions \[B, L, V\]"):
        ops.draft_topk(logits[0], 4)
    with pytest.raises(ValueError, match="draft_topk: logits: expected dtype Float or BFloat16, got Double"):
        ops.draft_topk(logits.double(), 4)
    with pytest.raises(ValueError, match="draft_topk: logits: expected a contiguous tensor"):
        ops.draft_topk(logits.mT.contiguous().mT, 4)


def test_feeds_tree_build(normal):
    logits = normal(2, 6, 331, scale=2.0)
    log_probs, ids = ops.draft_topk(logits, 331)
    tree = ops.tree_build(log_probs, ids, torch.tensor([1, 2]), 64)
    assert tree.num_nodes.tolist() == [65, 65]


def test_opcheck(opcheck, normal):
    opcheck("draft_topk", normal(2, 3, 65), 7)
