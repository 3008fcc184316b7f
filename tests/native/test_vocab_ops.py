"""What ranks make of a vocabulary that they share, against the operations on all of it, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.config import share_of_rank
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")

RANKS = [1, 2, 4, 8]


def logits_of(num_rows: int, vocab_size: int, device: torch.device, dtype=torch.float32) -> torch.Tensor:
    """Many ties, a row of one value, and rows with -inf."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).mul_(4).round_()
    logits[0], logits[1, ::2] = 2.5, -torch.inf
    return logits.div_(3).to(dtype).to(device)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("vocab_size", [256, 331, 5000])
def test_merged_shares_are_draft_topk(vocab_size, num_ranks, device, dtype, assert_same_bits):
    logits = logits_of(6, vocab_size, device, dtype).view(2, 3, -1)
    for width in (1, 7, 64, 256):
        want = ops.draft_topk(logits, width)
        words = []
        for rank in range(num_ranks):
            mine = logits[..., slice(*share_of_rank(vocab_size, rank, num_ranks))].contiguous()
            words.append(ops.draft_topk_share(mine, width, vocab_size, ops.Segments.of_rank(rank, num_ranks)))
        log_probs, token_ids = ops.draft_topk_merge(torch.stack(words), width)
        assert_same_bits(log_probs, want[0])
        assert torch.equal(token_ids, want[1])


def test_candidates_of_a_share_are_words_of_the_reference(device):
    logits = logits_of(4, 331, device)
    begin, end = share_of_rank(331, 1, 2)
    words = ops.draft_topk_share(logits[None, :, begin:end].contiguous(), 9, 331, ops.Segments(4, 4))[0].cpu().numpy()
    mine, ids = logits[:, begin:end].cpu().numpy(), np.arange(begin, end)
    assert np.array_equal(words[:, :9], -np.sort(-reference.words_of(mine, ids), axis=1)[:, :9])


def test_a_nan_is_reported_with_its_place(device):
    logits = torch.zeros(2, 3, 256, device=device)
    logits[1, 2, 200] = torch.nan
    parts = [logits[..., :128].contiguous(), logits[..., 128:].contiguous()]
    words = [ops.draft_topk_share(part, 4, 256, ops.Segments.of_rank(rank, 2)) for rank, part in enumerate(parts)]
    if device.type == "cuda":
        assert ops.draft_topk_merge(torch.stack(words), 4)[0][1, 2].isnan().all()
        return
    with pytest.raises(ValueError, match="draft_topk: logits of stream 1, depth 3"):
        ops.draft_topk_merge(torch.stack(words), 4)


PARAMETERS = [(1.0, 0, 1.0), (0.5, 20, 1.0), (0.8, 0, 0.7), (1.3, 1024, 0.95), (0.0, 0, 1.0), (2.0, 5, 0.3)]


@pytest.mark.parametrize("vocab_size", [256, 331, 5000])
def test_sampling_among_all_words_is_sampling(vocab_size, device):
    num_rows = 3 * len(PARAMETERS)
    logits = logits_of(num_rows, vocab_size, device)
    temperature, top_k, top_p = (torch.tensor(column, device=device) for column in zip(*PARAMETERS, strict=True))
    stream = torch.arange(num_rows, dtype=torch.int32, device=device) % len(PARAMETERS)
    seed = torch.arange(len(PARAMETERS), device=device) * 7
    by = (stream, stream * 3, temperature, top_k.int(), top_p, seed)
    ids = np.arange(vocab_size)
    words = torch.from_numpy(reference.words_of(logits.cpu().numpy(), ids))
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))
    words = torch.cat([words[:, order], torch.full((num_rows, 3), -(1 << 63))], 1).to(device)  # in any order, with gaps
    got = ops.sample_among(words, logits.amax(1), *by, vocab_size)
    token = (2**32 - 1) - (got & (2**32 - 1))
    assert torch.equal(token, ops.sample(logits, *by))
    arrays = [part.cpu().numpy() for part in (words, logits.amax(1), *by)]
    assert np.array_equal(got.cpu().numpy(), reference.sample_among(*arrays, vocab_size))


def test_a_nan_word_is_the_result(device):
    words = torch.tensor([[5, (1 << 63) - 1], [5, 6]], device=device)
    largest = torch.tensor([1.0, torch.nan], device=device)
    row = torch.zeros(2, dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    got = ops.sample_among(words, largest, row, row, one, row[:1], one, row[:1].long(), 100)
    assert got.tolist() == [(1 << 63) - 1] * 2


def test_wrong_sizes_are_refused(device):
    logits = torch.zeros(1, 1, 128, device=device)
    with pytest.raises(ValueError, match="draft_topk_share: whole_vocab: expected segments 0 … 3 of 300 elements"):
        ops.draft_topk_share(logits, 4, 300, ops.Segments(0, 4))
    with pytest.raises(ValueError, match="draft_topk_merge: words: expected shape"):
        ops.draft_topk_merge(torch.zeros(2, 1, 1, 9, dtype=torch.int64, device=device), 4)


def test_opcheck(opcheck, device):
    opcheck("draft_topk_share", torch.zeros(1, 2, 128, device=device), 4, 256, 0, 4)
    words = torch.zeros(2, 1, 2, 8, dtype=torch.int64, device=device)
    opcheck("draft_topk_merge", words, 4)
    row, one = torch.zeros(2, dtype=torch.int32, device=device), torch.ones(1, device=device)
    words = torch.zeros(2, 5, dtype=torch.int64, device=device)
    opcheck("sample_among", words, one.expand(2).contiguous(), row, row, one, row[:1], one, row[:1].long(), 100)
