"""`kvcore zoo`: does the simulation see the bugs that were planted?

Progress goes to standard error, and the table too when `--json` is given. Exit status: 0 every mutant is as the zoo
says, 1 one is not, 2 unusable input (nothing was run).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.ladder.options import check_seed

CASES = Path(__file__).with_name("cases")


def register(commands: Any) -> None:
    """Add `zoo` to the command line (entry point `kvcore.commands`)."""
    parser = commands.add_parser("zoo", help="plant deliberate bugs in kvcore and see whether they are caught")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one mutant; repeatable")
    parser.add_argument("--list", action="store_true", help="name the mutants with their reasons, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="worker processes")
    parser.add_argument("--first", default="0", metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="seeds per mutant at most (default 1000)")
    parser.add_argument("--catches", type=int, default=30, metavar="N", help="stop at so many catches (default 30)")
    parser.add_argument(
        "--shrink-runs", type=int, default=200, metavar="N", help="of each first catch; 0: do not shrink"
    )
    parser.add_argument("--json", action="store_true", help="write the result as JSON to standard output")
    parser.add_argument("--record", action="store_true", help="keep the first catches as the zoo's recorded cases")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and answer with the exit status."""
    from kvcore.ladder.zoo.catalogue import ZOO, find_mutant
    from kvcore.ladder.zoo.measure import Effort
    from kvcore.ladder.zoo.run import measure_all

    names = [find_mutant(name).name for name in dict.fromkeys(arguments.only)] or list(ZOO)
    if arguments.list:
        print("\n".join(_described(name) for name in names))
        return 0
    for name in ("jobs", "seeds", "catches"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} takes a number from 1 on, not {getattr(arguments, name)}")
    if arguments.shrink_runs < 0:
        raise ConfigError(f"--shrink-runs takes a number from 0 on, not {arguments.shrink_runs}")
    effort = Effort(check_seed(arguments.first, "--first"), arguments.seeds, arguments.catches, arguments.shrink_runs)
    result = measure_all(names, effort, arguments.jobs, lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.record:
        record(result.measured)
    table = "\n".join(result.lines())
    if arguments.json:
        print(json.dumps(result.to_json(), indent=1))
    print(table, file=sys.stderr if arguments.json else sys.stdout)
    return 0 if result.verdict == "pass" else 1


def _described(name: str) -> str:
    from kvcore.ladder.zoo.catalogue import ZOO

    mutant = ZOO[name]
    expected = f"expected: {', '.join(mutant.oracles)}" if mutant.oracles else f"behind it stands {mutant.behind}"
    return f"{name} ({mutant.kind}, group {mutant.group}): {mutant.reason}; {expected}"


def record(measured: Any) -> None:
    """Write the first catch of each mutant, minimised where it was, into `cases/`."""
    CASES.mkdir(exist_ok=True)
    for each in measured:
        if each.first is not None and each.oracle in each.mutant.oracles:
            (CASES / f"{each.mutant.name}.json").write_text(each.first.to_json())
