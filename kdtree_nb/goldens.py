"""Goldens: what the float64 reference says for prompts of both models. Made by `make_refs`, proven by `check_refs`.

A file `<model>.kdtr` holds for each prompt the arrays `<prompt>.prompt` and `<prompt>.tokens` (i64 ids), `.margins`
(f64, the largest logit minus the second largest at every token) and, for some prompts, `.logits` (f64 [24, V], those
that the first 24 tokens were chosen from). Decoding is greedy and does not stop at end-of-text tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.kdtr import open_kdtr, write_kdtr
from kdtree_nb.reference import ReferenceModel
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

DATA_DIR = Path(__file__).resolve().parent.parent / "data"
GOLDENS_DIR = DATA_DIR / "goldens"
MODELS = ("tiny", "tiny2")

FP32_TOLERANCE = 8e-6
"""An FP32 logit may differ from its golden by this times max(1, max |golden logit|)."""

MARGIN_FACTOR = 4
"""A golden token's margin exceeds the tolerance this many times, so that FP32 must choose the same token."""

NUM_TOKENS = {"tiny": 256, "tiny2": 128}
NUM_LOGITS_TOKENS = 24
NUM_LOGITS_PROMPTS = 2
NUM_TINY_PROMPTS = 10
TINY2_PROMPT_LENGTHS = (1, 12, 33, 64)


class Golden(NamedTuple):
    """One prompt and its greedy continuation by the reference in float64."""

    name: str
    prompt: list[int]
    tokens: list[int]
    margins: np.ndarray  # f64 [n]
    logits: np.ndarray | None  # f64 [24, V] of the first 24 tokens, or None


def fp32_tolerance(logits: np.ndarray) -> float:
    """How far FP32 logits may be from these golden ones."""
    return FP32_TOLERANCE * max(1.0, float(np.abs(logits).max()))


def load_goldens(model: str, goldens_dir: str | os.PathLike = GOLDENS_DIR) -> list[Golden]:
    """The committed goldens of 'tiny' or 'tiny2'; those with logits come first. Raises KdtrError for a broken file."""
    file = open_kdtr(Path(goldens_dir) / f"{model}.kdtr")
    return [
        Golden(
            name,
            file.array(f"{name}.prompt").tolist(),
            file.array(f"{name}.tokens").tolist(),
            file.array(f"{name}.margins"),
            file.array(f"{name}.logits") if f"{name}.logits" in file else None,
        )
        for name in file.metadata["prompts"]
    ]


def compute_goldens(model: str, data_dir: str | os.PathLike = DATA_DIR) -> tuple[list[Golden], dict[str, float]]:
    """Run the reference: (goldens, smallest margin of each prompt that was left out because FP32 could not match it).

    Raises ValueError for an unknown model, or if too few prompts have the margin.
    """
    reference, candidates, num_wanted = _model_and_prompts(model, Path(data_dir))
    goldens: list[Golden] = []
    left_out: dict[str, float] = {}
    while candidates and (num_missing := num_wanted - len(goldens)):
        batch, candidates = candidates[:num_missing], candidates[num_missing:]
        results = reference.generate_batch([prompt for _, prompt in batch], NUM_TOKENS[model], stop_token_ids=())
        for (name, prompt), (tokens, logits) in zip(batch, results, strict=True):
            best, second = np.sort(logits, axis=-1)[:, :-3:-1].T
            margins = best - second
            if not margins.min() > MARGIN_FACTOR * fp32_tolerance(logits):
                left_out[name] = float(margins.min())
                continue
            with_logits = len(goldens) < NUM_LOGITS_PROMPTS
            goldens.append(Golden(name, prompt, tokens, margins, logits[:NUM_LOGITS_TOKENS] if with_logits else None))
    if len(goldens) < num_wanted:
        raise ValueError(f"make_refs: {model}: expected {num_wanted} prompts with the margin, got {len(goldens)}; "
                         f"left out: {left_out}; add prompts")  # fmt: skip
    return goldens, left_out


def make_refs(
    models: Sequence[str] = MODELS, out_dir: str | os.PathLike = GOLDENS_DIR, data_dir: str | os.PathLike = DATA_DIR
) -> dict[str, Path]:
    """Compute the goldens of the models and write them: model -> path of its file. Errors as in `compute_goldens`."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    paths = {}
    for model in models:
        goldens, left_out = compute_goldens(model, data_dir)
        tensors: dict[str, np.ndarray] = {}
        for golden in goldens:
            tensors[f"{golden.name}.prompt"] = np.array(golden.prompt, np.int64)
            tensors[f"{golden.name}.tokens"] = np.array(golden.tokens, np.int64)
            tensors[f"{golden.name}.margins"] = golden.margins
            if golden.logits is not None:
                tensors[f"{golden.name}.logits"] = golden.logits
        metadata = {
            "model": model,
            "prompts": [golden.name for golden in goldens],
            "smallest_margin": min(float(golden.margins.min()) for golden in goldens),
            "left_out": left_out,
            "made_by": {"command": "kdtree-nb make-refs", "precision": "float64"},
        }
        paths[model] = Path(out_dir) / f"{model}.kdtr"
        write_kdtr(paths[model], tensors, metadata)
    return paths


def check_refs(
    models: Sequence[str] = MODELS,
    goldens_dir: str | os.PathLike = GOLDENS_DIR,
    data_dir: str | os.PathLike = DATA_DIR,
    tolerance: float = 1e-9,
) -> None:
    """Compute the goldens again and compare with the files: names, prompts and tokens exactly, the rest to `tolerance`.

    Raises ValueError at the first difference.
    """
    for model in models:
        computed, committed = compute_goldens(model, data_dir)[0], load_goldens(model, goldens_dir)
        names = [golden.name for golden in computed]
        if names != [golden.name for golden in committed]:
            raise ValueError(f"check_refs: {model}: expected prompts {names}, got {[g.name for g in committed]}; "
                             "run kdtree-nb make-refs")  # fmt: skip
        for want, got in zip(computed, committed, strict=True):
            _check_golden(model, want, got, tolerance)


def _check_golden(model: str, want: Golden, got: Golden, tolerance: float) -> None:
    for field in ("prompt", "tokens"):
        if getattr(want, field) != getattr(got, field):
            raise ValueError(
                f"check_refs: {model}: {want.name}: expected {field} {getattr(want, field)}, got {getattr(got, field)}"
            )
    for field in ("margins", "logits"):
        a, b = getattr(want, field), getattr(got, field)
        if a is None and b is None:
            continue
        if a is None or b is None or a.shape != b.shape or not np.abs(a - b).max() <= tolerance:
            raise ValueError(f"check_refs: {model}: {want.name}: expected {field} within {tolerance} of the file's")


def _model_and_prompts(model: str, data_dir: Path) -> tuple[ReferenceModel, list[tuple[str, list[int]]], int]:
    """The reference model, candidate prompts as (name, ids), and how many of them are wanted."""
    if model == "tiny2":
        vocab_size = tiny2_config().vocab_size
        prompts = [
            (f"random_{n}", (np.random.PCG64(n).random_raw(n) % vocab_size).tolist()) for n in TINY2_PROMPT_LENGTHS
        ]
        return ReferenceModel(tiny2_config(), tiny2_weights()), prompts, len(prompts)
    if model != "tiny":
        raise ValueError(f"make_refs: expected a model of {list(MODELS)}, got {model!r}")
    file = open_kdtr(data_dir / "tiny.kdtr")
    weights = {name: file.float32(name) for name in file.names}
    entries = json.loads((data_dir / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    prompts = [(entry["name"], list(entry["text"].encode())) for entry in entries]
    return ReferenceModel(ModelConfig.from_dict(file.metadata["config"]), weights), prompts, NUM_TINY_PROMPTS
