"""How a checkpoint's weights are quantised: FP8 in square blocks, or INT4 in groups along the inputs."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from kdtree_nb.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Fp8Blocks:
    """float8_e4m3fn weights [N, K] with a scale per block: w = value · `weight_scale_inv`[n // rows, k // columns]."""

    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Int4Groups:
    """Symmetric INT4 in groups along K, packed: `weight_packed` i32 [N, K/8] holds value + 8, the low nibble first.

    group_size: inputs that share a scale; `weight_scale` [N, K/group_size]
    ignore:     names of linear layers that are not quantised, plain or as `re:` patterns
    """

    group_size: int
    ignore: tuple[str, ...]

    def covers(self, name: str) -> bool:
        """Whether the linear layer `name` (without `.weight`) is quantised."""
        return not any(_matches(pattern, name) for pattern in self.ignore)


Quantization = Fp8Blocks | Int4Groups


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return name == pattern


def parse_quantization(fields: Any, where: str) -> Quantization | None:
    """The quantisation of a config's `quantization_config`. Raises CheckpointError on one that is not supported."""
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where}: quantization_config: expected an object, got {fields!r}")
    method = fields.get("quant_method")
    parsers = {"fp8": _parse_fp8, "compressed-tensors": _parse_compressed_tensors}
    if not isinstance(method, str) or method not in parsers:
        raise CheckpointError(
            f"{where}: quantization_config.quant_method: expected one of {sorted(parsers)}, got {method!r}; "
            "dequantise the checkpoint to bfloat16 first"
        )
    return parsers[method](fields, where)


def _expect(fields: dict[str, Any], allowed: dict[str, tuple[Any, ...]], where: str) -> None:
    """Every field is one of `allowed` and has one of its values; an empty tuple allows any value."""
    for name, value in fields.items():
        if name not in allowed:
            raise CheckpointError(f"{where}: {name}: expected one of {sorted(allowed)}, got an unknown field {value!r}")
        if allowed[name] and not any(value == v and type(value) is type(v) for v in allowed[name]):
            raise CheckpointError(f"{where}: {name}: expected one of {list(allowed[name])}, got {value!r}")


_FP8_FIELDS: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",), "fmt": ("e4m3",), "activation_scheme": ("dynamic",), "weight_block_size": (),
    "modules_to_not_convert": (), "dequantize": (False,), "scale_fmt": (None, "float", "ue8m0"),
}  # fmt: skip


def _parse_fp8(fields: dict[str, Any], where: str) -> Fp8Blocks:
    where = f"{where}: quantization_config"
    _expect(fields, _FP8_FIELDS, where)
    block = fields.get("weight_block_size")
    sizes = block if isinstance(block, list) and len(block) == 2 else []
    if not sizes or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise CheckpointError(f"{where}: weight_block_size: expected two positive integers, got {block!r}")
    return Fp8Blocks(*sizes)


_PACKED_FIELDS: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",), "format": ("pack-quantized",), "config_groups": (), "ignore": (),
    "kv_cache_scheme": (None,), "global_compression_ratio": (), "quantization_status": ("compressed", "frozen"),
    "sparsity_config": ({}, None), "transform_config": ({}, None), "version": (),
}  # fmt: skip

_GROUP_FIELDS: dict[str, tuple[Any, ...]] = {
    "targets": (["Linear"],), "weights": (), "input_activations": (None,), "output_activations": (None,),
    "format": (None, "pack-quantized"),
}  # fmt: skip

_WEIGHT_FIELDS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,), "type": ("int",), "strategy": ("group",), "group_size": (32, 64, 128), "symmetric": (True,),
    "dynamic": (False,), "actorder": (None,), "block_structure": (None,), "observer": (), "observer_kwargs": (),
    "scale_dtype": (None,), "zp_dtype": (None, "torch.int8"),
}  # fmt: skip


def _parse_compressed_tensors(fields: dict[str, Any], where: str) -> Int4Groups:
    where = f"{where}: quantization_config"
    _expect(fields, _PACKED_FIELDS, where)
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(next(iter(groups.values())), dict):
        raise CheckpointError(f"{where}: config_groups: expected one group, got {groups!r}")
    group = next(iter(groups.values()))
    _expect(group, _GROUP_FIELDS, f"{where}: config_groups")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where}: config_groups: weights: expected an object, got {weights!r}")
    _expect(weights, _WEIGHT_FIELDS, f"{where}: config_groups: weights")
    missing = [name for name in ("num_bits", "type", "strategy", "group_size", "symmetric") if name not in weights]
    if missing:
        raise CheckpointError(f"{where}: config_groups: weights: missing fields {missing}")
    return Int4Groups(weights["group_size"], _patterns(fields.get("ignore"), where))


def _patterns(ignore: Any, where: str) -> tuple[str, ...]:
    if not isinstance(ignore or [], list) or not all(isinstance(p, str) for p in ignore or []):
        raise CheckpointError(f"{where}: ignore: expected a list of names, got {ignore!r}")
    for pattern in ignore or []:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise CheckpointError(f"{where}: ignore: {pattern!r} is no regular expression: {error}") from error
    return tuple(ignore or [])
