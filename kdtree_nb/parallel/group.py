"""Group: the processes of a tensor-parallel run, what they exchange, and how they notice that one is missing."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store

from kdtree_nb.errors import RankError
from kdtree_nb.model.ranks import check_num_ranks
from kdtree_nb.parallel.watch import Patience, Watch

_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
"""Under its name since torch 2.13, or the one before."""

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets in the environment of every process."""


class Group:
    """One rank of `num_ranks`. Exchanges go over NCCL between GPUs, over Gloo between CPUs.

    A rank that is missing, late or disagrees is a RankError that names it, within a bounded time. As a context it tells
    the others when this rank fails, and takes leave of them when it is done.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, device: torch.device, patience: Patience) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self._patience = patience
        self._store, self._num_agreements = PrefixStore("kdtree_nb", store), 0
        self._watch = Watch(PrefixStore("watch", store.clone()), rank, num_ranks, patience)

    @classmethod
    def start(cls, device: torch.device, patience: Patience) -> Group:
        """The group of the processes that torchrun has started; all must come within patience.start_s.

        Raises ValueError for a world size that a model cannot be split over, RankError where a rank does not come.
        """
        rank, num_ranks = _read_environment()
        check_num_ranks(num_ranks)
        timeout = datetime.timedelta(seconds=patience.start_s)
        try:
            store, _, _ = next(distributed.rendezvous("env://", timeout=timeout))
            group = cls(store, rank, num_ranks, device, patience)
            group._gather_sizes()
            distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("exchange", store), rank=rank, world_size=num_ranks,
                timeout=datetime.timedelta(seconds=patience.exchange_s),
                device_id=device if device.type == "cuda" else None,
            )  # fmt: skip
        except RuntimeError as error:
            raise RankError(
                f"tensor parallel: rank {rank}: expected all {num_ranks} ranks within {patience.start_s:.0f} s, "
                f"got {error:.300}"
            ) from error
        return group

    def _gather_sizes(self) -> None:
        self.agree("the world size", str(self.num_ranks))

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:  # fmt: skip
        if error is not None and not isinstance(error, RankError):
            with contextlib.suppress(RuntimeError):
                self._watch.fail(f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Leave the group. Nothing can be exchanged afterwards."""
        self._watch.close()
        if distributed.is_initialized() and self.device.type == "cpu":  # NCCL's may be part of captured graphs
            distributed.destroy_process_group()

    # --- agreement ---------------------------------------------------------------------------------------------------

    def agree(self, what: str, value: str) -> None:
        """Raises RankError that names `what` and a rank where `value` is not that of this rank."""
        self._num_agreements += 1
        key, mine = f"agree/{self._num_agreements}", hashlib.sha256(value.encode()).hexdigest()
        with self._explained(what):
            self._store.set(f"{key}/{self.rank}", f"{mine} {what}: {value}")
            for other in range(self.num_ranks):
                digest, _, theirs = self._wait_for(f"{key}/{other}").partition(" ")
                if digest != mine:
                    raise RankError(self._difference(what, f"{what}: {value}", theirs, other))
            if self._num_agreements > 1:  # all have read what came before
                self._store.delete_key(f"agree/{self._num_agreements - 1}/{self.rank}")

    def _wait_for(self, key: str) -> str:
        """A value of the store, as soon as it is there or a rank is known to be gone."""
        deadline = time.monotonic() + self._patience.start_s
        while time.monotonic() < deadline and not self._watch.problem:
            if self._store.check([key]):
                return self._store.get(key).decode()
            time.sleep(0.005)
        if self._watch.problem:
            raise RankError(f"tensor parallel: rank {self.rank}: {self._watch.problem}")
        raise RuntimeError(f"no answer within {self._patience.start_s:.0f} s")

    def _difference(self, what: str, mine: str, theirs: str, other: int) -> str:
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
        here, there = (text[max(0, at - 40) : at + 40] for text in (mine, theirs))
        return (
            f"tensor parallel: {what}: expected the same on all {self.num_ranks} ranks, got …{here}… on rank "
            f"{self.rank} and …{there}… on rank {other}; start every rank with the same arguments, files and versions"
        )

    # --- exchanges ---------------------------------------------------------------------------------------------------

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[…] of every rank, in order of rank: [num_ranks, …]. All must have the same shape."""
        if self.num_ranks == 1:
            return x.unsqueeze(0)
        if self.device.type == "cpu":  # each rank sends to each other at once; Gloo's all_gather takes a turn for each
            return self.all_to_all(x.expand(self.num_ranks, *x.shape))
        out = x.new_empty(self.num_ranks, *x.shape)
        if x.numel():
            self._call("all_gather", lambda: _all_gather(out.view(-1), x.reshape(-1)))
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """From x[r] for every rank r to what every rank r had for this one: [num_ranks, …]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel():
            to, source = (t.view(-1).view(torch.uint8) for t in (out, x))
            self._call("all_to_all", lambda: distributed.all_to_all_single(to, source))
        return out

    def _call(self, name: str, exchange: Callable[[], object]) -> None:
        with self._explained(name):
            exchange()

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn what torch says into a RankError that says which rank is gone and why."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            problem = self._watch.wait_for_problem() or f"{type(error).__name__}: {str(error).splitlines()[0]:.300}"
            raise RankError(
                f"tensor parallel: {name}: rank {self.rank} expected an answer of all {self.num_ranks} ranks: {problem}"
            ) from error


def _read_environment() -> tuple[int, int]:
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"tensor parallel: expected {', '.join(VARIABLES)} in the environment, found no {', '.join(missing)}; "
            "start with torchrun --nproc-per-node 2 …, or call kdtree_nb.parallel.run"
        )
    numbers = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    for name, text in numbers.items():
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"tensor parallel: {name}: expected a number in the environment, got {text!r}")
    rank, num_ranks = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if rank >= num_ranks:
        raise ValueError(
            f"tensor parallel: RANK: expected 0 … WORLD_SIZE - 1, got {rank} of {num_ranks}; count the processes from 0"
        )
    return rank, num_ranks
