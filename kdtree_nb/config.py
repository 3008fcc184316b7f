"""Configuration of the target model, in the field names of DeepSeek-V3 checkpoints. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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


def segments_of_rank(rank: int, num_ranks: int) -> tuple[int, int]:
    """The first of the segments that a rank sums, and how many they are. num_ranks is 1, 2, 4 or 8."""
    count = NUM_SEGMENTS // num_ranks
    return rank * count, count


def share_of_rank(length: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Begin and end of what a rank holds of a dimension that is reduced: its whole segments, perhaps none at all."""
    (first, count), bounds = segments_of_rank(rank, num_ranks), segment_bounds(length)
    return bounds[first], bounds[first + count]


_POSITIVE = "a positive number that float32 holds"


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN: rotary frequencies stretched beyond the positions that the model was trained on first.

    factor:                           how many times longer than original_max_position_embeddings
    beta_fast, beta_slow:             turns within the original length at which a frequency is kept, and is stretched
    mscale, mscale_all_dim:           sizes of the corrections to cosines and sines, and to the softmax scale
    attention_factor:                 of cosines and sines, instead of the one that the mscales give
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for field in ("factor", "beta_fast", "beta_slow"):
            _require(_is_positive(getattr(self, field)), "rope_scaling: ", field, self, _POSITIVE)
        for field in ("mscale", "mscale_all_dim"):
            ok = getattr(self, field) == 0 or _is_positive(getattr(self, field))
            _require(ok, "rope_scaling: ", field, self, f"0 or {_POSITIVE}")
        length = self.original_max_position_embeddings
        name = "original_max_position_embeddings"
        _require(_is_integer(length, 1), "rope_scaling: ", name, self, "a positive integer below 2^31")
        ok = self.attention_factor is None or _is_positive(self.attention_factor)
        _require(ok, "rope_scaling: ", "attention_factor", self, f"{_POSITIVE} or none")
        for field in ("amplitude", "softmax_factor"):
            _require(_is_positive(getattr(self, field)), "rope_scaling: mscale, mscale_all_dim: ", field, self,
                     "a factor that float32 holds")  # fmt: skip

    def magnitude(self, mscale: float) -> float:
        """0.1 · mscale · ln(factor) + 1, or 1 where nothing is stretched."""
        return 1.0 if self.factor <= 1.0 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def amplitude(self) -> float:
        """Factor on all cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax scale."""
        magnitude = self.magnitude(self.mscale_all_dim) if self.mscale_all_dim else 1.0
        return magnitude * magnitude


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of an MLA + MoE decoder (names as in DeepSeek-V3's `config.json`).

    n_group, topk_group: experts are chosen from the topk_group best of n_group groups; 1 and 1: from all
    use_router_bias:     a bias e_score_correction_bias per expert takes part in choosing (not in weighing) experts
    latent_norm_eps:     epsilon of the norms inside attention; none: rms_norm_eps
    rope_scaling:        YaRN, or none
    """

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
    n_group: int = 1
    topk_group: int = 1
    use_router_bias: bool = False
    latent_norm_eps: float | None = None
    rope_scaling: Yarn | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.eos_token_ids, list):
            object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        _check(self)

    @property
    def attention_eps(self) -> float:
        """Epsilon of the norms of the latents inside attention."""
        return self.rms_norm_eps if self.latent_norm_eps is None else self.latent_norm_eps

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
        factor = 1.0 if self.rope_scaling is None else self.rope_scaling.softmax_factor
        return factor / math.sqrt(self.q_head_dim)

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
        fields = dict(fields)
        if isinstance(fields.get("rope_scaling"), dict):
            fields["rope_scaling"] = _from_dict(Yarn, fields["rope_scaling"], "model config: rope_scaling")
        return _from_dict(cls, fields, "model config")


MAX_LAYERS, MAX_EXPERTS = 1 << 10, 1 << 12
"""Largest num_hidden_layers and n_routed_experts: names of tensors are listed for every layer and expert."""

MAX_POSITIONS = 1 << 22
"""Largest max_position_embeddings: the rotation table has a row for every position."""

_COUNTS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok max_position_embeddings"
).split()


def _from_dict(cls: type, fields: dict[str, Any], where: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(fields) - set(known))
    missing = sorted(n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields)
    if unknown or missing:
        raise CheckpointError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    return cls(**fields)


def _require(ok: bool, where: str, field: str, owner: Any, expected: str) -> None:
    if not ok:
        raise CheckpointError(f"model config: {where}{field}: expected {expected}, got {getattr(owner, field)!r}")


def _check(config: ModelConfig) -> None:
    def require(ok: bool, field: str, expected: str) -> None:
        _require(ok, "", field, config, expected)

    for field in _COUNTS:
        require(_is_integer(getattr(config, field), 1), field, "a positive integer below 2^31")
    for field in ("first_k_dense_replace", "n_shared_experts"):
        require(_is_integer(getattr(config, field), 0), field, "an integer from 0 to below 2^31")
    for field in ("rms_norm_eps", "rope_theta", "routed_scaling_factor"):
        require(_is_positive(getattr(config, field)), field, _POSITIVE)
    require(config.rope_theta > 1, "rope_theta", "a number above 1")
    q_lora_rank, rope_dim = config.q_lora_rank, config.qk_rope_head_dim
    require(q_lora_rank is None or _is_integer(q_lora_rank, 1), "q_lora_rank", "a positive integer or none")
    require(rope_dim % 2 == 0 and rope_dim <= 1 << 12, "qk_rope_head_dim", "an even number up to 4096")
    require(config.max_position_embeddings <= MAX_POSITIONS, "max_position_embeddings", f"at most {MAX_POSITIONS}")
    require(config.num_hidden_layers <= MAX_LAYERS, "num_hidden_layers", f"at most {MAX_LAYERS}")
    require(config.n_routed_experts <= MAX_EXPERTS, "n_routed_experts", f"at most {MAX_EXPERTS}")
    require(config.first_k_dense_replace <= config.num_hidden_layers, "first_k_dense_replace", "0 … layers")
    require(config.num_experts_per_tok <= config.n_routed_experts, "num_experts_per_tok", "at most n_routed_experts")
    require(config.scoring_func in ("softmax", "sigmoid"), "scoring_func", "'softmax' or 'sigmoid'")
    for field in ("norm_topk_prob", "use_router_bias", "tie_word_embeddings"):
        require(isinstance(getattr(config, field), bool), field, "true or false")
    eps = config.latent_norm_eps
    require(eps is None or _is_positive(eps), "latent_norm_eps", f"{_POSITIVE} or none")
    require(config.rope_scaling is None or isinstance(config.rope_scaling, Yarn), "rope_scaling", "YaRN's or none")
    _check_groups(config, require)
    ids = config.eos_token_ids
    inside = isinstance(ids, tuple) and all(_is_integer(t, 0) and t < config.vocab_size for t in ids)
    require(inside, "eos_token_ids", "a list of ids inside the vocabulary")


def _check_groups(config: ModelConfig, require: Callable[[bool, str, str], None]) -> None:
    num_groups, chosen = config.n_group, config.topk_group
    divides = _is_integer(num_groups, 1) and config.n_routed_experts % num_groups == 0
    require(divides, "n_group", f"a divisor of the {config.n_routed_experts} experts")
    require(_is_integer(chosen, 1) and chosen <= num_groups, "topk_group", f"1 … n_group ({num_groups})")
    size = config.n_routed_experts // num_groups
    require(num_groups == 1 or size >= 2, "n_group", "groups of at least 2 experts")
    enough = config.num_experts_per_tok <= chosen * size
    require(enough, "num_experts_per_tok", f"at most the {chosen * size} experts of {chosen} groups")


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 1 << 31


FLT_MIN, FLT_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""The least normal and the largest number of float32, in which the operations take their factors."""


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and FLT_MIN <= value <= FLT_MAX
