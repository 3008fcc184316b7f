"""Watch: every rank says that it is alive, and notices when another no longer does or has failed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import Store

BEAT_S = 0.5
"""Between two signs of life."""


class Patience(NamedTuple):
    """How long a rank waits, in seconds.

    start_s:    for the others to come, and where one may have to load or compile longer than another
    exchange_s: for a rank that is alive, in an exchange
    silence_s:  for a sign of life, before a rank counts as gone
    grace_s:    for the main thread to notice that a rank is gone, before the process ends itself
    """

    start_s: float = 120.0
    exchange_s: float = 20.0
    silence_s: float = 8.0
    grace_s: float = 14.0


PATIENCE = Patience()
"""The usual one."""

EXIT_CODE = 70
"""Of a process that ended itself because another rank is gone."""


class Watch:
    """A thread that beats on the ranks' common store and listens to the others.

    A process whose GPU waits for a rank that is gone cannot be woken. So when a rank is found to be gone and the main
    thread has not left `close` behind it after grace_s, `end` is called: it reports and ends the process.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, patience: Patience, end: Callable[[str], None] | None = None
    ) -> None:  # fmt: skip
        self._patience = patience
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._end = end or self._report_and_exit
        self._stop = threading.Event()
        self._found = threading.Event()
        self.problem = ""
        self._beats = {other: ("", time.monotonic()) for other in range(num_ranks) if other != rank}
        self._thread = threading.Thread(target=self._run, name="kdtree_nb watch", daemon=True)
        self._store.set(f"beat/{rank}", "0")
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Tell the others why this rank goes."""
        self._store.set(f"failed/{self._rank}", reason[:2000] or "an error without a message")

    def wait_for_problem(self) -> str:
        """What is wrong with another rank, as soon as it is known; empty if nothing is, for silence_s."""
        self._found.wait(self._patience.silence_s + 2 * BEAT_S)
        return self.problem

    def close(self) -> None:
        """Say goodbye and stop listening. The rank that may hold the store waits for the others to have done so."""
        self._stop.set()
        self._thread.join()
        if self.problem:
            return
        self._store.set(f"left/{self._rank}", "1")
        deadline = time.monotonic() + self._patience.silence_s
        waits_for = [f"left/{other}" for other in self._beats] if self._rank == 0 else []
        while waits_for and time.monotonic() < deadline and not self._store.check(waits_for):
            time.sleep(0.01)

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S):
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", str(count))
                self._listen()
            except RuntimeError as error:
                self._report(f"the ranks' common store is gone, and with it the process that held it ({error:.200})")
            if self.problem:
                break
        if self.problem and not self._stop.wait(self._patience.grace_s):
            self._end(self.problem)

    def _listen(self) -> None:
        now = time.monotonic()
        for other, (last, since) in self._beats.items():
            if self._store.check([f"failed/{other}"]):
                self._report(f"rank {other} failed: {self._store.get(f'failed/{other}').decode()}")
            elif self._store.check([f"left/{other}"]):
                self._beats[other] = last, now
            else:
                key = f"beat/{other}"
                beat = self._store.get(key).decode() if self._store.check([key]) else ""
                self._beats[other] = (beat, now) if beat != last else (last, since)
                if now - self._beats[other][1] > self._patience.silence_s:
                    self._report(
                        f"rank {other} has given no sign of life for {self._patience.silence_s:.0f} s: its process "
                        "was killed or stopped, or its machine cannot be reached"
                    )

    def _report(self, problem: str) -> None:
        self.problem = self.problem or problem
        self._found.set()

    def _report_and_exit(self, problem: str) -> None:
        print(f"kdtree_nb: tensor parallel: rank {self._rank} ends: {problem}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)
