"""The tensors of a drafter: names and shapes, a random start, and the checkpoint folder they are kept in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from kdtree_nb.drafters.dflash.config import DFlashConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf.folder import SINGLE, CheckpointFolder

Weights = Mapping[str, torch.Tensor]


def shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor. D hidden size, I width, n target layers, H and K heads of length d:

    fc [D, nD] and hidden_norm [D] make one context row of a token's hidden states; norm [D] is the last one;
    in each layer input_layernorm and post_attention_layernorm [D], self_attn.q_proj [Hd, D], k_proj and v_proj [Kd, D],
    o_proj [D, Hd], q_norm and k_norm [d], mlp.gate_proj and up_proj [I, D], down_proj [D, I].
    """
    D, width, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = {
        "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (q_rows, D),
        "self_attn.k_proj": (kv_rows, D), "self_attn.v_proj": (kv_rows, D), "self_attn.o_proj": (D, q_rows),
        "self_attn.q_norm": (head,), "self_attn.k_norm": (head,), "mlp.gate_proj": (width, D),
        "mlp.up_proj": (width, D), "mlp.down_proj": (D, width),
    }  # fmt: skip
    outer = {"fc": (D, config.num_features), "hidden_norm": (D,), "norm": (D,)}
    layers = {f"layers.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (outer | layers).items()}


def random_weights(config: DFlashConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 weights to start from, in the `shapes` of `config`: norms 1, matrices normal with the square root of
    1 / inputs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes(config).items()
    }


def check_weights(config: DFlashConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises CheckpointError that names the first tensor that is missing, unknown or of another shape."""
    expected = shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{where}: expected a tensor {name!r}, got none of that name")
        if tuple(found[name]) != shape:
            raise CheckpointError(f"{where}: tensor {name!r}: expected shape {shape}, got {tuple(found[name])}")
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise CheckpointError(f"{where}: expected the tensors of its config only, got {unknown[0]!r} too")


def read_weights(config: DFlashConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder's safetensors files, as they are stored, in the `shapes` of `config`. Raises
    CheckpointError where names or shapes are others."""
    files = CheckpointFolder(folder)
    try:
        check_weights(config, {name: entry.shape for name, entry in files.entries.items()}, f"DFlash: {folder}")
        return {name: files.tensor(name).clone() for name in shapes(config)}
    finally:
        files.close()


def write_folder(config: DFlashConfig, weights: Weights, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model.safetensors and, last, config.json: a folder without one was not completed."""
    check_weights(config, {name: tuple(value.shape) for name, value in weights.items()}, "DFlash: save")
    fields = config.to_fields()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    tensors = {name: weights[name].detach().to("cpu", dtype).contiguous() for name in shapes(config)}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    fields["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
