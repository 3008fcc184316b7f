"""Steps that the device takes: launched ahead, read along, nothing emitted twice or too much. On a GPU with graphs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

from kdtree_nb import Engine, drafters, ops
from kdtree_nb.errors import DeviceMemoryError, NonFiniteError
from kdtree_nb.model import build_model
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.device_batch import LOOKAHEAD, DeviceBatch
from kdtree_nb.speculate.device_forward import DeviceForward
from kdtree_nb.speculate.device_step import Step, TreeBuffer
from kdtree_nb.speculate.mode import num_tree_slots
from kdtree_nb.speculate.step_runner import RING_SIZE, StepRunner
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

NUM_TOKENS = 24
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")


def device_engine(model, drafter=None, *args, **options) -> Engine:
    """An Engine whose steps the device takes, on a CPU too."""
    engine = Engine(model, drafter, *args, **options)
    engine._kind = engine_module.DEVICE
    return engine


@pytest.fixture
def skip_gram(prompts, ar):
    """A drafter on the device for tiny2, right now and then."""
    texts = [p + g.tokens for p, g in zip(prompts["tiny2"], ar("tiny2"), strict=True)]
    return drafters.SkipGram(sum(texts, []), 331, depth=5, min_count=2)


@pytest.fixture
def dflash():
    """A drafter on the device that sees hidden states of tiny2; untrained."""
    sizes = {"hidden_size": 192, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 331, "block_size": 8}
    return drafters.DFlash.random(drafters.DFlashConfig(**sizes, **heads, target_layer_ids=(1, 4), mask_token_id=330))


def test_a_drafter_that_sees_hidden_states_is_launched_ahead(tiny2, prompts, ar, dflash, calls):
    got = device_engine(tiny2, dflash).generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]
    assert calls[:LOOKAHEAD] == ["launch"] * LOOKAHEAD and calls.count("launch") == calls.count("wait")


def assert_same(got, want, count=None):
    assert got.tokens == want.tokens[:count]
    if got.logits is not None:
        assert torch.equal(got.logits, want.logits[:count])


@pytest.fixture
def calls(monkeypatch):
    """ "launch" and "wait" in the order in which runners are told to."""
    seen = []
    for name in ("launch", "wait"):
        method = getattr(StepRunner, name)

        def noted(self, *args, name=name, method=method):
            seen.append(name)
            return method(self, *args)

        monkeypatch.setattr(StepRunner, name, noted)
    return seen


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
        assert_same(g, w, count)
    assert len(engine._spares[0]._runners) == (1 if drafting != "drafter on the host" else 2)  # of 17 and of 3 nodes
    assert drafting == "ar" or sum(sum(g.stats.accepted_per_step) for g in got) > 0


def test_captured_steps_are_kept_for_the_next_text(tiny2, prompts, ar, skip_gram):
    engine = device_engine(tiny2, skip_gram)
    for text in (0, 2, 1, 0):
        for generate in (engine.generate_ar, engine.generate_ddtree):
            got = generate(prompts["tiny2"][text], NUM_TOKENS, stop_token_ids=(), return_logits=True)
            assert_same(got, ar("tiny2")[text])
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
        assert_same(engine.generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=()), ar("tiny2")[0])
    assert len(engine._spares[0]._runners) == 2


def test_few_kinds_of_steps_are_kept(tiny2, prompts, ar, skip_gram, monkeypatch):
    monkeypatch.setattr("kdtree_nb.speculate.device_forward.MAX_RUNNERS", 2)
    engine = device_engine(tiny2, skip_gram)
    for budget in (1, 2, 3, 1):
        got = engine.generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, budget=budget, stop_token_ids=())
        assert_same(got, ar("tiny2")[0])
        assert len(engine._spares[0]._runners) <= 2


def test_trees_of_the_device_can_be_watched(tiny2, prompts, ar, skip_gram):
    records = []
    engine = device_engine(tiny2, skip_gram)
    options = {"stop_token_ids": (), "on_step": records.append, "return_logits": True}
    got = engine.generate_ddtree(prompts["tiny2"], [NUM_TOKENS, 5, 9], budget=[16, 3, 0], **options)
    for g, w, count in zip(got, ar("tiny2"), [NUM_TOKENS, 5, 9], strict=True):
        assert_same(g, w, count)
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


class Broken:
    """Drafts on the device; `fill` says what the logits hold."""

    def __init__(self, depth, shape, fill):
        self.depth, self.shape, self.fill = depth, shape, fill

    def draft(self, context):
        raise AssertionError("asked on the host")

    def draft_on_device(self, state):
        logits = torch.zeros(self.shape, device=state.bonus.device)
        self.fill(logits, state)
        return logits


def test_nan_logits_of_a_drafter_on_the_device(tiny2, prompts, ar, skip_gram, device):
    """They name the stream and the position, where the stream has come to by then."""

    def fill(logits, state):
        logits[1, 1].masked_fill_(state.remaining[1] == 3, torch.nan)

    engine = device_engine(tiny2, Broken(2, (3, 2, 331), fill), budget=4)
    position = len(prompts["tiny2"][1]) + 5 + 1
    message = f"stream 1: .* position {position} " if device.type == "cuda" else "stream 1, depth 2: expected logits"
    with pytest.raises((NonFiniteError, ValueError), match=message):
        engine.generate_ddtree(prompts["tiny2"], 8, stop_token_ids=())
    engine.drafter = skip_gram
    got = engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]


@pytest.mark.parametrize("shape", [(1, 2, 330), (1, 3, 331), (2, 2, 331)])
def test_logits_of_another_shape(tiny2, prompts, ar, shape):
    engine = device_engine(tiny2, Broken(2, shape, lambda logits, state: None))
    with pytest.raises(ValueError, match=r"draft: Broken: expected logits \[S, L, V\] = \[1, 2, 331\], got "):
        engine.generate_ddtree(prompts["tiny2"][0], 8)
    assert engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=()).tokens == ar("tiny2")[0].tokens[:8]


@pytest.fixture
def poisonous(ar, device):
    """tiny2 whose embedding of the 6th emitted token of text 0 is NaN, and where that token stands first."""
    token = ar("tiny2")[0].tokens[5]
    weights = tiny2_weights()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][token] = np.nan
    return build_model(tiny2_config(), weights, device), token


@pytest.mark.parametrize("drafting", ["ar", "drafter on the device", "drafter on the host"])
def test_nan_logits_amid_the_text(poisonous, prompts, ar, skip_gram, drafting):
    """The steps in flight come to an end, the error is that of the host's steps, the engine goes on working."""
    (model, token), want = poisonous, ar("tiny2")[0].tokens
    prompt = prompts["tiny2"][0]
    assert token not in prompt
    place = want.index(token)
    drafter = {"ar": None, "drafter on the device": skip_gram}.get(drafting, drafters.Oracle(want))
    engine = device_engine(model, drafter)
    budget = 0 if drafting == "ar" else 16
    with pytest.raises(NonFiniteError, match=f"verify: stream 0: .* position {len(prompt) + place} hold a NaN"):
        engine.generate_ddtree(prompt, NUM_TOKENS, budget=budget, stop_token_ids=())
    got = engine.generate_ddtree(prompt, place + 1, budget=budget, stop_token_ids=())
    assert got.tokens == want[: place + 1]


def test_weights_that_turn_nan_between_steps(prompts, device):
    """A captured step reads the weights where they lie."""
    model = build_model(tiny2_config(), tiny2_weights(), device)
    good = model.norm.clone()
    engine = device_engine(model)
    want = engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=()).tokens

    def spoil(record):
        if record.step == 3:
            model.norm.fill_(torch.nan)

    with pytest.raises(NonFiniteError, match="verify: stream 0: the target's logits"):
        engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=(), on_step=spoil)
    with torch.inference_mode():
        model.norm.copy_(good)
    assert engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=()).tokens == want


def test_an_error_of_the_caller_waits_for_the_steps_in_flight(tiny2, prompts, ar, calls):
    engine = device_engine(tiny2)

    def interrupt(*args):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DeviceBatch, "emit", interrupt)
        engine.generate_ar(prompts["tiny2"][0], 8)
    assert calls == ["launch"] * LOOKAHEAD + ["wait"] * LOOKAHEAD and engine._spares == []
    assert engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=()).tokens == ar("tiny2")[0].tokens[:8]


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


def test_sizes_of_trees():
    assert [num_tree_slots(n) for n in (1, 2, 3, 4, 5, 6, 9, 10, 17, 18, 65, 66, 1023, 1024)] == [
        1, 2, 3, 5, 5, 9, 9, 17, 17, 33, 65, 129, 1024, 1024,
    ]  # fmt: skip


def test_a_buffer_holds_the_last_trees(device):
    generator = torch.Generator().manual_seed(0)
    buffer = TreeBuffer(3, 9, device)
    address = buffer.tree.token.data_ptr()
    for budget in (8, 3, 0, 8):
        log_probs = torch.rand(3, 3, 4, generator=generator).sort(2).values.flip(2).log()
        ids = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(9)]).view(3, 3, 4)
        tree = ops.tree_build(log_probs, ids, torch.tensor([1, 2, 3]), torch.tensor([budget, 0, 2]).int(), 8)
        buffer.put(tree)
        assert buffer.tree.num_nodes.tolist() == [budget + 1, 1, 3] and buffer.tree.token.data_ptr() == address
        for stream, count in enumerate((budget + 1, 1, 3)):
            for name in ("token", "parent", "depth"):
                got, want = getattr(buffer.tree, name), getattr(tree, name)
                assert torch.equal(got[stream, :count].cpu(), want[stream, :count])


def test_a_ring_keeps_the_last_records(device):
    """A runner hands out each record as long as no RING_SIZE later ones were begun."""
    counter = torch.zeros(1, dtype=torch.int64, device=device)

    def step(ring):
        ring.records.index_fill_(0, ring.step % RING_SIZE, 0)
        ring.records.index_add_(0, ring.step % RING_SIZE, counter.expand(1, 5, 2).contiguous())
        ring.step.add_(1)
        counter.add_(1)
        return Step(*[counter] * 4)

    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    runner = StepRunner(step, 2, 0, device, pool)
    counter.zero_()
    places = [runner.launch() for _ in range(RING_SIZE)]
    assert [runner.wait(place)[0, 0] for place in places] == list(range(RING_SIZE))
    places = [runner.launch() for _ in range(3)]
    assert [runner.wait(place).tolist() for place in places] == [[[RING_SIZE + i] * 2] * 5 for i in range(3)]


@NEEDS_GPU
class TestGpu:
    """What only a GPU has."""

    @pytest.fixture(autouse=True)
    def only_on_a_gpu(self, device):
        if device.type != "cuda":
            pytest.skip("looks at CUDA graphs and streams; the parameter cuda of the same test does")

    @pytest.mark.parametrize("drafting", ["ar", "drafter on the device", "with hidden states", "drafter on the host"])
    def test_no_step_waits_for_the_gpu(self, tiny2, prompts, ar, skip_gram, dflash, drafting):
        """Neither a wait of torch nor, in the profile of the CUDA calls, any other but that for an older record."""
        want = [g.tokens for g in ar("tiny2")]
        known = {"ar": None, "drafter on the device": skip_gram, "with hidden states": dflash}
        drafter = known.get(drafting, drafters.Oracle(want))
        engine = device_engine(tiny2, drafter)
        options = {"budget": 0 if drafting == "ar" else 16, "stop_token_ids": ()}
        engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, **options)  # captures
        step, profiles = DeviceBatch.step, []

        def strict(batch):
            with torch.profiler.profile() as profile, torch.profiler.record_function("one step"):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    step(batch)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            events = [e for e in profile.events() if e.device_type == DeviceType.CPU]
            whole = next(e.time_range for e in events if e.name == "one step")
            inside = [e.name for e in events if whole.start <= e.time_range.start <= whole.end]
            profiles.append([name for name in inside if name.startswith("cu")])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceBatch, "step", strict)
            got = engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, **options)
        assert [g.tokens for g in got] == want
        calls = [name for names in profiles for name in names]
        assert calls.count("cudaGraphLaunch") >= len(profiles) >= 3, sorted(set(calls))
        assert calls.count("cudaEventSynchronize") <= len(profiles)
        assert not {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"} & set(calls), sorted(set(calls))

    @pytest.mark.parametrize(
        ("what", "spare_bytes"),
        [
            ("LatentCache: expected .* GiB for 60 streams of 1280 slots", 0),
            ("generate: expected memory for a step of 60 streams of up to 1024 rows; cuda:0 has", 150 << 20),
        ],
    )
    def test_no_memory(self, tiny2, prompts, ar, skip_gram, what, spare_bytes):
        """A clear error, whatever did not fit, and the engine goes on working."""
        engine, config = device_engine(tiny2, skip_gram), tiny2.config
        skip_gram.draft_on_device(DeviceForward.allocate(tiny2, 1, 1).state)  # its tables are on the GPU by now
        torch.cuda.empty_cache()
        cache_bytes = config.num_hidden_layers * 60 * 1280 * config.latent_dim * 4 if spare_bytes else 0
        allowed = torch.cuda.memory_allocated() + cache_bytes + spare_bytes + (10 << 20)
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
        try:
            with pytest.raises(DeviceMemoryError, match=what):
                engine.generate_ddtree([[7]] * 60, 8, budget=1023, stop_token_ids=())
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        got = engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
        assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]

    def test_nothing_that_waits_can_be_captured(self, tiny2, prompts, ar):
        def fill(logits, state):
            logits[0, 0, int(state.bonus[0])] = 1.0

        engine = device_engine(tiny2, Broken(2, (1, 2, 331), fill))
        with pytest.raises(RuntimeError, match="captur"):
            engine.generate_ddtree(prompts["tiny2"][0], 8, stop_token_ids=())
        got = engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=())
        assert got.tokens == ar("tiny2")[0].tokens[:8]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_forwards_are_kept_by_address(self, models, dtype):
        model = models("tiny2", dtype)
        forward = DeviceForward.allocate(model, 2, 300)
        assert forward.fits(model, 2, 512) and not forward.fits(model, 2, 513) and not forward.fits(model, 1, 10)
