"""What a checkpoint needs before it is loaded: parameters, bytes by part, cache per token, number of devices."""

from __future__ import annotations

import dataclasses
import math

from kdtree_nb.config import ModelConfig
from kdtree_nb.hf.config import HfConfig
from kdtree_nb.hf.quantization import Int4Groups
from kdtree_nb.hf.tensors import weights

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)

PARTS = ("embedding", "attention", "dense feed-forward", "router", "routed experts", "shared experts", "norms", "head")

_WHOLE_ON_EVERY_RANK = ("embedding", "router", "norms")
_PART_BY_PIECE = {
    "norm.weight": "norms", "mlp.gate.": "router", "embed_tokens.": "embedding", "lm_head.": "head",
    ".self_attn.": "attention", ".shared_experts.": "shared experts", ".experts.": "routed experts",
}  # fmt: skip
"""Piece of a tensor's name -> its part; the first that fits."""

_INT4_BITS = 4
_SCALE_BYTES = 2  # scales are kept in BF16


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of weights. num_bytes: once loaded; split_bytes: those that tensor parallelism divides among ranks."""

    name: str
    dtype: str
    num_parameters: int
    num_bytes: int
    split_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a model takes on a device in one dtype of activations.

    cache_bytes_per_token: of the latent cache, all layers, for one token of one stream; whole on every rank
    int4_layer_bytes:      what INT4 experts of one layer take as floats, at most, while a forward uses them on a CPU or
                           in float32; not counted in what fits
    """

    parts: tuple[Part, ...]
    cache_bytes_per_token: int
    int4_layer_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """Weights of the text model."""
        return sum(part.num_parameters for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, once loaded."""
        return sum(part.num_bytes for part in self.parts)

    def bytes_per_rank(self, num_ranks: int, num_tokens: int) -> int:
        """Weights of one rank and a cache of num_tokens."""
        split = sum(part.split_bytes for part in self.parts)
        return self.num_bytes - split + math.ceil(split / num_ranks) + num_tokens * self.cache_bytes_per_token

    def num_ranks(self, device_bytes: int, num_tokens: int, num_heads: int) -> int | None:
        """The smallest tensor-parallel size whose ranks fit into device_bytes each; None if none does."""
        sizes = (n for n in TENSOR_PARALLEL_SIZES if num_heads % n == 0)
        return next((n for n in sizes if self.bytes_per_rank(n, num_tokens) <= device_bytes), None)

    def max_tokens(self, device_bytes: int, num_ranks: int = 1) -> int:
        """Tokens that a cache may hold beside the weights; 0 if not even they fit."""
        return max(0, (device_bytes - self.bytes_per_rank(num_ranks, 0)) // self.cache_bytes_per_token)


def make_plan(config: HfConfig, value_bytes: int) -> Plan:
    """The plan for activations and weights of value_bytes bytes a value (4 or 2). Routed experts in INT4 stay INT4; any
    other quantised weight is loaded as floats."""
    found: dict[tuple[str, str], list[int]] = {}
    for name, shape in weights(config.model):
        part = part_of(name)
        is_int4 = _is_int4(config, name)
        entry = found.setdefault((part, "int4" if is_int4 else _dtype_name(part, name, value_bytes)), [0, 0, 0])
        count = math.prod(shape)
        num_bytes = _int4_bytes(count, config.quantization) if is_int4 else count * _value_bytes(name, value_bytes)
        entry[0] += count
        entry[1] += num_bytes
        entry[2] += 0 if part in _WHOLE_ON_EVERY_RANK or _is_latent(name) else num_bytes
    parts = tuple(Part(part, dtype, *sums) for (part, dtype), sums in sorted(found.items(), key=_by_part))
    return Plan(parts, _cache_bytes(config.model, value_bytes), _int4_layer_bytes(config, parts, value_bytes))


def part_of(name: str) -> str:
    """The part that a tensor belongs to, one of PARTS."""
    return next((part for piece, part in _PART_BY_PIECE.items() if piece in name), "dense feed-forward")


def _by_part(item: tuple[tuple[str, str], list[int]]) -> tuple[int, str]:
    (part, dtype), _ = item
    return PARTS.index(part), dtype


def _is_int4(config: HfConfig, name: str) -> bool:
    if not isinstance(config.quantization, Int4Groups) or part_of(name) != "routed experts":
        return False
    return config.quantization.covers(config.prefix + name.removesuffix(".weight"))


def _is_latent(name: str) -> bool:
    """The projections to the latents, which every rank needs whole."""
    return name.endswith(("kv_a_proj_with_mqa.weight", "q_a_proj.weight"))


def _int4_bytes(count: int, groups: Int4Groups) -> int:
    return count * _INT4_BITS // 8 + count // groups.group_size * _SCALE_BYTES


def _value_bytes(name: str, value_bytes: int) -> int:
    return 4 if name.endswith("e_score_correction_bias") else value_bytes


def _dtype_name(part: str, name: str, value_bytes: int) -> str:
    return "float32" if _value_bytes(name, value_bytes) == 4 else "bfloat16"


def _int4_layer_bytes(config: HfConfig, parts: tuple[Part, ...], value_bytes: int) -> int:
    if all(part.dtype != "int4" for part in parts):
        return 0
    model = config.model
    return value_bytes * model.n_routed_experts * 3 * model.hidden_size * model.moe_intermediate_size


def _cache_bytes(config: ModelConfig, value_bytes: int) -> int:
    return config.num_hidden_layers * config.latent_dim * value_bytes
