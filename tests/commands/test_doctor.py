"""doctor: a finding per line, JSON for programs, status 1 when something is missing."""

from __future__ import annotations

import json

from kdtree_nb import cli
from kdtree_nb.native import doctor


def test_findings_as_text_and_json(capsys, monkeypatch):
    findings = [doctor.Finding("one", "ok", "here"), doctor.Finding("two", "absent", "not there", "nobody needs it")]
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok  one  here\n--  two  not there\n         -> nobody needs it\n"
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [finding.to_dict() for finding in findings]


def test_a_problem_is_status_1(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda: [doctor.Finding("x", "problem", "broken", "mend it")])
    assert cli.main(["doctor"]) == 1
    assert "!!  x  broken" in capsys.readouterr().out


def test_this_machine(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    names = [finding["name"] for finding in json.loads(capsys.readouterr().out)]
    assert {"python", "torch", "compiler", "cache", "cpu"} <= set(names)
