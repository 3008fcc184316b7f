"""load_model: from a KDTR file, or by the name of a model that this project ships, to a Model with packed weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.kdtr import open_kdtr
from kdtree_nb.model.mla import Attention, rope_table
from kdtree_nb.model.moe import DenseFeedForward, MoeFeedForward
from kdtree_nb.model.transformer import Layer, Model
from kdtree_nb.native import ops, require
from kdtree_nb.native.devices import memory_for
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

DATA_DIR = Path(__file__).resolve().parents[2] / "data"
"""Where the models that this project ships lie."""

DTYPES = (torch.float32, torch.bfloat16)
"""Types of weights and activations that the operations support."""

Weights = Callable[[str], np.ndarray]
"""A tensor's name to its float32 array; raises on a name that it lacks."""


def load_model(
    path_or_name: str | os.PathLike, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Model:
    """Load a model from a KDTR file, or by name: "tiny" (trained on Python text), "tiny2" (random weights, odd sizes).

    Weights are widened exactly to FP32 (or rounded to BF16), fused and packed once, here. Raises CheckpointError when
    the file is missing or describes no model, KdtrError when it is damaged, ValueError on another dtype, and
    KernelUnavailableError where there are no kernels for the device.
    """
    name = os.fspath(path_or_name)
    if name == "tiny2":
        return build_model(tiny2_config(), tiny2_weights(), device, dtype)
    path = DATA_DIR / "tiny.kdtr" if name == "tiny" else Path(name)
    if not path.is_file():
        raise CheckpointError(
            f"load_model: expected a KDTR file (or the name 'tiny' or 'tiny2'), found {_what(path)} at {path}; "
            "`kdtree-nb convert` makes a KDTR file from safetensors"
        )
    file = open_kdtr(path)
    fields = file.metadata.get("config")
    if not isinstance(fields, dict):
        raise CheckpointError(f"load_model: {path}: expected a model's config in the metadata, got {fields!r}")
    return _build(ModelConfig.from_dict(fields), _checked(file.float32, file.names, str(path)), device, dtype)


def build_model(
    config: ModelConfig, weights: Mapping[str, np.ndarray], device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:  # fmt: skip
    """A model from float32 arrays under the names of DeepSeek checkpoints. Errors as in `load_model`."""
    return _build(config, _checked(weights.__getitem__, list(weights), "weights"), device, dtype)


def _what(path: Path) -> str:
    return "a folder" if path.is_dir() else "no regular file" if path.exists() else "nothing"


def _checked(read: Weights, names: list[str], source: str) -> Weights:
    present = frozenset(names)

    def get(name: str) -> np.ndarray:
        if name not in present:
            raise CheckpointError(f"load_model: {source}: expected a tensor {name!r}, got none of that name")
        return read(name)

    return get


class _Reader:
    """Reads tensors of expected shapes as torch tensors of one dtype on one device."""

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self.weights, self.device, self.dtype = weights, device, dtype

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        array = self.weights(name)
        if array.shape != shape:
            raise CheckpointError(f"load_model: tensor {name!r}: expected shape {shape}, got {tuple(array.shape)}")
        return torch.from_numpy(np.array(array, dtype=np.float32)).to(self.device, self.dtype)


def _build(config: ModelConfig, weights: Weights, device: str | torch.device, dtype: torch.dtype) -> Model:
    if dtype not in DTYPES:
        raise ValueError(f"load_model: expected dtype torch.float32 or torch.bfloat16, got {dtype}")
    require(torch.device(device))
    what = f"load_model: expected memory for the weights, {dtype}"
    with memory_for(what, torch.device(device), "Use torch.bfloat16, a smaller model or another device."):
        return _read_model(config, _Reader(weights, torch.device(device), dtype))


def _read_model(config: ModelConfig, read: _Reader) -> Model:
    cos_sin = rope_table(config, read.device)
    layers = [_layer(config, read, i, cos_sin) for i in range(config.num_hidden_layers)]
    V, D = config.vocab_size, config.hidden_size
    embedding = read("model.embed_tokens.weight", V, D)
    return Model(config, embedding, layers, read("model.norm.weight", D), ops.pack_linear(read("lm_head.weight", V, D)))


def _layer(config: ModelConfig, read: _Reader, index: int, cos_sin: torch.Tensor) -> Layer:
    prefix = f"model.layers.{index}."
    feed_forward = _dense if config.is_dense_layer(index) else _moe
    return Layer(_attention(config, read, index, cos_sin), feed_forward(config, read, prefix))


def _attention(config: ModelConfig, read: _Reader, index: int, cos_sin: torch.Tensor) -> Attention:
    H, D, C, v = config.num_attention_heads, config.hidden_size, config.kv_lora_rank, config.v_head_dim
    name = f"model.layers.{index}.self_attn."
    return Attention(
        config,
        layer=index,
        norm=read(f"model.layers.{index}.input_layernorm.weight", D),
        q_proj=read(name + "q_proj.weight", H * config.q_head_dim, D),
        kv_a=read(name + "kv_a_proj_with_mqa.weight", config.latent_dim, D),
        kv_norm=read(name + "kv_a_layernorm.weight", C),
        kv_b=read(name + "kv_b_proj.weight", H * (config.qk_nope_head_dim + v), C),
        o_proj=read(name + "o_proj.weight", D, H * v),
        cos_sin=cos_sin,
    )


def _dense(config: ModelConfig, read: _Reader, prefix: str) -> DenseFeedForward:
    norm = read(prefix + "post_attention_layernorm.weight", config.hidden_size)
    return DenseFeedForward(config, norm, *_gated(config, read, prefix + "mlp.", config.intermediate_size))


def _moe(config: ModelConfig, read: _Reader, prefix: str) -> MoeFeedForward:
    D, E, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    routed = [_gated(config, read, f"{prefix}mlp.experts.{e}.", width) for e in range(E)]
    gate, up, down = (torch.stack(part) for part in zip(*routed, strict=True))
    shared = (None, None, None)
    if config.n_shared_experts:
        shared = _gated(config, read, prefix + "mlp.shared_experts.", config.shared_intermediate_size)
    experts = ops.pack_experts(gate, up, down, *shared)
    norm = read(prefix + "post_attention_layernorm.weight", D)
    return MoeFeedForward(config, norm, read(prefix + "mlp.gate.weight", E, D), experts)


def _gated(config: ModelConfig, read: _Reader, prefix: str, width: int) -> tuple[torch.Tensor, ...]:
    D = config.hidden_size
    return (
        read(prefix + "gate_proj.weight", width, D),
        read(prefix + "up_proj.weight", width, D),
        read(prefix + "down_proj.weight", D, width),
    )
