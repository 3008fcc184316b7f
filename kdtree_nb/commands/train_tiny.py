"""train-tiny: train the model `tiny` on Python source text. Its options are those of `kdtree_nb.train.train_tiny`."""

from __future__ import annotations

from collections.abc import Sequence

HELP = "train the model tiny on the standard library's source text"


def run(argv: Sequence[str]) -> int:
    """Hand the words after the command's name to the training program."""
    from kdtree_nb.train import train_tiny

    train_tiny.main(list(argv), prog="kdtree-nb train-tiny")
    return 0
