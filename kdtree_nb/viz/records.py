"""Recorded benchmarks (`data/benchmarks/*.json`): raw samples with device, date, commit, versions and command."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

BENCHMARKS = Path(__file__).resolve().parents[2] / "data" / "benchmarks"
"""Where the repository keeps its records."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Raw samples of one measured thing. name: `<group>/<contender>`; params: what distinguishes equal names."""

    name: str
    unit: str
    samples: tuple[float, ...]
    params: Mapping[str, Any]

    @property
    def median(self) -> float:
        """Median of the raw samples, in `unit`."""
        return statistics.median(self.samples)


@dataclasses.dataclass(frozen=True)
class Record:
    """One run of a benchmark command on one device.

    device_kind: cpu or cuda
    failed:      groups of which measurements are missing, and why
    """

    device: str
    date: str
    commit: str
    versions: Mapping[str, str]
    command: str
    results: tuple[Result, ...]
    path: Path
    device_kind: str = "cpu"
    failed: tuple[str, ...] = ()

    def find(self, name: str, **params: Any) -> Result | None:
        """The result of that name whose params include `params`; None if absent. Raises ValueError if several fit."""
        fits = [r for r in self.results if r.name == name and params.items() <= r.params.items()]
        if len(fits) > 1:
            found = [dict(r.params) for r in fits]
            raise ValueError(f"Record.find: {self.path.name}: {name!r}: expected one result, got params {found}")
        return fits[0] if fits else None

    def pairs(self, first: str, second: str) -> list[tuple[Result, Result]]:
        """Results of the two names that were measured with equal params."""
        others = [r for r in self.results if r.name == second]
        return [(a, b) for a in self.results if a.name == first for b in others if a.params == b.params]

    @property
    def label(self) -> str:
        """Device, date and versions in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.device} · {self.date[:10]} · {versions}"


def load_record(path: str | Path) -> Record:
    """Read and check one record. Raises ValueError naming the file, the field and the expectation, also where there is
    no file or it cannot be read."""
    path = Path(path)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"load_record: {path}: expected a record, got {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"load_record: {path}: expected JSON, got {error}") from error
    expected = {"device": str, "date": str, "commit": str, "versions": dict, "command": str, "results": list}
    for name, kind in expected.items():
        if not isinstance(fields, dict) or not isinstance(fields.get(name), kind) or not fields[name]:
            got = fields.get(name) if isinstance(fields, dict) else fields
            raise ValueError(f"load_record: {path}: {name}: expected a non-empty {kind.__name__}, got {got!r}")
    results = tuple(_result(path, index, r) for index, r in enumerate(fields["results"]))
    kind = fields.get("device_kind", "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"load_record: {path}: device_kind: expected cpu or cuda, got {kind!r}")
    named = {name: fields[name] for name in expected if name != "results"}
    return Record(**named, results=results, path=path, device_kind=kind, failed=_failed(path, fields.get("failed", [])))


def load_records(folder: str | Path = BENCHMARKS) -> list[Record]:
    """Every record of a folder, by file name."""
    return [load_record(path) for path in sorted(Path(folder).glob("*.json"))]


def _failed(path: Path, entries: Any) -> tuple[str, ...]:
    try:
        return tuple(f"{entry['group']}: {entry['reason']}" for entry in entries)
    except (KeyError, TypeError) as error:
        raise ValueError(f"load_record: {path}: failed: expected groups and reasons, got {entries!r}") from error


def _result(path: Path, index: int, fields: Any) -> Result:
    where = f"load_record: {path}: results[{index}]"
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise ValueError(f"{where}: expected an object with a name, got {fields!r}")
    samples = fields.get("samples")
    if not isinstance(samples, list) or not samples or not all(_is_measure(s) for s in samples):
        raise ValueError(f"{where} ({fields['name']}): samples: expected positive finite numbers, got {samples!r}")
    if not isinstance(fields.get("unit"), str) or not isinstance(fields.get("params", {}), dict):
        raise ValueError(f"{where} ({fields['name']}): expected a unit and params, got {fields!r}")
    return Result(fields["name"], fields["unit"], tuple(map(float, samples)), fields.get("params", {}))


def _is_measure(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    except OverflowError:  # an integer beyond what float holds
        return False


class Measured(Protocol):
    """A result of a record, or a measurement that was just taken."""

    @property
    def name(self) -> str:
        """`<group>/<contender>`."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """What tells equal names apart."""
        ...

    @property
    def median(self) -> float:
        """Of the samples."""
        ...


def number(result: Measured, param: str) -> Any:
    """A param of a result that is a positive finite number. Raises ValueError where it is none."""
    value = result.params.get(param)
    if not _is_measure(value):
        raise ValueError(
            f"record: {result.name}: expected a positive number {param!r} among the params, got {dict(result.params)}. "
            "Measure it anew."
        )
    return value
