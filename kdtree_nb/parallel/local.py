"""run: call a function on several ranks of this machine, each a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

from kdtree_nb.errors import RankError
from kdtree_nb.model.ranks import check_num_ranks
from kdtree_nb.parallel.tensor_parallel import start
from kdtree_nb.parallel.watch import PATIENCE, Patience

HOST = "127.0.0.1"

Program = Callable[..., Any]


def run(
    program: Program,
    num_ranks: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 600.0,
    num_threads: int = 0,
    patience: Patience = PATIENCE,
) -> list[Any]:
    """`program(ranks, *args)` in `num_ranks` processes; what each returned, in order of rank.

    program, args and results must be picklable; program is imported by the processes. device: "cpu", or "cuda" for one
    GPU each. num_threads: of each process on the CPU; default: the cores, shared out.

    Raises ValueError where that cannot be pickled, RankError with the first failed rank's traceback, and where a
    process dies or does not end within timeout_s. Those that still run when the others must have noticed are ended.
    """
    check_num_ranks(num_ranks)
    num_threads = _threads(num_threads, num_ranks)
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(["torch", "kdtree_nb.parallel"])
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        place = rank, num_ranks, store.port, device, num_threads, patience
        process = context.Process(target=_rank_main, args=(sender, place, program, args), daemon=True)
        _begin(process)
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        return _collect(pipes, timeout_s, patience)
    finally:
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _threads(wanted: int, num_ranks: int) -> int:
    if wanted < 0:
        raise ValueError(f"run: num_threads: expected at least 1, or 0 for the cores shared out, got {wanted}")
    return wanted or max(1, (os.cpu_count() or 1) // num_ranks)


def _begin(process: multiprocessing.process.BaseProcess) -> None:
    try:
        process.start()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"run: expected a program and arguments that can be pickled, got {error}; define the program at the top of "
            "a module that the processes can import"
        ) from error


def _collect(pipes: list[Connection], timeout_s: float, patience: Patience) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = dict(enumerate(pipes))
    while open_pipes and time.monotonic() < deadline:
        ready = wait(list(open_pipes.values()), timeout=max(0.0, deadline - time.monotonic()))
        for rank in [rank for rank, pipe in open_pipes.items() if pipe in ready]:
            try:
                ok, value = pickle.loads(open_pipes.pop(rank).recv_bytes())
            except EOFError:
                ok, value = False, "the process ended without a result: it was killed, or ended itself"
            (results if ok else failures)[rank] = value
            if not ok:  # the others notice soon
                deadline = min(deadline, time.monotonic() + patience.silence_s + 4.0)
    failures |= dict.fromkeys(open_pipes, "no result in time")
    if failures:
        first, *others = sorted(failures.items())
        told = "\n".join(
            [f"rank {first[0]}: {first[1]}", *(f"rank {rank}: {_last_line(text)}" for rank, text in others)]
        )
        raise RankError(f"run: expected a result of each of {len(pipes)} ranks, got failures:\n{told}")
    return [results[rank] for rank in range(len(pipes))]


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _rank_main(sender: Connection, place: tuple, program: Program, args: tuple) -> None:
    rank, num_ranks, port, device, num_threads, patience = place
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(num_threads)
    try:
        with start(device, patience) as ranks:
            result = True, program(ranks, *args)
    except BaseException:
        result = False, traceback.format_exc()
    try:
        data = pickle.dumps(result)
    except Exception:
        data = pickle.dumps((False, f"its result: expected one that can be pickled, got\n{traceback.format_exc()}"))
    sender.send_bytes(data)  # not send, which would leave tensors in this process
    if device == "cuda":
        sender.close()
        os._exit(0)  # captured graphs and NCCL's communicators have no order in which both could be destroyed
