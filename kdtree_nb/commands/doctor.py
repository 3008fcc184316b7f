"""doctor: what the native kernels need, what is there, and what to do about what is missing."""

from __future__ import annotations

import argparse
import json
import textwrap

HELP = "say whether the native kernels can be built and run here, and if not, what fixes it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="print a list of findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if anything that the kernels need is missing."""
    from kdtree_nb.native.doctor import diagnose

    findings = diagnose()
    if args.json:
        print(json.dumps([finding.to_dict() for finding in findings], indent=1))
    else:
        marks = {"ok": "ok", "absent": "--", "problem": "!!"}
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{marks[finding.status]}  {finding.name:{width}}  {finding.detail}")
            if finding.remedy:
                print(textwrap.indent(f"-> {finding.remedy}", " " * (width + 6)))
    return int(any(finding.status == "problem" for finding in findings))
