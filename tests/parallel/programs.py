"""What the ranks of the tests compute. Each program takes its ranks first, also the one process that is compared with.

Results are plain: lists, strings and tensors, so that the processes can send them.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import numpy as np
import torch

from kdtree_nb import Engine, Sampling, drafters, load_model
from kdtree_nb.config import ModelConfig, share_of_rank
from kdtree_nb.drafters.dflash import DFlashConfig
from kdtree_nb.hf.tensors import weights
from kdtree_nb.kdtr import open_kdtr
from kdtree_nb.model import build_model
from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.model.ranks import SampleBy
from kdtree_nb.train.nano.recipe import NANO_CONFIG

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
PROMPT = list(b"def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return")
NUM_TOKENS = 256
MAX_CANDIDATES_ON_GPU = 1024
"""That draft_topk has a kernel for."""


def random_weights(config: ModelConfig, seed: int = 7) -> dict[str, np.ndarray]:
    """Weights of a configuration, BF16 values, that keep activations near 1 and tell tokens apart."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1 and "bias" not in name:
            return np.ones(shape, np.float32)
        scale = 0.1 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        values = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * np.float32(scale))
        return values.bfloat16().float().numpy()

    return {name: draw(name, shape) for name, shape in weights(config)}


def config_of(name: str) -> ModelConfig:
    """tiny8: tiny with 8 heads, and widths of which each of 8 ranks has a part; nano: the configuration of nano-k2."""
    if name == "nano":
        return NANO_CONFIG
    tiny = ModelConfig.from_dict(open_kdtr(DATA_DIR / "tiny.kdtr").metadata["config"])
    return dataclasses.replace(tiny, num_attention_heads=8, moe_intermediate_size=264, vocab_size=331)


def load(name: str, dtype: str, ranks, device: str | torch.device = "cpu"):
    """A model of this test by name: tiny, which is trained, a folder, or one of `config_of` with random weights."""
    if name == "tiny" or "/" in name:
        return load_model(name, device, DTYPES[dtype], ranks=ranks, report=lambda message: None)
    config = config_of(name)
    return build_model(config, random_weights(config), device, DTYPES[dtype], ranks)


def texts(ranks, name: str, dtype: str, num_tokens: int = NUM_TOKENS) -> dict:
    """Tokens and logits of AR and DDTree decoding, greedy, of one stream."""
    model = load(name, dtype, ranks)
    engine = Engine(model, drafter=drafters.NGram(), budget=12, max_seq_len=512)
    prompt = [token % model.config.vocab_size for token in PROMPT]
    found = {}
    for kind, generate in (("ar", engine.generate_ar), ("ddtree", engine.generate_ddtree)):
        text = generate(prompt, num_tokens, return_logits=True, stop_token_ids=())
        found[kind] = text.tokens, text.logits, text.stats.accepted_per_step
    return found


def submitted(ranks, dtype: str) -> list:
    """Streams that join while others run: tokens, logits, and one that is cancelled."""
    model = load("tiny", dtype, ranks)
    engine = Engine(model, drafter=drafters.NGram(), budget=9, max_seq_len=256, max_streams=2)
    first = engine.submit(PROMPT, 30, return_logits=True)
    for _ in range(4):
        engine.step()
    others = [engine.submit(PROMPT[:n], 20, budget=n % 9, return_logits=True) for n in (3, 17, 40)]
    engine.step()
    others[1].cancel()
    engine.run()
    return [(h.result().tokens, h.result().logits) for h in (first, others[0], others[2])]


def dflash_config(target: ModelConfig) -> DFlashConfig:
    """A small drafter for a model of this test."""
    return DFlashConfig(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, block_size=5,
        mask_token_id=target.vocab_size - 1, target_layer_ids=(0, 2), max_position_embeddings=1024,
    )  # fmt: skip


def many_streams(ranks, dtype: str) -> dict:
    """Streams of several lengths, one so long that it is prefilled in blocks; sampled and greedy, and by a DFlash."""
    model = load("tiny", dtype, ranks)
    prompts = [PROMPT * 4, PROMPT[:1], PROMPT]
    samplings = [Sampling(0.8, seed=3), Sampling(1.0, top_k=20, top_p=0.9, seed=4), None]
    engine = Engine(model, drafter=drafters.NGram(), budget=9, max_seq_len=512)
    random = Engine(model, drafter=drafters.DFlash.random(dflash_config(model.config)), budget=9, max_seq_len=512)
    found = {
        "sampled": engine.generate_ddtree(prompts, [24, 40, 31], sampling=samplings),
        "greedy": engine.generate_ar(prompts, [24, 40, 31], stop_token_ids=()),
        "dflash": random.generate_ddtree(prompts, [8, 8, 8], return_logits=True, stop_token_ids=()),
        "dflash sampled": random.generate_ddtree(prompts[1:], 8, sampling=Sampling(0.7, top_p=0.95, seed=1)),
    }
    return {
        kind: [(text.tokens, text.stats.nodes_per_step, text.logits) for text in of_kind]
        for kind, of_kind in found.items()
    }


def vocabulary_choices(
    ranks, vocab_size: int, num_rows: int, seed: int, device: str | torch.device = "cpu"
) -> list[torch.Tensor]:
    """argmax, sample and draft_topk of logits with ties, infinities and a NaN, of which each rank has its part."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator).mul_(3).round_().div_(2)  # many are equal
    logits[1] = 1.0
    logits[2, ::3] = -torch.inf
    logits[3] = torch.where(torch.arange(vocab_size) % 2 == 0, 0.0, -0.0)
    begin, end = share_of_rank(vocab_size, ranks.rank, ranks.num_ranks)
    logits, found = logits.to(device), []
    most = vocab_size if torch.device(device).type == "cpu" else min(vocab_size, MAX_CANDIDATES_ON_GPU)
    for width in (1, 2, 17, 33, 70, most):
        drafts = ranks.draft_topk(logits[None, :, begin:end].contiguous(), vocab_size, min(width, vocab_size))
        found += [part.clone() for part in drafts]
    logits[4, 5] = torch.nan
    logits[5, 40], logits[5, 7] = torch.inf, torch.inf
    mine = logits[:, begin:end].contiguous()
    found.append(ranks.argmax(mine, vocab_size, None))
    for samplings in (
        [Sampling(1.0), Sampling(0.5)],
        [Sampling(0.9, top_k=5), Sampling(0.0)],
        [Sampling(1.3, top_k=40, top_p=0.7), Sampling(1.0)],
        [Sampling(1.0, top_p=0.5), Sampling(2.0, top_k=1024, top_p=0.99)],
    ):
        found.append(_sample(ranks, mine, vocab_size, samplings))
    found.append(ranks.all_logits(mine, vocab_size))
    return found


def _sample(ranks, mine: torch.Tensor, vocab_size: int, samplings: list[Sampling]) -> torch.Tensor:
    num_rows = len(mine)
    row = torch.arange(num_rows, dtype=torch.int32, device=mine.device)
    columns = zip(*((s.temperature, s.top_k, s.top_p, s.seed + 11) for s in samplings), strict=True)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.int64)
    parameters = [
        torch.tensor(column, dtype=dtype, device=mine.device) for column, dtype in zip(columns, dtypes, strict=True)
    ]
    max_kept = max(sampling.num_kept(vocab_size) for sampling in samplings)
    return ranks.sample(mine, vocab_size, SampleBy(row % 2, row * 7, *parameters, max_kept), None)


def everything(ranks, models: dict[str, int], with_streams: bool) -> dict:
    """All of the above in one start of the processes. models: how many tokens of each."""
    found = {(name, dtype): texts(ranks, name, dtype, models[name]) for name in models for dtype in DTYPES}
    for vocab_size in (331, 256, 1000):
        found["vocabulary", vocab_size] = vocabulary_choices(ranks, vocab_size, 9, vocab_size)
    if with_streams:
        for dtype in DTYPES:
            found["streams", dtype] = many_streams(ranks, dtype)
            found["submitted", dtype] = submitted(ranks, dtype)
    return found


def stop_midway(ranks, victim: int, how: str) -> None:
    """Generate; one rank is killed, or fails, after some steps. The others get tokens until then."""
    model = load("tiny", "f32", ranks)
    steps = []

    def on_step(record) -> None:
        steps.append(record.step)
        if len(steps) == 5 and ranks.rank == victim:
            if how == "raise":
                raise KeyError("planted")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    Engine(model, max_seq_len=512).generate_ar(PROMPT, 200, on_step=on_step, stop_token_ids=())


def load_different(ranks, what: str) -> None:
    """Ranks that do not load the same: another configuration, other weights, another dtype, or other prompts."""
    config = dataclasses.replace(config_of("tiny8"), num_hidden_layers=2)
    odd = ranks.rank == ranks.num_ranks - 1
    if what == "configuration" and odd:
        config = dataclasses.replace(config, rms_norm_eps=1e-5)
    seed = 8 if what == "weights" and odd else 7
    dtype = torch.bfloat16 if what == "dtype" and odd else torch.float32
    model = build_model(config, random_weights(config, seed), dtype=dtype, ranks=ranks)
    prompt = PROMPT[: 20 + (what == "prompt" and odd)]
    Engine(model, max_seq_len=64).generate_ar([token % 331 for token in prompt], 4)


def budget_auto(ranks) -> str:
    """What an engine says to a budget that each rank would choose by itself."""
    try:
        Engine(load("tiny8", "f32", ranks), drafters.NGram(), budget="auto")
    except ValueError as error:
        return str(error)


def unpicklable(ranks):
    """Returns what no other process can have."""
    return lambda: ranks.rank


def held_bytes(ranks, name: str) -> dict[str, int]:
    """Bytes of the packed weights that a rank holds."""
    model = load(name, "f32", ranks)
    return {"all": sum(t.numel() * t.element_size() for t in model.tensors()), "head": model.head.data.numel() * 4}


def sleep_forever(ranks) -> None:
    """Never ends by itself."""
    time.sleep(1000)
