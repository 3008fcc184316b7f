"""A checkpoint of a published model's dimensions and random weights: written, loaded and decoded, AR and DDTree alike.

`python -m kdtree_nb.bench.load_checkpoint --out FILE` does it with Moonlight-16B-A3B's dimensions (32 GB) on a GPU.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kdtree_nb.bench.record import make_record, write_record
from kdtree_nb.bench.runner import Measurement, require
from kdtree_nb.config import ModelConfig
from kdtree_nb.drafters import Oracle
from kdtree_nb.hf.tensors import weights
from kdtree_nb.hf.write import write_folder
from kdtree_nb.model import Model, load_model
from kdtree_nb.speculate import Engine

MOONLIGHT = ModelConfig(
    vocab_size=163840, hidden_size=2048, num_hidden_layers=27, first_k_dense_replace=1, num_attention_heads=16,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, intermediate_size=11264,
    moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, rms_norm_eps=1e-5,
    rope_theta=5e4, max_position_embeddings=8192, scoring_func="sigmoid", norm_topk_prob=True,
    routed_scaling_factor=2.446, use_router_bias=True, latent_norm_eps=1e-6,
)  # fmt: skip
"""Published dimensions of Moonlight-16B-A3B."""

BUDGET = 16
NUM_PROMPT_TOKENS = 65


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Callable[[str], torch.Tensor]:
    """Name -> random tensor on the CPU: norms of 1, rows of about unit length, a router that is far from uniform."""
    shapes = dict(weights(config))
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            is_bias = name.endswith("bias")
            return torch.zeros(shape) if is_bias else torch.ones(shape, dtype=dtype)
        spread = 3.0 if name.endswith("mlp.gate.weight") else 1.0
        value = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return value.mul_(spread * shape[-1] ** -0.5).to(dtype).cpu()

    return read


def measure(
    config: ModelConfig, name: str, device: torch.device, dtype: torch.dtype, num_tokens: int, num_rounds: int,
    parent: Path | None = None,
) -> list[Measurement]:  # fmt: skip
    """Seconds to write, load and decode such a checkpoint. Raises BenchmarkError unless DDTree's logits are AR's."""
    params = {"model": name, "dtype": str(dtype).removeprefix("torch."), "device": device.type}
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        start = time.perf_counter()
        write_folder(config, random_weights(config, device, dtype), Path(folder))
        write_s = time.perf_counter() - start
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        start = time.perf_counter()
        model = load_model(folder, device, dtype)
        load_s = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = {**params, "bytes": num_bytes, "peak_host_bytes": peak}
    results = [
        Measurement("load_checkpoint/write", [write_s], sizes),
        Measurement("load_checkpoint/load", [load_s], sizes),
    ]
    return results + _decode(model, params, num_tokens, num_rounds)


def _decode(model: Model, params: dict[str, object], num_tokens: int, num_rounds: int) -> list[Measurement]:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.config.vocab_size, (NUM_PROMPT_TOKENS,), generator=generator).tolist()
    ar = Engine(model).generate_ar(prompt, num_tokens, stop_token_ids=(), return_logits=True)
    engine = Engine(model, drafter=Oracle([ar.tokens]), budget=BUDGET)
    tree = engine.generate_ddtree(prompt, num_tokens, stop_token_ids=(), return_logits=True)
    require(
        ar.tokens == tree.tokens and torch.equal(ar.logits, tree.logits), "load_checkpoint", "AR's tokens and logits"
    )
    require(len(set(ar.tokens)) >= 8, "load_checkpoint", "a text of at least 8 different tokens")
    params = {**params, "num_tokens": num_tokens, "budget": BUDGET, "rows": len(ar.logits)}
    runs = {"AR": engine.generate_ar, "DDTree with an oracle": engine.generate_ddtree}
    results = []
    for name, generate in runs.items():
        samples = []
        for _ in range(num_rounds + 1):
            start = time.perf_counter()
            generate(prompt, num_tokens, stop_token_ids=())
            samples.append((time.perf_counter() - start) / num_tokens)
        results.append(Measurement(f"load_checkpoint/{name}", samples[1:], params))
    return results


def main() -> None:
    """Measure with Moonlight's dimensions and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    results = measure(MOONLIGHT, "Moonlight-16B-A3B", device, torch.bfloat16, args.tokens, args.rounds)
    command = f"python -m kdtree_nb.bench.load_checkpoint --device {args.device}"
    print(write_record(make_record(results, command, device.type), args.out))
    for result in results:
        print(result.name, result.median, dict(result.params))


if __name__ == "__main__":
    main()
