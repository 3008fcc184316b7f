"""What one decode step must fetch and compute at least, from the configuration alone; and the part that a rank has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from kdtree_nb.hf.config import HfConfig
from kdtree_nb.hf.plan import make_plan
from kdtree_nb.hf.quantization import Int4Groups

_VALUE_BYTES = 2  # BF16: weights that are not INT4, and the cache


@dataclasses.dataclass(frozen=True)
class StepWork:
    """bytes_by_part: bytes fetched, each weight once, by part of the plan, `cache` among them; flops: operations."""

    bytes_by_part: Mapping[str, float]
    flops: float

    @property
    def num_bytes(self) -> float:
        """Bytes of all parts."""
        return sum(self.bytes_by_part.values())

    def floor_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds below which a device of these two rates cannot go."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def rank_config(config: HfConfig, num_ranks: int) -> HfConfig:
    """What one of num_ranks tensor-parallel ranks computes, as a model of its own.

    Heads, widths of experts and dense layers and the vocabulary are divided; the projections to the latents, the
    router and the latent cache are whole on every rank. Raises ValueError where a head or an INT4 group would be cut.
    """
    model, unit = config.model, 1
    if isinstance(config.quantization, Int4Groups):
        unit = config.quantization.group_size
    sizes = {"num_attention_heads": 1, "intermediate_size": 1, "moe_intermediate_size": unit, "vocab_size": 1}
    for field, whole in sizes.items():
        size = getattr(model, field)
        if num_ranks < 1 or size % (num_ranks * whole):
            raise ValueError(
                f"rank_config: {field}: expected a multiple of {whole} for each of {num_ranks} ranks, got {size} in "
                "all. Use another number of ranks."
            )
    divided = {field: getattr(model, field) // num_ranks for field in sizes}
    return dataclasses.replace(config, model=dataclasses.replace(model, eos_token_ids=(), **divided))


def expected_experts(num_experts: int, top_k: int, num_rows: int) -> float:
    """Distinct experts of num_rows rows that choose top_k of num_experts at random, on average."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_rows)


def step_work(
    config: HfConfig, num_rows: int, prefix_len: int, num_experts: float | None = None
) -> StepWork:  # fmt: skip
    """A step of num_rows rows of one stream behind prefix_len tokens, in BF16 with the experts as they are stored.

    num_experts: distinct routed experts that a layer wakes, on average over layers; None: as with random routing
    """
    model, parts = config.model, _parts(config)
    used = dict.fromkeys(parts, 1.0)
    used["embedding"] = num_rows / model.vocab_size
    products = sum(parts[name][1] for name in parts if name not in ("embedding", "norms", "routed experts"))
    if "routed experts" in parts:
        if num_experts is None:
            num_experts = expected_experts(model.n_routed_experts, model.num_experts_per_tok, num_rows)
        used["routed experts"] = num_experts / model.n_routed_experts
        products += parts["routed experts"][1] * model.num_experts_per_tok / model.n_routed_experts
    num_bytes = {name: share * parts[name][0] for name, share in used.items()}
    seen = model.num_hidden_layers * (prefix_len + num_rows)
    num_bytes["cache"] = seen * model.latent_dim * _VALUE_BYTES
    attention = seen * model.num_attention_heads * (model.latent_dim + model.kv_lora_rank)
    return StepWork(num_bytes, 2.0 * num_rows * (products + attention))


@functools.lru_cache(maxsize=16)
def _parts(config: HfConfig) -> dict[str, tuple[int, int]]:
    """Part -> bytes and parameters of the whole model."""
    found: dict[str, tuple[int, int]] = {}
    for part in make_plan(config, _VALUE_BYTES).parts:
        num_bytes, count = found.get(part.name, (0, 0))
        found[part.name] = num_bytes + part.num_bytes, count + part.num_parameters
    return found
