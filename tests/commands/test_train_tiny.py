"""train-tiny hands its words to the training program."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import cli
from kdtree_nb.train import train_tiny


def test_the_words_are_passed_on(monkeypatch):
    calls = []
    monkeypatch.setattr(train_tiny, "main", lambda argv, prog: calls.append((argv, prog)))
    assert cli.main(["train-tiny", "--out", "x.kdtr", "--steps", "5"]) == 0
    assert calls == [(["--out", "x.kdtr", "--steps", "5"], "kdtree-nb train-tiny")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train-tiny", "--out", str(tmp_path / "x.kdtr"), "--device", "cuda"])
    assert stop.value.code == 2 and "use --device cpu" in capsys.readouterr().err
