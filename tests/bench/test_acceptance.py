"""The harness: its steps are the engine's for every budget, its sums its definitions, and a wrong text is noticed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters
from kdtree_nb.bench import BenchmarkError, acceptance, prompt_sets
from kdtree_nb.bench.acceptance import CHAIN, Acceptance, check, decode_texts, distinct_runs, measure_acceptance
from kdtree_nb.bench.text_drafts import draft_along
from kdtree_nb.goldens import load_goldens

BUDGETS = (1, 2, 5, 16, 40)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def prompts():
    """Prompts of tiny2 of different lengths."""
    return [golden.prompt for golden in load_goldens("tiny2")]


@pytest.fixture(scope="module")
def texts(models, prompts):
    """What tiny2 writes after them."""
    return decode_texts(models("tiny2"), prompts, NUM_TOKENS)


def make_drafter(name, texts):
    return {
        "oracle": lambda: drafters.Oracle(texts, depth=4),
        "ngram": lambda: drafters.NGram(),
        "always wrong": lambda: drafters.AlwaysWrong(texts),
        "skip gram": lambda: drafters.SkipGram(sum(texts, []), 331, depth=5, min_count=2),
    }[name]()


def test_texts_are_those_of_ar_to_the_last_token(models, prompts, texts):
    engine = Engine(models("tiny2"))
    assert texts == [engine.generate_ar(p, NUM_TOKENS, stop_token_ids=()).tokens for p in prompts]


@pytest.mark.parametrize("at_once", [2, 32])
@pytest.mark.parametrize("name", ["oracle", "ngram", "always wrong", "skip gram"])
def test_every_budget_takes_the_engines_steps(models, prompts, texts, name, at_once, monkeypatch):
    monkeypatch.setattr(acceptance, "AT_ONCE", at_once if name == "skip gram" else 32)
    model, drafter = models("tiny2"), make_drafter(name, texts)
    found = measure_acceptance(model, drafter, prompts, texts, BUDGETS)
    assert list(found.accepted) == [CHAIN, *BUDGETS]
    for budget in found.accepted:
        assert check(model, drafter, prompts, found, budget) == len(prompts)
    taus = [found.tau(budget) for budget in BUDGETS]
    if name == "oracle":
        assert found.tau(CHAIN) == found.tau(16) == NUM_TOKENS / 5  # steps of 5, 5, 5, 5, 4
        assert found.accepted_by_rank(16) == [1.0]
    elif name == "always wrong":
        assert taus == [1.0] * len(taus) and found.accepted_by_rank(16) == found.accepted_by_depth(16) == []
    else:
        assert taus[-1] > 1


def test_ranks_and_expectations_are_those_of_the_engines_trees(models, prompts, texts):
    model, drafter = models("tiny2"), make_drafter("skip gram", texts)
    found = measure_acceptance(model, drafter, prompts, texts, BUDGETS)
    records = []
    engine = Engine(model, drafter, 16)
    engine.generate_ddtree(prompts[0], NUM_TOKENS, stop_token_ids=(), on_step=records.append)
    for place, record in zip(found.steps(16, 0), records, strict=True):
        tree, count = record.tree, int(record.tree.num_nodes[0])
        assert found.expected[16][0, place] == pytest.approx(float(tree.log_prob[0, 1:count].exp().sum()), rel=1e-12)
        (path,) = record.accepted_path
        parents = tree.parent[0].tolist()
        assert found.ranks[16][0][place] == [tree.children(0, parents[node]).index(node) for node in path]


def test_a_wrong_token_and_a_wrong_count_are_noticed(models, prompts, texts):
    model, drafter = models("tiny2"), make_drafter("skip gram", texts)
    found = measure_acceptance(model, drafter, prompts, texts, BUDGETS)
    found.texts[2][7] = (found.texts[2][7] + 1) % 331
    with pytest.raises(BenchmarkError, match="the tokens of text 2"):
        check(model, drafter, prompts, found, 16)
    found = measure_acceptance(model, drafter, prompts, texts, BUDGETS)
    found.accepted[16][1, 0] += 1
    with pytest.raises(BenchmarkError, match="the steps of text 1"):
        check(model, drafter, prompts, found, 16)


def by_hand() -> Acceptance:
    """Two texts of 6 tokens; steps of the first at 0, 3, 4 and of the second at every token."""
    accepted = np.array([[2, 9, 9, 0, 1, 9], [0] * 6], dtype=np.int32)
    expected = np.array([[1.0, 9, 9, 2.0, 3.0, 9], [0.5] * 6])
    ranks = [[[0, 1], [9], [9], [], [1], [9]], [[]] * 6]
    return Acceptance([[1, 2, 3, 4, 5, 6], [7] * 6], {4: accepted}, {4: expected}, {4: ranks})


def test_figures_by_hand():
    found = by_hand()
    assert found.steps(4, 0) == [0, 3, 4] and found.steps(4, 0, 4) == [0, 3] and found.steps(4, 1, 2) == [0, 1]
    assert found.tau(4) == 12 / 9 and found.tau_mean(4) == (2 + 1) / 2
    assert found.tau(4, [0]) == 2.0 and found.tau(4, num_tokens=4) == 8 / 6
    assert found.calibration(4) == pytest.approx((9 / 9, 3 / 9))
    assert found.accepted_by_depth(4) == pytest.approx([2 / 9, 1 / 9])
    assert found.accepted_by_rank(4) == pytest.approx([1 / 3, 2 / 3])
    assert found.less_repetitive() == [0]
    (entry,) = json.loads(json.dumps(found.report()))
    assert entry["tau_less_repetitive"] == 2.0 and entry["tau"] == 12 / 9 and entry["budget"] == 4


@pytest.mark.parametrize(("text", "share"), [([1] * 5, 1 / 2), ([1, 2, 3, 4, 5], 1.0), ([1, 2, 3], 1.0)])
def test_distinct_runs(text, share):
    assert distinct_runs(text) == share


class Listener:
    """Drafts nothing, and notes what it was given to remember: the first hidden value of every token."""

    depth, feature_layers = 1, (1,)

    def __init__(self):
        self.seen = {}

    def attach(self, model, num_streams, num_slots):
        self.seen, self.device = {}, model.device
        return Attached(self)


class Attached:
    depth, feature_layers = 1, (1,)

    def __init__(self, owner):
        self.owner = owner

    def remember(self, features, stream, position):
        for s, p, value in zip(stream.tolist(), position.tolist(), features[:, 0].tolist(), strict=True):
            assert (s, p) not in self.owner.seen or p < 0
            self.owner.seen[s, p] = value

    def draft(self, context):
        for s, tokens in enumerate(context.tokens):
            assert all((s, p) in self.owner.seen for p in range(len(tokens) - 1))
            assert (s, len(tokens) - 1) not in self.owner.seen
        count = len(context.tokens)
        nothing, device = (count, 1, 1), self.owner.device
        return drafters.DraftCandidates(
            torch.zeros(nothing, device=device), torch.ones(nothing, dtype=torch.int64, device=device)
        )


def test_hidden_states_are_those_of_decoding(models, prompts, texts):
    model, listener = models("tiny2"), Listener()
    for _ in draft_along(model, listener, prompts, texts, 4):
        pass
    seen = dict(listener.seen)
    engine = Engine(model, listener, 4, use_graphs=False)
    engine.generate_ddtree(prompts, NUM_TOKENS, stop_token_ids=())
    decoded = {place: value for place, value in listener.seen.items() if place[1] >= 0}
    assert seen.items() <= decoded.items() and len(seen) == sum(len(p) + NUM_TOKENS - 2 for p in prompts)


def test_evaluate_reports_every_set(models, prompts, texts):
    drafter = make_drafter("skip gram", texts)
    sets = {"all": prompts, "one": prompts[:1]}
    found = acceptance.evaluate(models("tiny2"), drafter, sets, NUM_TOKENS, (2, 8), (CHAIN, 8))
    assert json.loads(json.dumps(found)).keys() == sets.keys()
    assert found["all"]["exact_texts"] == {CHAIN: 4, "8": 4} and found["one"]["num_texts"] == 1
    assert [entry["budget"] for entry in found["all"]["budgets"]] == [CHAIN, 2, 8]
    assert found["all"]["prompt_lookup"][0]["tau"] >= 1


def test_own_prompts():
    encode = lambda text: list(text.encode())  # noqa: E731
    code, every = prompt_sets.own_prompts(encode, "code"), prompt_sets.own_prompts(encode)
    assert 0 < len(code.prompts) < len(every.prompts) and code.source == every.source
    with pytest.raises(ValueError, match="expected a kind of"):
        prompt_sets.own_prompts(encode, "poems")


def test_library_prompts_are_pinned_pieces_of_the_length_asked_for():
    encode = lambda text: list(text.encode())  # noqa: E731
    first, again = (prompt_sets.library_prompts(encode, 12, (20, 30)) for _ in range(2))
    assert first == again and len(first.source["sha256"]) == 64
    assert len({tuple(p) for p in first.prompts}) == 12 and {len(p) for p in first.prompts} <= set(range(20, 31))
    assert len({len(p) for p in first.prompts}) > 1
    assert prompt_sets.library_prompts(encode, 12, (20, 30), seed=1).prompts != first.prompts
