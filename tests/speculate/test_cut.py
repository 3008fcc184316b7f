"""Where trees are cut: the choice of brute force over every budget, on the host as on the device, and exact output."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters, ops
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.cost import NEVER_S, CostKey, CostModel, Surface
from kdtree_nb.speculate.cut import Cutter, cut, cut_on_host
from kdtree_nb.speculate.mode import num_tree_slots
from tests.speculate.shared import linear_cost

KEY = CostKey("d", "t", "host", "s", "m", "b")


def random_trees(rng: np.random.Generator, num_streams: int, max_budget: int, device: torch.device, sure: float = 1.0):
    """Best-first trees over random marginals of depth 4, of random budgets."""
    logits = torch.from_numpy(rng.normal(scale=3 * sure, size=(num_streams, 4, 12))).float().to(device)
    log_probs, ids = ops.draft_topk(logits, min(max_budget, 12))
    budgets = torch.from_numpy(rng.integers(0, max_budget + 1, num_streams)).int().to(device)
    bonus = torch.zeros(num_streams, dtype=torch.int64, device=device)
    return ops.tree_build(log_probs, ids, bonus, budgets, max_budget)


def rate_of(tree, counts, seconds) -> float:
    """Tokens per second where stream s has counts[s] nodes, root included."""
    expected = sum(float(tree.log_prob[s, :n].exp().sum()) for s, n in enumerate(counts))
    return expected / float(seconds[sum(counts)])


def best_rate(tree, seconds) -> float:
    """By trying every budget of every stream."""
    ranges = [range(min(1, int(n)), int(n) + 1) for n in tree.num_nodes]
    return max(rate_of(tree, counts, seconds) for counts in itertools.product(*ranges) if sum(counts))


def random_seconds(rng: np.random.Generator, num_rows: int, num_active: int) -> torch.Tensor:
    """Of a step by rows: rising, flat and with jumps, as captured sizes make them."""
    kind = rng.integers(3)
    steps = rng.exponential(size=num_rows + 1) * (rng.random(num_rows + 1) < (0.2 if kind == 0 else 1))
    seconds = rng.choice([0.2, 3.0, 30.0]) + np.cumsum(steps)
    seconds[:num_active] = NEVER_S
    return torch.from_numpy(seconds)


def both(tree, seconds) -> list[list[int]]:
    """What the device and the host choose, which is the same."""
    on_device = cut(tree, seconds.to(tree.log_prob.device)).tolist()
    on_host, rate = cut_on_host(tree.log_prob.cpu().numpy(), tree.num_nodes.tolist(), seconds.numpy())
    assert on_host == on_device and rate == pytest.approx(rate_of(tree, on_host, seconds), rel=1e-12)
    return [on_device, on_host]


@pytest.mark.parametrize("seed", range(60))
def test_one_stream_gets_the_budget_of_brute_force(seed, device):
    rng = np.random.default_rng(seed)
    tree = random_trees(rng, 1, int(rng.choice([1, 2, 7, 33, 64])), device)
    seconds = random_seconds(rng, tree.log_prob.numel(), 1)
    for counts in both(tree, seconds):
        assert rate_of(tree, counts, seconds) == pytest.approx(best_rate(tree, seconds), rel=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_several_streams_get_the_budgets_of_brute_force(seed, device):
    rng = np.random.default_rng(seed)
    num_streams = int(rng.choice([2, 3]))
    tree = random_trees(rng, num_streams, int(rng.choice([1, 4, 9])), device)
    active = torch.from_numpy(rng.random(num_streams) < 0.8).int().to(device)
    tree.num_nodes.mul_(active)
    num_active = int((tree.num_nodes > 0).sum())
    seconds = random_seconds(rng, tree.log_prob.numel(), max(1, num_active))
    if num_active == 0:
        assert cut(tree, seconds.to(device)).tolist() == [0] * num_streams
        return
    for counts in both(tree, seconds):
        assert all((n > 0) == (most > 0) and n <= most for n, most in zip(counts, tree.num_nodes.tolist(), strict=True))
        assert rate_of(tree, counts, seconds) == pytest.approx(best_rate(tree, seconds), rel=1e-12)


def test_a_free_step_takes_every_node_and_a_dear_one_none(device):
    tree = random_trees(np.random.default_rng(3), 3, 12, device)
    rows = torch.arange(tree.log_prob.numel() + 1, dtype=torch.float64, device=device)
    assert both(tree, torch.ones_like(rows).cpu())[0] == tree.num_nodes.tolist()
    dear = torch.where(rows < 3, NEVER_S, rows**4)
    assert both(tree, dear.cpu())[0] == [1, 1, 1]


def test_certain_nodes_and_roots_tie_and_every_stream_keeps_its_root(device):
    log_probs = torch.zeros(3, 4, 1, device=device)
    ids, bonus = torch.ones(3, 4, 1, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    tree = ops.tree_build(log_probs, ids, bonus, 4)
    seconds = torch.arange(16, dtype=torch.float64, device=device) + 1
    seconds[:3] = NEVER_S
    assert both(tree, seconds.cpu())[0] == [5, 5, 5]


def surface(num_streams, size, rng, num_slots=0):
    rows = tuple(num_streams * n for n in range(1, size + 1))
    base = rng.exponential() + np.cumsum(rng.exponential(size=(2, size)), 1) * rng.choice([0.1, 1])
    return Surface(num_slots, num_streams, rows, tuple(map(tuple, base.tolist())))


@pytest.mark.parametrize("num_streams", range(1, 11))
def test_the_host_and_the_device_choose_alike(num_streams, device):
    rng = np.random.default_rng(num_streams)
    cost = CostModel(KEY, 8, (10, 60), (surface(1, 9, rng), surface(4, 9, rng)))
    for _ in range(20):
        tree = random_trees(rng, num_streams, 8, device)
        active = torch.from_numpy(rng.random(num_streams) < 0.7).int().to(device)
        tree.num_nodes.mul_(active)
        lengths = torch.from_numpy(rng.integers(0, 100, num_streams)).int().to(device)
        cutter = Cutter(cost, num_streams, 8, [0.1 * n for n in range(1, num_streams + 1)], device)
        got = cutter.on_device(tree, active, lengths)
        num_active = int(active.sum())
        if num_active == 0:
            assert got.tolist() == [0] * num_streams
            continue
        mean = (lengths * active).sum().item() / num_active
        on_host = dataclasses.replace(tree, **{name: field.cpu() for name, field in vars(tree).items()})
        assert got.tolist() == cutter.on_host(on_host, num_active, mean)
        rows = range(num_active, int(tree.num_nodes.sum()) + 1)
        middle = cutter.grid_prefix(mean)
        seconds = [cost.seconds(num_active, middle, n) + 0.1 * num_active for n in rows]
        table = [NEVER_S] * num_active + seconds
        if num_streams <= 2:
            assert rate_of(tree, got.tolist(), table) == pytest.approx(best_rate(tree, table), rel=1e-6)


@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.cpu_only("the host chooses among captured steps on the CPU")
def test_the_host_knows_the_sizes_of_captured_steps(num_streams, device):
    """Slots that are not used cost something, so that costs jump where the next captured step begins."""
    rng = np.random.default_rng(5)
    sizes = [1, 2, 3, 5, 9]
    for _ in range(20):
        largest, idle = surface(num_streams, 9, rng), np.cumsum(rng.exponential(size=len(sizes)))
        seconds = np.array(largest.seconds)
        surfaces = tuple(
            Surface(size, num_streams, largest.num_rows[:size], tuple(map(tuple, (seconds[:, :size] + i).tolist())))
            for size, i in zip(sizes, idle, strict=True)
        )
        cost = CostModel(KEY, 8, (10, 60), surfaces)
        cutter = Cutter(cost, num_streams, 8, [0.0] * num_streams, device, sizes)
        tree = random_trees(rng, num_streams, 8, device)
        counts, middle = cutter.on_host(tree, num_streams, 30), cutter.grid_prefix(30)

        def rate(counts, tree=tree, cost=cost, middle=middle):
            slots = num_tree_slots(max(counts))
            seconds = {sum(counts): cost.seconds(num_streams, middle, sum(counts), slots)}
            return rate_of(tree, counts, seconds)

        every = itertools.product(*(range(1, int(n) + 1) for n in tree.num_nodes))
        assert rate(counts) == pytest.approx(max(map(rate, every)), rel=1e-12)


def test_a_prefix_is_looked_up_close_by(device):
    cost = CostModel(KEY, 1, (10, 1000), (Surface(0, 1, (1, 2), ((1.0, 2.0), (3.0, 4.0))),))
    cutter = Cutter(cost, 1, 1, [0.0], device)
    for prefix_len in (0, 1, 500, 1000, 1999):
        assert abs(cutter.grid_prefix(prefix_len) - prefix_len) <= 16
    assert cutter.grid_prefix(10**6) == cutter.grid_prefix(2047) <= 2047


def make_drafter(name, continuations, vocab_size):
    return {
        "oracle": lambda: drafters.Oracle(continuations),
        "ngram": lambda: drafters.NGram(),
        "random": lambda: drafters.Random(),
        "skip gram": lambda: drafters.SkipGram(sum(continuations, []), vocab_size, depth=5, min_count=2),
    }[name]()


@pytest.mark.parametrize("mode", ["tree", "chain"])
@pytest.mark.parametrize("per_row", [1e-6, 0.05, 1e6])
@pytest.mark.parametrize("name", ["oracle", "ngram", "random", "skip gram"])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_auto_gives_the_text_of_ar(models, prompts, ar, monkeypatch, kind, name, per_row, mode):
    model, want = models("tiny2"), ar("tiny2")
    drafter = make_drafter(name, [g.tokens for g in want], model.config.vocab_size)
    monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: getattr(engine_module, kind.upper()))
    cost = linear_cost(model, kind, drafter, per_row)
    engine = Engine(model, drafter, "auto", cost=cost, mode=mode)
    alone = engine.generate_ddtree(prompts["tiny2"][0], 24, return_logits=True, stop_token_ids=())
    together = engine.generate_ddtree(prompts["tiny2"], 24, return_logits=True, stop_token_ids=())
    for got, expected in zip([alone, *together], [want[0], *want], strict=True):
        assert got.tokens == expected.tokens and torch.equal(got.logits, expected.logits)
    if per_row == 1e6 and (name, mode) != ("random", "chain"):  # a row costs more than a node short of certain brings
        assert set(alone.stats.nodes_per_step) == {1}
    if name == "oracle" and per_row == 1e-6:
        assert alone.stats.num_target_forwards == 3


@pytest.mark.parametrize("num_streams", [1, 2, 5, 10])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_one_to_ten_streams(models, prompts, ar, monkeypatch, kind, num_streams):
    model = models("tiny2")
    order = [i % 3 for i in range(num_streams)]
    counts = [24, 5, 9, 24, 7, 1, 13, 3, 24, 2][:num_streams]
    want = [ar("tiny2")[i] for i in order]
    drafter = make_drafter("skip gram", [g.tokens for g in ar("tiny2")], model.config.vocab_size)
    monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: getattr(engine_module, kind.upper()))
    engine = Engine(model, drafter, "auto", cost=linear_cost(model, kind, drafter, 0.02))
    got = engine.generate_ddtree([prompts["tiny2"][i] for i in order], counts, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens[:count] for w, count in zip(want, counts, strict=True)]
    assert len({n for g in got for n in g.stats.nodes_per_step}) > 1


@pytest.mark.parametrize("kind", ["host", "device"])
def test_every_step_is_cut_where_brute_force_cuts_it(models, prompts, ar, monkeypatch, kind):
    model = models("tiny2")
    if kind == "device" and model.device.type == "cuda":
        pytest.skip("a captured step cannot be watched; the kind host cuts on the GPU by the same function")
    drafter = make_drafter("skip gram", [g.tokens for g in ar("tiny2")], model.config.vocab_size)
    monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: getattr(engine_module, kind.upper()))
    cost, seen, records = linear_cost(model, kind, drafter, 0.05), [], []
    name = "on_device" if kind == "device" or model.device.type == "cuda" else "on_host"
    choose = getattr(Cutter, name)

    def watched(self, tree, active, prefix_len):
        counts = choose(self, tree, active, prefix_len)
        seen.append((tree.log_prob.clone(), tree.num_nodes.tolist(), counts))
        return counts

    monkeypatch.setattr(Cutter, name, watched)
    engine = Engine(model, drafter, "auto", cost=cost)
    engine.generate_ddtree(prompts["tiny2"][0], 24, stop_token_ids=(), on_step=records.append)
    taken = [(log_prob, whole, [int(n) for n in counts]) for log_prob, whole, counts in seen if whole[0] > 0]
    assert len({counts[0] for _, _, counts in taken}) > 1
    assert [int(r.tree.num_nodes[0]) for r in records if r.tree.num_nodes[0] > 1] == [
        c[0] for *_, c in taken if c[0] > 1
    ]
    for log_prob, (whole,), counts in taken:
        expected = log_prob[0].exp().cumsum(0).tolist()
        seconds = [cost.seconds(1, 1, n, 17 if kind == "device" else 0) for n in range(1, whole + 1)]
        rates = [e / s for e, s in zip(expected, seconds, strict=False)]
        assert counts == [1 + rates.index(max(rates))]


def test_a_chain_has_one_node_per_depth(models, prompts, ar, monkeypatch, device):
    model = models("tiny2")
    for kind in ("host", "device"):
        monkeypatch.setattr(
            engine_module, "_kind", lambda use_graphs, device, k=kind: getattr(engine_module, k.upper())
        )
        drafter = make_drafter("skip gram", [g.tokens for g in ar("tiny2")], model.config.vocab_size)
        records = []
        engine = Engine(model, drafter, 16, mode="chain")
        got = engine.generate_ddtree(prompts["tiny2"][0], 24, stop_token_ids=(), on_step=records.append)
        assert got.tokens == ar("tiny2")[0].tokens
        for record in records:
            count = int(record.tree.num_nodes[0])
            assert record.tree.depth[0, :count].tolist() == list(range(count)) and count <= 6
        assert max(got.stats.nodes_per_step) == 6  # the drafter's depth, whatever the budget


def test_a_chain_of_a_drafter_of_trees_is_refused(tiny2, script):
    ready = script(lambda context: random_trees(np.random.default_rng(0), 1, 4, torch.device("cpu")))
    with pytest.raises(ValueError, match="Script: expected DraftCandidates for mode 'chain', got a DraftTree"):
        Engine(tiny2, ready, 4, mode="chain", use_graphs=False).generate_ddtree([1, 0], 8)


def test_ready_trees_are_cut_too(tiny2, prompts, ar, script):
    """The scores behind the num_nodes of a drafter's tree do not count."""

    def answer(context):
        ids = torch.arange(4).expand(1, 3, 4).contiguous()
        log_probs = torch.tensor([-0.1, -3.0, -4.0, -5.0]).expand(1, 3, 4).contiguous()
        tree = ops.tree_build(log_probs, ids, torch.tensor([context.tokens[0][-1]]), 12)
        tree.num_nodes.fill_(3)
        return tree

    drafter = script(answer, depth=3)
    cost = linear_cost(tiny2, "host", drafter, 1e-6)
    engine = Engine(tiny2, drafter, "auto", cost=cost, use_graphs=False)
    got = engine.generate_ddtree(prompts["tiny2"][0], 12, stop_token_ids=())
    assert got.tokens == ar("tiny2")[0].tokens[:12] and max(got.stats.nodes_per_step) == 3


def test_bad_modes_and_budgets(tiny2):
    with pytest.raises(ValueError, match="Engine: mode: expected one of tree, chain, got 'line'"):
        Engine(tiny2, drafters.NGram(), mode="line")
    with pytest.raises(ValueError, match="budget: expected an integer of 0 … 1023 or .auto., got 'many'"):
        Engine(tiny2, drafters.NGram(), budget="many")
    with pytest.raises(ValueError, match='expected a drafter for budget "auto", got none'):
        Engine(tiny2).generate_ddtree([1], 4, budget="auto")


def test_ar_needs_no_cost_model_and_is_not_cut(tiny2, prompts, ar):
    drafter = drafters.NGram()
    engine = Engine(
        tiny2, drafter, "auto", cost=linear_cost(tiny2, engine_module._kind(None, tiny2.device).name, drafter, 1)
    )
    assert engine.generate_ar(prompts["tiny2"][0], 5, stop_token_ids=()).tokens == ar("tiny2")[0].tokens[:5]
