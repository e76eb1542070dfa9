"""`kvcore report`: one folder per report, with a page that works offline (reports/page).

Everything that can be checked is checked before any work: names, numbers, files, the folder. Progress goes to standard
error, the verdict and the folder to standard output. Ctrl-C ends the work; what was done is written, with what is
missing on the page, and the exit status is 130. Otherwise 0; 1 where the report judges and finds something bad, or
could not be written to its folder in the end (it is kept elsewhere if that can be done); 2 for unusable input.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvcore.errors import ConfigError, OutOfRoomError

if TYPE_CHECKING:
    from kvcore.reports.page import Kept
    from kvcore.reports.page.document import Report
    from kvcore.reports.page.work import Work

BAD, INTERRUPTED = 1, 130
SHOWN = 8
"""Names of what is missing in one line of a terminal."""
Named = TypeVar("Named", bound=Enum)


def register(commands: Any) -> None:
    """Add `report` to the command line (entry point `kvcore.commands`)."""
    parser = commands.add_parser("report", help="is the cache worth it? Break-even, traces, goodput, calibration")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for add in (_add_breakeven, _add_trace, _add_goodput, _add_ladder, _add_calibrate, _add_compare, _add_peers):
        add(kinds)


def _kind(kinds: Any, name: str, text: str, build: Any) -> Any:
    """A subcommand with what all of them have."""
    parser = kinds.add_parser(name, help=text)
    default = f"report-{name}"
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=Path(default), help=f"folder to write (default {default})"
    )
    parser.add_argument("--force", action="store_true", help="replace the report in DIR, if one is there")
    parser.set_defaults(run=run, build=build)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Check, work, write, and say the verdict."""
    from kvcore.reports.page import Work, check_drawing, check_folder, keep, provenance

    folder: Path = arguments.out
    _check_text(arguments.words)
    check_drawing()
    check_folder(folder, arguments.force)
    work = Work()
    report: Report = arguments.build(arguments, work)
    kept = keep(report, folder, provenance(report.seed, arguments.words), arguments.force)
    try:
        _print(report, kept)
    finally:  # also where nobody reads the verdict
        if kept.trouble:
            print(f"kvcore report: {kept.trouble}; {_what_to_do(kept)}", file=sys.stderr)
    if kept.trouble:
        return BAD
    if work.interrupted:
        return INTERRUPTED
    return BAD if report.good is False else 0


def _check_text(given: Sequence[str]) -> None:
    """A report names its command, and its files are text: a name in another encoding can be in none of them."""
    for word in given:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"{word!a} is no UTF-8 text, so no report can name it: give the file another name")


def _print(report: Report, kept: Kept) -> None:
    lines = list(report.verdict)
    if report.missing:
        lines.append(f"not done: {listed(report.missing)}")
    if kept.folder:
        lines.append(f"{kept.folder / kept.files[0]} ({len(kept.files)} files)")
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # the reader has seen enough
        raise
    except OSError as error:
        where = f"the report is in {kept.folder}" if kept.folder else "nothing is kept"
        raise OutOfRoomError(f"cannot print the verdict ({error.strerror}); {where}") from error


def _what_to_do(kept: Kept) -> str:
    if kept.folder:
        return f"the report is in {kept.folder}: move it from there"
    return "only the verdict is left: make room, then run it again"


def listed(missing: Sequence[str]) -> str:
    """The first ones; the page has all."""
    more = len(missing) - SHOWN
    return ", ".join(missing[:SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---- options that several kinds have


def _add_parameters(parser: Any) -> None:
    parser.add_argument(
        "--parameters", type=Path, metavar="FILE", help="your own models, hosts and tiers (JSON or TOML)"
    )


def number(text: str, option: str, low: float, high: float) -> float:
    """A number in [low, high], or a ConfigError that names the option."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(f"{option} takes a number from {low:g} to {high:g}, not {text!r}")
    return value


def whole(text: str, option: str, low: int, high: int) -> int:
    """A whole number in [low, high], or a ConfigError that names the option."""
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise ConfigError(f"{option} takes a whole number from {low:,} to {high:,}, not {text!r}")
    return int(text)


# ---- breakeven


def _add_breakeven(kinds: Any) -> None:
    parser = _kind(kinds, "breakeven", "from which prefix length on is loading cheaper? Closed forms", _breakeven)
    _add_parameters(parser)
    parser.add_argument("--model", action="append", metavar="NAME", help="repeatable (default Llama-3.1-8B; 'all')")
    parser.add_argument("--host", action="append", metavar="NAME", help="GPU; repeatable (default H100; 'all')")
    parser.add_argument("--tier", action="append", metavar="NAME", help="repeatable (default: host memory and farther)")
    parser.add_argument("--gpus", default="0", metavar="N", help="per replica (default: as many as the weights need)")
    parser.add_argument("--block-tokens", default="16", metavar="N", help="tokens per copy (default 16)")
    parser.add_argument("--prefix", default="8192", metavar="N", help="prefix length for the columns under load")
    parser.add_argument("--rest", default="512", metavar="N", help="new tokens after the prefix (default 512)")
    parser.add_argument("--lookup-ms", default="0", metavar="MS", help="time of one lookup (default 0)")
    parser.add_argument("--load", default="0.5", metavar="X", help="how busy the GPU is without a cache, 0 to 0.99")
    parser.add_argument(
        "--sharers", default="1", metavar="N", help="replicas that share the link of a tier (default 1)"
    )
    parser.add_argument("--hits", default="0.5", metavar="X", help="share of the requests that find the prefix, 0 to 1")


def _breakeven(arguments: argparse.Namespace, work: Work) -> Report:
    from kvcore.reports import parameters
    from kvcore.reports.kinds import breakeven

    known = parameters.read(arguments.parameters)
    default = breakeven.Question()
    question = breakeven.Question(
        models=_names(arguments.model, default.models, known.models),
        hosts=_names(arguments.host, default.hosts, known.hosts),
        tiers=_names(arguments.tier, default.tiers, (*default.tiers, *known.tiers)),
        gpus=whole(arguments.gpus, "--gpus", 0, 4096),
        block_tokens=whole(arguments.block_tokens, "--block-tokens", 1, 65536),
        prefix_tokens=whole(arguments.prefix, "--prefix", 1, 10_000_000),
        rest_tokens=whole(arguments.rest, "--rest", 1, 10_000_000),
        lookup_s=number(arguments.lookup_ms, "--lookup-ms", 0, 60_000) / 1000,
        load=number(arguments.load, "--load", 0, 0.99),
        hits=number(arguments.hits, "--hits", 0, 1),
        sharers=whole(arguments.sharers, "--sharers", 1, 100_000),
    )
    return breakeven.build(known, question, work)


def _names(given: list[str] | None, default: tuple[str, ...], known: Any) -> tuple[str, ...]:
    if not given:
        return default
    return tuple(dict.fromkeys(name for one in given for name in (known if one == "all" else (one,))))


# ---- ladder, compare


def _add_ladder(kinds: Any) -> None:
    parser = _kind(kinds, "ladder", "what ladder, swarm and zoo have shown, on one page", _ladder)
    parser.add_argument("--ladder", type=Path, metavar="FILE", help="written by kvcore ladder --json")
    parser.add_argument("--swarm", type=Path, metavar="FILE", help="written by kvcore sim swarm --json")
    parser.add_argument("--zoo", type=Path, metavar="FILE", help="written by kvcore zoo --json")


def _ladder(arguments: argparse.Namespace, work: Work) -> Report:
    from kvcore.reports.kinds import ladder

    return ladder.build(ladder.read_files(arguments.ladder, arguments.swarm, arguments.zoo))


def _add_compare(kinds: Any) -> None:
    parser = _kind(kinds, "compare", "two reports of one kind: what is different, and by how much?", _compare)
    parser.add_argument("before", type=Path, metavar="A", help="folder of a report")
    parser.add_argument("after", type=Path, metavar="B", help="folder of another one of the same kind")


def _compare(arguments: argparse.Namespace, work: Work) -> Report:
    from kvcore.reports.kinds import compare

    for report in (arguments.before, arguments.after):
        if arguments.out.resolve() in (report.resolve(), report.resolve().parent):
            raise ConfigError(f"--out {arguments.out} would replace {report}, which is to be compared")
    return compare.build(arguments.before, arguments.after)


def _add_peers(kinds: Any) -> None:
    parser = _kind(kinds, "peers", "kvcore beside another cache, as scripts/bench_peers.py has measured them", _peers)
    parser.add_argument("measured", type=Path, metavar="FILE", help="written by scripts/bench_peers.py")


def _peers(arguments: argparse.Namespace, work: Work) -> Report:
    from kvcore.reports.kinds import peers

    return peers.build(arguments.measured)


# ---- trace, goodput


def _add_trace(kinds: Any) -> None:
    parser = _kind(kinds, "trace", "serve a trace in simulation, with several policies", _trace)
    _add_replay(parser, loads="1")
    parser.add_argument("--slo", nargs="+", metavar="LIMIT", help="such as ttft:2000 tpot:50 (milliseconds)")


def _add_goodput(kinds: Any) -> None:
    parser = _kind(kinds, "goodput", "up to which load do requests meet their objectives?", _goodput)
    _add_replay(parser, loads="0.1 0.2 0.4 0.6 0.8 1 1.5 2")
    parser.add_argument("--slo", nargs="+", required=True, metavar="LIMIT", help="such as ttft:2000 tpot:50 (ms)")


def _add_replay(parser: Any, loads: str) -> None:
    _add_parameters(parser)
    parser.add_argument("--trace", default="generated", metavar="NAME|FILE", help="a known trace or a file of one")
    parser.add_argument("--limit", metavar="N", help="only the first N requests")
    parser.add_argument("--raw-timestamps", action="store_true", help="do not spread rounded arrival times")
    parser.add_argument("--seed", metavar="N", help="of what is drawn: spread arrivals, generated trace (default 0)")
    parser.add_argument("--model", default="Llama-3.1-8B", metavar="NAME")
    parser.add_argument("--host", default="H100", metavar="NAME")
    parser.add_argument("--gpus", default="0", metavar="N", help="per replica (default: as many as the weights need)")
    parser.add_argument("--tier", action="append", metavar="NAME=SIZE[,shared]", help="repeatable, nearest first")
    parser.add_argument(
        "--policy", nargs="+", default=["never", "always", "pays"], metavar="NAME", help="default: all three"
    )
    parser.add_argument("--eviction", nargs="+", default=["lru"], metavar="NAME", help="lru, s3fifo, fifo, lfu, belady")
    parser.add_argument(
        "--load", nargs="+", default=loads.split(), metavar="X", help=f"times the rate (default {loads})"
    )
    parser.add_argument("--workers", default="1", metavar="N")
    parser.add_argument("--jobs", default="1", metavar="J", help="processes that serve cells side by side (default 1)")
    parser.add_argument("--router", default="prefix", metavar="NAME", help="prefix, least or round")
    parser.add_argument("--overlap", action="store_true", help="compute layer by layer while loading")


DEFAULT_TIERS = ("host memory (DMA)=100GiB",)


def _prepared(arguments: argparse.Namespace) -> Any:
    from kvcore.reports.kinds import replay
    from kvcore.reports.serving import Eviction, Policy, Router
    from kvcore.reports.serving.sweep import JOBS_MAX
    from kvcore.reports.slo import parse_slo
    from kvcore.reports.traces import named_seed

    seed = whole(arguments.seed or "0", "--seed", 0, 2**63)
    if arguments.seed is not None and named_seed(arguments.trace, seed) != seed:
        raise ConfigError(f"--seed {seed} and --trace {arguments.trace} name two seeds: which one counts?")
    ask = replay.Ask(
        trace=arguments.trace,
        limit=None if arguments.limit is None else whole(arguments.limit, "--limit", 1, 10_000_000),
        raw_timestamps=arguments.raw_timestamps,
        seed=named_seed(arguments.trace, seed),
        model=arguments.model,
        host=arguments.host,
        gpus=whole(arguments.gpus, "--gpus", 0, 4096),
        tiers=tuple(replay.read_tier(text) for text in arguments.tier or DEFAULT_TIERS),
        policies=tuple(one_of(Policy, name, "--policy") for name in dict.fromkeys(arguments.policy)),
        evictions=tuple(one_of(Eviction, name, "--eviction") for name in dict.fromkeys(arguments.eviction)),
        loads=tuple(sorted({number(text, "--load", 0.001, 1000) for text in arguments.load})),
        workers=whole(arguments.workers, "--workers", 1, 1024),
        jobs=whole(arguments.jobs, "--jobs", 1, JOBS_MAX),
        router=one_of(Router, arguments.router, "--router"),
        overlap=arguments.overlap,
        slo=parse_slo(arguments.slo),
    )
    return replay.prepare(ask, arguments.parameters)


def _trace(arguments: argparse.Namespace, work: Work) -> Report:
    from kvcore.reports.kinds import trace

    return trace.build(_prepared(arguments), work)


def _goodput(arguments: argparse.Namespace, work: Work) -> Report:
    from kvcore.reports.kinds import goodput

    return goodput.build(_prepared(arguments), work)


def one_of(kind: type[Named], name: str, option: str) -> Named:
    """The member of that value, or a ConfigError with the nearest."""
    values = [member.value for member in kind]
    if name in values:
        return kind(name)
    near = difflib.get_close_matches(name, values, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(values)}"
    raise ConfigError(f"{option}: unknown {name!r}; {hint}")


# ---- calibrate


def _add_calibrate(kinds: Any) -> None:
    parser = _kind(kinds, "calibrate", "measure this machine, predict the break-even, then run both ways", _calibrate)
    parser.add_argument("--rounds", default="7", metavar="N", help="runs of each way, interleaved (default 7)")
    parser.add_argument("--prefix", nargs="+", metavar="N", help="prefix lengths in tokens (default: seven of them)")
    parser.add_argument("--rest", default="16", metavar="N", help="new tokens after the prefix (default 16)")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="folder for the L2's files (default: a temporary one)"
    )
    parser.add_argument("--seed", default="0", metavar="N", help="of the model's weights and the prompts")


def _calibrate(arguments: argparse.Namespace, work: Work) -> Report:
    from kvcore.reports.kinds import calibrate

    prefixes = None
    if arguments.prefix is not None:
        prefixes = tuple(sorted({whole(text, "--prefix", 1, 1_000_000) for text in arguments.prefix}))
    ask = calibrate.checked(
        prefixes=prefixes,
        rest=whole(arguments.rest, "--rest", 1, 1_000_000),
        rounds=whole(arguments.rounds, "--rounds", 3, 1000),
        store=arguments.store,
        seed=whole(arguments.seed, "--seed", 0, 2**31),
    )
    return calibrate.build(ask, work)
