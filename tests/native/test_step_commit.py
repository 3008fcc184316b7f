"""step_commit against the reference: what is emitted, the state behind it, the record of the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.native.ops import StepRing, StreamState

V, P, R = 50, 200, 3
STOP = {0, 7, 49}


class Case:
    """S streams in the middle of their texts, whose trees of at most N nodes accepted paths of at most L."""

    def __init__(self, rng, S, L, N, nan_rate=0.02, inactive_rate=0.2):
        self.L = L
        self.num_nodes = rng.integers(1, N + 1, S).astype(np.int32)
        self.active = (rng.random(S) >= inactive_rate).astype(np.int32)
        self.num_nodes[rng.random(S) < 0.1] = 0
        self.paths = [self._path(rng, count) for count in self.num_nodes]
        self.choices = rng.integers(1, V, (S, N))
        self.choices[np.isin(self.choices, list(STOP)) & (rng.random((S, N)) < 0.8)] = 1
        self.choices[rng.random((S, N)) < nan_rate] = -1
        self.remaining = rng.integers(1, L + 4, S).astype(np.int32)
        self.prefix_len = rng.integers(0, P - L - 2, S).astype(np.int32)
        self.text = rng.integers(0, V, (S, P))
        self.bonus = self.text[np.arange(S), self.prefix_len]

    def _path(self, rng, count):
        length = rng.integers(0, min(self.L, max(count - 1, 0)) + 1)
        return np.sort(rng.permutation(np.arange(1, max(count, 1)))[:length]).tolist()

    def state(self, device="cpu"):
        fields = (self.prefix_len, self.bonus, self.remaining, self.active, self.text)
        return StreamState(*(torch.from_numpy(f.copy()).to(device) for f in fields))

    def reference(self):
        streams = reference.Streams(*(f.numpy() for f in self.state()))
        return streams, reference.step_commit(streams, self.paths, self.num_nodes, self.choices, STOP)

    def arguments(self, device):
        """accepted_path, num_accepted, num_nodes, target_token, row_begin, is_stop; rows of other nodes hold -1."""
        S, L = len(self.paths), self.L
        path = np.full((S, L), -1, np.int32)
        for s, nodes in enumerate(self.paths):
            path[s, : len(nodes)] = nodes
        begin = np.cumsum(self.num_nodes) - self.num_nodes
        target = np.full(self.num_nodes.sum() + 3, -1)
        for s, nodes in enumerate(self.paths):
            for node in [0, *nodes] if self.num_nodes[s] else []:
                target[begin[s] + node] = self.choices[s, node]
        num_accepted = np.array([len(nodes) for nodes in self.paths], np.int32)
        is_stop = np.isin(np.arange(V), list(STOP))
        arrays = (path, num_accepted, self.num_nodes, target, begin.astype(np.int32), is_stop)
        return [torch.from_numpy(a).to(device) for a in arrays]


def new_ring(S, L, device, step=0):
    records = torch.full((R, 5 + L, S), -(10**6), device=device)
    return StepRing(records, torch.tensor([step], device=device))


def check(case: Case, device, step=0):
    S, L = len(case.paths), case.L
    state, ring = case.state(device), new_ring(S, L, device, step)
    ops.step_commit(state, ring, *case.arguments(device))
    want_state, want = case.reference()
    for name, got in state._asdict().items():
        assert np.array_equal(got.cpu().numpy(), getattr(want_state, name)), name
    records = ring.records.cpu()
    record = records[step % R].numpy()
    assert ring.step.item() == step + 1
    assert all(bool((records[r] == -(10**6)).all()) for r in range(R) if r != step % R)
    for s, (emitted, status) in enumerate(want):
        took_part = bool(case.active[s]) and case.num_nodes[s] > 0
        header = [case.num_nodes[s], len(case.paths[s])] if took_part else [0, 0]
        padded = emitted + [-1] * (L + 1 - len(emitted))
        assert record[:, s].tolist() == [*header, len(emitted), status, *padded]
    return want


@pytest.mark.parametrize("S", [1, 2, 10, 33, 70])
@pytest.mark.parametrize(("L", "N"), [(0, 1), (1, 2), (5, 17), (31, 40), (32, 65), (70, 90)])
def test_equals_the_reference(S, L, N, rng, device):
    for step in range(4):
        check(Case(rng, S, L, N), device, step)


def test_cases_hold_every_way_to_end(rng, device):
    want = check(Case(rng, 400, 8, 20, nan_rate=0.05), device)
    assert {status for _, status in want} == {0, 1, 2}
    lengths = {len(emitted) for emitted, _ in want}
    assert {0, 1, 9} <= lengths


def one(choices, remaining, device, path=(1, 2), stop=7):
    """One stream at prefix 3 with a tree whose choices are given: its state and its record."""

    def int32(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    text = torch.tensor([[1, 1, 1, 9, 0, 0, 0, 0, 0, 0]], device=device)
    state = StreamState(int32(3), text[:, 3].clone(), int32(remaining), int32(1), text)
    ring, target = new_ring(1, len(path), device), torch.tensor(choices, device=device)
    is_stop = torch.arange(V, device=device) == stop
    lengths = int32(len(path)), int32(len(choices))
    ops.step_commit(state, ring, int32(*path)[None], *lengths, target, int32(0), is_stop)
    return state, ring.records[0, :, 0].tolist()


def test_a_whole_path(device):
    state, record = one([4, 5, 6], 9, device)
    assert record == [3, 2, 3, 0, 4, 5, 6]
    assert [f.tolist() for f in state] == [[6], [6], [6], [1], [[1, 1, 1, 9, 4, 5, 6, 0, 0, 0]]]


def test_nothing_is_emitted_behind_a_stop_token_and_no_nan_there_matters(device):
    state, record = one([4, 7, -1], 9, device)
    assert record == [3, 2, 2, 0, 4, 7, -1]
    assert [f.tolist() for f in state[:4]] == [[5], [7], [7], [0]]


def test_no_more_than_remain(device):
    state, record = one([4, 5, -1], 2, device)
    assert record == [3, 2, 2, 0, 4, 5, -1] and state.active.item() == 0 and state.remaining.item() == 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_ends_the_stream_behind_the_tokens_before_it(place, device):
    choices = [4, 5, 6]
    choices[place] = -1
    state, record = one(choices, 9, device)
    assert record[2:4] == [place, 2] and state.active.item() == 0 and state.prefix_len.item() == 3 + place
    assert state.bonus.item() == [9, 4, 5][place]


def test_num_nodes_may_be_the_array_active(device):
    """AR decoding: the tree is a root where the stream is active."""
    active = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    text = torch.zeros(3, 8, dtype=torch.int64, device=device)
    state = StreamState(zeros.clone(), text[:, 0].clone(), zeros + 2, active, text)
    ring, path = new_ring(3, 0, device), torch.empty(3, 0, dtype=torch.int32, device=device)
    target, begin = torch.tensor([4, 7], device=device), torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    ops.step_commit(state, ring, path, zeros, active, target, begin, torch.arange(V, device=device) == 7)
    assert active.tolist() == [1, 0, 0] and state.bonus.tolist() == [4, 0, 7]
    assert ring.records[0].tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 1], [0, 0, 0], [4, -1, 7]]


def test_steps_go_round_the_ring(device):
    active = torch.ones(1, dtype=torch.int32, device=device)
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    text = torch.zeros(1, 20, dtype=torch.int64, device=device)
    state = StreamState(zeros.clone(), text[:, 0].clone(), zeros + 6, active, text)
    ring, path = new_ring(1, 0, device), torch.empty(1, 0, dtype=torch.int32, device=device)
    for step in range(8):  # two more than the stream has tokens
        target = torch.tensor([10 + step], device=device)
        ops.step_commit(
            state, ring, path, zeros, active, target, zeros, torch.zeros(V, dtype=torch.bool, device=device)
        )
    assert ring.records[:, 4, 0].tolist() == [-1, -1, 15] and ring.records[:, 2, 0].tolist() == [0, 0, 1]
    assert state.text[0, :8].tolist() == [0, 10, 11, 12, 13, 14, 15, 0] and state.prefix_len.item() == 6


def test_opcheck(opcheck, rng):
    case = Case(rng, 5, 4, 9)
    opcheck("step_commit", *case.arguments("cpu"), *case.state(), *new_ring(5, 4, "cpu"))


BAD = {
    "a node past the tree": lambda a, s: a[0].fill_(9),
    "too long a path": lambda a, s: a[1].fill_(5),
    "a row past the targets": lambda a, s: a[4].fill_(1000),
    "a token outside": lambda a, s: a[3].fill_(V),
    "no tokens left": lambda a, s: s.remaining.fill_(0),
    "no room in the text": lambda a, s: s.prefix_len.fill_(P - 1),
}


@pytest.mark.parametrize("case", BAD)
def test_values_outside_are_refused_before_anything_changes(case, rng):
    arguments, state, ring = full_paths(rng)
    BAD[case](arguments, state)
    before = [t.clone() for t in (*state, *ring)]
    with pytest.raises(ValueError, match="step_commit: expected accepted nodes below num_nodes, rows and tokens"):
        ops.step_commit(state, ring, *arguments)
    assert all(torch.equal(t, b) for t, b in zip((*state, *ring), before, strict=True))


def full_paths(rng):
    """Three active streams whose trees are chains of five nodes, wholly accepted."""
    case = Case(rng, 3, 4, 5, nan_rate=0.0, inactive_rate=0.0)
    case.num_nodes[:], case.paths = 5, [[1, 2, 3, 4]] * 3
    return case.arguments("cpu"), case.state(), new_ring(3, 4, "cpu")


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("prefix_len", lambda t: t.long(), "prefix_len: expected dtype Int, got Long"),
        ("bonus", lambda t: t[:2].contiguous(), "bonus: expected shape"),
        ("active", lambda t: t.bool(), "active: expected dtype Int, got Bool"),
        ("text", lambda t: t[0], "text: expected shape"),
    ],
)
def test_wrong_arguments(field, change, message, rng):
    arguments, state, ring = full_paths(rng)
    with pytest.raises(ValueError, match=f"step_commit: {message}"):
        ops.step_commit(state._replace(**{field: change(getattr(state, field))}), ring, *arguments)


def test_a_ring_fits_the_paths(rng):
    arguments, state, _ = full_paths(rng)
    with pytest.raises(ValueError, match=r"step_commit: ring: expected shape \[R, 4 \+ 1 \+ L, S\]"):
        ops.step_commit(state, new_ring(3, 5, "cpu"), *arguments)
    with pytest.raises(ValueError, match="step_commit: ring size R: expected at least 1, got 0"):
        ops.step_commit(state, StepRing(torch.zeros(0, 9, 3).long(), torch.zeros(1).long()), *arguments)
    with pytest.raises(ValueError, match="step_commit: step: expected 0 … .*, got -1"):
        ops.step_commit(state, new_ring(3, 4, "cpu", -1), *arguments)
