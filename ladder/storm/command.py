"""`kvcore storm`: one storm, or its forecast, from the command line.

Exit status as in `kvcore.cli`: 0 the storm has hit what it must and found nothing, 1 it found something or proved
nothing, 2 unusable input.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvcore.errors import ConfigError
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import check_seed, check_transfer

DEFAULT_CELL = "full+window/r1/s2/async"


def register(commands: Any) -> None:
    """Add `storm` to the command line (entry point `kvcore.commands`)."""
    about = "kill and stop real servers, workers and schedulers, break their connections: does any output change?"
    parser = commands.add_parser(
        "storm",
        help="kill and cut off real processes: does any output change?",
        description=f"{about[0].upper()}{about[1:]}",
    )
    parser.add_argument("--seed", default="0", metavar="N", help="draws what happens, to whom and when")
    parser.add_argument(
        "--cell", default=DEFAULT_CELL, metavar="CELL", help=f"model/ranks/servers/loads ({DEFAULT_CELL})"
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of rounds, at least (default 60)")
    parser.add_argument("--short", action="store_true", help="the deck of the storm in `make test`")
    parser.add_argument("--transfer", default="worker", metavar="WHO", help="who copies KV: worker (default) or server")
    parser.add_argument("--forecast", action="store_true", help="print the first rounds of the forecast and stop")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Storm, print, and answer with the exit status."""
    from kvcore.ladder.storm.forecast import DECK, SHORT_DECK, Forecast

    transfer = check_transfer(arguments.transfer)
    seed, deck = check_seed(arguments.seed), SHORT_DECK if arguments.short else DECK
    if not 0 <= arguments.seconds <= 3600:
        raise ConfigError(f"--seconds takes a time from 0 to 3600, not {arguments.seconds:g}")
    if arguments.forecast:
        forecast = Forecast(seed, deck)
        for number in range(1, 5):
            print(f"round {number}: {'; '.join(map(str, forecast.round()))}")
        return 0
    try:
        from kvcore.ladder.storm.storm import StormConfig, run_storm
    except ModuleNotFoundError as error:
        raise ConfigError(f"a storm needs {error.name}: pip install 'kvcore[sim,torch]'") from None
    config = StormConfig(seed, MatrixCell.parse(arguments.cell), arguments.seconds, deck, transfer=transfer)
    result = run_storm(config, lambda line: print(line, flush=True))
    print(result.text())
    return 0 if result.verdict == "pass" else 1
