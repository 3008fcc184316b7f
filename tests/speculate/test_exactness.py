"""DDTree gives the tokens of AR and the same bits of logits: every drafter, budget, batch mix, model and dtype."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import Engine, drafters
from tests.speculate.shared import assert_same

BUDGETS = [0, 1, 2, 7, 16, 31, 32, 33, 63, 64, 65, 128, 512, 1023]
DRAFTERS = {
    "oracle": lambda continuations, V: drafters.Oracle(continuations),
    "always wrong": lambda continuations, V: drafters.AlwaysWrong(continuations),
    "random": lambda continuations, V: drafters.Random(seed=4),
    "ngram": lambda continuations, V: drafters.NGram(),
    "skip gram": lambda continuations, V: drafters.SkipGram(sum(continuations, []), V, depth=5, min_count=2),
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_fp32(model, name, budget, ar, prompts, request):
    model_name = request.node.callspec.params["model"]
    check(model, name, budget, ar(model_name), prompts[model_name])


@pytest.mark.parametrize("budget", [0, 7, 33, 64, 128])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("model_name", ["tiny", "tiny2"])
def test_bf16(model_name, name, budget, ar, prompts, models):
    check(models(model_name, torch.bfloat16), name, budget, ar(model_name, torch.bfloat16), prompts[model_name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [3, 16, 64, 200])
def test_accepted_nodes_scattered_over_the_tree(model, budget, dtype, ar, prompts, models, shuffled_oracle, request):
    model_name = request.node.callspec.params["model"]
    expected = ar(model_name, dtype)
    drafter = shuffled_oracle([g.tokens for g in expected])
    moved = []
    engine = Engine(models(model_name, dtype), drafter, budget)
    results = engine.generate_ddtree(
        prompts[model_name], 24, return_logits=True, stop_token_ids=(), on_step=lambda record: moved.append(record)
    )
    for got, want in zip(results, expected, strict=True):
        assert_same(got, want)
    paths = [path for record in moved for path in record.accepted_path]
    assert any(path and path != list(range(1, len(path) + 1)) for path in paths)
    assert any(not path for path in paths) or budget > 16


def check(model, name, budget, expected, prompts):
    """DDTree with the drafter of that name, alone and in a batch, against AR: `expected`."""
    drafter = DRAFTERS[name]([g.tokens for g in expected], model.config.vocab_size)
    engine = Engine(model, drafter, budget)
    alone = engine.generate_ddtree(prompts[0], 24, return_logits=True, stop_token_ids=())
    assert_same(alone, expected[0])
    together = engine.generate_ddtree(prompts, 24, return_logits=True, stop_token_ids=())
    for got, want in zip(together, expected, strict=True):
        assert_same(got, want)
    if isinstance(drafter, drafters.AlwaysWrong):
        assert together[0].stats.accepted_per_step == [0] * 24
    if isinstance(drafter, drafters.Oracle) and budget >= drafter.depth:
        assert alone.stats.num_target_forwards == 3 and alone.stats.tokens_per_step == 8.0


def test_ar_is_golden(model, ar, golden_texts, request):
    """So that what is equal to AR in this module is equal to the golden."""
    model_name = request.node.callspec.params["model"]
    for got, golden in zip(ar(model_name), golden_texts[model_name], strict=True):
        assert got.tokens == golden.tokens[:24]


def test_ar_is_the_same_alone_and_in_a_batch(model, ar, prompts, request):
    model_name = request.node.callspec.params["model"]
    together = Engine(model).generate_ar(prompts[model_name], 24, return_logits=True, stop_token_ids=())
    for got, want in zip(together, ar(model_name), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_prefill_are_those_of_decoding(model, dtype, ar, prompts, models, request):
    """Every position of prompt + output in one chain forward, against the logits that AR chose its tokens from."""
    from kdtree_nb import ops
    from kdtree_nb.speculate.drafting import chain_trees

    model_name = request.node.callspec.params["model"]
    model = models(model_name, dtype)
    for prompt, generation in zip(prompts[model_name], ar(model_name, dtype), strict=True):
        text = prompt + generation.tokens[:-1]
        prefix_len = torch.zeros(1, dtype=torch.int32, device=model.device)
        tree = chain_trees([text], model.device)
        logits = model.forward(ops.tree_rows(tree, prefix_len), tree, model.new_cache(1, len(text)), prefix_len)
        assert torch.equal(logits[len(prompt) - 1 :], generation.logits)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_does_not_change_a_bit(model, num_threads, ar, prompts, request):
    model_name = request.node.callspec.params["model"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        got = Engine(model).generate_ar(prompts[model_name][0], 6, return_logits=True, stop_token_ids=())
    finally:
        torch.set_num_threads(before)
    want = ar(model_name)[0]
    assert got.tokens == want.tokens[:6] and torch.equal(got.logits, want.logits[:6])


def test_texts_are_worth_comparing(ar):
    """Enough distinct tokens that equality means something."""
    assert len({t for g in ar("tiny2") for t in g.tokens}) >= 8
    assert len({t for g in ar("tiny") for t in g.tokens}) >= 8
