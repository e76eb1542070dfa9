"""`make mutation`: are the tests of the pure core able to fail? A sample of mutants, and the share that they kill.

    python scripts/mutation --sample 300 --seed 2         a sample; repeated after an interruption it goes on
    python scripts/mutation --survivors REPORT            those that survived there, once more
    python scripts/mutation --only kvcore.keys kvcore.l2   these modules and what is under these packages

1. Copy the tree to a work folder (a colleague may edit on; nothing outside the copy is changed).
2. Enumerate the mutants of each pure module (cosmic-ray's operators), and draw `--sample` of them: each module gets a
   share in proportion to its mutants, and within a module every mutant is as likely as any other. `--exclude REPORT`
   leaves out what an earlier sample held.
3. For each: change the file in the copy, run the tests of its module (targets.py), stop at the first that fails.
4. Score = killed / sampled, with the exact 95 % interval. A sample drawn in proportion to the strata has no larger
   variance than a simple one, so the binomial interval is on the safe side.

The exit status is 1 when the lower bound is under `--bound` per cent. Equivalent mutants count as survivors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "scripts"))

from population import Mutant, difference, mutants_of, mutated, path_of  # noqa: E402
from runner import copy_tree, guard, mutated_file, prepare, recover, run_tests  # noqa: E402
from sample import draw  # noqa: E402
from targets import named, pure_modules, tests_of  # noqa: E402

SCHEMA = 1
FIRST_LIMIT_S = 120.0
NICE = 10

Result = dict[str, Any]


class Work:
    """The folder of one sample: the copy, the population, and one line of JSON per mutant that was tried."""

    def __init__(self, folder: Path, assertions: bool, only: tuple[str, ...] = ()) -> None:
        self._assertions = assertions
        self._only = only
        self.tree = folder / "tree"
        self._population = folder / "population.json"
        self._results = folder / "results.jsonl"
        self._limits: dict[tuple[str, ...], float] = {}
        if not self._population.exists():
            shutil.rmtree(folder, ignore_errors=True)
            copy_tree(ROOT, self.tree)
            found = [asdict(mutant) for module in pure_modules(ROOT) for mutant in mutants_of(self.tree, module)]
            self._population.write_text(json.dumps(found))
        recover(self.tree)
        prepare()

    def population(self) -> dict[str, list[Mutant]]:
        """The mutants of each pure module that was asked for: those in assertions, or all others."""
        found: dict[str, list[Mutant]] = {module: [] for module in named(self._only, pure_modules(self.tree))}
        for mutant in (Mutant(**fields) for fields in json.loads(self._population.read_text())):
            if mutant.in_assert == self._assertions and mutant.module in found:
                found[mutant.module].append(mutant)
        return found

    def results(self) -> dict[str, Result]:
        """What was found out so far, by the mutants' names."""
        lines = self._results.read_text().splitlines() if self._results.exists() else []
        return {result["name"]: result for result in map(json.loads, lines)}

    def attempt(self, mutant: Mutant, serial: int) -> Result:
        """Try one mutant, and write down what became of it."""
        tests = tests_of(mutant.module)
        limit_s = self._limit(tests)
        path = path_of(self.tree, mutant.module)
        source = mutated(self.tree, mutant)
        assert source is not None
        lines = difference(path.read_text(), source)
        with mutated_file(self.tree, path, source, serial):
            verdict = run_tests(self.tree, tests, limit_s)
        result = {"name": mutant.name, **asdict(mutant), "change": lines, "killed": verdict.killed, **asdict(verdict)}
        with self._results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        return result

    def _limit(self, tests: tuple[str, ...]) -> float:
        """What a mutant may use: a multiple of what the tests need without one. They must pass without one."""
        if tests not in self._limits:
            if not self._limits:
                run_tests(self.tree, ("tests/unit/test_allocator.py",), FIRST_LIMIT_S, write_compiled=True)
                guard(self.tree, "kvcore.allocator")
            verdict = run_tests(self.tree, tests, FIRST_LIMIT_S, write_compiled=True)
            if verdict.killed:
                raise SystemExit(f"without a mutant: {verdict.by or verdict.how} fails\n{self.tree}/last_run.log")
            self._limits[tests] = 3 * verdict.cpu_s + 5
        return self._limits[tests]


def try_all(work: Work, sample: list[Mutant]) -> list[Result]:
    """Try those that were not tried yet; a line for each."""
    done = work.results()
    for serial, mutant in enumerate(sample, start=2):
        if mutant.name not in done:
            result = done[mutant.name] = work.attempt(mutant, serial)
            tried = [done[other.name]["killed"] for other in sample if other.name in done]
            print(f"{len(tried):4}/{len(sample)}  killed {sum(tried):4}  {line_of(result)}", flush=True)
    return [done[mutant.name] for mutant in sample]


def line_of(result: Result) -> str:
    verdict = f"{result['how']:8}" if result["killed"] else "SURVIVED"
    return f"{verdict} {result['cpu_s']:5.1f} s  {result['name']}  {result['by']}"


def report_of(work: Work, results: list[Result], seed: int, wall_s: float) -> Result:
    """The report as JSON, `{"schema": 1, ...}`."""
    from kvcore.ladder.zoo.interval import interval  # after the last fork: no child inherits a module of kvcore

    killed = sum(result["killed"] for result in results)
    low, high = interval(killed, len(results))
    population = work.population()
    return {
        "schema": SCHEMA,
        "tool": f"cosmic-ray {version('cosmic-ray')}",
        "seed": seed,
        "population": sum(map(len, population.values())),
        "sampled": len(results),
        "killed": killed,
        "score": killed / max(len(results), 1),
        "low": low,
        "high": high,
        "cpu_s": sum(result["cpu_s"] for result in results),
        "wall_s": wall_s,
        "how": dict(Counter(result["how"] for result in results)),
        "modules": _by_module(population, results),
        "mutants": results,
    }


def _by_module(population: dict[str, list[Mutant]], results: list[Result]) -> dict[str, dict[str, int]]:
    sampled = Counter(result["module"] for result in results)
    killed = Counter(result["module"] for result in results if result["killed"])
    return {
        module: {"population": len(found), "sampled": sampled[module], "killed": killed[module]}
        for module, found in population.items()
    }


def show_report(report: Result) -> None:
    """The table per module, the survivors, and the score, in Markdown."""
    print("\n| module | mutants | sampled | killed |\n| --- | ---: | ---: | ---: |")
    for module, row in report["modules"].items():
        print(f"| {module} | {row['population']} | {row['sampled']} | {row['killed']} |")
    for result in report["mutants"]:
        if not result["killed"]:
            print(f"\n{result['name']} in {result['where']}", *result["change"], sep="\n    ")
    print(f"\nkilled {report['killed']} of {report['sampled']} (population {report['population']}): ", end="")
    print(f"{report['score']:.1%}, 95 % interval {report['low']:.1%} to {report['high']:.1%}; ", end="")
    print(f"{report['cpu_s']:.0f} s of CPU, {report['wall_s']:.0f} s")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=300, metavar="N", help="how many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="MODULE", help="modules, or packages with all in them")
    parser.add_argument("--assertions", action="store_true", help="mutants inside assertions, instead of all others")
    parser.add_argument("--exclude", nargs="+", type=Path, default=[], metavar="REPORT", help="leave out their mutants")
    parser.add_argument("--survivors", type=Path, metavar="REPORT", help="only those that survived there, once more")
    parser.add_argument("--report", type=Path, help="write the report there, as JSON")
    parser.add_argument("--work", type=Path, help="the work folder (default: one per seed among the temporary files)")
    parser.add_argument("--restart", action="store_true", help="copy the tree anew instead of going on")
    parser.add_argument("--bound", type=float, default=85.0, help="fail when the lower bound is under this (%%)")
    return parser.parse_args(argv)


def names_in(reports: Iterable[Path], killed: tuple[bool, ...] = (True, False)) -> set[str]:
    """The mutants of some reports."""
    found = (result for report in reports for result in json.loads(report.read_text())["mutants"])
    return {result["name"] for result in found if result["killed"] in killed}


def sample_of(work: Work, arguments: argparse.Namespace) -> list[Mutant]:
    """What the command line asks for."""
    if not arguments.survivors:
        return draw(work.tree, work.population(), arguments.sample, arguments.seed, names_in(arguments.exclude))
    wanted = names_in([arguments.survivors], (False,))
    found = [mutant for mutants in work.population().values() for mutant in mutants if mutant.name in wanted]
    gone = wanted - {mutant.name for mutant in found}
    print(*(f"no longer in the source: {name}" for name in sorted(gone)), sep="\n")
    return found


def main() -> int:
    arguments = parse()
    os.nice(NICE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted; the same command goes on"))
    start = time.monotonic()
    folder = (
        arguments.work
        or Path(tempfile.gettempdir()) / f"kvcore-mutation-{arguments.seed}{'-assertions' * arguments.assertions}"
    )
    if arguments.restart or arguments.survivors:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"work folder {folder}", flush=True)
    work = Work(folder, arguments.assertions, tuple(arguments.only))
    report = report_of(work, try_all(work, sample_of(work, arguments)), arguments.seed, time.monotonic() - start)
    show_report(report)
    if arguments.report:
        arguments.report.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["low"] * 100 >= arguments.bound else 1


if __name__ == "__main__":
    sys.exit(main())
