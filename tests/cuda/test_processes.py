"""A GPU run that hangs is killed with all that it started, and the next goes on without it. Needs no GPU."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from processes import run_for, watch
from steps import Steps

HANGS = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
Path(sys.argv[1]).write_text(str(child.pid))
print("step", flush=True)
time.sleep(60)
"""
FIRST, SECOND = ("case", "shape 0"), ("case", "shape 1")


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Within two seconds."""
    deadline = time.monotonic() + 2
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


@pytest.mark.parametrize("run", [watch, run_for])
def test_a_process_that_hangs_is_killed_with_its_descendants(run, tmp_path, capsys):
    note = tmp_path / "pid"
    command = [sys.executable, "-c", HANGS, str(note)]
    result = watch(command, 2.0, dict(os.environ)) if run is watch else run_for(command, 2.0, dict(os.environ))
    assert result is None if run is watch else result == ("step\n", None)
    assert run is run_for or capsys.readouterr().out == "step\n"
    assert ends(int(note.read_text()))


def test_a_process_that_ends_gives_its_output_and_code(capsys):
    command = [sys.executable, "-c", "import sys; print('words'); sys.exit(3)"]
    assert run_for(command, 30.0, dict(os.environ)) == ("words\n", 3)
    assert watch(command, 30.0, dict(os.environ)) == 3
    assert capsys.readouterr().out == "words\n"


def stopped_in(path: Path, *steps: tuple[str, ...]) -> bool:
    """Another process that is stopped in the last of these steps; whether a next one is of use."""
    report = Steps(path)
    assert [report.begin(*step) for step in steps] == [True] * len(steps)
    return Steps(path).stop("no sign")


def test_the_next_process_leaves_out_the_step_and_its_shape(tmp_path):
    path = tmp_path / "report.json"
    assert stopped_in(path, FIRST, SECOND)
    after = Steps(path)
    assert after.failures == ["case, shape 1: no sign"] and after.record["broken"] == ["shape 1"]
    assert not after.begin(*FIRST) and not after.begin(*SECOND) and not after.begin("another case", "shape 1")
    assert after.begin("another case", "shape 0")


def test_a_shape_that_once_worked_can_break(tmp_path):
    path = tmp_path / "report.json"
    assert stopped_in(path, FIRST, ("long case", "shape 0"))
    assert Steps(path).record["broken"] == ["shape 0"]


def test_of_two_shapes_the_new_one_is_broken(tmp_path):
    path = tmp_path / "report.json"
    assert stopped_in(path, ("case", "shape 0", "shape 1"), ("case", "shape 0", "shape 2"))
    assert Steps(path).record["broken"] == ["shape 2"]


def test_two_stopped_in_the_same_step_are_enough(tmp_path):
    path = tmp_path / "report.json"
    for expected in (True, False):
        Steps(path).announce("weights")
        assert Steps(path).stop("no sign") is expected


def test_none_goes_on_where_no_step_began(tmp_path):
    report = Steps(tmp_path / "report.json")
    assert not report.stop("its process ended with 1")
    assert report.failures == ["before the first step: its process ended with 1"]


def test_checks_are_counted(tmp_path):
    report = Steps(tmp_path / "report.json")
    report.check(True, "holds")
    report.check(False, "does not")
    assert report.record["checks"] == 2 and report.failures == ["does not"]
