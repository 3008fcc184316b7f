from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import drafters
from kdtree_nb.drafters.base import StreamDraft, as_continuations, check_depth, stack

CPU = torch.device("cpu")


def test_stack_pads_with_minus_infinity_and_distinct_ids():
    wide = StreamDraft(np.log([[0.5, 0.3, 0.2]]).astype(np.float32), np.array([[7, 1, 0]]))
    deep = StreamDraft(np.log([[0.9], [0.8]]).astype(np.float32), np.array([[2], [1]]))
    log_probs, token_ids = stack([wide, deep], CPU)
    assert log_probs.shape == token_ids.shape == (2, 2, 3)
    assert log_probs.dtype == torch.float32 and token_ids.dtype == torch.int64
    assert token_ids[0, 0].tolist() == [7, 1, 0]
    assert token_ids[1, :, 0].tolist() == [2, 1]
    assert torch.isneginf(log_probs[0, 1]).all() and torch.isneginf(log_probs[1, :, 1:]).all()
    assert torch.isfinite(log_probs[0, 0]).all() and torch.isfinite(log_probs[1, :, 0]).all()
    assert all(len(set(level)) == 3 for stream in token_ids.tolist() for level in stream)


def test_stack_of_nothing_is_empty():
    empty = StreamDraft(np.empty((0, 4), np.float32), np.empty((0, 4), np.int64))
    assert stack([empty, empty], CPU).log_probs.shape == (2, 0, 4)


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, None])
def test_a_depth_is_a_positive_integer(depth):
    with pytest.raises(ValueError, match="depth of at least 1"):
        check_depth("Oracle", depth)


def test_continuations_of_one_stream_or_several():
    assert as_continuations("Oracle", [1, 2]) == [[1, 2]]
    assert as_continuations("Oracle", [[1], [2, 3]]) == [[1], [2, 3]]
    with pytest.raises(ValueError, match="got none"):
        as_continuations("Oracle", [])


@pytest.mark.parametrize(
    "drafter",
    [drafters.Oracle([1]), drafters.AlwaysWrong([1]), drafters.Random(), drafters.NGram()],
    ids=lambda d: type(d).__name__,
)
def test_implementations_follow_the_protocol(drafter):
    assert isinstance(drafter, drafters.Drafter)
