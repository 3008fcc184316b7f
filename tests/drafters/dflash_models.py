"""Small DFlash drafters for tiny2, and a text."""

from __future__ import annotations

import torch

from kdtree_nb.drafters import DFlashConfig
from kdtree_nb.drafters.dflash.weights import random_weights

TEXT = torch.randint(0, 331, (45,), generator=torch.Generator().manual_seed(3)).tolist()


def config_for(**changes) -> DFlashConfig:
    """A small drafter for tiny2."""
    fields = {
        "hidden_size": 192, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 20, "vocab_size": 331, "target_layer_ids": (3, 0), "mask_token_id": 330,
        "block_size": 6, "rms_norm_eps": 1e-5, "rope_theta": 5e4, "max_position_embeddings": 512,
    }  # fmt: skip
    return DFlashConfig(**fields | changes)


def noisy_weights(config, seed=0):
    """Random weights whose norms are not all ones."""
    generator = torch.Generator().manual_seed(seed + 100)
    return {
        name: value * (1 + 0.3 * torch.randn(value.shape, generator=generator)) if value.ndim == 1 else value
        for name, value in random_weights(config, seed).items()
    }


KINDS = {
    "full": {},
    "window": {"windows": (7, 7, 7)},
    "sliding": {"windows": (5, None, 5), "causal": (True, False, True)},
    "causal": {"causal": (True, True, True)},
    "one head each": {"num_key_value_heads": 6},
    "one layer": {"num_hidden_layers": 1, "target_layer_ids": (3, 0)},
}
"""What makes attention differ, as arguments of `config_for`."""
