"""Everything that must be shown on a GPU, in one call: `python tests/cuda/on_gpu.py OUT [PHASE …]`.

build      compile the kernels by the JIT build, once; the sanitizer's libraries beside it
bench      the timed groups of `kdtree-nb bench --device cuda`, alone on the machine
book       the chapters, which compare times too
checks     side by side: the tests with the GPU as device, the counts of the bench (invariance), the checks of
           tests/cuda (attention to 128k, linear, small operations)
int4       packed INT4 weights: checks, then the times of their tile shapes, alone on the machine
schedules  streams that join, leave and are cancelled at random, each compared with itself alone; FP32 and BF16
streams    throughput and latency by the number of streams, alone on the machine
checkpoint a checkpoint of Moonlight's dimensions: written, loaded, decoded
sanitizer  compute-sanitizer over every kernel

Each part writes its log and record into OUT as it goes; a part that fails or runs out of time does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from processes import kill_tree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = sys.executable

COUNTS = ("invariance", "invariance_tokens")
STREAMS = "streams"


def timed_groups() -> list[str]:
    """`--group NAME` for each group of the GPU bench that measures times."""
    listed = subprocess.run(
        [PYTHON, "-m", "kdtree_nb.cli", "bench", "--device", "cuda", "--list"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [word for name in names if name not in (*COUNTS, STREAMS) for word in ("--group", name)]


def bench(out: Path, name: str, groups: list[str]) -> list[str]:
    """The command of a partial record."""
    return [PYTHON, "-m", "kdtree_nb.cli", "bench", "--device", "cuda", *groups, "--out", str(out / f"{name}.json")]


def tests(out: Path) -> list[str]:
    """pytest with the GPU as device; the book, whose tests need a notebook client, is left to run_chapters.py."""
    folders = [
        "tests",
        "--ignore=tests/book",
        "--ignore=tests/viz/test_theme.py",
        "--ignore=tests/cuda/test_compile.py",
        "--ignore=tests/test_environment.py",
    ]
    return [PYTHON, "-m", "pytest", *folders, "-v", "-n", "14", "-p", "no:cacheprovider", "-k", "cuda or device or gpu"]


def phases(out: Path) -> dict[str, list[tuple[str, list[str], float]]]:
    """Phase -> parts that run side by side: name, command, most seconds."""
    counts = [word for name in COUNTS for word in ("--group", name)]
    checkpoint = [PYTHON, "-m", "kdtree_nb.bench.load_checkpoint"]
    schedules = [PYTHON, "-m", "tests.speculate.schedules", "--device", "cuda", "--count", "50"]
    sanitize, libraries = [PYTHON, str(HERE / "sanitize.py"), str(out)], out.parent / f"{out.name}-libraries"
    return {
        "build": [
            ("build", [PYTHON, "-c", "from kdtree_nb import native; print(native.load())"], 180.0),
            ("build_sanitizer", [PYTHON, str(HERE / "sanitize.py"), str(libraries), "--build-only", "90a"], 180.0),
        ],
        "bench": [("bench", bench(out, "times", timed_groups()), 200.0)],
        "book": [("chapters", [PYTHON, str(HERE / "run_chapters.py"), str(out)], 150.0)],
        "checks": [
            ("tests", tests(out), 240.0),
            ("counts", bench(out, "counts", counts), 200.0),
            ("attention", [PYTHON, str(HERE / "run_attn.py"), "long"], 200.0),
            ("linear", [PYTHON, str(HERE / "run_linear.py")], 200.0),
            ("small_ops", [PYTHON, str(HERE / "run_small_ops.py"), "check"], 200.0),
        ],
        "int4": [("int4", [PYTHON, str(HERE / "run_int4.py")], 200.0)],
        "schedules": [
            ("schedules_fp32", schedules, 240.0),
            ("schedules_bf16", [*schedules, "--dtype", "bfloat16"], 240.0),
        ],
        "streams": [("streams", bench(out, "streams", ["--group", STREAMS]), 200.0)],
        "checkpoint": [("moonlight", [*checkpoint, "--out", str(out / "moonlight.json")], 180.0)],
        "sanitizer": [("sanitizer", [*sanitize, "--library", str(libraries / "kernels.so"), "--skip-checks"], 200.0)],
    }


def run_side_by_side(parts: list[tuple[str, list[str], float]], out: Path) -> dict[str, str]:
    """Start all parts and wait for each up to its limit. Part -> what came of it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OUT": str(out), "PYTHONUNBUFFERED": "1"}
    started, verdicts = [], {}
    start = time.perf_counter()
    for name, command, limit_s in parts:
        log = (out / f"{name}.log").open("w")
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        started.append((name, process, log, limit_s))
    for name, process, log, limit_s in started:
        try:
            status = process.wait(max(1.0, start + limit_s - time.perf_counter()))
            verdicts[name] = "ok" if status == 0 else f"exit {status}"
        except subprocess.TimeoutExpired:
            kill_tree(process)
            verdicts[name] = f"stopped after {limit_s:.0f} s"
        log.close()
    return verdicts


def main() -> int:
    """Run the phases in order and print a line per part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("phases", nargs="*", help="default: all")
    args = parser.parse_args()
    out = args.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = phases(out)
    unknown = sorted(set(args.phases) - set(known))
    if unknown:
        parser.error(f"expected phases of {list(known)}, got {unknown}")
    failed = False
    for phase in args.phases or known:
        start = time.perf_counter()
        for name, verdict in run_side_by_side(known[phase], out).items():
            failed |= verdict != "ok"
            print(f"{phase:10} {name:16} {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
            if verdict != "ok":
                print("".join((out / f"{name}.log").read_text().splitlines(keepends=True)[-12:]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
