"""DFlash: a block-diffusion drafter (Chen et al. 2026): one pass over the bonus token and masks drafts all depths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from kdtree_nb.drafters.dflash.config import DFlashConfig, read_config
from kdtree_nb.drafters.dflash.layers import PackedDrafter
from kdtree_nb.drafters.dflash.streams import DFlashStreams
from kdtree_nb.drafters.dflash.weights import check_weights, random_weights, read_weights, write_folder
from kdtree_nb.errors import CheckpointError
from kdtree_nb.model import Model
from kdtree_nb.model.checkpoint import DATA_DIR, NANO

__all__ = ["DFlash", "DFlashConfig"]


class DFlash:
    """A drafter that sees the hidden states of several of the target's layers.

    A projection and a norm make one context row of a token's hidden states, from which every layer takes keys and
    values. The block, the bonus token and masks, attends to that context and, both ways, to itself. Embedding and head
    are the target's own.

    weights:    by the names of `shapes`
    block_size: bonus token and masks, at most the config's. A drafter that was trained with one size fails with others
    depth:      how much of the block is drafted; default: all of it
    """

    def __init__(
        self, config: DFlashConfig, weights: Mapping[str, torch.Tensor], block_size: int | None = None,
        depth: int | None = None,
    ) -> None:  # fmt: skip
        check_weights(config, {name: tuple(value.shape) for name, value in weights.items()}, "DFlash")
        self.config, self.weights = config, dict(weights)
        self.block_size = _within("block_size", block_size, 2, config.block_size)
        self.depth = _within("depth", depth, 1, self.block_size - 1)
        self._packed: dict[tuple[torch.device, torch.dtype], PackedDrafter] = {}

    @classmethod
    def load(cls, path_or_name: str | os.PathLike, block_size: int | None = None, depth: int | None = None) -> DFlash:
        """From a checkpoint folder, config.json and safetensors, or by name "nano-k2" the drafter of that model.

        Raises CheckpointError that names what is wrong.
        """
        folder = DATA_DIR / f"{NANO}-dflash" if os.fspath(path_or_name) == NANO else Path(path_or_name)
        if os.fspath(path_or_name) == NANO and not folder.is_dir():
            raise CheckpointError(
                f"DFlash: expected the trained drafter of {NANO!r} at {folder}, found none; train it: "
                "kdtree-nb train-nano drafter --preset gpu --device cuda --target data/nano-k2 --texts FOLDER "
                f"--out data/{NANO}-dflash"
            )
        config = read_config(folder)
        return cls(config, read_weights(config, folder), block_size, depth)

    @classmethod
    def random(cls, config: DFlashConfig, seed: int = 0) -> DFlash:
        """Untrained."""
        return cls(config, random_weights(config, seed))

    def save(self, folder: str | os.PathLike, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write a checkpoint folder that `load` reads."""
        write_folder(self.config, self.weights, Path(folder), dtype)

    def attach(self, model: Model, num_streams: int, num_slots: int) -> DFlashStreams:
        """A drafter for the streams of a batch. Raises ValueError for a target of other sizes than it was made for."""
        self._check(model)
        key = (model.device, model.dtype)
        if key not in self._packed:
            self._packed[key] = PackedDrafter(self.config, self.weights, *key)
        packed, sizes = self._packed[key], (num_streams, num_slots, self.block_size, self.depth)
        return DFlashStreams(self.config, packed, model, *sizes)

    def _check(self, model: Model) -> None:
        for name in ("hidden_size", "vocab_size"):
            mine, its = getattr(self.config, name), getattr(model.config, name)
            if mine != its:
                raise ValueError(f"DFlash: {name}: expected a target with {mine}, as its config says, got {its}")
        last = model.config.num_hidden_layers - 2
        if max(self.config.target_layer_ids) > last:
            raise ValueError(
                f"DFlash: target_layer_ids: expected layers 0 … {last} of the target (what leaves its last one goes "
                f"through its final norm), got {list(self.config.target_layer_ids)}"
            )


def _within(name: str, value: int | None, low: int, high: int) -> int:
    """`value`, or `high` where it is None. Raises ValueError outside low … high."""
    if value is None:
        return high
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"DFlash: {name}: expected an integer of {low} … {high}, got {value!r}")
    return value
