"""How large a step is launched: the best by the cost model and by trees that were seen steps ago, and exact output."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

import numpy as np
import pytest
import torch

from kdtree_nb import Engine
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.cost import CostKey, CostModel, Surface
from kdtree_nb.speculate.cut import Cutter
from kdtree_nb.speculate.device_batch import LOOKAHEAD, DeviceBatch
from kdtree_nb.speculate.device_forward import DeviceForward
from kdtree_nb.speculate.mode import Auto, captured_sizes
from kdtree_nb.speculate.sizer import EXPLORE_EVERY, SAMPLE_EVERY, SWITCH_GAIN, Size, Sizer
from tests.speculate.shared import NUM_TOKENS, Broken, cost_of, submit_all

KEY = CostKey("d", "t", "device", "s", "m", "b")
SIZES = captured_sizes(64)
CPU = torch.device("cpu")


def sizer_of(seconds, typical=(), num_streams=1, cut_s=0.0, sizes=SIZES) -> Sizer:
    """seconds(slots, rows, num_active): of a step that cuts nothing."""
    cutters = {}
    for slots in sizes:
        rows = {S: range(S, S * slots + 1) for S in range(1, num_streams + 1)}
        surfaces = tuple(
            Surface(slots, S, tuple(r), (tuple(seconds(slots, n, S) for n in r),)) for S, r in rows.items()
        )
        cost = CostModel(KEY, 64, (100,), surfaces)
        besides = [cut_s if slots > 1 else 0.0] * num_streams
        cutters[slots] = Cutter(cost, num_streams, slots - 1, besides, CPU, [slots])
    return Sizer(cutters, {slots: cut_s if slots > 1 else 0.0 for slots in sizes}, typical)


def falling(exponent: float, rng=None, length: int = 65) -> np.ndarray:
    """Probabilities of the nodes of a best-first tree, the root's first."""
    mass = 0.9 * np.arange(1, length, dtype=float) ** -exponent
    if rng is not None:
        mass = np.sort(mass * rng.uniform(0.5, 1, length - 1))[::-1]
    return np.concatenate([[1.0], mass])


def run(sizer, trees, lag=0, prefix_len=10.0) -> list[Size]:
    """The sizes chosen for steps over `trees` f64 [steps, nodes], whose records come `lag` steps later."""
    chosen, in_flight = [], deque()
    for mass in trees:
        size, is_seen = sizer.choose(1, prefix_len)
        chosen.append(size)
        in_flight.append((mass[: size.num_slots], is_seen and size.num_slots > 1))
        while len(in_flight) > lag:
            seen, is_seen = in_flight.popleft()
            if is_seen:
                sizer.learn(np.log(seen)[None], prefix_len)
    return chosen


def best_size(mean, seconds) -> int:
    """By looking at every size."""
    return max(SIZES, key=lambda slots: mean[:slots].sum() / seconds(slots, slots, 1))


def only(best: int):
    """Seconds by which one size is far better than all others."""
    return lambda slots, rows, num_active: 1.0 if slots == best else 100.0


@pytest.mark.parametrize("lag", [0, LOOKAHEAD])
@pytest.mark.parametrize("exponent", [0.3, 0.7, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("per_slot", [0.002, 0.02, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("prior", [None, 0.3, 3.0])
def test_the_size_found_is_that_of_brute_force(lag, exponent, per_slot, prior):
    """From any prior. Seconds depend on the slots alone, so that cutting gains nothing."""

    def seconds(slots, rows, num_active):
        return 1 + per_slot * slots

    rng = np.random.default_rng(int(100 * exponent))
    trees = [falling(exponent, rng) for _ in range(600)]
    sizer = sizer_of(seconds, () if prior is None else falling(prior), cut_s=0.001)
    chosen = run(sizer, trees, lag)
    mean = np.mean(trees, 0)
    want = best_size(mean, seconds)
    got = chosen[-1]
    assert not got.is_cut or got.num_slots == 1
    rate = {slots: mean[:slots].sum() / seconds(slots, slots, 1) for slots in (got.num_slots, want)}
    assert rate[got.num_slots] * 1.03 >= rate[want], (got, want)


@pytest.mark.parametrize("best", [1, 2, 9, 33, 65])
def test_with_typical_trees_the_first_step_is_of_the_best_size(best):
    chosen = run(sizer_of(only(best), falling(1.0)), [falling(1.0)] * 20, LOOKAHEAD)
    assert {size.num_slots for size in chosen} == {best}


@pytest.mark.parametrize("best", [2, 9, 33])
def test_without_typical_trees_the_first_steps_are_the_largest(best):
    chosen = run(sizer_of(only(best)), [falling(1.0)] * 20, LOOKAHEAD)
    assert chosen[: LOOKAHEAD + 1] == [Size(65, True)] * (LOOKAHEAD + 1)
    assert {size.num_slots for size in chosen[LOOKAHEAD + 1 :]} == {best}


def test_a_size_that_has_become_too_small_or_too_large_is_noticed():
    def seconds(slots, rows, num_active):
        return 1 + 0.02 * slots

    unsure, sure = falling(0.3), falling(4.0)
    assert best_size(sure, seconds) < 9 < 33 <= best_size(unsure, seconds)
    chosen = run(sizer_of(seconds, sure, cut_s=0.01), [sure] * 100 + [unsure] * 800 + [sure] * 800, LOOKAHEAD)
    assert chosen[99].num_slots == best_size(sure, seconds) == chosen[-1].num_slots
    assert chosen[899].num_slots == best_size(unsure, seconds)
    assert sum(a != b for a, b in zip(chosen, chosen[1:], strict=False)) <= 40  # 2 at a time to explore


def test_where_rows_are_dear_and_trees_differ_steps_cut_them():
    """A step in two is sure of all its nodes, the others of none: no size suits both."""
    trees = [np.concatenate([[1.0], np.full(64, 0.99 if i % 2 else 0.01)]) for i in range(400)]

    def seconds(slots, rows, num_active):
        return 1 + 0.2 * rows

    chosen = run(sizer_of(seconds, trees[1], cut_s=0.01), trees, LOOKAHEAD)
    assert chosen[-1].is_cut and chosen[-1].num_slots >= 33
    chosen = run(sizer_of(seconds, trees[1], cut_s=50.0), trees, LOOKAHEAD)
    assert not chosen[-1].is_cut


def test_noise_does_not_make_it_switch():
    rng = np.random.default_rng(0)
    trees = [falling(1.0, rng) for _ in range(500)]
    sizer = sizer_of(lambda slots, rows, num_active: 1 + 0.01 * slots, falling(1.0), cut_s=0.01)
    chosen = run(sizer, trees, LOOKAHEAD)
    switches = sum(a != b for a, b in zip(chosen, chosen[1:], strict=False))
    assert switches <= 3 + 2 * len(trees) // EXPLORE_EVERY
    rates = sizer.rates(1, 10.0)
    assert rates[chosen[-1]] * SWITCH_GAIN >= max(rates.values())


def test_a_useless_drafter_is_left_out_and_asked_again():
    useless, useful = np.concatenate([[1.0], np.full(64, 1e-6)]), falling(0.5)

    def seconds(slots, rows, num_active):
        return 1.0 if slots == 1 else 1.5 + 0.01 * slots

    chosen = run(sizer_of(seconds, useless, cut_s=0.01), [useless] * 200 + [useful] * 3000, LOOKAHEAD)
    counts = Counter(size.num_slots > 1 for size in chosen[:200])
    assert counts[True] == 200 // EXPLORE_EVERY
    assert all(size.num_slots > 9 for size in chosen[-50:])


def test_trees_are_looked_at_now_and_then():
    sizer = sizer_of(only(9), falling(1.0))
    seen = 0
    for _ in range(400):
        _, is_seen = sizer.choose(1, 10.0)
        if is_seen:
            sizer.learn(np.log(falling(1.0)[:9])[None], 10.0)
            seen += 1
    assert seen == pytest.approx(400 / SAMPLE_EVERY, abs=SAMPLE_EVERY)


@pytest.mark.parametrize("num_streams", [2, 10])
def test_fewer_streams_may_have_larger_trees(num_streams):
    def seconds(slots, rows, num_active):
        return 1 + 0.05 * rows

    sizer = sizer_of(seconds, falling(1.0), num_streams)
    mean = falling(1.0)
    for active in (num_streams, 1):
        got = sizer.choose(active, 10.0)[0]
        rates = {n: active * mean[:n].sum() / seconds(n, active * n, active) for n in SIZES}
        assert rates[got.num_slots] * SWITCH_GAIN >= max(rates.values())
    assert sizer.choose(1, 10.0)[0].num_slots > 5


def test_trees_that_are_not_full_count_as_what_they_are():
    """A drafter with three candidates: larger steps hold no more rows."""

    def seconds(slots, rows, num_active):
        return 1 + rows + 0.001 * slots

    sizer = sizer_of(seconds)
    log_prob = np.full((1, 65), -np.inf)
    log_prob[0, :4] = 0.0
    sizer.learn(log_prob, 10.0)
    rates = sizer.rates(1, 10.0)
    assert rates[Size(65)] == pytest.approx(4 / (1 + 4 + 0.065)) and rates[Size(5)] == pytest.approx(4 / 5.005)


@pytest.fixture
def launched(monkeypatch):
    """The slots of every step that was launched: 1 of roots."""
    monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: engine_module.DEVICE)
    seen = []
    launch = DeviceBatch._launch

    def noted(self, runner, with_scores=False):
        seen.append(runner.result.tree.log_prob.shape[1] if hasattr(runner, "result") else None)
        launch(self, runner, with_scores)
        seen[-1] = runner.result.tree.log_prob.shape[1]

    monkeypatch.setattr(DeviceBatch, "_launch", noted)
    return seen


@pytest.mark.parametrize("best", [1, 2, 9, 33])
@pytest.mark.parametrize("is_known", [True, False])
def test_the_engine_launches_steps_of_the_best_size(tiny2, prompts, ar, skip_gram, launched, best, is_known):
    typical = tuple(falling(1.0, length=33)) if is_known else ()
    engine = Engine(tiny2, skip_gram, "auto", cost=cost_of(tiny2, skip_gram, best, typical))
    for text, want in zip(prompts["tiny2"] * 2, ar("tiny2") * 2, strict=True):
        got = engine.generate_ddtree(text, NUM_TOKENS, stop_token_ids=())
        assert got.tokens == want.tokens
    before = LOOKAHEAD + 1 if not is_known else 0
    assert launched.count(best) > 0.9 * (len(launched) - before)  # now and then another one is tried
    assert len(launched) > before + 6 and (is_known or launched[:LOOKAHEAD] == [33] * LOOKAHEAD)
    assert len(engine._spares[0]._runners) <= (2 if is_known else 3) + (best == 1)
    assert max(got.stats.nodes_per_step) <= best or best == 1


@pytest.mark.parametrize("best", [2, 9])
def test_chains_of_the_best_length(tiny2, prompts, ar, skip_gram, launched, best):
    engine = Engine(tiny2, skip_gram, "auto", mode="chain", cost=cost_of(tiny2, skip_gram, best))
    got = engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]
    assert set(launched[LOOKAHEAD + 1 :]) <= {min(best, 6)} and max(launched) == 6  # the drafter's depth, and the root


@pytest.mark.parametrize("seed", range(4))
def test_streams_that_come_and_go_under_changing_sizes(tiny2, prompts, ar, skip_gram, monkeypatch, seed):
    """Every step of another size, cut or not, streams of budgets of their own: each text as alone."""
    monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: engine_module.DEVICE)
    rng = np.random.default_rng(seed)
    sizes = captured_sizes(16)

    def choose(self, num_active, prefix_len):
        slots = int(rng.choice(sizes))
        return Size(slots, bool(slots > 1 and rng.random() < 0.5)), bool(rng.random() < 0.5)

    monkeypatch.setattr(Sizer, "choose", choose)
    cost = cost_of(tiny2, skip_gram, 9)
    surfaces = tuple(s for s in cost.surfaces if s.num_slots <= 17)
    cost = CostModel(cost.key, 16, cost.prefix_len, surfaces, cost.overhead)
    engine = Engine(tiny2, skip_gram, "auto", cost=cost, max_streams=3)
    order = rng.integers(0, 3, 8)
    counts = rng.integers(1, NUM_TOKENS + 1, 8).tolist()
    budgets = [None, *rng.integers(0, 17, 7).tolist()]
    handles = []
    for text, count, budget in zip(order, counts, budgets, strict=True):
        handles += submit_all(engine, [prompts["tiny2"][text]], count, budget=budget)
        for _ in range(rng.integers(0, 4)):
            engine.step()
    engine.run()
    for handle, text, count, budget in zip(handles, order, counts, budgets, strict=True):
        assert handle.result().tokens == ar("tiny2")[text].tokens[:count]
        assert budget is None or max(handle.stats.nodes_per_step, default=0) <= 1 + budget


def test_no_step_is_launched_that_likely_comes_too_late(tiny2, prompts, ar, calls, monkeypatch):
    """A drafter that is always right: of 24 tokens, six a step, the last steps are not launched in vain."""
    monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: engine_module.DEVICE)
    want = ar("tiny2")[0].tokens
    known = torch.tensor(prompts["tiny2"][0] + want + [0] * 8, device=tiny2.device)

    def fill(logits, state):
        for depth in range(1, 6):
            place = (state.prefix_len.long() + depth).clamp(max=len(known) - 1)
            logits[0, depth - 1].index_fill_(0, known.index_select(0, place), 30.0)

    engine = Engine(tiny2, Broken(5, (1, 5, 331), fill), 5)
    got = engine.generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=())
    assert got.tokens == want and got.stats.num_target_forwards == 4
    assert calls.count("launch") == 4  # all are in flight before the first record is read


def test_a_forward_keeps_to_the_budgets_of_its_streams(tiny2, skip_gram):
    with torch.inference_mode():
        forward = DeviceForward.allocate(tiny2, 2, 64)
        forward.budget.copy_(torch.tensor([3, 9]))
        forward.drafting_runner(skip_gram, 4)
        (limited,) = forward._budgets.values()
        assert limited.tolist() == [3, 4]
        forward.budget.copy_(torch.tensor([7, 1]))
        forward.limit_budgets()
        assert limited.tolist() == [4, 1]


def test_sizes_that_no_drafter_could_pay_for_are_left_out(tiny2, skip_gram):
    """A step emits at most 1 + depth tokens: one that takes longer than as many plain steps is never launched."""
    cost = cost_of(tiny2, skip_gram, 1)
    slow = {slots: 7.0 if slots > 5 else 2.0 for slots in captured_sizes(32)} | {1: 1.0}
    surfaces = tuple(dataclasses.replace(s, seconds=((slow[s.num_slots],) * 2,)) for s in cost.surfaces)
    mode = Auto(tiny2, "device", dataclasses.replace(cost, surfaces=surfaces)).mode(skip_gram, 1, False)
    assert mode.sizer.sizes == [1, 2, 3, 5] and mode.cutter.max_budget == 4
