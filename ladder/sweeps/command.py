"""`kvcore sim sweep`: exhaustive sweeps over the short scenarios.

One line per scenario and kind on standard output, or JSON with `--json`; progress goes to standard error. The last
lines name a case for each finding, which `kvcore sim replay` runs again.

Exit status: 0 nothing found, 1 something found or an empty sweep, 2 unusable input.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.ladder.sweeps.sweep import SweepResult

SCHEMA = 1


def add(actions: Any) -> None:
    """Add `sweep` to the actions of `kvcore sim`."""
    parser = actions.add_parser("sweep", help="one fault at every point of short scenarios")
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO", help="which scenarios (default: all)")
    parser.add_argument("--kind", action="append", metavar="K", help="crash, allocation, l2, send, ...: see --list")
    parser.add_argument("--every", default="1", metavar="N", help="only every N-th point (default 1: all)")
    parser.add_argument("--json", action="store_true", help="write the result as JSON to standard output")
    parser.add_argument("--list", action="store_true", help="name the scenarios and kinds, and run nothing")
    parser.set_defaults(run=run_sweeps)


def run_sweeps(arguments: argparse.Namespace) -> int:
    """Sweep; progress as it goes."""
    from kvcore.ladder.sweeps.scenario import SCENARIOS
    from kvcore.ladder.sweeps.sweep import KINDS, chosen, sweeps

    if arguments.list:
        rows = [(scenario.name, scenario.about) for scenario in SCENARIOS.values()]
        rows += [(kind.name, kind.about) for kind in KINDS.values()]
        print("\n".join(f"{name:16}{about}" for name, about in rows))
        return 0
    every = _count(arguments.every)
    chosen(arguments.scenario, SCENARIOS, "scenario")
    chosen(arguments.kind, KINDS, "kind")
    results: list[SweepResult] = []
    for result in sweeps(arguments.scenario or None, arguments.kind, every=every):
        results.append(result)
        print(line_of(result), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(to_json(results), indent=1))
    else:
        print(f"{_total(results)}: {verdict_of(results)}")
    return 0 if verdict_of(results) == "pass" else 1


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"--every takes a whole number from 1 on, not {text!r}")
    return int(text)


def line_of(result: SweepResult) -> str:
    """One row of the table, and a line per finding."""
    row = result.to_json()
    empty = "  nothing took effect" if result.is_empty else ""
    text = (
        f"{row['scenario']:16}{row['kind']:12}{row['points']:6} points {row['took_effect']:6} took effect"
        f"{len(result.findings):5} findings{row['cpu_s']:9.1f} s  {row['verdict']}{empty}"
    )
    return "\n".join([text, *(f"    {found.event}: {found.finding}" for found in result.findings)])


def verdict_of(results: list[SweepResult]) -> str:
    """ "pass" when every sweep did something and none found anything."""
    return "pass" if results and all(result.verdict == "pass" for result in results) else "fail"


def _total(results: list[SweepResult]) -> str:
    points = sum(sum(result.points.values()) for result in results)
    effects = sum(sum(result.took_effect.values()) for result in results)
    return f"{len(results)} sweeps, {points} points, {effects} took effect"


def to_json(results: list[SweepResult]) -> dict[str, Any]:
    """The whole result. `cases` are those that found something, ready for replay."""
    return {
        "schema": SCHEMA,
        "sweeps": [result.to_json() for result in results],
        "cases": [json.loads(found.case.to_json()) for result in results for found in result.findings],
        "verdict": verdict_of(results),
    }
