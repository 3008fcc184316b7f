from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters, ops
from kdtree_nb.drafters import DraftCandidates

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture
def engine(tiny2):
    return Engine(tiny2, drafters.NGram(), max_seq_len=64)


@pytest.mark.parametrize("prompt", [[], [[]], [PROMPT, []]])
def test_an_empty_prompt_is_an_error(engine, prompt):
    with pytest.raises(ValueError, match="at least 1 token"):
        engine.generate_ar(prompt, 4)


@pytest.mark.parametrize("token", [-1, 331, 10**12])
def test_ids_outside_the_vocabulary_are_named(engine, token):
    with pytest.raises(ValueError, match=rf"prompt 1: expected ids of 0 … 330, got {token} at position 2"):
        engine.generate_ddtree([PROMPT, [1, 2, token]], 4)


@pytest.mark.parametrize("prompt", [[1.5], [None, 1], [1, "a"]])
def test_ids_are_integers(engine, prompt):
    with pytest.raises(ValueError, match="expected integer token ids"):
        engine.generate_ar(prompt, 4)


@pytest.mark.parametrize("text", ["def", b"def", ["def", "class"]])
def test_text_is_not_a_prompt(engine, text):
    with pytest.raises(ValueError, match="tokenizer.encode"):
        engine.generate_ar(text, 4)


def test_a_prompt_that_leaves_no_room_is_an_error(engine):
    assert len(engine.generate_ar([1] * 63, 4).tokens) == 1
    with pytest.raises(ValueError, match="at most 63 tokens, got 64: .*shorten"):
        engine.generate_ar([1] * 64, 4)


@pytest.mark.parametrize("budget", [-1, 1024, 1.5, True])
def test_a_budget_out_of_range_is_an_error(tiny2, engine, budget):
    with pytest.raises(ValueError, match="budget: expected an integer of 0 … 1023"):
        Engine(tiny2, drafters.NGram(), budget)
    with pytest.raises(ValueError, match="budget: expected"):
        engine.generate_ddtree([PROMPT, PROMPT], 4, budget=[1, budget])


@pytest.mark.parametrize("count", [-1, [3], [1, 2, 3], [1, -2]])
def test_bad_counts(engine, count):
    with pytest.raises(ValueError, match="max_new_tokens: expected"):
        engine.generate_ar([PROMPT, PROMPT], count)


@pytest.mark.parametrize("max_seq_len", [0, 1, 2049])
def test_max_seq_len_is_bounded_by_the_positions_of_the_model(tiny2, max_seq_len):
    with pytest.raises(ValueError, match="max_seq_len: expected 2 … 2048"):
        Engine(tiny2, max_seq_len=max_seq_len)


def test_ddtree_without_a_drafter(tiny2):
    with pytest.raises(ValueError, match="drafter"):
        Engine(tiny2).generate_ddtree(PROMPT, 4)
    assert Engine(tiny2).generate_ddtree(PROMPT, 4, budget=0).tokens == Engine(tiny2).generate_ar(PROMPT, 4).tokens


def test_one_prompt_gives_a_generation_and_a_list_gives_a_list(engine):
    single = engine.generate_ar(PROMPT, 4)
    (listed,) = engine.generate_ar([PROMPT], 4)
    assert single.tokens == listed.tokens and len(single.tokens) == 4


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor, lambda p: np.array([p])])
def test_prompts_of_other_sequence_types(engine, convert):
    got = engine.generate_ar(convert(PROMPT), 4)
    got = got[0] if isinstance(got, list) else got
    assert got.tokens == engine.generate_ar(PROMPT, 4).tokens
    assert all(type(t) is int for t in got.tokens)


def test_counts_and_budgets_of_numpy(engine):
    want = engine.generate_ar([PROMPT, PROMPT], [4, 2])
    got = engine.generate_ddtree([PROMPT, PROMPT], np.array([4, 2]), budget=np.int64(3))
    assert [g.tokens for g in got] == [w.tokens for w in want]


def test_the_prompt_is_left_alone(engine):
    prompt = list(PROMPT)
    engine.generate_ddtree(prompt, 4)
    assert prompt == PROMPT


def test_no_tokens_asked_for(engine):
    got = engine.generate_ddtree([PROMPT, PROMPT], [0, 3], return_logits=True)
    assert got[0].tokens == [] and got[0].finish_reason == "length" and got[0].logits.shape == (0, 331)
    assert got[0].stats.num_target_forwards == 0 and got[0].stats.num_prefill_forwards == 0
    assert got[1].tokens == engine.generate_ar(PROMPT, 3).tokens
    assert engine.generate_ar(PROMPT, 0).tokens == []


def test_logits_are_those_that_the_tokens_were_chosen_from(engine):
    got = engine.generate_ddtree(PROMPT, 12, return_logits=True)
    assert got.logits.shape == (12, 331) and got.logits.dtype == torch.float32
    assert got.logits.argmax(dim=1).tolist() == got.tokens
    got.logits[0, 0] = 0.0  # an ordinary tensor
    assert engine.generate_ar(PROMPT, 3).logits is None


def test_stats_add_up(engine, tiny2):
    tokens = engine.generate_ar(PROMPT, 21).tokens
    stats = Engine(tiny2, drafters.Oracle(tokens, depth=3), budget=9).generate_ddtree(PROMPT, 21).stats
    assert stats.accepted_per_step == [3, 3, 3, 3, 3, 0]
    assert stats.nodes_per_step == [10, 10, 10, 10, 10, 1]
    assert stats.num_target_forwards == 6 and stats.num_prefill_forwards == 1
    assert stats.num_tokens == 21 and stats.tokens_per_step == 21 / 6
    assert set(stats.seconds) == {"prefill", "draft", "build", "verify", "accept", "compact"}
    assert all(seconds >= 0 for seconds in stats.seconds.values()) and stats.seconds["verify"] > 0


def test_a_long_prompt_is_prefilled_in_chunks(tiny2):
    prompt = np.random.default_rng(0).integers(0, 331, 600).tolist()
    together = Engine(tiny2).generate_ar([prompt, PROMPT], 3, return_logits=True)
    assert [g.stats.num_prefill_forwards for g in together] == [3, 1]
    whole = Engine(tiny2).generate_ar(prompt[:200], 3)
    assert whole.stats.num_prefill_forwards == 1


def test_prefill_chunks_do_not_change_the_logits(tiny2, monkeypatch):
    prompt = np.random.default_rng(0).integers(0, 331, 100).tolist()
    want = Engine(tiny2).generate_ar(prompt, 3, return_logits=True)
    monkeypatch.setattr("kdtree_nb.speculate.batch.PREFILL_CHUNK_TOKENS", 7)
    got = Engine(tiny2).generate_ar(prompt, 3, return_logits=True)
    assert got.stats.num_prefill_forwards == 15
    assert torch.equal(got.logits, want.logits)


def test_steps_can_be_watched(engine, tiny2):
    tokens = engine.generate_ar(PROMPT, 10).tokens
    records = []
    got = Engine(tiny2, drafters.Oracle(tokens, depth=4), 6).generate_ddtree(PROMPT, 10, on_step=records.append)
    assert [r.step for r in records] == [0, 1]
    assert [t for r in records for t in r.emitted[0]] == got.tokens
    first = records[0]
    assert first.stream_ids == [0] and first.accepted_path == [[1, 2, 3, 4]]
    assert first.tree.num_nodes.tolist() == [7] and first.tree.token[0, 0] == PROMPT[-1]
    nodes = [0, *first.accepted_path[0]]
    assert first.target_token[0, nodes].tolist() == first.emitted[0]


def test_a_ready_tree(tiny2, script):
    """A drafter may return trees; here those that tree_build makes of an oracle's candidates."""
    prompts = [PROMPT, [9, 8, 7], [1]]
    want = Engine(tiny2).generate_ar(prompts, [20, 6, 13])
    oracle = drafters.Oracle([g.tokens for g in want], depth=5)

    def answer(context):
        bonus = torch.tensor([tokens[-1] for tokens in context.tokens], device=context.device)
        return ops.tree_build(*oracle.draft(context), bonus, 12)

    got = Engine(tiny2, script(answer), budget=9).generate_ddtree(prompts, [20, 6, 13])
    assert [g.tokens for g in got] == [g.tokens for g in want]
    assert got[0].stats.num_target_forwards == 4
    assert max(n for g in got for n in g.stats.nodes_per_step) == 10  # cut to the budget


def test_a_ready_tree_of_another_root_is_an_error(tiny2, script):
    tree = ops.tree_build(torch.zeros(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.int64), torch.tensor([3]), 1)
    with pytest.raises(ValueError, match="Script: expected trees whose roots are the bonus tokens"):
        Engine(tiny2, script(lambda c: tree)).generate_ddtree(PROMPT, 4)
    with pytest.raises(ValueError, match="a tree for each of 2 streams, got 1"):
        Engine(tiny2, script(lambda c: tree)).generate_ddtree([PROMPT, PROMPT], 4)


BAD_CANDIDATES = {
    "increasing": ([[[-0.5, -0.1]]], [[[1, 2]]], "log-probs"),
    "positive": ([[[0.5, -0.1]]], [[[1, 2]]], "log-probs"),
    "repeated ids": ([[[-0.1, -0.5]]], [[[1, 1]]], "differ"),
    "ids outside the vocabulary": ([[[-0.1, -0.5]]], [[[331, 1]]], "ids of 0 … 330, got 331"),
    "too few dimensions": ([[-0.1, -0.5]], [[1, 2]], "one shape"),
    "different shapes": ([[[-0.1, -0.5]]], [[[1]]], "one shape"),
}


@pytest.mark.parametrize("case", BAD_CANDIDATES)
def test_bad_candidates_are_errors_that_name_the_drafter(tiny2, script, case):
    log_probs, token_ids, message = BAD_CANDIDATES[case]
    draft = DraftCandidates(torch.tensor(log_probs), torch.tensor(token_ids))
    with pytest.raises(ValueError, match=f"Script: .*{message}"):
        Engine(tiny2, script(lambda c: draft)).generate_ddtree(PROMPT, 4)


def test_a_drafter_sees_what_it_needs(tiny2, script):
    seen = []

    def answer(context):
        seen.append((context.stream_ids, [len(t) for t in context.tokens], context.num_prompt_tokens))
        assert context.num_candidates == 16 and context.vocab_size == 331
        shape = (len(context.tokens), 0, 0)
        return DraftCandidates(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64))

    Engine(tiny2, script(answer)).generate_ddtree([PROMPT, [1, 2]], [2, 4])
    assert seen == [([0, 1], [8, 2], [8, 2]), ([0, 1], [9, 3], [8, 2]), ([1], [4], [2])]


def test_an_exception_of_the_drafter_passes_through(tiny2, script):
    def answer(context):
        raise RuntimeError("out of ideas")

    engine = Engine(tiny2, script(answer))
    with pytest.raises(RuntimeError, match="out of ideas"):
        engine.generate_ddtree(PROMPT, 4)
    assert len(engine.generate_ar(PROMPT, 4).tokens) == 4


BAD_DRAFTS = {
    "nothing": (lambda c: None, "expected DraftCandidates or a DraftTree, got NoneType"),
    "a bare pair": (lambda c: (torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)), "expected DraftCandidates .*, got tuple"),
    "another device": (
        lambda c: DraftCandidates(*torch.zeros(2, 1, 1, 1, device="meta")),
        "expected tensors on c",
    ),
    "no tensors": (lambda c: DraftCandidates([[[0.0]]], [[[1]]]), "expected tensors on c"),
    "a longer context": (lambda c: c.tokens[0].append(3) or no_draft(c), "expected context.tokens to be left"),
    "another context": (lambda c: c.tokens[0].__setitem__(-1, 3) or no_draft(c), "expected context.tokens to be left"),
    "an emptied context": (lambda c: c.tokens[0].clear() or no_draft(c), "expected context.tokens to be left"),
}


def no_draft(context):
    shape = (len(context.tokens), 0, 0)
    return DraftCandidates(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("case", BAD_DRAFTS)
def test_what_a_drafter_must_not_do(tiny2, script, case):
    answer, message = BAD_DRAFTS[case]
    with pytest.raises(ValueError, match=f"draft: Script: {message}"):
        Engine(tiny2, script(answer)).generate_ddtree(PROMPT, 4)


def test_a_ready_tree_has_a_root(tiny2, script):
    tree = ops.tree_build(torch.zeros(1, 0, 0), torch.zeros(1, 0, 0).long(), torch.tensor(PROMPT[-1:]), 0)
    tree.num_nodes.zero_()
    with pytest.raises(ValueError, match=r"expected trees of at least 1 node, got \[0\]"):
        Engine(tiny2, script(lambda c: tree)).generate_ddtree(PROMPT, 4)


@pytest.mark.parametrize("drafter", [drafters.NGram, "ngram", 3])
def test_a_drafter_is_an_instance_that_can_draft(tiny2, drafter):
    with pytest.raises(ValueError, match="Engine: drafter: expected an instance with a method draft"):
        Engine(tiny2, drafter)


@pytest.mark.parametrize("model", ["tiny", None, Engine])
def test_a_model_is_what_load_model_gives(model):
    with pytest.raises(ValueError, match="Engine: model: expected what load_model gives"):
        Engine(model)


@pytest.mark.parametrize("prompt", [None, 5, torch.tensor(5), [[1, 2], 3], [1, [2]], [True, False]])
def test_other_things_are_no_prompts(engine, prompt):
    with pytest.raises(ValueError, match="expected a list of token ids|expected integer token ids"):
        engine.generate_ar(prompt, 4)


def test_numbers_may_be_tensors_without_dimensions(engine):
    want = engine.generate_ddtree([5, 6], 4, budget=3).tokens
    assert engine.generate_ddtree([torch.tensor(5), np.array(6)], np.array(4), budget=torch.tensor(3)).tokens == want


@pytest.mark.parametrize("max_seq_len", [64.0, "64", True])
def test_max_seq_len_is_an_integer(tiny2, max_seq_len):
    with pytest.raises(ValueError, match="max_seq_len: expected an integer"):
        Engine(tiny2, max_seq_len=max_seq_len)


def test_stop_tokens_of_other_types(engine):
    tokens = engine.generate_ar(PROMPT, 8, stop_token_ids=()).tokens
    stopped = tokens[: tokens.index(tokens[3]) + 1]
    for stop in (torch.tensor(tokens[3:4]), [np.int64(tokens[3])], {tokens[3]}):
        assert engine.generate_ar(PROMPT, 8, stop_token_ids=stop).tokens == stopped
    for stop in (3, ["a"], [1.0], [True]):
        with pytest.raises(ValueError, match="stop_token_ids: expected"):
            engine.generate_ar(PROMPT, 8, stop_token_ids=stop)


def test_budgets_of_zero_need_no_drafter(tiny2):
    engine = Engine(tiny2)
    assert engine.generate_ddtree([PROMPT], 3, budget=[0])[0].tokens == engine.generate_ar(PROMPT, 3).tokens
