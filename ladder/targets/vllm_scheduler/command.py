"""Command of the target. Exits with 0 only if everything passed; each failing seed gives one reproducing line."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

from kvcore.ladder.targets.vllm_scheduler.case import Case, make_case
from kvcore.ladder.targets.vllm_scheduler.differential import Difference, compare_seed
from kvcore.ladder.targets.vllm_scheduler.drive import Outcome, Subject, run_case
from kvcore.ladder.targets.vllm_scheduler.mutants import MUTANTS
from kvcore.ladder.targets.vllm_scheduler.shrink import apply_edits, shrink

COMMAND = ".venv-vllm/bin/python -m kvcore.ladder.targets.vllm_scheduler"
FAILURES_SHOWN_MAX = 5
RARE = ("preemptions", "resumed as V1", "resumed as V2", "resumed with a load", "loads failed", "aborts", "null blocks")
"""States that many seeds must have reached, or they proved nothing."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=COMMAND, description="vLLM's real schedulers with kvcore, without a model.")
    parser.add_argument("--seeds", type=int, default=100, help="run this many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--edit", default="", help="edits of the seed's case, separated by commas")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="put this bug in; the run is to fail")
    parser.add_argument("--differential", action="store_true", help="our simulated scheduler beside vLLM's")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object to standard output")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    begin = time.monotonic()
    gc.freeze()
    report = differential(options) if options.differential else hunt(options)
    report["seconds"] = round(time.monotonic() - begin, 1)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if report["passed"] else 1


def show(report: dict[str, Any]) -> None:
    for failure in report["failures"]:
        print("\n".join(f"  {line}" if number else line for number, line in enumerate(failure)))
    for name, count in sorted(report["counts"].items()):
        print(f"{name:<28}{count:>12,}")
    verdict = "ok" if report["passed"] else "FAILED"
    print(f"{verdict}: {report['seeds']} seeds, {report['failed']} failed [{report['seconds']} s]")


def _map(options: argparse.Namespace, work: Any, seeds: Sequence[int]) -> Any:
    if options.jobs == 1 or len(seeds) == 1:
        return map(work, seeds)
    return get_context("spawn").Pool(options.jobs).imap(work, seeds, chunksize=5)


def seeds_of(options: argparse.Namespace) -> list[int]:
    return [options.seed] if options.seed is not None else list(range(options.first, options.first + options.seeds))


# ---------------------------------------------------------------------- the hunt


class Hunt:
    """One seed of the hunt; picklable."""

    def __init__(self, mutant: str | None, edits: Sequence[str]) -> None:
        self.mutant = mutant
        self.edits = edits

    def case(self, seed: int) -> Case:
        return apply_edits(make_case(seed), self.edits)

    def run(self, case: Case) -> Outcome:
        return run_case(case, Subject(spoil=MUTANTS[self.mutant] if self.mutant else None))

    def __call__(self, seed: int) -> tuple[int, Outcome]:
        return seed, self.run(self.case(seed))


def hunt(options: argparse.Namespace) -> dict[str, Any]:
    work = Hunt(options.mutant, [edit for edit in options.edit.split(",") if edit])
    counts: Counter[str] = Counter()
    failures: list[list[str]] = []
    failed = 0
    seeds = seeds_of(options)
    for seed, outcome in _map(options, work, seeds):
        counts.update(outcome.counts)
        if not outcome.findings:
            continue
        failed += 1
        if len(failures) < FAILURES_SHOWN_MAX:
            failures.append(explain(options, work, seed, outcome))
    missed = [name for name in RARE if not counts[name]] if len(seeds) >= 100 and not failed else []
    failures += [[f"no seed reached: {name}"] for name in missed]
    return _report(not failed and not missed, seeds, failed, failures, counts)


def explain(options: argparse.Namespace, work: Hunt, seed: int, outcome: Outcome) -> list[str]:
    mutant = f" --mutant {work.mutant}" if work.mutant else ""
    case = work.case(seed)
    edit = f" --edit {','.join(work.edits)}" if work.edits else ""
    command = f"{COMMAND} --seed {seed}{edit}{mutant}"
    lines = [f"seed {seed}: {case.describe()}", *map(str, outcome.findings[:3]), command]
    if not options.no_shrink:
        edits, smaller = shrink(case, lambda each: work.run(each).kinds)
        edit = ",".join([*work.edits, *edits])
        lines.append(f"smaller ({len(smaller.requests)} requests): {COMMAND} --seed {seed} --edit {edit}{mutant}")
    return lines


# ---------------------------------------------------------------------- the differential


def differential(options: argparse.Namespace) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    failures: list[list[str]] = []
    seeds = seeds_of(options)
    difference: Difference | None
    for seed, difference, seen in _map(options, compare_seed, seeds):
        counts.update(seen)
        if difference is not None:
            failures.append([f"seed {seed}: {difference}", f"{COMMAND} --differential --seed {seed}"])
    return _report(not failures, seeds, len(failures), failures[:FAILURES_SHOWN_MAX], counts)


def _report(
    passed: bool, seeds: Sequence[int], failed: int, failures: list[list[str]], counts: Counter[str]
) -> dict[str, Any]:
    return {"passed": passed, "seeds": len(seeds), "failed": failed, "failures": failures, "counts": dict(counts)}
