"""What is trained and how: the configurations of nano-k2 and of its one-minute sibling, and their schedules."""

from __future__ import annotations

import dataclasses

from kdtree_nb.config import ModelConfig
from kdtree_nb.train.nano.tokenizer import EOS, VOCAB_SIZE

NANO_CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=320,
    num_hidden_layers=6,
    first_k_dense_replace=1,
    num_attention_heads=8,
    q_lora_rank=96,
    kv_lora_rank=96,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=704,
    moe_intermediate_size=16,
    n_routed_experts=64,
    num_experts_per_tok=4,
    n_shared_experts=16,
    scoring_func="sigmoid",
    use_router_bias=True,
    norm_topk_prob=True,
    routed_scaling_factor=2.827,
    rms_norm_eps=1e-5,
    latent_norm_eps=1e-6,
    rope_theta=5e4,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    eos_token_ids=(EOS,),
)
"""K2's structure: 64 narrow experts, so that the experts that a step touches depend on its rows; the shared expert is
as wide as 16 of them, since a token's four alone would be little for a layer of 320."""

CPU_CONFIG = dataclasses.replace(
    NANO_CONFIG, hidden_size=96, num_hidden_layers=3, num_attention_heads=4, q_lora_rank=32, kv_lora_rank=32,
    qk_nope_head_dim=16, v_head_dim=16, intermediate_size=192, n_routed_experts=16, n_shared_experts=6,
)  # fmt: skip
"""The same structure in a size that a laptop trains while one waits."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the result beside corpus and configuration. Rates are peaks of a cosine over num_steps.

    batch_tokens:    tokens a step, in windows of the lengths in context_cycle, one length a step
    bias_rate:       what a step moves a router's bias by, towards an even load; in the last fifth: final_bias_rate
    """

    num_steps: int
    batch_tokens: int
    context_cycle: tuple[int, ...]
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    router_lr: float = 5e-4
    weight_decay: float = 0.05
    warmup_share: float = 0.03
    final_lr_share: float = 0.02
    bias_rate: float = 1e-3
    final_bias_rate: float = 2e-4
    num_eval_windows: int = 64
    eval_context: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("num_steps", "batch_tokens", "num_eval_windows", "eval_context"):
            if getattr(self, field) < 1:
                raise ValueError(f"recipe: {field}: expected at least 1, got {getattr(self, field)}")
        object.__setattr__(self, "context_cycle", tuple(self.context_cycle))

    def bias_rate_at(self, step: int) -> float:
        """What this step moves a router's bias by."""
        return self.bias_rate if step < 0.8 * self.num_steps else self.final_bias_rate


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model, its schedule and what it is for."""

    config: ModelConfig
    recipe: Recipe
    purpose: str


PRESETS = {
    "gpu": Preset(
        NANO_CONFIG,
        Recipe(num_steps=12000, batch_tokens=65536, context_cycle=(*(512,) * 7, 2048)),
        "nano-k2 itself: 786 M tokens, minutes on a large GPU",
    ),
    "cpu": Preset(
        CPU_CONFIG,
        Recipe(num_steps=400, batch_tokens=1024, context_cycle=(128,), num_eval_windows=8, eval_context=128),
        "a small sibling of nano-k2: about a minute on two cores",
    ),
}
