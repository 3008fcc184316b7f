"""How a drafter is trained: shapes that suit a target, and the schedules."""

from __future__ import annotations

import dataclasses

from kdtree_nb.config import ModelConfig
from kdtree_nb.drafters import DFlashConfig
from kdtree_nb.errors import CheckpointError

MIXED_SIZES = (16,) * 56 + (8,) * 14 + tuple(range(2, 16))
"""Two thirds of the blocks whole, a sixth of 8, the rest of any size: a drafter fails with fewer masks than it has
seen, and learns most from whole blocks."""

MIXED_SIZES_OF_8 = (8,) * 6 + tuple(range(2, 8))
"""The same for blocks of up to 8."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the result beside texts, target and configuration.

    batch_texts, anchors:  texts a step, and blocks in each, at random places behind the prompt
    block_sizes:           one of these, drawn for each block
    gamma:                 the loss at depth k weighs exp(-(k - 1) / gamma)
    muon_lr, adam_lr:      peaks of a cosine over num_steps, of the matrices and of the norms
    """

    num_steps: int
    batch_texts: int = 128
    anchors: int = 32
    block_sizes: tuple[int, ...] = MIXED_SIZES
    gamma: float = 7.0
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.03
    final_lr_share: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("num_steps", "batch_texts", "anchors"):
            if getattr(self, field) < 1:
                raise ValueError(f"recipe: {field}: expected at least 1, got {getattr(self, field)}")
        if not self.block_sizes or min(self.block_sizes) < 2:
            raise ValueError(f"recipe: block_sizes: expected sizes of at least 2, got {self.block_sizes}")
        if self.gamma <= 0:
            raise ValueError(f"recipe: gamma: expected a positive number, got {self.gamma}")
        object.__setattr__(self, "block_sizes", tuple(self.block_sizes))


def default_layers(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Layers of the target spread from the second to the last but one, as in published drafters; of a small target all
    but the last. Raises CheckpointError for a target of one layer."""
    if num_layers < 2:
        raise CheckpointError(f"drafter: expected a target of at least 2 layers, got {num_layers}")
    if num_layers - 2 <= num_features:
        return tuple(range(num_layers - 1))[-num_features:]
    if num_features == 1:
        return (num_layers - 2,)
    return tuple(1 + round(i * (num_layers - 3) / (num_features - 1)) for i in range(num_features))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a drafter beside those that its target has.

    num_features: layers of the target that it sees
    window:       how far back it sees, or None
    """

    num_layers: int = 3
    width: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 40
    num_features: int = 3
    block_size: int = 16
    window: int | None = None

    def config(self, target: ModelConfig, mask_token_id: int) -> DFlashConfig:
        """A drafter of this shape for `target`."""
        return DFlashConfig(
            hidden_size=target.hidden_size, intermediate_size=self.width, num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads, num_key_value_heads=self.num_kv_heads, head_dim=self.head_dim,
            vocab_size=target.vocab_size, mask_token_id=mask_token_id, block_size=self.block_size,
            target_layer_ids=default_layers(target.num_hidden_layers, self.num_features),
            rms_norm_eps=target.rms_norm_eps, max_position_embeddings=target.max_position_embeddings,
            windows=(self.window,) * self.num_layers,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Preset:
    """A shape, its schedule and what it is for."""

    shape: Shape
    recipe: Recipe
    purpose: str


PRESETS = {
    "gpu": Preset(
        Shape(width=768),
        Recipe(num_steps=18000),
        "the drafter of nano-k2: 74 M blocks, minutes on a large GPU",
    ),
    "cpu": Preset(
        Shape(num_layers=2, width=512, num_heads=2, num_kv_heads=1, head_dim=64, block_size=8),
        Recipe(num_steps=800, batch_texts=8, anchors=24, block_sizes=MIXED_SIZES_OF_8, gamma=4.0, muon_lr=0.06,
               adam_lr=4e-3),
        "for a small target: about a minute on a core that multiplies BF16, two on others",
    ),
}  # fmt: skip
