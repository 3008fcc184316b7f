"""What the tests of DFlash draft for."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb.speculate.text_hidden import text_hidden
from tests.drafters.dflash_models import TEXT


@pytest.fixture(scope="module")
def target(models):
    """tiny2, its head as a matrix and its hidden states of TEXT."""
    from kdtree_nb import ops

    model = models("tiny2")
    head = ops.linear(torch.eye(192, device=model.device), model.head).T.cpu()
    hidden = text_hidden(model, torch.tensor([TEXT]), (3, 0))
    return model, model.embedding.cpu(), head, torch.cat(hidden, -1)[0].cpu()
