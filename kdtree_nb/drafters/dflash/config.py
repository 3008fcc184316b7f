"""DFlashConfig: shape and arithmetic of a block-diffusion drafter, in the field names of published checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdtree_nb.config import Yarn
from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf.config import check_fields, parse_rope
from kdtree_nb.hf.json_file import read_object

MAX_BLOCK_SIZE = 64
"""Longest block that is drafted in one pass."""

MAX_HEAD_DIM = 256
"""Longest head of a query or key."""

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """A decoder whose layers attend to the target's hidden states and, both ways, to a block of masked tokens.

    hidden_size, vocab_size: the target's, whose embedding and head the drafter uses
    target_layer_ids:        the target's layers, from 0, whose outputs it sees
    mask_token_id:           the token that stands for the ones to be drafted
    block_size:              the bonus token and the masks behind it, at most
    windows:                 per layer, how far back a token sees (itself included), or None for all
    causal:                  per layer, whether a token of the block sees only those before it
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope_scaling: Yarn | None = None
    max_position_embeddings: int = 4096
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for name, default in (("windows", None), ("causal", False)):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * self.num_hidden_layers)
        _check(self)

    @property
    def num_features(self) -> int:
        """Length of the hidden states of one token, side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def num_groups(self) -> int:
        """Query heads for each key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def to_fields(self) -> dict[str, Any]:
        """The fields of `config.json`. Raises CheckpointError for windows that differ from layer to layer."""
        sizes = {window for window in self.windows if window is not None}
        kinds = {causal for causal, window in zip(self.causal, self.windows, strict=True) if window is not None}
        rest = {causal for causal, window in zip(self.causal, self.windows, strict=True) if window is None}
        if len(sizes) > 1 or len(kinds | rest) > 1:
            raise CheckpointError(
                f"DFlash: expected one window and one kind of block, as checkpoints have, got {self.windows} and "
                f"{self.causal}"
            )
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            yarn = dataclasses.asdict(self.rope_scaling)
            rope |= {"rope_type": "yarn", **{name: value for name, value in yarn.items() if value is not None}}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **{name: getattr(self, name) for name in _COUNTS},
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "is_causal": (kinds | rest).pop(),
            "layer_types": [FULL if window is None else SLIDING for window in self.windows],
            "sliding_window": sizes.pop() if sizes else None,
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }


_COUNTS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "max_position_embeddings"
).split()

_OWN = ("rms_norm_eps", "block_size", "mask_token_id", "target_layer_ids")

_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",), "hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None),
    "attention_dropout": (0, 0.0, None), "output_multiplier": (1, 1.0, None),
    "final_logit_softcapping": (0, 0.0, None), "input_embedding_scale": (1, 1.0, None),
}  # fmt: skip
"""Fields that change the arithmetic, and the only values that this package computes."""

_OTHERS = (
    "layer_types sliding_window is_causal use_sliding_window rope_theta rope_scaling rope_parameters "
    "num_target_layers tie_word_embeddings max_window_layers eos_token_id"
).split()


def read_config(folder: Path) -> DFlashConfig:
    """Read `config.json`. Raises CheckpointError, naming the file and the field, on anything that is not understood."""
    path = folder / "config.json"
    return parse_config(read_object(path, "DFlash"), f"DFlash: {path}")


def parse_config(fields: dict[str, Any], where: str) -> DFlashConfig:
    """`read_config` on the parsed object; `where` begins its errors. What `dflash_config` says goes before the same
    field outside of it."""
    own = fields.get("dflash_config")
    if not isinstance(own, dict):
        raise CheckpointError(f"{where}: dflash_config: expected an object, got {own!r}; this is no DFlash drafter")
    flat = {**{name: value for name, value in fields.items() if name != "dflash_config"}, **own}
    missing = [name for name in (*_COUNTS, *_OWN) if name not in flat]
    if missing:
        raise CheckpointError(f"{where}: expected fields {missing}, got none of these names")
    check_fields(flat, (*_COUNTS, *_OWN, *_OTHERS), _FIXED, where)
    theta, yarn = parse_rope(flat, where)
    try:
        windows, causal = _layer_types(flat, own.get("sliding_window"))
        return DFlashConfig(
            **{name: flat[name] for name in (*_COUNTS, *_OWN[:3])},
            target_layer_ids=_as_tuple(flat["target_layer_ids"]), rope_theta=theta, rope_scaling=yarn,
            windows=windows, causal=causal,
        )  # fmt: skip
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _layer_types(fields: dict[str, Any], own_window: int | None) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Windows and kinds of block by layer. Without layer_types only dflash_config's own window counts, in all layers.

    Where is_causal does not say, layers of the type sliding_attention are causal inside the block and others are not,
    as in the published code.
    """
    num_layers, window = fields["num_hidden_layers"], fields.get("sliding_window")
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or not 1 <= num_layers <= 1 << 12:
        raise CheckpointError(f"num_hidden_layers: expected an integer of 1 … 4096, got {num_layers!r}")
    kinds, is_causal = fields.get("layer_types"), fields.get("is_causal")
    if kinds is None and fields.get("use_sliding_window"):
        raise CheckpointError("layer_types: expected the types of the layers beside use_sliding_window, got none")
    if kinds is None:
        return (own_window,) * num_layers, (bool(is_causal),) * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise CheckpointError(
            f"layer_types: expected {SLIDING!r} or {FULL!r} for each of {num_layers} layers, got {kinds!r}"
        )
    if SLIDING in kinds and window is None:
        raise CheckpointError("sliding_window: expected a number of tokens for the sliding layers, got None")
    slides = [kind == SLIDING for kind in kinds]
    causal = tuple(slides) if is_causal is None else (bool(is_causal),) * num_layers
    return tuple(window if slide else None for slide in slides), causal


def _check(config: DFlashConfig) -> None:
    def require(ok: bool, field: str, expected: str) -> None:
        if not ok:
            raise CheckpointError(f"{field}: expected {expected}, got {getattr(config, field)!r}")

    for field in _COUNTS:
        require(_is_integer(getattr(config, field), 1), field, "a positive integer below 2^31")
    for field in ("rms_norm_eps", "rope_theta"):
        value = getattr(config, field)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        require(ok, field, "a positive finite number")
    require(
        config.head_dim % 2 == 0 and config.head_dim <= MAX_HEAD_DIM, "head_dim", f"an even number up to {MAX_HEAD_DIM}"
    )
    divides = config.num_attention_heads % config.num_key_value_heads == 0
    require(divides, "num_key_value_heads", f"a divisor of num_attention_heads ({config.num_attention_heads})")
    ok = _is_integer(config.block_size, 2) and config.block_size <= MAX_BLOCK_SIZE
    require(ok, "block_size", f"an integer of 2 … {MAX_BLOCK_SIZE}")
    ok = _is_integer(config.mask_token_id, 0) and config.mask_token_id < config.vocab_size
    require(ok, "mask_token_id", f"an id of 0 … vocab_size - 1 ({config.vocab_size - 1})")
    _check_layers(config, require)


def _check_layers(config: DFlashConfig, require: Callable[[bool, str, str], None]) -> None:
    ids = config.target_layer_ids
    are_ids = isinstance(ids, tuple) and all(_is_integer(i, 0) for i in ids)
    require(are_ids and 0 < len(set(ids)) == len(ids), "target_layer_ids", "different layers, at least one")
    require(len(config.windows) == config.num_hidden_layers, "windows", "one for each layer")
    require(len(config.causal) == config.num_hidden_layers, "causal", "one for each layer")
    for window in config.windows:
        require(window is None or _is_integer(window, 1), "windows", "positive numbers of tokens (sliding_window)")


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 1 << 31
