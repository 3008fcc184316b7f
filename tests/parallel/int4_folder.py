"""A small checkpoint folder of Kimi's kind whose routed experts are INT4."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kdtree_nb.hf.folder import INDEX
from kdtree_nb.hf.write import write_folder
from tests.hf.int4_config import GROUP, QUANTIZATION
from tests.parallel.programs import config_of, random_weights


def write_int4(folder: Path, width: int) -> str:
    """8 heads, routed experts of `width`, a multiple of 32, with random words and scales. The folder's name."""
    config = dataclasses.replace(
        config_of("tiny8"), q_lora_rank=64, moe_intermediate_size=width, num_hidden_layers=3, scoring_func="sigmoid",
        use_router_bias=True, routed_scaling_factor=2.5, latent_norm_eps=1e-6,
    )  # fmt: skip
    arrays = random_weights(config)
    write_folder(config, lambda name: torch.from_numpy(arrays[name]).bfloat16(), folder)
    (folder / INDEX).unlink()
    shard = next(folder.glob("*.safetensors"))
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, value in load_file(shard).items():
        if ".experts." not in name:
            tensors[name] = value
            continue
        layer, (num_out, num_in) = name.removesuffix(".weight"), value.shape
        words = torch.randint(-(2**31), 2**31, (num_out, num_in // 8), generator=generator)
        scale = torch.rand(num_out, num_in // GROUP, generator=generator).add_(0.5).mul_(0.3 / num_in**0.5)
        tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_scale"] = words.int(), scale.bfloat16()
        tensors[f"{layer}.weight_shape"] = torch.tensor([num_out, num_in])
    shard.unlink()
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": QUANTIZATION}))
    return str(folder)
