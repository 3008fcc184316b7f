"""sample: the same logits give the same tokens on the CPU and on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import ops

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

STREAMS = [
    (1.0, 0, 1.0, 1), (0.7, 50, 0.9, 2**40), (2.0, 0, 0.5, 5), (0.0, 5, 1.0, 3), (1.3, 7, 1.0, 2**63 - 1),
    (0.2, 1024, 0.999, 0), (1.0, 1, 1.0, 1), (30.0, 0, 1.0, 9), (5.0, 1000, 0.6, 9), (1.0, 0, 0.999, 4),
]  # fmt: skip


@pytest.mark.parametrize("vocab_size", [1, 5, 256, 331, 1025, 5003, 32_768, 163_840])
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_tokens_do_not_depend_on_the_device(vocab_size, scale):
    num_rows = 400 if vocab_size < 10_000 else 60
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    if scale == 4.0:
        logits[::3] = logits[::3].round()  # many ties
    stream = torch.arange(num_rows, dtype=torch.int32) % len(STREAMS)
    position = torch.from_numpy(np.random.default_rng(vocab_size).integers(0, 2**31 - 1, num_rows)).int()
    types = (torch.float32, torch.int32, torch.float32, torch.int64)
    parameters = [torch.tensor(c, dtype=t) for c, t in zip(zip(*STREAMS, strict=True), types, strict=True)]
    inputs = [logits, stream, position, *parameters]
    on_cpu = ops.sample(*inputs)
    on_gpu = ops.sample(*(value.cuda() for value in inputs))
    assert torch.equal(on_gpu.cpu(), on_cpu)
