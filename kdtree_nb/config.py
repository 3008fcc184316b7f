"""Configuration of the target model, in the field names of DeepSeek-V3 checkpoints. No torch here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kdtree_nb.errors import CheckpointError

MAX_BUDGET = 1023
"""Largest number of tree nodes besides the root."""

MAX_TOP_K = 1024
"""Most tokens that sampling's top_k may keep, and as many as its top_p looks at."""

NUM_SEGMENTS = 8
"""A reduction is always cut into this many segments; see `segment_bounds`."""

SEGMENT_UNIT = 32
"""Segments begin and end at multiples of this many elements."""


def segment_bounds(length: int) -> list[int]:
    """Borders of the 8 segments of a reduction over `length` elements: 9 ascending ints, first 0, last `length`.

    Segment s covers [bounds[s], bounds[s+1]); segments may be empty. The borders depend on the length alone.
    """
    num_units = -(-length // SEGMENT_UNIT)
    return [min(SEGMENT_UNIT * (s * num_units // NUM_SEGMENTS), length) for s in range(NUM_SEGMENTS + 1)]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of an MLA + MoE decoder (names as in DeepSeek-V3's `config.json`)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    q_lora_rank: int | None = None
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.eos_token_ids, list):
            object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        _check(self)

    @property
    def q_head_dim(self) -> int:
        """Length of one head's query before absorption: nope part, then rope part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores. In the absorbed form it stays (nope + rope)^-0.5, not the latent length's."""
        return 1.0 / math.sqrt(self.q_head_dim)

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared expert: n_shared_experts experts fused into one."""
        return self.n_shared_experts * self.moe_intermediate_size

    def is_dense_layer(self, layer: int) -> bool:
        """Whether a layer has a dense feed-forward block instead of experts."""
        return layer < self.first_k_dense_replace

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary that `from_dict` accepts."""
        return dataclasses.asdict(self) | {"eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """Build from a dictionary. Raises CheckpointError on a missing or unknown field, or an impossible value."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        missing = sorted(n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields)
        if unknown or missing:
            raise CheckpointError(f"model config: unknown fields {unknown}, missing fields {missing}")
        return cls(**fields)


MAX_POSITIONS = 1 << 22
"""Largest max_position_embeddings: the rotation table has a row for every position."""

_COUNTS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok max_position_embeddings"
).split()


def _check(config: ModelConfig) -> None:
    def require(ok: bool, field: str, expected: str) -> None:
        if not ok:
            raise CheckpointError(f"model config: {field}: expected {expected}, got {getattr(config, field)!r}")

    for field in _COUNTS:
        require(_is_integer(getattr(config, field), 1), field, "a positive integer below 2^31")
    for field in ("first_k_dense_replace", "n_shared_experts"):
        require(_is_integer(getattr(config, field), 0), field, "an integer from 0 to below 2^31")
    for field in ("rms_norm_eps", "rope_theta", "routed_scaling_factor"):
        require(_is_positive(getattr(config, field)), field, "a positive finite number")
    q_lora_rank, rope_dim = config.q_lora_rank, config.qk_rope_head_dim
    require(q_lora_rank is None or _is_integer(q_lora_rank, 1), "q_lora_rank", "a positive integer or none")
    require(rope_dim % 2 == 0 and rope_dim <= 1 << 12, "qk_rope_head_dim", "an even number up to 4096")
    require(config.max_position_embeddings <= MAX_POSITIONS, "max_position_embeddings", f"at most {MAX_POSITIONS}")
    require(config.first_k_dense_replace <= config.num_hidden_layers, "first_k_dense_replace", "0 … layers")
    require(config.num_experts_per_tok <= config.n_routed_experts, "num_experts_per_tok", "at most n_routed_experts")
    require(config.scoring_func in ("softmax", "sigmoid"), "scoring_func", "'softmax' or 'sigmoid'")
    require(isinstance(config.norm_topk_prob, bool), "norm_topk_prob", "true or false")
    ids = config.eos_token_ids
    inside = isinstance(ids, tuple) and all(_is_integer(t, 0) and t < config.vocab_size for t in ids)
    require(inside, "eos_token_ids", "a list of ids inside the vocabulary")


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 1 << 31


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
