"""bench k26 --tp in small, over Gloo: any number of ranks has one model, texts are exact, failures are bounded."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time

import pytest
import torch

from kdtree_nb import parallel, viz
from kdtree_nb.bench import all_ranks
from kdtree_nb.errors import RankError
from kdtree_nb.model.ranks import ONE_RANK
from kdtree_nb.native import build
from kdtree_nb.parallel import Patience
from kdtree_nb.speculate import Generation, GenerationStats
from tests.parallel import all_ranks_programs as programs

SMALL = ["bench", "k26", "--device", "cpu", "--small", "--layers", "2", "--quick", "--rows", "1", "--prefix", "24"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    """Compiled before any process starts."""
    build.load()


def of(measured, name):
    return [m for m in measured if m.name == name]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_model_is_the_same_for_any_number_of_ranks(num_ranks):
    want = programs.step_logits()
    assert torch.isfinite(want).all() and len(want.argmax(1).unique()) >= 4
    for got in parallel.run(programs.step_logits, num_ranks, num_threads=1):
        assert torch.equal(got, want)


def test_a_rank_makes_its_share_alone():
    whole = programs.held_bytes(ONE_RANK)
    for held in parallel.run(programs.held_bytes, 4, num_threads=1):
        assert held < 0.45 * whole  # the embedding, the router and the latent projections are on all


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_texts_have_the_bits_of_one_process_and_trees_change_none(num_ranks):
    tokens, logits = programs.text_alone()
    digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]
    assert len(set(tokens)) >= 8
    for found in parallel.run(programs.measured, num_ranks, ("k26_tp_text",), num_threads=1):
        for drafter in ("oracle", "random"):
            (text,) = of(found, f"k26_tp_text/{drafter}")
            assert text.samples == [64] and text.params["changed_tokens"] == 0
            assert text.params["digest"] == digest
        assert of(found, "k26_tp_text/oracle")[0].params["accepted"] > 40
        ar, tree = (of(found, f"k26_tp_text/{name}")[0] for name in ("AR", "DDTree, oracle"))
        assert min(*ar.samples, *tree.samples) > 0 and ar.params == tree.params


def test_steps_and_memory_of_two_ranks():
    first, second = parallel.run(programs.measured, 2, ("k26_tp_build", "k26_tp", "k26_tp_rows", "k26_tp_memory"))
    for name in ("step", "without exchange", "exchanges alone"):
        cells = of(first, f"k26_tp/{name}")
        assert [(m.params["rows"], m.params["prefix_len"], m.params["tp"]) for m in cells] == [(1, 40, 2), (5, 40, 2)]
        assert [m.samples for m in cells] == [m.samples for m in of(second, f"k26_tp/{name}")]  # of the slowest rank
        assert [m.params["distinct_experts"] for m in cells][0] == 8
    (rows,) = of(first, "k26_tp_rows/native")
    assert rows.params["changed_rows"] == 0 < rows.params["rows"]
    (weights,) = of(first, "k26_tp_memory/weights")
    assert len(weights.samples) == 2 and weights.unit == "byte"
    assert of(first, "k26_tp_build/random weights")[0].samples == of(second, "k26_tp_build/random weights")[0].samples


def test_a_rank_that_is_killed_ends_the_run_in_bounded_time():
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 has given no sign of life for 3 s"):
        patience = Patience(start_s=30.0, exchange_s=20.0, silence_s=3.0, grace_s=5.0)
        parallel.run(programs.killed_in_a_step, 2, timeout_s=60, patience=patience, num_threads=1)
    assert time.monotonic() - begin < 30


def a_text(logits: torch.Tensor) -> Generation:
    return Generation(logits.argmax(1).tolist(), "length", GenerationStats(accepted_per_step=[1, 2]), logits)


def test_a_bit_that_differs_is_counted():
    told, other = (torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert all_ranks.compared("x", a_text(told), a_text(other), {}).params["changed_tokens"] == 0
    other[4, 0] = torch.nextafter(other[4, 0], torch.tensor(9.0))
    found = all_ranks.compared("x", a_text(told), a_text(other), {})
    assert found.params["changed_tokens"] == 1 and found.samples == [6] and found.params["accepted"] == 3
    assert found.params["digest"] != all_ranks.compared("x", a_text(told), a_text(told), {}).params["digest"]


def torchrun(num_ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, str(num_ranks), "-m", "kdtree_nb", *SMALL, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_prints_once_writes_a_record_and_the_error_of_a_projection(tmp_path):
    alone, together = tmp_path / "one.json", tmp_path / "two.json"
    single = [sys.executable, "-m", "kdtree_nb", *SMALL, "--tp-rank-of", "2", "--out", str(alone)]
    subprocess.run(single, capture_output=True, timeout=120, check=True)
    done = torchrun(2, "--tp", "2", "--out", str(together), "--projection", str(alone))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("random weights") == 1 and done.stdout.count("projection    1 rows behind      24") == 1
    record = viz.load_record(together)
    assert record.device.startswith("2 × ") and record.command.count("torchrun --nproc-per-node 2 -m kdtree_nb") == 1
    (found,) = viz.k26.projections(record.results, viz.load_record(alone).results)
    assert found.rows == 1 and found.prefix_len == 24 and found.measured_s == record.find("k26_tp/step").median
    assert f"({found.assumed_error:+.1%})" in done.stdout and f"({found.with_exchange_error:+.1%})" in done.stdout


def test_refusals():
    assert "expected the number of processes that torchrun has started, 1, got 0" in torchrun(1, "--tp", "0").stderr
    done = torchrun(1, "--tp", "2")
    assert (
        done.returncode != 0
        and "--tp: expected the number of processes that torchrun has started, 1, got 2" in done.stderr
    )
