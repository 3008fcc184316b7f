from __future__ import annotations

import pytest
import torch

from kdtree_nb import ops
from kdtree_nb.errors import DeviceMemoryError
from kdtree_nb.model import LatentCache
from kdtree_nb.native.devices import memory_for

CPU = torch.device("cpu")


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def cache(tiny2):
    made = LatentCache(tiny2.config, num_streams=2, num_slots=10, dtype=torch.float32, device=CPU)
    made.data.fill_(torch.nan)
    return made


def test_shape_and_size(cache, tiny2):
    config = tiny2.config
    assert cache.data.shape == (config.num_hidden_layers, 2, 10, config.kv_lora_rank + config.qk_rope_head_dim)
    assert cache.num_bytes == cache.data.numel() * 4
    assert len(cache.layers) == config.num_hidden_layers
    assert all(layer.data_ptr() == cache.data[i].data_ptr() for i, layer in enumerate(cache.layers))


def test_append_writes_the_rows_of_one_layer_and_nothing_else(cache, tiny2):
    config = tiny2.config
    latent, k_rope = torch.randn(3, config.kv_lora_rank), torch.randn(3, config.qk_rope_head_dim)
    ops.cache_append(cache.layers[4], latent, k_rope, i32(0, 1, 1), i32(7, 0, 3))
    written = torch.cat([latent, k_rope], dim=1)
    assert torch.equal(cache.data[4, [0, 1, 1], [7, 0, 3]], written)
    assert torch.isfinite(cache.data).sum() == written.numel()


def test_compact_moves_the_accepted_rows_behind_the_prefix(cache):
    cache.data.copy_(torch.arange(cache.data.numel(), dtype=torch.float32).view(cache.data.shape))
    before = cache.data.clone()
    cache.compact(i32(2, 5), torch.tensor([[2, 5, -1], [3, -1, -1]], dtype=torch.int32), i32(2, 1))
    assert torch.equal(cache.data[:, 0, 3:5], before[:, 0, [4, 7]])
    assert torch.equal(cache.data[:, 1, 6], before[:, 1, 8])
    assert torch.equal(cache.data[:, 0, :3], before[:, 0, :3])
    assert torch.equal(cache.data[:, 1, :6], before[:, 1, :6])


@pytest.mark.parametrize(("num_streams", "num_slots"), [(0, 4), (1, 0)])
def test_a_cache_without_room_is_an_error(tiny2, num_streams, num_slots):
    with pytest.raises(ValueError, match="at least 1 stream and 1 slot"):
        tiny2.new_cache(num_streams, num_slots)


@pytest.mark.parametrize("num_slots", [2**44, 2**60])
def test_too_much_memory_is_told_with_a_remedy(num_slots, tiny2):
    with pytest.raises(
        DeviceMemoryError, match=f"LatentCache: expected .* GiB for 2 streams of {num_slots} slots .*; cpu"
    ):
        LatentCache(tiny2.config, num_streams=2, num_slots=num_slots, dtype=torch.float32, device=CPU)


def test_other_errors_are_left_as_they_are():
    with pytest.raises(RuntimeError, match="^something else$"), memory_for("load: expected memory", CPU, "Use less."):
        raise RuntimeError("something else")
