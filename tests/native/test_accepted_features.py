"""accepted_features against the reference; what is no token is zeros at no place, whatever its values say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def steps(rng, num_streams: int, depth: int) -> tuple[torch.Tensor, ...]:
    """Rows of trees one behind the other, paths of all lengths; a third of the streams is not active."""
    num_nodes = rng.integers(depth + 1, depth + 9, num_streams)
    first_row = np.concatenate([[0], np.cumsum(num_nodes)[:-1]])
    num_accepted, path = rng.integers(0, depth + 1, num_streams), np.full((num_streams, depth), -1)
    for s, count in enumerate(num_accepted):
        path[s, :count] = np.sort(rng.permutation(np.arange(1, num_nodes[s]))[:count])
    active, prefix_len = np.arange(num_streams) % 3 != 2, rng.integers(0, 99, num_streams)
    return (
        int(num_nodes.sum()),
        *(int32(a.tolist()) for a in (first_row, prefix_len)),
        torch.from_numpy(path.astype(np.int32)),
        *(int32(a.tolist()) for a in (num_accepted, active.astype(np.int32))),
    )


@pytest.mark.parametrize("num_layers", range(1, 9))
@pytest.mark.parametrize(("num_streams", "depth", "dim"), [(1, 15, 640), (7, 5, 21), (3, 1, 8), (4, 0, 33)])
def test_reference(num_layers, num_streams, depth, dim, rng, normal, exactly):
    num_rows, *place = steps(rng, num_streams, depth)
    hidden = [normal(num_rows, dim) for _ in range(num_layers)]
    features, stream, position = ops.accepted_features(hidden, *place)
    want = reference.accepted_features(list(map(exactly, hidden)), *(values.numpy() for values in place))
    assert features.dtype == hidden[0].dtype and (stream.dtype, position.dtype) == (torch.int32, torch.int32)
    assert np.array_equal(exactly(features), want[0])
    assert np.array_equal(stream.numpy(), want[1]) and np.array_equal(position.numpy(), want[2])


def test_values_of_no_token_are_not_looked_at(normal):
    hidden = [normal(4, 8) for _ in range(2)]
    hidden[1][2:] = torch.nan
    path = int32([[1, -9, 2**31 - 1], [7, 7, 7]])
    features, stream, position = ops.accepted_features(
        hidden, int32([0, -5]), int32([9, -1]), path, int32([1, 77]), int32([1, 0])
    )
    assert stream.tolist() == [0, 0, *[-1] * 6] and position.tolist() == [9, 10, *[-1] * 6]
    assert features[:2].equal(torch.cat(hidden, 1)[:2]) and features[2:].eq(0).all()


def test_no_streams(normal):
    none = int32([])
    features, stream, position = ops.accepted_features([normal(4, 8)] * 3, none, none, none.view(0, 2), none, none)
    assert features.shape == (0, 24) and len(stream) == len(position) == 0


@BY_VALUE
@pytest.mark.parametrize(
    ("first_row", "prefix_len", "path", "count"),
    [(3, 0, 1, 1), (-1, 0, 1, 1), (0, -1, 1, 1), (0, 2**31 - 1, 1, 1), (0, 0, -1, 1), (0, 0, 4, 1), (0, 0, 1, 2),
     (0, 0, 1, -1)],
)  # fmt: skip
def test_rows_outside_are_refused(first_row, prefix_len, path, count, normal):
    place = (int32([first_row]), int32([prefix_len]), int32([[path]]), int32([count]), int32([1]))
    with pytest.raises(ValueError, match="accepted_features: expected at most 1 accepted nodes, rows among the 4"):
        ops.accepted_features([normal(4, 8)], *place)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [([], "number of hidden: expected 1 … 8, got 0"), ([(4, 8)] * 9, "number of hidden: expected 1 … 8, got 9"),
     ([(4, 8), (4, 9)], r"hidden: expected shape \[T, D\] = \[4, 8\]"), ([(4,)], "hidden: expected 2 dimensions")],
)  # fmt: skip
def test_hidden_states_that_do_not_fit(shapes, message, normal):
    one = int32([1])
    with pytest.raises(ValueError, match=f"accepted_features: {message}"):
        ops.accepted_features([normal(*shape) for shape in shapes], one, one, one[None], one, one)


def test_opcheck(opcheck, rng, normal):
    num_rows, *place = steps(rng, 3, 4)
    opcheck("accepted_features", [normal(num_rows, 12), normal(num_rows, 12)], *place)
