"""What compute-sanitizer said of a case, by sanitize.py: read from its output, told in lines."""

from __future__ import annotations

import dataclasses
import re

TOOLS = ("memcheck", "synccheck", "racecheck", "initcheck")

PRODUCERS = {"bulk_copy", "cp_async16", "XProducer", "store_shared(unsigned int, uint4)"}
CONSUMERS = {"load_matrices", "load_shared", "Int4Fragments"}
"""The two sides of the stages of linear and moe_experts, by the function that touches shared memory. One fills a
stage, by bulk copies, by cp.async or, where rows are not aligned, by stores of a uint4 (sums are stored as float[4]);
the other reads it. mbarriers hand it over. When a stage is filled again, racecheck 2025.3 knows of the reads before
only those of the lane that arrived: where each lane reads bytes of its own, as in BF16, it reports 31 of a warp's 32.
NVIDIA's release notes say that false reports around mbarriers were mended in 2025.4 and 2026.1
(docs.nvidia.com/compute-sanitizer/ReleaseNotes); others describe those of copies by address
(Dao-AILab/flash-attention, v2.8.3, AI/RACECHECK_TMA_HAZARD.md). Reports between these two sides alone are counted
apart, as `known`; any other is an error. What stands for the hand-over itself is tests/cuda/run_linear.py: bits of
thousands of shapes and rows."""
KNOWN_OF = ("linear", "moe_experts")
"""Operations that have such stages."""
ACCESS = re.compile(r"(Read|Write) access at (?:kdtree::)?(\w+(?:\(unsigned int, uint4\))?)")
SUMMARY = re.compile(
    r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warning"
)


@dataclasses.dataclass
class Result:
    """What a tool said of a case. errors is None where it said nothing: the process failed or ran out of time; `known`
    ones are not among them."""

    kernel: str
    tool: str
    errors: int | None
    warnings: int
    forms: str
    seconds: float
    known: int = 0

    @property
    def is_clean(self) -> bool:
        """Nothing was found, and something was looked at."""
        return self.errors == 0 and self.warnings == 0 and self.forms != ""


def read_result(kernel: str, tool: str, text: str, code: int, seconds: float) -> Result:
    """From the output of a tool and its exit code."""
    found = SUMMARY.findall(text)
    errors = int(found[-1][0] or found[-1][1]) if found else None
    warnings = int(found[-1][2] or 0) if found else 0
    known = known_races(text) if tool == "racecheck" and kernel.startswith(KNOWN_OF) and errors else 0
    if errors is not None:
        code, errors = (0 if known and known == errors and code == 9 else code), errors - known
    if code and errors == 0 and warnings == 0:  # the program failed by itself
        errors = None
    forms = re.findall(r"^[^=\n]*?(\d+ forms: .*|\d+ checks, 0 failed|all checks passed)", text, re.M)
    return Result(kernel, tool, errors, warnings, forms[-1] if forms else "", round(seconds, 1), known)


def known_races(text: str) -> int:
    """How many of racecheck's errors are between PRODUCERS that write and CONSUMERS that read."""
    reports = text.split("Error: Race reported between ")[1:]
    accesses = [ACCESS.findall(report.partition("========= \n")[0]) for report in reports]
    sides = {("Write", name) for name in PRODUCERS}, {("Read", name) for name in CONSUMERS}
    return sum(
        any({first} <= one and {*others} <= other for one, other in (sides, sides[::-1]))
        for first, *others in accesses
        if others
    )


def report(results: list[Result], asked_for: int) -> None:
    """A line for each kernel and tool that is not clean or has known reports, the totals, and whether these are all of
    the processes that were asked for."""
    for result in results:
        if result.known:
            print(
                f"known     {result.tool:9s} {result.kernel}: {result.known} reports of stages that mbarriers hand over"
            )
        if not result.is_clean:
            print(f"NOT CLEAN {result.tool:9s} {result.kernel}: {result.errors} errors, {result.warnings} warnings "
                  f"({result.forms or 'did not end well'}), {result.seconds} s", flush=True)  # fmt: skip
    for tool in TOOLS:
        mine = [result for result in results if result.tool == tool]
        if mine:
            print(f"{tool}: {sum(r.is_clean for r in mine)} of {len(mine)} clean, {sum(r.seconds for r in mine):.0f} s "
                  f"of work, the longest {max(r.seconds for r in mine)} s", flush=True)  # fmt: skip
    if len(results) < asked_for:
        print(f"CUT SHORT {len(results)} of {asked_for} processes have ended", flush=True)
