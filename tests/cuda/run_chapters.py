"""Run the code cells of the chapters on this machine, each notebook in a process: `python run_chapters.py OUT`.

For a machine with a GPU and IPython but no notebook client; `make notebooks` is the way where there is one. Writes
OUT/chapters.json: per chapter the seconds, and where it failed the cell, its tags and the error. Exit code 1 if one
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BOOK = Path(__file__).resolve().parents[2] / "book"
LIMIT_S = 180.0

RUN_ONE = """
import json, os, sys
os.environ["MPLBACKEND"] = "Agg"
from IPython.core.interactiveshell import InteractiveShell
os.chdir(os.path.dirname(sys.argv[1]))
shell = InteractiveShell.instance()
cells = [c for c in json.load(open(sys.argv[1]))["cells"] if c["cell_type"] == "code"]
for number, cell in enumerate(cells):
    result = shell.run_cell("".join(cell["source"]))
    if not result.success:
        error = result.error_before_exec or result.error_in_exec
        sys.exit(f"cell {number} {cell['metadata'].get('tags', [])}: {type(error).__name__}: {error}")
"""


def run(path: Path, num_threads: int) -> dict[str, object]:
    """One notebook from its first cell to its last, with so many threads: the others run beside it."""
    start = time.perf_counter()
    try:
        command = [sys.executable, "-c", RUN_ONE, str(path)]
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
        error = "" if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip())[-2000:]
    except subprocess.TimeoutExpired:
        error = f"took more than {LIMIT_S:.0f} s"
    return {"chapter": path.stem, "seconds": round(time.perf_counter() - start, 1), "error": error}


def main() -> int:
    """All chapters, several at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=4)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        num_threads = max(1, len(os.sched_getaffinity(0)) // args.jobs)
        paths = sorted(BOOK.glob("[0-9][0-9]_*.ipynb"))
        results = list(pool.map(lambda path: run(path, num_threads), paths))
    (args.folder / "chapters.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for result in results:
        print(result["chapter"], result["seconds"], "s", result["error"] or "ok")
    return int(any(result["error"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
