"""Captured forwards: the same bits as forwards that are run, whatever the trees of one shape hold."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kdtree_nb import Engine, load_model, ops
from kdtree_nb.drafters import Random
from kdtree_nb.speculate.forward import MAX_CAPTURED_ROWS, TreeForward, forward

pytestmark = pytest.mark.cpu_only("forwards are captured on the CPU only")

BUDGET = 9


def random_trees(num_streams, seed):
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(num_streams, 4, 6, generator=generator).log_softmax(2).sort(2, descending=True).values
    ids = torch.stack([torch.randperm(331, generator=generator)[:6] for _ in range(num_streams * 4)])
    bonus = torch.randint(0, 331, (num_streams,), generator=generator)
    return ops.tree_build(log_probs, ids.view(num_streams, 4, 6), bonus, BUDGET)


@pytest.fixture
def prefilled(tiny2):
    """A cache of 3 streams whose first 40 slots hold random values, and the lengths of the prefixes."""
    cache = tiny2.new_cache(3, 64)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    return cache, torch.tensor([20, 7, 31], dtype=torch.int32)


def test_replays_give_the_bits_of_a_run(tiny2, prefilled):
    cache, prefix_len = prefilled
    run = TreeForward(tiny2, cache, prefix_len)
    for seed in range(4):
        tree = random_trees(3, seed)
        if seed == 2:
            prefix_len += torch.tensor([3, 1, 2], dtype=torch.int32)
        logits, token = (t.clone() for t in run(tree, 3 * (BUDGET + 1))[:2])
        cached = cache.data.clone()
        want_logits, want_token, _ = forward(tiny2, cache, prefix_len, tree)
        assert torch.equal(logits, want_logits) and torch.equal(token, want_token)
        assert torch.equal(cached, cache.data)


def test_streams_may_share_out_the_rows_in_another_way(tiny2, prefilled):
    cache, prefix_len = prefilled
    run = TreeForward(tiny2, cache, prefix_len)
    for num_nodes in ([10, 0, 2], [1, 4, 7], [0, 10, 2]):
        tree = random_trees(3, 1)
        tree.num_nodes.copy_(torch.tensor(num_nodes))
        logits = run(tree, 12)[0].clone()
        assert torch.equal(logits, forward(tiny2, cache, prefix_len, tree)[0])


def test_a_replay_that_is_refused_gives_the_error_of_a_run(tiny2, prefilled):
    cache, prefix_len = prefilled
    run = TreeForward(tiny2, cache, prefix_len)
    run(random_trees(3, 0), 30)
    tree = random_trees(3, 1)
    tree.token[1, 4] = 331
    with pytest.raises(ValueError, match="embed: token"):
        run(tree, 30)
    prefix_len.fill_(60)
    with pytest.raises(ValueError, match="latent_append: slot"):
        run(random_trees(3, 1), 30)


def test_large_forwards_are_run(tiny2, prefilled):
    cache, prefix_len = prefilled
    run = TreeForward(tiny2, cache, prefix_len)
    wide = torch.zeros(3, 1, 20)
    ids = torch.arange(20).expand(3, 1, 20).contiguous()
    tree = ops.tree_build(wide - 3, ids, torch.zeros(3, dtype=torch.int64), 20)
    assert 3 * 21 > MAX_CAPTURED_ROWS
    assert torch.equal(run(tree, 63)[0], forward(tiny2, cache, prefix_len, tree)[0])


class _Seen(TorchDispatchMode):
    """Collects the operators that are called."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["tiny", "tiny2"])
def test_a_forward_consists_of_native_operators_and_views(models, name):
    """Any other torch operation would be missing from a replay."""
    model = models(name)
    tree, prefix_len = random_trees(1, 0), torch.zeros(1, dtype=torch.int32)
    cache = model.new_cache(1, 64)
    tree.token.clamp_(max=model.config.vocab_size - 1)
    with _Seen() as seen:
        forward(model, cache, prefix_len, tree)
    native = [op for op in seen.operators if op.namespace.startswith("kdtree_")]
    assert len(native) > 11 * model.config.num_hidden_layers
    assert [str(op) for op in seen.operators if op not in native and not op.is_view] == []


def test_an_engine_reuses_its_cache_and_captures(tiny2):
    engine = Engine(tiny2, Random(depth=3), budget=5)
    first = engine.generate_ddtree([5, 6, 7], 20, return_logits=True)
    (kept,) = engine._spares
    with torch.inference_mode():
        kept.cache.data.fill_(float("nan"))  # nothing of the last text may be read
    again = engine.generate_ddtree([5, 6, 7], 20, return_logits=True)
    assert engine._spares == [kept]
    assert again.tokens == first.tokens
    assert torch.equal(again.logits, first.logits)
    engine.generate_ar([[5, 6], [7]], 3)
    assert engine._spares != [kept], "two streams need another cache"


def test_an_engine_drops_the_cache_of_a_failed_call(tiny2):
    engine = Engine(tiny2, Random(depth=3), budget=5)
    expected = engine.generate_ddtree([5, 6, 7], 20).tokens

    def fail(step):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        engine.generate_ddtree([5, 6, 7], 20, on_step=fail)
    assert engine._spares == []
    assert engine.generate_ddtree([5, 6, 7], 20).tokens == expected


@pytest.mark.parametrize("swap", ["object", "storage"])
def test_an_engine_sees_weights_that_were_exchanged(swap):
    model = load_model("tiny2")
    engine, prompt = Engine(model), [5, 6, 7]
    before = engine.generate_ar(prompt, 4, return_logits=True)
    if swap == "object":
        model.head = model.head._replace(data=-model.head.data)
    else:
        model.head.data.data = -model.head.data
    after = engine.generate_ar(prompt, 4, return_logits=True)
    assert torch.equal(after.logits[0], -before.logits[0])
    fresh = Engine(model).generate_ar(prompt, 4, return_logits=True)
    assert after.tokens == fresh.tokens and torch.equal(after.logits, fresh.logits)


def test_weights_of_captured_forwards_stay_in_memory():
    model = load_model("tiny2")
    engine, prompt = Engine(model), [5, 6, 7]
    want = engine.generate_ar(prompt, 8, return_logits=True)

    def exchange(step):
        if step.step == 2:
            model.head = model.head._replace(data=torch.full_like(model.head.data, torch.nan))

    got = engine.generate_ar(prompt, 8, return_logits=True, on_step=exchange)
    assert torch.equal(got.logits, want.logits)
