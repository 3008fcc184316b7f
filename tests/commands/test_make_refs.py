"""make-refs: writes goldens, and --check notices a changed one."""

from __future__ import annotations

import pytest

from kdtree_nb import cli
from kdtree_nb.goldens import GOLDENS_DIR
from kdtree_nb.kdtr import open_kdtr, write_kdtr


def test_goldens_are_made_again_bit_for_bit(tmp_path):
    assert cli.main(["make-refs", "--model", "tiny2", "--dir", str(tmp_path)]) == 0
    made, committed = open_kdtr(tmp_path / "tiny2.kdtr"), open_kdtr(GOLDENS_DIR / "tiny2.kdtr")
    assert made.names == committed.names
    assert made.array("random_12.tokens").tolist() == committed.array("random_12.tokens").tolist()


def test_check(capsys, tmp_path):
    assert cli.main(["make-refs", "--check", "--model", "tiny2"]) == 0
    file = open_kdtr(GOLDENS_DIR / "tiny2.kdtr")
    arrays = {name: file.array(name).copy() for name in file.names}
    arrays["random_12.tokens"][3] += 1
    write_kdtr(tmp_path / "tiny2.kdtr", arrays, file.metadata)
    assert cli.main(["make-refs", "--check", "--model", "tiny2", "--dir", str(tmp_path)]) == 1
    assert "random_12: expected tokens" in capsys.readouterr().err


def test_a_missing_folder_and_an_unknown_model(capsys, tmp_path):
    assert cli.main(["make-refs", "--check", "--model", "tiny2", "--dir", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["make-refs", "--model", "huge"])
    assert stop.value.code == 2
