"""Write a model as a checkpoint folder, config.json and safetensors in shards, as `transformers` reads it too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kdtree_nb.config import ModelConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf.config import LATENT_NORM_EPS
from kdtree_nb.hf.folder import INDEX
from kdtree_nb.hf.rotary_rows import plain_rows, to_interleaved
from kdtree_nb.hf.tensors import weights

MAX_SHARD_BYTES = 4 << 30
"""A shard is closed before it would grow beyond this."""

Read = Callable[[str], torch.Tensor]


def write_folder(config: ModelConfig, read: Read, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> int:
    """Write the tensors that `read` gives by name (rotated rows in NeoX order) and return their number.

    `config.json` is written last: a folder without one was not completed. Raises CheckpointError on a configuration
    that checkpoints cannot express, and where a file cannot be written, such as on a full disk. Weights of a checkpoint
    that the folder held are removed first: some readers would prefer them.
    """
    fields = to_fields(config)
    folder.mkdir(parents=True, exist_ok=True)
    for old in [folder / "config.json", folder / INDEX, *folder.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    placed: dict[str, str] = {}
    shards = list(_shards(config, max_shard_bytes))
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _as_stored(config, name, read(name)) for name in names}
        _save(tensors, folder / shard)
        placed |= dict.fromkeys(names, shard)
    index = {"metadata": {}, "weight_map": placed}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    for shard in set(placed.values()):  # the library makes its files for their owner alone
        shutil.copymode(folder / "config.json", folder / shard)
    return len(placed)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's, also for a disk that is full
        path.unlink(missing_ok=True)
        raise CheckpointError(f"convert: {path}: expected room and leave to write it, got {error}") from error


def _as_stored(config: ModelConfig, name: str, value: torch.Tensor) -> torch.Tensor:
    num_plain = plain_rows(config, name)
    return value.contiguous() if num_plain is None else to_interleaved(value, num_plain, config.qk_rope_head_dim)


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of `config.json`. Raises CheckpointError for a model that checkpoint folders cannot describe."""
    if config.attention_eps != LATENT_NORM_EPS:
        raise CheckpointError(
            f"convert: latent_norm_eps: expected {LATENT_NORM_EPS}, the only one that checkpoint folders have, got "
            f"{config.attention_eps}; keep this model as a KDTR file"
        )
    fields = config.to_dict()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    yarn = fields.pop("rope_scaling")
    if yarn is not None:
        rope |= {"rope_type": "yarn", **{name: value for name, value in yarn.items() if value is not None}}
        if not (rope["mscale"] and rope["mscale_all_dim"]):  # what one of them alone means differs between readers
            rope["attention_factor"] = config.rope_scaling.amplitude
    for name in ("use_router_bias", "latent_norm_eps"):
        fields.pop(name)
    eos = fields.pop("eos_token_ids")
    return {
        **_kind(config), **fields, "rope_parameters": rope, "eos_token_id": eos or None, "hidden_act": "silu",
        "num_key_value_heads": config.num_attention_heads, "attention_bias": False, "num_nextn_predict_layers": 0,
        "head_dim": config.qk_rope_head_dim,
    }  # fmt: skip


def _kind(config: ModelConfig) -> dict[str, Any]:
    """The family whose router this is."""
    if config.scoring_func == "sigmoid" and config.use_router_bias:
        return {"model_type": "deepseek_v3", "topk_method": "noaux_tc", "architectures": ["DeepseekV3ForCausalLM"]}
    if config.scoring_func == "softmax" and not config.use_router_bias and config.n_group == 1:
        return {"model_type": "deepseek_v2", "topk_method": "greedy", "architectures": ["DeepseekV2ForCausalLM"]}
    raise CheckpointError(
        "convert: expected a softmax router without bias or groups, or a sigmoid router with a bias, got "
        f"{config.scoring_func}, bias {config.use_router_bias}, {config.n_group} groups; keep it as a KDTR file"
    )


def _shards(config: ModelConfig, max_bytes: int) -> Iterator[list[str]]:
    """Names of the tensors of each shard; sizes counted in float32."""
    names: list[str] = []
    size = 0
    for name, shape in weights(config):
        num_bytes = 4 * torch.Size(shape).numel()
        if names and size + num_bytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    yield names
