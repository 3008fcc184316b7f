"""Several ranks have the bits of one: over Gloo, each rank a process. `run_all.py` beside it has 8 ranks as well."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import parallel
from kdtree_nb.model.ranks import ONE_RANK
from tests.parallel import programs
from tests.parallel.int4_folder import write_int4

TINY_TOKENS, RANDOM_TOKENS = 96, 24


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """How many tokens of each model are compared."""
    folder = tmp_path_factory.mktemp("int4")
    int4 = [write_int4(folder / f"width{width}", width) for width in (288, 32)]
    return {"tiny": TINY_TOKENS, **dict.fromkeys(["tiny8", "nano", *int4], RANDOM_TOKENS)}


@pytest.fixture(scope="module")
def alone(models):
    """What one process computes, without any of what several ranks need."""
    return programs.everything(ONE_RANK, models, with_streams=True)


def assert_same(got, want, where: str) -> None:
    """The same structure and the same bits; NaN only where the bits are the same."""
    assert type(got) is type(want), f"{where}: expected {type(want)}, got {type(got)}"
    if isinstance(want, torch.Tensor):
        assert got.shape == want.shape and got.dtype == want.dtype, f"{where}: expected {want.shape}, got {got.shape}"
        as_integers = (lambda t: t.view(torch.int32)) if want.dtype == torch.float32 else (lambda t: t)
        different = (as_integers(got) != as_integers(want)).nonzero().tolist()
        assert not different, f"{where}: {len(different)} of {want.numel()} differ, the first at {different[0]}"
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_same(got[key], want[key], f"{where}: {key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: expected {len(want)} values, got {len(got)}"
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{where}: {i}")
    else:
        assert got == want, f"{where}: expected {want}, got {got}"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_has_the_bits_of_one(num_ranks, models, alone):
    for rank, found in enumerate(
        parallel.run(programs.everything, num_ranks, models, True, timeout_s=300, num_threads=1)
    ):
        assert_same(found, alone, f"rank {rank} of {num_ranks}")


def test_what_is_compared_says_something(alone, models):
    for dtype in programs.DTYPES:
        for name, num_tokens in models.items():
            tokens, logits, _ = alone[name, dtype]["ar"]
            assert len(tokens) == num_tokens == len(logits) and len(set(tokens)) >= 8
            assert torch.isfinite(logits).all()
        tokens, _, accepted = alone["tiny", dtype]["ddtree"]
        assert tokens == alone["tiny", dtype]["ar"][0]
        assert sum(accepted) > 0 and min(accepted) == 0
    with pytest.raises(AssertionError, match="differ, the first at"):
        changed = alone["vocabulary", 331][0].clone()
        changed[0, 0, 0] = -torch.inf
        assert_same(changed, alone["vocabulary", 331][0], "a changed bit")


def test_a_rank_holds_its_share_alone():
    whole = programs.held_bytes(ONE_RANK, "tiny")
    for rank, held in enumerate(parallel.run(programs.held_bytes, 2, "tiny")):
        assert held["head"] * 2 == whole["head"], f"rank {rank}"
        assert held["all"] < 0.8 * whole["all"], f"rank {rank}"
