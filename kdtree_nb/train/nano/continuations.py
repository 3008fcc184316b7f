"""What a drafter learns from: beginnings of training text, each continued greedily by the target itself.

A folder of parts, `part-00000.kdtr` and so on, each decoded at once and complete or absent, so that a run that stopped
goes on where it was.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from kdtree_nb.errors import CorpusError
from kdtree_nb.kdtr import open_kdtr, write_kdtr
from kdtree_nb.train.nano.decode import greedy_batch
from kdtree_nb.train.plain_model import PlainModel
from kdtree_nb.train.streams import sample_windows


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is generated. All texts are total_len tokens long; the parts take turns with the prompt lengths.

    Prompts of one length would teach a drafter one length; longer continuations would teach it a small model's loops.
    """

    num_texts: int = 131072
    part_texts: int = 8192
    total_len: int = 400
    prompt_lens: tuple[int, ...] = (192, 256, 96, 224, 128, 288, 160, 240)
    seed: int = 0

    def __post_init__(self) -> None:
        if not all(0 < p < self.total_len for p in self.prompt_lens) or min(self.num_texts, self.part_texts) < 1:
            raise ValueError(f"continuations: expected texts and prompts of 1 … total_len - 1 tokens, got {self}")

    @property
    def num_parts(self) -> int:
        """Files of the folder."""
        return -(-self.num_texts // self.part_texts)

    def part(self, index: int) -> tuple[int, int]:
        """(texts, prompt length) of a part."""
        num_texts = min(self.part_texts, self.num_texts - index * self.part_texts)
        return num_texts, self.prompt_lens[index % len(self.prompt_lens)]


class Continuations(NamedTuple):
    """tokens int16 [N, total_len], prompt_len int32 [N]: what follows the prompt is the target's own. metadata: of the
    first part: plan, target's and corpus's fingerprints."""

    tokens: np.ndarray
    prompt_len: np.ndarray
    metadata: dict[str, Any]


def generate(model: PlainModel, stream: np.ndarray, plan: Plan, folder: Path, made_by: dict[str, Any]) -> None:
    """Write the parts of `folder` that are not there yet. `stream` int16 [n] is the training stream.

    made_by: fingerprints that the parts share. Raises CorpusError when a part that is there has others.
    """
    metadata = {"plan": dataclasses.asdict(plan) | {"prompt_lens": list(plan.prompt_lens)}, **made_by}
    tokens = torch.from_numpy(stream).to(model.device)
    dtype = torch.bfloat16 if tokens.is_cuda else torch.float32
    folder.mkdir(parents=True, exist_ok=True)
    for index in tqdm(range(plan.num_parts), desc="generate", unit="part"):
        path = part_path(folder, index)
        if path.is_file():
            _check(path, metadata)
            continue
        num_texts, prompt_len = plan.part(index)
        generator = torch.Generator().manual_seed((plan.seed << 32) + index)
        prompt = sample_windows(tokens, num_texts, prompt_len, generator)
        text = greedy_batch(model, prompt, plan.total_len - prompt_len, dtype)
        arrays = {"tokens": text.to(torch.int16).cpu().numpy(), "prompt_len": np.full(num_texts, prompt_len, np.int32)}
        write_kdtr(path, arrays, metadata)


def load_continuations(folder: Path) -> Continuations:
    """All parts of a folder. Raises CorpusError when one is missing or made for another plan or target."""
    metadata = open_kdtr(part_path(folder, 0)).metadata
    plan = Plan(**metadata["plan"])
    parts = []
    for index in range(plan.num_parts):
        path = part_path(folder, index)
        if not path.is_file():
            raise CorpusError(
                f"continuations: {path}: expected {plan.num_parts} parts, got none of this name; make it: "
                "kdtree-nb train-nano generate"
            )
        _check(path, metadata)
        file = open_kdtr(path)
        parts.append((file.array("tokens"), file.array("prompt_len")))
    tokens, prompt_len = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Continuations(tokens, prompt_len, metadata)


def part_path(folder: Path, index: int) -> Path:
    """The file of a part."""
    return folder / f"part-{index:05d}.kdtr"


def _check(path: Path, metadata: dict[str, Any]) -> None:
    found = open_kdtr(path).metadata
    for field, expected in metadata.items():
        if found.get(field) != expected:
            raise CorpusError(
                f"continuations: {path}: {field}: expected {expected}, got {found.get(field)}; use another folder"
            )
