"""Steps that the device takes: launched ahead, read along, nothing emitted twice or too much. On a GPU with graphs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.device_batch import LOOKAHEAD
from tests.speculate.shared import NUM_TOKENS, device_engine


def assert_starts(got, want, count=None):
    assert got.tokens == want.tokens[:count]
    if got.logits is not None:
        assert torch.equal(got.logits, want.logits[:count])


def test_an_engine_on_a_gpu_uses_graphs_unless_told_not_to(models, device):
    model = models("tiny2")
    assert Engine(model)._kind is (engine_module.DEVICE if device.type == "cuda" else engine_module.HOST)
    assert Engine(model, use_graphs=False)._kind is engine_module.HOST
    if device.type == "cpu":
        with pytest.raises(ValueError, match="Engine: use_graphs: expected a model on a GPU, got one on cpu"):
            Engine(model, use_graphs=True)


def test_steps_are_launched_ahead_of_what_is_read(tiny2, prompts, calls):
    device_engine(tiny2).generate_ar(prompts["tiny2"][0], 10, stop_token_ids=())
    assert calls == ["launch"] * LOOKAHEAD + ["wait", "launch"] * (10 - LOOKAHEAD) + ["wait"] * LOOKAHEAD


def test_a_drafter_on_the_device_is_launched_ahead(tiny2, prompts, ar, skip_gram, calls):
    got = device_engine(tiny2, skip_gram).generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=())
    assert got.tokens == ar("tiny2")[0].tokens
    assert calls[:LOOKAHEAD] == ["launch"] * LOOKAHEAD and calls.count("launch") == calls.count("wait")
    assert got.stats.num_target_forwards <= calls.count("launch") < got.stats.num_target_forwards + LOOKAHEAD


def test_a_drafter_that_sees_hidden_states_is_launched_ahead(tiny2, prompts, ar, dflash, calls):
    got = device_engine(tiny2, dflash).generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]
    assert calls[:LOOKAHEAD] == ["launch"] * LOOKAHEAD and calls.count("launch") == calls.count("wait")


@pytest.mark.parametrize("options", [{"return_logits": True}, {"on_step": lambda record: None}])
def test_steps_that_are_watched_are_read_one_by_one(tiny2, prompts, calls, options):
    device_engine(tiny2).generate_ar(prompts["tiny2"][0], 5, stop_token_ids=(), **options)
    assert calls == ["launch", "wait"] * 5


def test_what_is_launched_behind_the_end_of_a_text_emits_nothing(tiny2, prompts, ar, calls):
    want = ar("tiny2")[0].tokens
    end = want.index(want[10]) + 1
    engine = device_engine(tiny2)
    got = engine.generate_ar(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=[want[10]])
    assert got.tokens == want[:end] and got.finish_reason == "eos" and got.stats.num_target_forwards == end
    assert calls.count("launch") == calls.count("wait") == end + LOOKAHEAD - 1
    state = engine._spares[0].state
    assert state.text[0, : state.prefix_len[0] + 1].tolist() == prompts["tiny2"][0] + got.tokens
    assert state.active.tolist() == [0] and state.bonus.tolist() == [want[10]]


@pytest.mark.parametrize("drafting", ["ar", "drafter on the device", "drafter on the host"])
def test_a_batch_shrinks_under_one_captured_graph(tiny2, prompts, ar, skip_gram, drafting):
    order = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    counts = [24, 5, 4, 6, 14, 3, 5, 4, 12, 6]
    expected = [ar("tiny2")[i] for i in order]
    drafter = {"ar": None, "drafter on the device": skip_gram}.get(
        drafting, drafters.Oracle([g.tokens for g in expected])
    )
    budget = 0 if drafting == "ar" else [16, 3, 0, 16, 7, 1, 16, 16, 2, 5]
    engine = device_engine(tiny2, drafter)
    got = engine.generate_ddtree([prompts["tiny2"][i] for i in order], counts, budget=budget, stop_token_ids=())
    for g, w, count in zip(got, expected, counts, strict=True):
        assert_starts(g, w, count)
    assert len(engine._spares[0]._runners) == (1 if drafting != "drafter on the host" else 2)  # of 17 and of 3 nodes
    assert drafting == "ar" or sum(sum(g.stats.accepted_per_step) for g in got) > 0


def test_captured_steps_are_kept_for_the_next_text(tiny2, prompts, ar, skip_gram):
    engine = device_engine(tiny2, skip_gram)
    for text in (0, 2, 1, 0):
        for generate in (engine.generate_ar, engine.generate_ddtree):
            got = generate(prompts["tiny2"][text], NUM_TOKENS, stop_token_ids=(), return_logits=True)
            assert_starts(got, ar("tiny2")[text])
    (kept,) = engine._spares
    assert len(kept._runners) == 2
    before = dict(kept._runners)
    engine.generate_ar(prompts["tiny2"][0], 3)
    assert engine._spares == [kept] and kept._runners == before
    engine.generate_ar(prompts["tiny2"][:2], 3)
    assert engine._spares != [kept], "two streams need another cache"


def test_another_drafter_is_captured_anew(tiny2, prompts, ar, skip_gram):
    engine = device_engine(tiny2, skip_gram)
    for seed in range(2):
        engine.drafter = drafters.SkipGram(np.random.default_rng(seed).integers(0, 331, 500), 331, order=1)
        assert_starts(engine.generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=()), ar("tiny2")[0])
    assert len(engine._spares[0]._runners) == 2


def test_few_kinds_of_steps_are_kept(tiny2, prompts, ar, skip_gram, monkeypatch):
    monkeypatch.setattr("kdtree_nb.speculate.device_forward.MAX_RUNNERS", 2)
    engine = device_engine(tiny2, skip_gram)
    for budget in (1, 2, 3, 1):
        got = engine.generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, budget=budget, stop_token_ids=())
        assert_starts(got, ar("tiny2")[0])
        assert len(engine._spares[0]._runners) <= 2


def test_trees_of_the_device_can_be_watched(tiny2, prompts, ar, skip_gram):
    records = []
    engine = device_engine(tiny2, skip_gram)
    options = {"stop_token_ids": (), "on_step": records.append, "return_logits": True}
    got = engine.generate_ddtree(prompts["tiny2"], [NUM_TOKENS, 5, 9], budget=[16, 3, 0], **options)
    for g, w, count in zip(got, ar("tiny2"), [NUM_TOKENS, 5, 9], strict=True):
        assert_starts(g, w, count)
    for record in records:
        for stream, path, emitted in zip(record.stream_ids, record.accepted_path, record.emitted, strict=True):
            target = record.target_token[stream].tolist()
            assert [target[node] for node in (0, *path)] == emitted
            assert record.tree.token[stream, path].tolist() == emitted[:-1]
        left = set(range(3)) - set(record.stream_ids)
        assert all(record.tree.num_nodes[stream] == 0 for stream in left)
    assert len({id(record.tree.token) for record in records}) == len(records) > 1
    assert [r.tree.num_nodes[0].item() for r in records] == got[0].stats.nodes_per_step


def test_roots_can_be_watched(tiny2, prompts, ar):
    records = []
    device_engine(tiny2).generate_ar(prompts["tiny2"][:2], [4, 2], stop_token_ids=(), on_step=records.append)
    want = [g.tokens for g in ar("tiny2")[:2]]
    roots = [[p[-1], *tokens] for p, tokens in zip(prompts["tiny2"], want, strict=False)]
    assert [r.tree.token[0, 0].item() for r in records] == roots[0][:4]
    assert [r.tree.num_nodes.tolist() for r in records] == [[1, 1], [1, 1], [1, 0], [1, 0]]
    assert [r.target_token[0, 0].item() for r in records] == want[0][:4]


def test_engines_in_two_threads(models, prompts, ar, skip_gram):
    model, results = models("tiny2"), {}

    def work(name, engine):
        for _ in range(3):
            results[name] = [engine.generate_ddtree(p, NUM_TOKENS, stop_token_ids=()).tokens for p in prompts["tiny2"]]

    want = [g.tokens for g in ar("tiny2")]
    makers = {"device": skip_gram, "host": drafters.NGram(), "oracle": drafters.Oracle(want[0] * 2)}
    threads = [threading.Thread(target=work, args=(n, device_engine(model, d))) for n, d in makers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(makers, want)
