"""Random weights of a checkpoint's shapes, made on the device: nothing is read, nothing crosses the bus."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from kdtree_nb.config import NUM_SEGMENTS
from kdtree_nb.hf.config import HfConfig
from kdtree_nb.hf.plan import part_of
from kdtree_nb.hf.quantization import Int4Groups
from kdtree_nb.model.share import Part, Range
from kdtree_nb.model.source import cut, int4_parts

_NIBBLE_STD = 4.61
"""Standard deviation of the 16 INT4 values."""

Fill = Callable[[torch.Tensor, torch.Generator], object]
"""Fills a tensor with random values of a generator."""


class RandomSource:
    """A `model.source.Source`. Weights keep the size of what they are applied to; norms are 1, biases of routers 0.

    Routed experts that the configuration quantises are INT4: random nibbles, scales of one group in BF16. keeps_words:
    they stay as a checkpoint stores them, see `Source`.

    A tensor of which ranks have parts is made in as many pieces, along the dimension that is split, as a reduction has
    segments, each from a seed of its own, which follows from `seed`, the tensor's name and the piece. So the whole is
    the same however it is split, and a rank makes no more than the pieces that its part lies in.
    """

    def __init__(
        self, config: HfConfig, device: torch.device, dtype: torch.dtype, seed: int = 0, keeps_words: bool = False
    ) -> None:
        self.config, self.device, self.dtype, self.seed, self.keeps_words = config, device, dtype, seed, keeps_words
        self._generator = torch.Generator(device)

    def __call__(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        """Normal numbers, or ones for a vector."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        std = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        return self._made(name, shape, self.dtype, part, lambda x, generator: x.normal_(0.0, std, generator=generator))

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
        mean = num_in**-0.5 / _NIBBLE_STD
        of_words, of_scales = int4_parts(name, groups, part)

        def words(x: torch.Tensor, generator: torch.Generator) -> None:
            x.random_(-(2**31), 2**31, generator=generator)

        def scales(x: torch.Tensor, generator: torch.Generator) -> None:
            x.uniform_(0.5 * mean, 1.5 * mean, generator=generator)

        num_groups = num_in // groups.group_size
        return (
            self._made(f"{name}/words", (num_out, num_in // 8), torch.int32, of_words, words),
            self._made(f"{name}/scales", (num_out, num_groups), torch.bfloat16, of_scales, scales),
        )

    def _made(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None, fill: Fill
    ) -> torch.Tensor:  # fmt: skip
        """The part of a tensor, or all of it, from the pieces that it lies in."""
        if part is None:
            return self._piece(name, 0, shape, dtype, fill)
        dim, (begin, end) = part
        length, found = shape[dim], []
        bounds = [length * i // NUM_SEGMENTS for i in range(NUM_SEGMENTS + 1)]
        for index, piece in enumerate(map(Range, bounds, bounds[1:])):
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                size = (*shape[:dim], piece.length, *shape[dim + 1 :])
                made = self._piece(name, index, size, dtype, fill)
                found.append(cut(made, Part(dim, Range(first - piece.begin, last - piece.begin))))
        if not found:
            return torch.empty((*shape[:dim], 0, *shape[dim + 1 :]), dtype=dtype, device=self.device)
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    def _piece(self, name: str, index: int, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{name}/{index}".encode(), digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        made = torch.empty(shape, dtype=dtype, device=self.device)
        fill(made, self._generator)
        return made
