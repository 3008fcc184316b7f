"""Random weights of a checkpoint's shapes, made on the device: nothing is read, nothing crosses the bus."""

from __future__ import annotations

import torch

from kdtree_nb.hf.config import HfConfig
from kdtree_nb.hf.plan import part_of
from kdtree_nb.hf.quantization import Int4Groups
from kdtree_nb.model.share import Part
from kdtree_nb.model.source import cut, int4_parts

_NIBBLE_STD = 4.61
"""Standard deviation of the 16 INT4 values."""


class RandomSource:
    """A `model.source.Source`. Weights keep the size of what they are applied to; norms are 1, biases of routers 0.

    Routed experts that the configuration quantises are INT4: random nibbles, scales of one group in BF16.
    """

    def __init__(self, config: HfConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        """Normal numbers, or ones for a vector. A part is cut from the same whole on every rank."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        std = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        return cut(weight.normal_(0.0, std, generator=self._generator), part)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        """A router's bias: no expert is preferred."""
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def int4(self, name: str, *shape: int, part: Part | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Words i32 [N, K/8] and scales bf16 [N, K/group] of a quantised expert; else None."""
        groups = self.config.quantization
        if not isinstance(groups, Int4Groups) or part_of(name) != "routed experts":
            return None
        if not groups.covers(self.config.prefix + name.removesuffix(".weight")):
            return None
        num_out, num_in = shape
        options = {"device": self.device, "generator": self._generator}
        words = torch.randint(-(2**31), 2**31, (num_out, num_in // 8), dtype=torch.int32, **options)
        scale = torch.empty(num_out, num_in // groups.group_size, dtype=torch.bfloat16, device=self.device)
        mean = num_in**-0.5 / _NIBBLE_STD
        scale.uniform_(0.5 * mean, 1.5 * mean, generator=self._generator)
        of_words, of_scales = int4_parts(name, groups, part)
        return cut(words, of_words), cut(scale, of_scales)
