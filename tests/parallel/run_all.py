"""Compare 1, 2, 4 and 8 ranks with one process on more tokens than CI does: python -m tests.parallel.run_all"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from kdtree_nb import parallel
from kdtree_nb.model.ranks import ONE_RANK
from tests.parallel import programs
from tests.parallel.int4_folder import write_int4
from tests.parallel.test_tensor_parallel import assert_same


def main() -> None:
    """Print a line for each number of ranks. Raises AssertionError that names the first difference."""
    with tempfile.TemporaryDirectory() as folder:
        int4 = write_int4(Path(folder) / "int4", 288)
        models = {"tiny8": 256, "nano": 256, int4: 64}
        tiny = {"tiny": 256}
        for num_ranks, names in ((1, models | tiny), (2, models | tiny), (4, models | tiny), (8, models)):
            want = programs.everything(ONE_RANK, names, with_streams="tiny" in names)
            start = time.perf_counter()
            ranks = parallel.run(programs.everything, num_ranks, names, "tiny" in names, num_threads=1)
            for rank, found in enumerate(ranks):
                assert_same(found, want, f"rank {rank} of {num_ranks}")
            print(
                f"{num_ranks} ranks: the bits of one in {sorted(map(str, want))}: {time.perf_counter() - start:.0f} s"
            )


if __name__ == "__main__":
    main()
