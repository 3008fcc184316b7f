"""Calls native operators with one damaged argument at a time, each operator in a process of its own.

`python -m tests.native.bad_calls` prints one JSON object: by call what was wrong, which damage was accepted, and how
many calls there were. Inputs lie against a page that nobody may touch, so that reading past them is a crash.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kdtree_nb.native.ops.namespace import native
from tests.native.damage import Damage, damages
from tests.native.valid_calls import CALLS, IN_PLACE, PER_ROW, Arguments, Inputs, operator_of

MEMORY_BYTES = 2**30
"""What a process may take beyond what it has: a result of absurd size is an error, not a wait."""

SECONDS = 60
"""For all calls of one operator: what loops forever ends there."""

SAYS_WHAT_CAME = ("got ", "free of NaN", "log-probs", "parent")
"""What is in a message that says what came: of NaN and of trees, it is enough to say where."""

PAGE = mmap.PAGESIZE
_protect = ctypes.CDLL(None, use_errno=True).mprotect


def guarded(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy with the same strides whose storage ends, or begins, at a page that is not to be touched."""
    base = tensor.new_empty(0).set_(tensor.untyped_storage())
    num_bytes = base.numel() * base.element_size()
    if num_bytes == 0:
        return tensor
    room = -(-num_bytes // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (address, address + PAGE + room):
        if _protect(ctypes.c_void_p(page), PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    begin = PAGE + (room - num_bytes if at_end else 0)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=base.numel(), offset=begin).copy_(base)
    return copy.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bits."""
    return a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))


class Calls:
    """The calls of one operator; `wrong` and `accepted` tell what became of them."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.operator, self.dtype = name, operator_of(name), dtype
        self.schema = getattr(getattr(torch.ops, native.load()), self.operator).default._schema
        self.wrong: list[str] = []
        self.accepted: set[str] = set()
        self.num_calls = 0

    def valid(self) -> Arguments:
        return CALLS[self.name](Inputs(self.dtype))

    def run(self, arguments: Arguments) -> tuple[torch.Tensor, ...]:
        result = getattr(native, self.operator)(*arguments.values())
        return result if isinstance(result, tuple) else () if result is None else (result,)

    def check_all(self, tell: Callable[[str], None]) -> None:
        """Every damage; `tell` is given the name of each before it is done."""
        types = {a.name: str(a.type) for a in self.schema.arguments}
        if list(types) != list(self.valid()):
            raise AssertionError(f"{self.name}: the schema has {list(types)}, the valid call {list(self.valid())}")
        self.clean = self.run(self.valid())
        for count, damage in enumerate(damages(self.valid(), types)):
            tell(str(damage))
            self.check(damage, at_end=count % 4 != 0)

    def check(self, damage: Damage, at_end: bool) -> None:
        """One damaged call."""
        self.num_calls += 1
        arguments = {k: v for k, v in self.valid().items() if k != damage.argument or damage.has_value}
        if damage.has_value:
            arguments[damage.argument] = damage.value
        arguments = {k: guarded(v, at_end) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        names = [name for name in IN_PLACE.get(self.operator, ()) if isinstance(arguments.get(name), torch.Tensor)]
        before = {name: arguments[name].clone() for name in names}
        try:
            result = self.run(arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            self.wrong += [f"{damage}: {problem}" for problem in self.refusal(error, damage)]
            changed = [name for name in names if not same_bits(arguments[name], before[name])]
            self.wrong += [f"{damage}: refused after it had written {name}" for name in changed]
        except BaseException as error:
            self.wrong.append(f"{damage}: {type(error).__name__}: {error}")
        else:
            self.accepted.add(damage.kind)
            self.wrong += [f"{damage}: {problem}" for problem in self.outcome(result, arguments, damage)]

    def refusal(self, error: Exception, damage: Damage) -> Iterator[str]:
        """What is wrong with an error: it names the operation, the argument, and what came."""
        text = str(error)
        named = self.operator if self.operator != "draft_topk_merge" else "draft_topk"  # whose errors it gives
        if not re.search(rf"{named}(_merge)?(: |\(\))|::{self.operator}\b", text):
            yield f"the message does not name the operation: {text!r}"
        if isinstance(error, ValueError) and not any(word in text for word in SAYS_WHAT_CAME):
            yield f"the message does not say what came: {text!r}"

    def outcome(self, result: tuple[torch.Tensor, ...], arguments: Arguments, damage: Damage) -> Iterator[str]:
        """What is wrong with a result: shapes are those of the fake kernel, and rows without damage are as before."""
        if self.operator != "tree_rows":  # whose sizes are in its data
            fake = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
            want, got = ([(t.shape, t.dtype) for t in tensors] for tensors in (self.run(fake), result))
            if got != want:
                yield f"the fake kernel says {want}, got {got}"
        if damage.row is not None and damage.argument in PER_ROW.get(self.operator, ()):
            for got, clean in zip(result, self.clean, strict=True):
                others = [row for row in range(len(clean)) if row != damage.row]
                if not same_bits(got[others], clean[others]):
                    yield "it changed rows that it was not in"


def run_call(name: str) -> dict[str, Any]:
    """All damaged calls of one name in CALLS, in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(name, write)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        lines = pipe.read().splitlines()
    status = os.waitpid(child, 0)[1]
    if status == 0:
        return json.loads(lines[-1])
    how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    return {"wrong": [f"{how} in {lines[-1] if lines else 'its first call'}"], "accepted": [], "num_calls": len(lines)}


def _child(name: str, write: int) -> None:
    status = 1
    try:
        signal.alarm(SECONDS)
        held = int(open("/proc/self/statm").read().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))
        found: dict[str, Any] = {"wrong": [], "accepted": set(), "num_calls": 0}
        for dtype in (torch.float32, torch.bfloat16):
            calls = Calls(name, dtype)
            calls.check_all(lambda damage, dtype=dtype: _say(write, f"{dtype}, {damage}"))
            found["wrong"] += calls.wrong
            found["accepted"] |= calls.accepted
            found["num_calls"] += calls.num_calls
        _say(write, json.dumps(found | {"accepted": sorted(found["accepted"])}))
        status = 0
    except BaseException as error:
        _say(write, f"{type(error).__name__}: {error}".replace("\n", " "))
    finally:
        os._exit(status)


def _say(write: int, text: str) -> None:
    data = text.encode() + b"\n"
    while data:
        data = data[os.write(write, data) :]


def main() -> None:
    """Forks one process per operator, before any of them has threads."""
    torch.set_num_threads(1)
    native.load()
    names = sys.argv[1:] or list(CALLS)
    print(json.dumps({name: run_call(name) for name in names}))


if __name__ == "__main__":
    main()
