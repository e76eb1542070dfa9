"""`kvcore demo`: half a minute in which a stranger sees what kvcore does, with no arguments and nothing prepared.

    1  the ladder      a small climb in a few configurations: does the cache change any output?
    2  one bug         a copy that nobody waits for is planted into the cache: the ladder stops, and says why; the
                       smallest world in which it happens is drawn
    3  the break-even  from which prefix length on is loading cheaper, for one model on one GPU

All of it is real: the climbs are those of `kvcore ladder`, the bug is one of `kvcore zoo`, planted in memory and taken
out again, the table is that of `kvcore report breakeven`. Pictures and the directory of the failure go into a folder.

It needs `pip install 'kvcore[sim,reports]'` and no checkout. Without matplotlib and jinja2 the pictures and the page
are left out, and the demo says so; without simpy there is nothing to show, and it says that before it begins.

Exit status as in `kvcore.cli`: 0 the ladder passed and the bug was caught, 1 not so, 2 unusable input.

Who holds: the folder is the user's. A folder that exists is refused, so nothing of anybody's is overwritten.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.ladder.result import LadderResult
    from kvcore.ladder.zoo.mutant import Mutant
    from kvcore.reports.page import Report

CELLS = ("full/r1/inproc/sync", "full+window/r2/s1/async", "full+window+recurrent/r1/s2/sync")
"""One group in process; two groups, two ranks and a server; three groups over two servers."""
REQUESTS = 40
BUG = "preemption_without_the_fence"
CHART_COLUMNS = 110
CHART_LINES = 14
"""Of the sequence chart, up to the violation. The whole chart is in the folder."""


def register(commands: Any) -> None:
    """Add `demo` to the command line (entry point `kvcore.commands`)."""
    about = "half a minute: a climb, a planted bug explained, a break-even"
    parser = commands.add_parser("demo", help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder for the pictures (default: a temporary one)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the three parts, and answer with the exit status."""
    if find_spec("simpy") is None:
        raise ConfigError("the demo needs simpy, which is not installed: pip install 'kvcore[sim,reports]'")
    folder = _folder(arguments.out)
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    good = _ladder(folder, draws=not missing)
    caught = _bug(folder)
    _break_even(folder, draws=not missing)
    if missing:
        _say("", f"Left out for lack of {' and '.join(missing)}: pictures and page. pip install 'kvcore[reports]'")
    _say(
        "",
        f"Everything is in {folder}. Go on with `kvcore --help`, or climb with your own: `kvcore ladder --connector`.",
    )
    return 0 if good and caught else 1


def _folder(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="kvcore-demo-"))
    try:
        given.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out takes a folder that can be made, and {given} cannot: {error.strerror}") from None
    return given


def _say(*lines: str) -> None:
    print("\n".join(lines), flush=True)


# ---- 1: the ladder


def _ladder(folder: Path, draws: bool) -> bool:
    _say("1  Does the cache change any output? The ladder, small.", "")
    result = _climb(CELLS)
    _say(*rungs(result), "")
    _say(f"{len(result.cells)} configurations, {result.workload}.")
    _say("Every token and every byte of KV was compared, also where requests lost their blocks under running copies.")
    if draws:
        from kvcore.reports.rung_picture import draw

        title = f"kvcore demo: {len(result.cells)} configurations: {result.verdict}"
        _say(f"Picture: {draw([rung.to_json() for rung in result.totals()], title, folder / 'rungs.png')}")
    return result.verdict == "pass"


def _climb(cells: Sequence[str]) -> LadderResult:
    from kvcore.ladder.climb import climb_all
    from kvcore.ladder.matrix import MatrixCell
    from kvcore.ladder.options import LadderOptions

    class Everywhere(LadderOptions):
        """The same on every machine: generated requests, also where a trace lies beside the checkout."""

        def default_trace(self) -> None:
            return None

    return climb_all(Everywhere(cells=tuple(map(MatrixCell.parse, cells)), requests=REQUESTS))


def rungs(result: LadderResult) -> Iterator[str]:
    """The rung table, narrow."""
    from kvcore.ladder.result import RUNG_NAMES

    heads = ("tokens", "differ", "loads", "stores", "preempted", "in flight")
    yield f"   {'rung':<7}{'':<16}{''.join(f'{head:>11}' for head in heads)}  verdict"
    for rung in result.totals():
        found = rung.counts
        compared = (found.tokens_compared, found.mismatches, found.loads_verified, found.stores_verified)
        counts = (*compared, found.preemptions, found.preemptions_store_inflight)
        figures = "".join(f"{count:>11,}" for count in counts)
        yield f"   {rung.rung:<7}{RUNG_NAMES[rung.rung]:<16}{figures}  {rung.verdict}"


# ---- 2: the bug


def _bug(folder: Path) -> bool:
    from kvcore.ladder.result import failures
    from kvcore.ladder.zoo.catalogue import find_mutant
    from kvcore.ladder.zoo.planted import planted

    mutant = find_mutant(BUG)
    _say("", "", "2  Would we see a bug? One is planted.", "", *_described(mutant), "")
    with planted(BUG):
        result = _climb(CELLS[:1])
    found = failures(result.cells)
    _say("The same climb with it:", "", *rungs(result), "", *(f"   {line}" for line in found[:2]))
    _say("", "The smallest world in which it happens, up to the violation:", "", *_smallest(folder), "")
    _say(f"Chart, trace, difference and states: {folder / 'failure'}; read README.txt first.")
    return result.verdict == "fail" and bool(found)


def _described(mutant: Mutant) -> Iterator[str]:
    yield f"   {mutant.name}: {mutant.reason}"
    for edit in mutant.edits:
        yield f"   in {edit.target.replace(':', '.')}"
        yield from (f"   - {line}" for line in edit.old.strip("\n").splitlines())
        yield from (f"   + {line}" for line in edit.new.strip("\n").splitlines())


def _smallest(folder: Path) -> Iterator[str]:
    """The recorded case of the bug, run and minimised once more; its chart, and what it says."""
    from kvcore.ladder.repro.directory import write_failure
    from kvcore.ladder.repro.observe import judge, planting
    from kvcore.ladder.swarm.case import Case
    from kvcore.ladder.zoo.command import CASES

    case = Case.from_json((CASES / f"{BUG}.json").read_bytes())
    with planting(case.mutant):
        outcome = judge(case)
    where = write_failure(case, outcome, folder / "failure")
    chart = (where / "chart.txt").read_text(encoding="utf-8").splitlines()
    end = next((number for number, line in enumerate(chart) if "VIOLATED" in line), len(chart))
    yield f"   {chart[0]}"
    yield from (f"   {line}" for line in chart[max(1, end - CHART_LINES) : end + 3])
    yield ""
    said = (where / "README.txt").read_text(encoding="utf-8").split("\n\n")
    yield from (f"   {line}" for line in said[0].splitlines()[:1])


# ---- 3: the break-even


def _break_even(folder: Path, draws: bool) -> None:
    from kvcore.reports import parameters
    from kvcore.reports.kinds import breakeven
    from kvcore.reports.page import Work, provenance, write

    report = breakeven.build(parameters.read(None), breakeven.Question(), Work(say=lambda _line: None))
    _say(
        "",
        "",
        "3  Is loading cheaper than computing? Closed forms, for one model on one GPU.",
        "",
        *break_evens(report),
    )
    if draws:
        page = folder / "breakeven"
        write(report, page, provenance(None))
        _say("", f"Picture: {page / 'ttft.png'}; page with a calculator: {page / 'index.html'}")


def break_evens(report: Report) -> Iterator[str]:
    """The table, narrow, and the verdict."""
    rows = report.tables[0].rows
    yield f"   {rows[0]['model']} on {rows[0]['host']}"
    yield f"   {'tier':<22}{'load from':>12}{'recompute 8k':>14}{'load 8k':>10}"
    for row in rows:
        tokens = "never" if row["break_even_tokens"] is None else f"{row['break_even_tokens']:,} tokens"
        times = [f"{1000 * float(row[name] or 0):.0f} ms" for name in ("recompute_s", "load_s")]
        yield f"   {row['tier']!s:<22}{tokens:>12}{times[0]:>14}{times[1]:>10}"
