"""What the checks of the CUDA kernels share: counted expectations, bit equality, poisoned tensors."""

from __future__ import annotations

import numpy as np
import torch

DEV = "cuda"
NAN = float("nan")
F32, BF16 = torch.float32, torch.bfloat16
failures: list[str] = []
num_checks = 0


def expect(good: bool | torch.Tensor | np.bool_, text: str) -> None:
    """Counts a check; a failed one is kept and printed."""
    global num_checks
    num_checks += 1
    if not bool(good):
        failures.append(text)
        if len(failures) <= 30:
            print("FAIL", text, flush=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN, or of -7 for integers."""
    return torch.full(shape, NAN if dtype.is_floating_point else -7, dtype=dtype, device=DEV)


def count_of(n: int) -> torch.Tensor:
    """A row count on the device."""
    return torch.tensor([n], dtype=torch.int32, device=DEV)
