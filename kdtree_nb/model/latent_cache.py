"""LatentCache: what MLA remembers per token and layer: kv_lora_rank latent values and the rotated key, side by side."""

from __future__ import annotations

import math

import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.native import ops
from kdtree_nb.native.devices import memory_for


class LatentCache:
    """One tensor `data` [layers, S, P, C+R]: S streams of P slots. A slot is never read before it was appended to
    (`ops.latent_append`), and appending beyond the end is a ValueError: max_seq_len + 1 + budget slots are enough.

    During a step the rows of a tree lie at slots prefix_len + node index; `compact` moves the accepted ones forward.
    """

    def __init__(
        self, config: ModelConfig, num_streams: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_streams < 1 or num_slots < 1:
            raise ValueError(f"LatentCache: expected at least 1 stream and 1 slot, got {num_streams} and {num_slots}")
        shape = (config.num_hidden_layers, num_streams, num_slots, config.latent_dim)
        gib = math.prod(shape) * dtype.itemsize / 2**30
        what = (
            f"LatentCache: expected {gib:.2f} GiB for {num_streams} streams of {num_slots} slots in {shape[0]} layers"
        )
        with memory_for(what, torch.device(device), "Use fewer streams, a shorter max_seq_len or torch.bfloat16."):
            self.data = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [self.data[i] for i in range(config.num_hidden_layers)]
        self.num_streams = num_streams
        self.num_slots = num_slots

    @property
    def num_bytes(self) -> int:
        """Memory of the cache in bytes."""
        return self.data.numel() * self.data.element_size()

    def compact(self, prefix_len: torch.Tensor, accepted_path: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Move the accepted rows of every layer to slots prefix_len + 1 …

        prefix_len, num_accepted: i32 [S]. accepted_path: i32 [S, L], padded with -1.
        """
        ops.cache_compact(self.data, prefix_len, accepted_path, num_accepted)
