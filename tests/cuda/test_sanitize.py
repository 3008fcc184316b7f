"""The suite of compute-sanitizer looks at every kernel, and reads what the tools say. Needs no GPU."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kdtree_nb.viz.records import load_record

sys.path.insert(0, str(Path(__file__).parent))
import sanitize
import sanitize_case
from op_structs import args_type, cuda_ops, workspace_ops
from sanitize_list import BF16, CASES, F32, Out

LIBRARY = SimpleNamespace(kd_num_shapes=lambda dtype: 2, kd_num_int4_shapes=lambda partial: 2)
CLEAN = "rope: 2 forms: rope F32, rope BF16\n========= ERROR SUMMARY: 0 errors\n"


def test_every_operation_has_cases():
    assert {name.partition(":")[0] for name in CASES} == set(cuda_ops())
    assert {"linear", "tree_build"} <= set(cuda_ops()) and {"moe_experts", "draft_topk"} <= set(workspace_ops())


@pytest.mark.parametrize("name", CASES)
def test_cases_fill_the_struct(name):
    for case in CASES[name](LIBRARY):
        kinds = dict(args_type(case.op)._fields_)
        assert case.op == name.partition(":")[0] and set(case.fields) <= set(kinds)
        given = {field for field, value in case.fields.items() if isinstance(value, (np.ndarray, Out))}
        pointers = {field for field, kind in kinds.items() if kind is ctypes.c_void_p}
        is_share = case.fields.get("num_segments", 0) > 0
        of_another = {"residual", "log_probs", "token_ids"} if is_share else {"words"}
        assert given <= pointers and pointers - given <= {"num_rows_device", "workspace", "row_begin"} | of_another
        sizes = {field for field, kind in kinds.items() if field not in pointers and kind is ctypes.c_int64}
        of_share = set() if is_share else {"whole_in", "whole_width", "whole_shared_width", "whole_vocab"}
        assert sizes <= set(case.fields) | {"workspace_bytes"} | of_share


def test_operations_with_a_type_are_looked_at_in_both():
    seen = {
        (case.op, case.fields["dtype"]) for make in CASES.values() for case in make(LIBRARY) if "dtype" in case.fields
    }
    typed = {op for op in cuda_ops() if "dtype" in dict(args_type(op)._fields_)}
    assert seen == {(op, dtype) for op in typed for dtype in (F32, BF16)}


@pytest.mark.parametrize(
    ("text", "code", "errors", "warnings", "is_clean"),
    [
        (CLEAN, 0, 0, 0, True),
        ("small ops: 9 checks, 0 failed\n========= ERROR SUMMARY: 0 errors\n", 0, 0, 0, True),
        (CLEAN.replace("0 errors", "3 errors"), 9, 3, 0, False),
        (CLEAN.replace("2 forms: rope F32, rope BF16", ""), 0, 0, 0, False),
        (CLEAN, 1, None, 0, False),
        ("Error: no device", 1, None, 0, False),
        ("x: 1 forms: x F32\n= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, 0, 0, True),
        ("x: 1 forms: x F32\n= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", 9, 1, 2, False),
        ("x: 1 forms: x F32\n= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", 0, 0, 2, False),
    ],
)
def test_what_a_tool_says_is_read(text, code, errors, warnings, is_clean):
    result = sanitize.read_result("rope", "racecheck", text, code, 1.25)
    assert (result.errors, result.warnings, result.is_clean) == (errors, warnings, is_clean)


RACE = """========= Error: Race reported between {} access at kdtree::{}+0xcd0 in a.cuh:26
=========     and {} access at kdtree::{}+0x3370 in a.cuh:61 [5952 hazards]
========= \n"""


@pytest.mark.parametrize(
    ("ends", "known"),
    [
        (("Read", "load_matrices(unsigned int)", "Write", "bulk_copy(unsigned int, const void *)"), 1),
        (("Write", "cp_async16", "Read", "load_shared"), 1),
        (("Write", "bulk_copy", "Write", "cp_async16"), 0),
        (("Read", "load_matrices", "Write", "send_sums"), 0),
        (("Write", "load_matrices", "Read", "bulk_copy"), 0),
        (("Write", "store_shared(unsigned int, uint4)", "Read", "load_matrices"), 1),
        (("Write", "store_shared(unsigned int, const float (&)[4])", "Read", "load_shared"), 0),
    ],
)
@pytest.mark.parametrize("kernel", ["linear:BF16", "moe_experts:spread", "verify_attn:BF16"])
def test_races_between_the_sides_of_a_stage_are_known(ends, known, kernel):
    known *= not kernel.startswith("verify_attn")
    text = "linear: 1 forms: x\n" + 2 * RACE.format(*ends)
    text += "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    result = sanitize.read_result(kernel, "racecheck", text, 9, 1.0)
    assert (result.known, result.errors, result.is_clean) == (2 * known, 2 - 2 * known, bool(known))
    mixed = text.replace(RACE.format(*ends), RACE.format("Write", "fold", "Read", "load_shared"), 1)
    assert not sanitize.read_result(kernel, "racecheck", mixed, 9, 1.0).is_clean
    assert sanitize.read_result(kernel, "memcheck", text, 9, 1.0).known == 0


def test_racecheck_and_initcheck_leave_out_the_long_checks(tmp_path):
    jobs = sanitize.processes(tmp_path / "kernels.so", list(sanitize.TOOLS))
    assert {tool for kernel, tool, _ in jobs if kernel.startswith("checks")} == {"memcheck", "synccheck"}
    seen = {(kernel, tool) for kernel, tool, _ in jobs}
    assert {(name, tool) for name in CASES for tool in sanitize.TOOLS} - seen == sanitize.LEFT_OUT
    assert {name for name, _ in sanitize.LEFT_OUT} < set(CASES)


def test_only_what_is_named_is_looked_at(tmp_path):
    jobs = sanitize.processes(tmp_path / "kernels.so", list(sanitize.TOOLS))
    few = {(kernel, tool) for kernel, tool, _ in sanitize.select(jobs, ["rope", "checks: attention"])}
    checks = {("checks: attention", "memcheck"), ("checks: attention", "synccheck")}
    assert few == checks | {("rope", tool) for tool in sanitize.TOOLS}
    assert sanitize.select(jobs, None) == jobs
    raced = [job for job in jobs if job[1] == "racecheck"]
    with pytest.raises(ValueError, match=r"sanitize --only: .* got \['checks: attention', 'ropes'\]. Name others"):
        sanitize.select(raced, ["rope", "ropes", "checks: attention"])
    with pytest.raises(ValueError, match="racecheck of moe_experts:whole would not end: name another tool"):
        sanitize.select(raced, ["moe_experts:whole"])
    with pytest.raises(ValueError, match=r"got \[''\]"):
        sanitize.select(jobs, [""])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine that has a GPU and all tools. `run(*arguments)` is the exit code; `said` is what a tool says."""
    said, ended = {}, []

    def run_one(kernel, tool, command, library, options):
        ended.append((kernel, tool))
        if isinstance(text := said.get(tool, CLEAN), BaseException):
            raise text
        return sanitize.read_result(kernel, tool, text, 0, 1.0), text

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sanitize.py", str(tmp_path / "out"), *arguments])
        return sanitize.main()

    monkeypatch.setattr(sanitize, "run_one", run_one)
    monkeypatch.setattr(sanitize, "describe_device", lambda library: {"device": "a GPU"})
    monkeypatch.setattr(sanitize, "versions", lambda: {"nvcc": "13.0"})
    monkeypatch.setattr(sanitize, "commit", lambda: "abc")
    monkeypatch.setattr(sanitize, "find_arch", lambda: "90a")
    monkeypatch.setattr(sanitize, "build", lambda folder, arch, jobs: ended.append("built"))
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    return SimpleNamespace(run=run, said=said, ended=ended, out=tmp_path / "out")


def test_a_run_writes_a_record_and_a_log(machine, capsys):
    assert machine.run("--only", "rope", "ropes", "--jobs", "1") == 2
    assert machine.ended == [] and "got ['ropes']" in capsys.readouterr().err and not machine.out.exists()
    assert machine.run("memcheck", "memcheck", "--only", "rope", "embed", "--library", "kernels.so") == 0
    assert sorted(machine.ended) == [("embed", "memcheck"), ("rope", "memcheck")]
    record = load_record(machine.out / "sanitizer.json")
    assert [r.params["kernel"] for r in record.results] == ["embed", "rope"] and "CUT" not in capsys.readouterr().out
    told = [line for line in (machine.out / "sanitizer.log").read_text().splitlines() if line.startswith("#####")]
    assert sorted(told) == ["##### memcheck embed", "##### memcheck rope"]
    machine.said["memcheck"] = "Error: no device"
    assert machine.run("memcheck", "--only", "rope") == 1 and machine.ended[2] == "built"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (OSError("a full disk"), 2)])
def test_a_run_that_is_cut_short_leaves_what_it_found(machine, capsys, error, status):
    """racecheck of a case comes before its other tools."""
    machine.said["initcheck"] = error
    assert machine.run("racecheck", "initcheck", "--only", "rope", "--jobs", "1", "--library", "kernels.so") == status
    told = capsys.readouterr()
    assert "CUT SHORT 1 of 2 processes have ended" in told.out and ("a full disk" in told.err) == (status == 2)
    assert [r.name for r in load_record(machine.out / "sanitizer.json").results] == ["sanitizer/racecheck"]
    assert json.loads((machine.out / "sanitizer.json").read_text())["asked_for"] == 2
    assert sorted(path.name for path in machine.out.iterdir()) == ["sanitizer.json", "sanitizer.log"]


@pytest.mark.parametrize("options", [["--jobs", "0"], ["--limit-s", "nan"], ["--limit-s", "-1"], ["--only"], ["rope"]])
def test_options_that_cannot_be_are_refused(machine, options):
    with pytest.raises(SystemExit, match="2"):
        machine.run(*options)
    assert machine.ended == []


def test_tools_that_are_not_there_are_named_before_anything_is_built(machine, capsys, monkeypatch):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None if name == "nvidia-smi" else name)
    assert machine.run() == 2 and machine.ended == []
    want = "sanitize: expected compute-sanitizer, nvcc, nvidia-smi on the PATH, got no nvidia-smi\n"
    assert capsys.readouterr().err == want
    assert machine.run("--only", "rope", "--library", "kernels.so") == 0


def test_a_library_that_is_none_is_an_error_before_anything_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", str(tmp_path), "--library", "none.so", "--only", "rope"])
    assert sanitize.main() == 2
    assert "sanitize: " in (err := capsys.readouterr().err) and "none.so" in err


def test_the_compilers_version_is_a_number(monkeypatch):
    texts = iter(["NVIDIA\nVersion 2025.3.1.0 (build 1)\n", "nvcc: NVIDIA (R)\nrelease 13.0, V13.0.88\nBuild x\n"])
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=next(texts)))
    assert sanitize.versions() == {"compute_sanitizer": "2025.3.1.0", "nvcc": "13.0.88"}


def test_a_case_names_each_form_before_it_runs(monkeypatch, capsys):
    def run(lib, case):
        assert capsys.readouterr().out == f"{case.name}\n"

    monkeypatch.setattr(sanitize_case, "open_library", lambda path: None)
    monkeypatch.setattr(sanitize_case, "run", run)
    monkeypatch.setattr(sys, "argv", ["sanitize_case.py", "kernels.so", "rope"])
    sanitize_case.main()
    text = capsys.readouterr().out + "========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.read_result("rope", "memcheck", text, 0, 1.0).forms == "2 forms: rope F32, rope BF16"


def test_experts_of_their_own_leave_no_block_of_a_cluster_without_rows():
    for case in CASES["moe_experts:whole each"](LIBRARY):
        pairs = case.fields["expert_id"]
        assert len(np.unique(pairs)) == pairs.size <= case.fields["num_experts"] and pairs.size % 4 == 0


def test_the_record_is_one_of_a_benchmark(tmp_path):
    results = [
        sanitize.read_result("rope", "memcheck", CLEAN, 0, 1.5),
        sanitize.Result("embed", "racecheck", 2, 1, "x", 2.0),
    ]
    device = {"device": "a GPU", "cuda_driver": "13.0"}
    made = sanitize.to_record(results, device, {"nvcc": "13.0"}, "abc", ["OUT", "memcheck"])
    (tmp_path / "record.json").write_text(json.dumps(made))
    record = load_record(tmp_path / "record.json")
    assert (record.device, record.device_kind, record.commit) == ("a GPU", "cuda", "abc")
    assert record.versions == {"nvcc": "13.0", "cuda_driver": "13.0"} and record.command.endswith(
        "sanitize.py OUT memcheck"
    )
    found = record.find("sanitizer/racecheck", kernel="embed")
    assert found.samples == (2.0,) and found.params["errors"] == 2 and found.params["warnings"] == 1
    assert record.find("sanitizer/memcheck", kernel="rope").params["forms"] == "2 forms: rope F32, rope BF16"
