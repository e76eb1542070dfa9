"""`kvcore sim replay | shrink | diff | show`.

A CASE is a `case.json`, the directory of a failure, or a case in one line ("kvcase1...."). A TRACE is a file of trace
lines, as in the directory of a failure.

Exit status, fit for `git bisect run`:

    0    the case passes; the two runs do not differ
    1    the case fails; the two runs differ
    2    unusable input
    125  this revision cannot judge the case: another schema, unknown fields, a mutant or a fault kind that is gone

`shrink` and `show` answer as a replay of the case would.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError

PASSES, FAILS, BAD_INPUT, CANNOT_JUDGE = 0, 1, 2, 125
CASE_HELP = "a case.json, the directory of a failure, or a case in one line"


def add(subparsers: Any) -> None:
    """Add the four actions to `kvcore sim`."""
    replay = subparsers.add_parser("replay", help="run a case again")
    replay.add_argument("case", help=CASE_HELP)
    replay.add_argument("--minimised", action="store_true", help="of a directory, the minimised case")
    replay.add_argument("--json", action="store_true", help="write the outcome as JSON to standard output")
    replay.add_argument("--trace", type=Path, metavar="FILE", help="write the trace as text")
    replay.set_defaults(run=guarded(_replay))
    shrink = subparsers.add_parser("shrink", help="minimise a failing case and explain it")
    shrink.add_argument("case", help=CASE_HELP)
    shrink.add_argument("--runs", type=int, default=400, metavar="N", help="at most so many runs (default 400)")
    shrink.add_argument("--seconds", type=float, metavar="S", default=120.0, help="of processor time (default 120)")
    shrink.add_argument("--out", type=Path, metavar="DIR", help="write the directory of the failure")
    shrink.set_defaults(run=guarded(_shrink))
    diff = subparsers.add_parser("diff", help="the first event that differs between two cases or two traces")
    diff.add_argument("first", help=f"{CASE_HELP}, or a trace file")
    diff.add_argument("second", help="another one of the same sort")
    diff.set_defaults(run=guarded(_diff))
    show = subparsers.add_parser("show", help="a sequence chart of a case around its violation")
    show.add_argument("case", help=f"{CASE_HELP} (of a directory, the minimised case)")
    show.add_argument("--width", type=int, metavar="COLUMNS", help="default: that of the terminal")
    show.add_argument("--mermaid", action="store_true", help="as a Mermaid diagram")
    show.set_defaults(run=guarded(_show))


def guarded(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The action with its exit status for what cannot be judged."""

    def run(arguments: argparse.Namespace) -> int:
        from kvcore.ladder.repro.line import CannotJudge

        try:
            return action(arguments)
        except CannotJudge as error:
            print(f"kvcore sim: cannot judge: {error}", file=sys.stderr)
            return CANNOT_JUDGE
        except ConfigError as error:
            print(f"kvcore sim: error: {error}", file=sys.stderr)
            return BAD_INPUT

    return run


def _replay(arguments: argparse.Namespace) -> int:
    from kvcore.ladder.repro.line import command_for, find_case
    from kvcore.ladder.repro.observe import observe, planting

    case = find_case(arguments.case, prefer_minimised=arguments.minimised)
    with planting(case.mutant):
        observed = observe(case)
    if arguments.trace is not None:
        arguments.trace.write_text(observed.text, encoding="utf-8")
    print(case.banner(), file=sys.stderr)
    outcome = observed.outcome
    print(outcome.to_json() if arguments.json else "\n".join(outcome.lines()))
    if outcome.findings and not arguments.json:
        print(command_for(case))
    return FAILS if outcome.findings else PASSES


def _shrink(arguments: argparse.Namespace) -> int:
    from kvcore.ladder.repro.directory import write_failure
    from kvcore.ladder.repro.line import command_for, find_case
    from kvcore.ladder.repro.observe import judge, planting
    from kvcore.ladder.repro.shrink import CaseShrinker

    case = find_case(arguments.case)
    if arguments.runs < 1:
        raise ConfigError(f"--runs takes a number from 1 on, not {arguments.runs}")
    if arguments.out is not None:
        with planting(case.mutant):
            outcome = judge(case)
        if not outcome.findings:
            print("the case passes; there is nothing to shrink")
            return PASSES
        write_failure(case, outcome, arguments.out, runs=arguments.runs, budget_s=arguments.seconds)
        print((arguments.out / "README.txt").read_text(encoding="utf-8"), end="")
        return FAILS
    shrinker = CaseShrinker(case, runs=arguments.runs, budget_s=arguments.seconds)
    smallest = shrinker.run()
    print("\n".join(shrinker.log))
    if not shrinker.failure:
        return PASSES
    print(smallest.banner())
    print(command_for(smallest))
    return FAILS


def _diff(arguments: argparse.Namespace) -> int:
    from kvcore.ladder.repro.compare import compare

    same, lines = compare(arguments.first, arguments.second)
    print("\n".join(lines))
    return PASSES if same else FAILS


def _show(arguments: argparse.Namespace) -> int:
    from kvcore.ladder.repro.line import find_case
    from kvcore.ladder.repro.observe import observe, planting
    from kvcore.ladder.repro.show import mermaid_chart, terminal_chart

    case = find_case(arguments.case, prefer_minimised=True)
    with planting(case.mutant):
        observed = observe(case)
    width = arguments.width or shutil.get_terminal_size((120, 40)).columns
    print(mermaid_chart(observed) if arguments.mermaid else terminal_chart(observed, width), end="")
    for finding in observed.outcome.findings:
        print(finding)
    return FAILS if observed.outcome.findings else PASSES
