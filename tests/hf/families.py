"""Small random checkpoints of every family, made by `transformers` itself, and its logits of a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

COMMON = {
    "vocab_size": 331, "hidden_size": 108, "intermediate_size": 152, "num_attention_heads": 3,
    "num_key_value_heads": 3, "num_hidden_layers": 3, "first_k_dense_replace": 1, "kv_lora_rank": 44,
    "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28, "max_position_embeddings": 640,
    "attn_implementation": "eager", "bos_token_id": 0, "eos_token_id": 1, "head_dim": 12,
}  # fmt: skip


def _yarn(factor: float, theta: float, **fields: float) -> dict:
    original = {"original_max_position_embeddings": 96, "rope_theta": theta, "rope_type": "yarn"}
    return {"rope_parameters": {"factor": factor, **original, **fields}}


def _plain(theta: float) -> dict:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}


FAMILIES: dict[str, dict] = {
    "deepseek-v2-lite": {
        "q_lora_rank": None, "n_routed_experts": 10, "num_experts_per_tok": 4, "n_shared_experts": 2,
        "moe_intermediate_size": 36, "topk_method": "greedy", "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6,
        **_yarn(40.0, 1e4, mscale=0.707, mscale_all_dim=0.707, beta_fast=32, beta_slow=1),
    },
    "moonlight": {
        "q_lora_rank": None, "n_routed_experts": 11, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 36, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5,
        **_plain(5e4),
    },
    "deepseek-v3": {
        "q_lora_rank": 52, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
        **_yarn(40.0, 1e4, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
    },
    "kimi-k2-instruct": {
        "q_lora_rank": 52, "n_routed_experts": 13, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 40, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-6,
        **_yarn(32.0, 5e4, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0),
    },
    "kimi-k2-thinking": {
        "q_lora_rank": 52, "n_routed_experts": 13, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 40, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5,
        **_yarn(64.0, 5e4, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0),
    },
}  # fmt: skip
"""Shape and arithmetic of each family, small and with sizes that are no powers of two; prompts cross YaRN's original
length of 96."""

WRAPPED = "kimi-k2.6"
"""The text model inside a multimodal one: K2-Thinking's arithmetic under another prefix."""


def make_reference(family: str, seed: int) -> torch.nn.Module:
    """A random model of `transformers`, in FP32, whose logits reach 5 and whose routing is far from uniform."""
    fields = {**COMMON, **FAMILIES["kimi-k2-thinking" if family == WRAPPED else family]}
    is_v2 = family == "deepseek-v2-lite"
    config = (DeepseekV2Config if is_v2 else DeepseekV3Config)(**fields)
    model = (DeepseekV2ForCausalLM if is_v2 else DeepseekV3ForCausalLM)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
            elif "norm" in name:
                value.copy_(1.0 + 0.2 * torch.randn(value.shape, generator=generator))
            elif value.dim() >= 2:
                value.copy_(_spread(name) * torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.5)
    return model


def _spread(name: str) -> float:
    """Standard deviation of a product with rows of unit size."""
    return 3.0 if "mlp.gate.weight" in name else 2.0 if "lm_head" in name or "embed" in name else 1.1


def save(model: torch.nn.Module, folder: Path, family: str, **options: object) -> Path:
    """The checkpoint as `save_pretrained` writes it, under the wrapped names for the multimodal family."""
    model.save_pretrained(folder, **options)
    if family == WRAPPED:
        _wrap(folder)
    return folder


def _wrap(folder: Path) -> None:
    """Rename to the names of a multimodal checkpoint, and add vision tensors and the wrapper's config."""
    from safetensors.torch import load_file, save_file

    tensors = {f"language_model.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.patch_embed.weight"] = torch.zeros(4, 4)
    tensors["mm_projector.proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    rope = text.pop("rope_parameters")
    text |= {"model_type": "kimi_k2", "rope_theta": rope.pop("rope_theta"), "scoring_func": "sigmoid"}
    text |= {"rope_scaling": {"type": rope.pop("rope_type"), **rope}, "topk_method": "noaux_tc"}
    outer = {"model_type": "kimi_k25", "text_config": text, "vision_config": {}, "architectures": ["Kimi"]}
    (folder / "config.json").write_text(json.dumps(outer))


@torch.no_grad()
def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """f32 [T, V] after every token of one text."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by `transformers`, without stopping."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()
