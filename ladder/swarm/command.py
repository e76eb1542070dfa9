"""`kvcore sim`: run one seed or a swarm of them; replay, shrink, diff and show what they found.

Progress and banners go to standard error; with `--json`, standard output holds JSON only.
Exit status: 0 nothing found, 1 something found, 2 unusable input, 125 this revision cannot run the case at all, which
`git bisect run` takes as "skip".
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.errors import ConfigError
from kvcore.ladder.options import check_seed, check_transfer

if TYPE_CHECKING:
    from kvcore.ladder.swarm.swarm import SwarmOptions
    from kvcore.ladder.swarm.worker import Task


def register(commands: Any) -> None:
    """Add `sim` to the command line (entry point `kvcore.commands`)."""
    parser = commands.add_parser("sim", help="run the simulated world from a seed, with faults")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_run(actions)
    _add_swarm(actions)
    from kvcore.ladder.repro.command import add as add_repro
    from kvcore.ladder.sweeps.command import add as add_sweep

    add_repro(actions)
    add_sweep(actions)


def _add_run(actions: Any) -> None:
    parser = actions.add_parser("run", help="draw the case of one seed and run it")
    parser.add_argument("--seed", default="0", metavar="N")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the trace as text")
    parser.add_argument("--case", type=Path, metavar="FILE", help="write the case as JSON")
    _add_common(parser)
    parser.set_defaults(run=run_one)


def _add_swarm(actions: Any) -> None:
    parser = actions.add_parser("swarm", help="run many seeds")
    parser.add_argument("--seeds", metavar="N", help="how many (default 500, unless --seconds is given)")
    parser.add_argument("--seconds", metavar="S", help="stop after this time")
    parser.add_argument("--first", default="0", metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--jobs", default="1", metavar="J", help="worker processes (default 1)")
    parser.add_argument("--artifacts", type=Path, metavar="DIR", help="write a directory per failure into DIR")
    _add_common(parser)
    parser.set_defaults(run=run_many)


def _add_common(parser: Any) -> None:
    parser.add_argument("--planes", metavar="A,B", help="only faults of these planes ('none': no faults at all)")
    parser.add_argument("--kinds", metavar="A,B", help="only these fault kinds")
    parser.add_argument("--transfer", metavar="WHO", help="who copies KV: worker or server (default: drawn)")
    parser.add_argument("--mutant", default="", metavar="NAME", help="plant this bug of the zoo")
    parser.add_argument("--json", action="store_true", help="write the result as JSON to standard output")


# ---- checking


def task_from(arguments: argparse.Namespace) -> Task:
    """What the options restrict the seeds to. Raises `ConfigError` for a name that does not exist."""
    from kvcore.ladder.swarm.draw import chosen_kinds
    from kvcore.ladder.swarm.worker import Task, planted

    transfer = "" if arguments.transfer is None else check_transfer(arguments.transfer)
    task = Task(_names(arguments.planes), _names(arguments.kinds), arguments.mutant, transfer)
    chosen_kinds(task.planes, task.kinds)
    with planted(task.mutant):
        return task


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return () if text == "none" else tuple(filter(None, (name.strip() for name in text.split(","))))


def check_count(text: str, option: str) -> int:
    """A whole number from 1 on."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"{option} takes a whole number from 1 on, not {text!r}")
    return int(text)


def check_seconds(text: str, option: str = "--seconds") -> float:
    """A positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise ConfigError(f"{option} takes a positive number of seconds, not {text!r}")
    return seconds


def check_artifacts(path: Path | None, option: str = "--artifacts") -> Path | None:
    """A directory that exists from now on and can be written to."""
    if path is None:
        return None
    probe = path / ".kvcore-writable"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: cannot write into {path}: {error.strerror}") from None
    return path


def swarm_options(arguments: argparse.Namespace) -> SwarmOptions:
    """Everything is checked before the first seed."""
    from kvcore.ladder.swarm.swarm import SwarmOptions

    seconds = 0.0 if arguments.seconds is None else check_seconds(arguments.seconds)
    seeds = 0 if seconds else DEFAULT_SEEDS
    if arguments.seeds is not None:
        seeds = check_count(arguments.seeds, "--seeds")
    return SwarmOptions(
        check_seed(arguments.first, "--first"),
        seeds,
        seconds,
        check_count(arguments.jobs, "--jobs"),
        task_from(arguments),
        check_artifacts(arguments.artifacts),
    )


DEFAULT_SEEDS = 500

# ---- running


def run_one(arguments: argparse.Namespace) -> int:
    """Draw the case of a seed and run it."""
    from kvcore.ladder.swarm.episode import run_case
    from kvcore.ladder.swarm.swarm import SwarmOptions
    from kvcore.ladder.swarm.worker import planted
    from kvcore.sim.trace import Trace

    task = task_from(arguments)
    case = task.case(check_seed(arguments.seed))
    print(case.banner(), file=sys.stderr)
    if arguments.case is not None:
        _write(arguments.case, case.to_json(), "--case")
    with planted(task.mutant):
        if arguments.trace is None:
            outcome = run_case(case)
        else:
            with _open(arguments.trace, "--trace") as file:
                outcome = run_case(case, trace=Trace(text_to=file))
    print(outcome.to_json() if arguments.json else "\n".join(outcome.lines()))
    if not outcome.findings:
        return 0
    print(f"reproduce: {SwarmOptions(task=task).command(case.seed)}", file=sys.stderr if arguments.json else sys.stdout)
    return 1


def run_many(arguments: argparse.Namespace) -> int:
    """Run the swarm; progress as it goes."""
    from kvcore.ladder.swarm.swarm import run_swarm

    options = swarm_options(arguments)
    result = run_swarm(options, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps(result.to_json(), indent=1))
    print("\n".join(result.lines()), file=sys.stderr if arguments.json else sys.stdout)
    return 0 if result.verdict == "pass" else 1


def _open(path: Path, option: str) -> Any:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}") from None


def _write(path: Path, text: str, option: str) -> None:
    with _open(path, option) as file:
        file.write(text)
