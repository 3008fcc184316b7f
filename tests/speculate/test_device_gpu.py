"""Steps that the device takes: what only a GPU has, graphs, streams and memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import DeviceType

from kdtree_nb import drafters
from kdtree_nb.errors import DeviceMemoryError
from kdtree_nb.speculate.device_batch import DeviceBatch
from kdtree_nb.speculate.device_forward import DeviceForward
from tests.speculate.shared import NUM_TOKENS, Broken, cost_of, device_engine

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")


@NEEDS_GPU
class TestGpu:
    """What only a GPU has."""

    @pytest.fixture(autouse=True)
    def only_on_a_gpu(self, device):
        if device.type != "cuda":
            pytest.skip("looks at CUDA graphs and streams; the parameter cuda of the same test does")

    @pytest.mark.parametrize(
        "drafting", ["ar", "drafter on the device", "with hidden states", "auto", "drafter on the host"]
    )
    def test_no_step_waits_for_the_gpu(self, tiny2, prompts, ar, skip_gram, dflash, drafting):
        """Neither a wait of torch nor, in the profile of the CUDA calls, any other but that for an older record."""
        want = [g.tokens for g in ar("tiny2")]
        known = {"ar": None, "drafter on the device": skip_gram, "with hidden states": dflash, "auto": skip_gram}
        drafter = known.get(drafting, drafters.Oracle(want))
        cost = cost_of(tiny2, drafter, 9, (1.0, 0.5)) if drafting == "auto" else None
        engine = device_engine(tiny2, drafter, cost=cost)
        options = {"budget": {"ar": 0, "auto": "auto"}.get(drafting, 16), "stop_token_ids": ()}
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
