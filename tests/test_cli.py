"""The command line as a whole: help, one-line errors with status 2, Ctrl-C, a closed pipe, a missing compiler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kdtree_nb import cli
from kdtree_nb.errors import KdtreeError

COMMANDS = ["demo", "generate", "bench", "calibrate", "evaluate", "convert", "doctor", "make-refs", "train-tiny"]
KDTREE_NB = [sys.executable, "-m", "kdtree_nb.cli"]


def hear_interrupts():
    """A shell has what it starts in the background ignore them, and a child would do the same."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*args: str, **options) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": hear_interrupts}
    return subprocess.Popen([*KDTREE_NB, *args], **pipes, **options)


def test_the_package_is_the_command_too():
    done = subprocess.run([sys.executable, "-m", "kdtree_nb", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == subprocess.check_output([*KDTREE_NB, "--help"], text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: kdtree-nb {command} ")


def test_the_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"    {command}" in out for command in COMMANDS)


def test_help_does_not_import_torch():
    code = "import sys; from kdtree_nb import cli; cli.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("argv", [[], ["fly"], ["demo", "--budget", "many"], ["train-tiny"]])
def test_wrong_usage_has_status_2(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2 and "usage: kdtree-nb" in capsys.readouterr().err


class Failing:
    """A command that raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, args):
        raise self.error


@pytest.mark.parametrize("error", [KdtreeError("no good"), ValueError("no good"), OSError("no good")])
def test_an_error_is_one_line_and_status_2(capsys, monkeypatch, error):
    monkeypatch.setattr(cli.doctor, "run", Failing(error))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "kdtree-nb doctor: no good\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli.doctor, "run", Failing(TypeError("a bug")))
    with pytest.raises(TypeError, match="a bug"):
        cli.main(["doctor"])


def test_an_interrupt_has_status_130(capsys, monkeypatch):
    monkeypatch.setattr(cli.doctor, "run", Failing(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nkdtree-nb doctor: interrupted\n"


def test_ctrl_c_in_the_middle_of_a_text():
    for _ in range(5):  # on a busy machine a text may end before we get to run
        with start("generate", "--prompt", "import ", "--max-new-tokens", "4000", "--ar") as process:
            first = process.stdout.read(1)  # the line may have ended by then: a part of it lies in the buffer
            process.send_signal(signal.SIGINT)
            out, err = first + process.stdout.read(), process.stderr.read()
        if process.returncode != 0:
            break
    assert process.returncode == 130 and first
    assert out.endswith("\n") and err == "\nkdtree-nb generate: interrupted\n"


def test_a_reader_that_stops_reading():
    process = start("generate", "--prompt", "import ", "--max-new-tokens", "500", "--ar")
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert "Traceback" not in process.stderr.read()


def test_no_compiler(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    environment |= {"PATH": str(tmp_path), "KDTREE_CACHE_DIR": str(tmp_path / "cache")}
    process = start("generate", "--prompt", "x", env=environment)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and len(err.splitlines()) == 1
    assert err.startswith("kdtree-nb generate: native kernels: ") and "apt install g++" in err


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    process = start("generate", "--prompt", "x", env=os.environ | {"KDTREE_CACHE_DIR": str(tmp_path / "file/cache")})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "Set KDTREE_CACHE_DIR" in err


def test_the_console_script_is_installed():
    script = Path(sys.executable).with_name("kdtree-nb")
    done = subprocess.run([script, "bench", "--list"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "ar_step" in done.stdout


@pytest.mark.parametrize(("closed", "status", "message"), [("<&-", 2, "got an empty prompt"), (">&-", 0, "tokens in")])
def test_closed_standard_streams(closed, status, message):
    command = f'"{sys.executable}" -m kdtree_nb.cli generate --max-new-tokens 2 {closed}'
    done = subprocess.run(["sh", "-c", command], input="x = ", capture_output=True, text=True)
    assert done.returncode == status and message in done.stderr and "Traceback" not in done.stderr


def test_characters_that_the_encoding_lacks_are_replaced():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [*KDTREE_NB, "demo", "--prompt", "x", "--max-new-tokens", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "AR decoding" in done.stdout and "?" in done.stdout
