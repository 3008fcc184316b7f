"""The target's hidden states reach a drafter that wants them: the right ones, and the output stays what it is."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import Engine, drafters, ops
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.text_hidden import text_hidden
from tests.speculate.shared import NUM_TOKENS

LAYERS = (2, 0)


class Probe:
    """Wants the outputs of LAYERS; drafts `texts`, the true token of every depth among others, not always first."""

    def __init__(self, texts, vocab_size, depth=5):
        self.texts, self.vocab_size, self.depth = texts, vocab_size, depth
        self.attached = []

    def attach(self, model, num_streams, num_slots):
        self.attached.append(Attached(self, model, num_streams, num_slots))
        return self.attached[-1]


class Attached:
    """Keeps what it is given by stream and position, NaN where nothing came."""

    feature_layers = LAYERS

    def __init__(self, probe, model, num_streams, num_slots):
        self.depth, device = probe.depth, model.device
        shape = (len(LAYERS), num_streams, num_slots + 1, model.config.hidden_size)
        self.seen = torch.full(shape, torch.nan, dtype=model.dtype, device=device)
        length = num_slots + probe.depth + 1
        padded = [(text + [0] * length)[:length] for text in probe.texts[:num_streams]]
        self.text = torch.tensor(padded, device=device)
        self.offset = torch.arange(1, probe.depth + 1, device=device)
        self.spread = torch.randn(length, probe.vocab_size, generator=torch.Generator().manual_seed(0)).to(device)

    def remember(self, features, stream, position):
        hidden = features.chunk(len(LAYERS), 1)
        stream, slot = stream.clamp(min=0).long(), position.long()  # position -1 is the last slot, which nobody reads
        for seen, states in zip(self.seen, hidden, strict=True):
            seen[stream, slot] = states

    def _logits(self, stream, prefix_len):
        place = prefix_len.long()[:, None] + self.offset
        logits = self.spread[place].clone()
        true = self.text[stream].gather(1, place)
        return logits.scatter_add_(2, true[:, :, None], torch.full_like(logits[:, :, :1], 3.0))

    def draft(self, context):
        stream = torch.tensor(context.stream_ids, device=context.device)
        prefix_len = torch.tensor([len(t) - 1 for t in context.tokens], device=context.device)
        for row, length in zip(context.stream_ids, prefix_len.tolist(), strict=True):
            assert not self.seen[:, row, :length].isnan().any(), "all tokens but the bonus token are known by now"
        return drafters.DraftCandidates(*ops.draft_topk(self._logits(stream, prefix_len), context.num_candidates))

    def draft_on_device(self, state):
        return self._logits(torch.arange(len(state.bonus), device=state.bonus.device), state.prefix_len)


def probe_for(model, prompts, generations):
    texts = [p + g.tokens for p, g in zip(prompts, generations, strict=True)]
    return Probe(texts, model.config.vocab_size)


def assert_seen(model, attached, row, text, known):
    """The attached drafter has the hidden states of text[:known]: the bits of one forward over the text."""
    want = text_hidden(model, torch.tensor([text]), LAYERS)
    for seen, states in zip(attached.seen, want, strict=True):
        assert torch.equal(seen[row, :known], states[0, :known])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_what_a_drafter_is_given(models, prompts, ar, dtype, budget, kind):
    model, want = models("tiny2", dtype), ar("tiny2", dtype)
    probe = probe_for(model, prompts["tiny2"], want)
    options = {"stop_token_ids": (), "return_logits": True}
    got = Engine(model, probe, budget=budget).generate_ddtree(prompts["tiny2"], [NUM_TOKENS, 5, 13], **options)
    (attached,) = probe.attached
    for row, (g, w, prompt) in enumerate(zip(got, want, prompts["tiny2"], strict=True)):
        assert g.tokens == w.tokens[: len(g.tokens)] and torch.equal(g.logits, w.logits[: len(g.tokens)])
        known = len(prompt) + len(g.tokens) - 1
        assert_seen(model, attached, row, prompt + g.tokens, known)
    assert sum(got[0].stats.accepted_per_step) > 0


@pytest.mark.parametrize("budget", [[7, 0, 3], [0, 0, 5]])
def test_batches_of_several_budgets(tiny2, prompts, ar, budget, kind):
    probe = probe_for(tiny2, prompts["tiny2"], ar("tiny2"))
    got = Engine(tiny2, probe).generate_ddtree(prompts["tiny2"], NUM_TOKENS, budget=budget, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]
    for row, (g, prompt) in enumerate(zip(got, prompts["tiny2"], strict=True)):
        assert_seen(tiny2, probe.attached[0], row, prompt + g.tokens, len(prompt) + len(g.tokens) - 1)


def test_prompts_in_several_chunks(tiny2, ar, prompts, kind, monkeypatch):
    monkeypatch.setattr("kdtree_nb.speculate.batch.PREFILL_CHUNK_TOKENS", 3)
    prompt, want = prompts["tiny2"][0], ar("tiny2")[0]
    probe = probe_for(tiny2, [prompt], [want])
    assert Engine(tiny2, probe).generate_ddtree(prompt, NUM_TOKENS, stop_token_ids=()).tokens == want.tokens
    assert_seen(tiny2, probe.attached[0], 0, prompt + want.tokens, len(prompt) + NUM_TOKENS - 1)


def test_what_is_attached_is_kept_for_the_next_text(tiny2, prompts, ar, kind):
    probe = probe_for(tiny2, prompts["tiny2"][:1], ar("tiny2")[:1])
    engine, prompt, want = Engine(tiny2, probe), prompts["tiny2"][0], ar("tiny2")[0].tokens
    for generate in (engine.generate_ddtree, engine.generate_ar, engine.generate_ddtree):
        assert generate(prompt, NUM_TOKENS, stop_token_ids=()).tokens == want
    assert len(probe.attached) == 1
    engine.drafter = drafters.NGram()
    assert engine.generate_ddtree(prompt, NUM_TOKENS, stop_token_ids=()).tokens == want
    engine.drafter = probe
    assert engine.generate_ddtree(prompt, NUM_TOKENS, stop_token_ids=()).tokens == want
    assert len(probe.attached) == 1
    engine.drafter = other = probe_for(tiny2, prompts["tiny2"][:1], ar("tiny2")[:1])
    assert engine.generate_ddtree(prompt, NUM_TOKENS, stop_token_ids=()).tokens == want
    assert len(probe.attached) == len(other.attached) == 1


@pytest.mark.parametrize("how", ["ar", "another drafter"])
def test_nothing_is_kept_where_nobody_wants_it(tiny2, prompts, monkeypatch, how, kind):
    wanted = []
    forward = type(tiny2).forward

    def watch(self, *args, hidden=None, **options):
        wanted.append(hidden)
        return forward(self, *args, hidden=hidden, **options)

    monkeypatch.setattr(type(tiny2), "forward", watch)
    probe = Probe(prompts["tiny2"], 331)
    engine = Engine(tiny2, probe if how == "ar" else drafters.Random())
    engine.generate_ddtree(prompts["tiny2"][0], 8, budget=0 if how == "ar" else 5)
    assert wanted and all(not hidden for hidden in wanted) and probe.attached == []


def test_a_drafter_on_the_host_of_steps_on_the_device(tiny2, prompts, ar, monkeypatch):
    monkeypatch.setattr(engine_module, "_kind", lambda use_graphs, device: engine_module.DEVICE)
    probe = probe_for(tiny2, prompts["tiny2"], ar("tiny2"))
    attach = probe.attach

    class Host:
        """Only what a drafter on the host needs."""

        def __init__(self, attached):
            self.depth, self.feature_layers = attached.depth, attached.feature_layers
            self.draft, self.remember = attached.draft, attached.remember

    probe.attach = lambda *args: Host(attach(*args))
    if tiny2.device.type == "cuda":
        pytest.skip("the context's device is the host's there")
    got = Engine(tiny2, probe).generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]
    for row, (g, prompt) in enumerate(zip(got, prompts["tiny2"], strict=True)):
        assert_seen(tiny2, probe.attached[0], row, prompt + g.tokens, len(prompt) + len(g.tokens) - 1)


def test_hidden_states_of_texts_in_chunks(tiny2, monkeypatch):
    texts = torch.randint(0, 331, (3, 19), generator=torch.Generator().manual_seed(1))
    want = text_hidden(tiny2, texts, (0, 3, 5))
    assert [tuple(states.shape) for states in want] == [(3, 19, 192)] * 3
    monkeypatch.setattr("kdtree_nb.speculate.text_hidden.CHUNK_TOKENS", 4)
    assert all(torch.equal(a, b) for a, b in zip(text_hidden(tiny2, texts, (0, 3, 5)), want, strict=True))
    with pytest.raises(ValueError, match=r"text_hidden: token: expected ids of 0 … 330, got \d+ …"):
        text_hidden(tiny2, texts + 331, (0,))
