"""`kvcore sim diff`: where two runs part, given as cases or as trace files.

Two cases are run, and run once more up to where they differ, to ask the components for their states there. Traces are
read from their text; they say nothing about states. A trace line is `time process label fields...`; lines without a
process (as the trace itself writes them) are read, too. Then the process is not used for either trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from kvcore.errors import ConfigError
from kvcore.ladder.repro.difference import first_difference
from kvcore.ladder.repro.line import find_case
from kvcore.ladder.repro.observe import Observed, observe, planting
from kvcore.ladder.swarm.case import Case
from kvcore.sim.charts.steps import Step
from kvcore.sim.trace import Field

_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_LABELS = ("finding", "pick", "phase", "reference")  # all others have a dot, and no process has one


def compare(first: str, second: str) -> tuple[bool, list[str]]:
    """Whether the two say the same, and what to print."""
    traces = [_is_trace(Path(given)) for given in (first, second)]
    if traces[0] != traces[1]:
        raise ConfigError("give two cases or two traces, not one of each")
    if not traces[0]:
        return _compare_cases(find_case(first), find_case(second))
    ours, theirs = read_trace(Path(first)), read_trace(Path(second))
    if not all(step.process for step in (*ours, *theirs)):
        ours, theirs = ([step._replace(process="") for step in steps] for steps in (ours, theirs))
    difference = first_difference(ours, theirs)
    return (True, ["no event differs"]) if difference is None else (False, difference.lines(ours, theirs))


def _is_trace(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return not file.read(64).lstrip().startswith(b"{")
    except OSError:
        return False


def read_trace(path: Path) -> list[Step]:
    """The steps of a trace file; `ConfigError` where a line is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a trace from {path}: {error}") from None
    return [_step(path, number, line) for number, line in enumerate(lines, start=1) if line.strip(" >")]


def _step(path: Path, number: int, line: str) -> Step:
    words = _WORDS.findall(line.lstrip("> "))
    try:
        time_ns, second = int(words[0]), words[1]
        if "." in second or second in _LABELS:
            return Step(time_ns, "", second, tuple(map(_field, words[2:])))
        return Step(time_ns, second, words[2], tuple(map(_field, words[3:])))
    except (IndexError, ValueError):
        raise ConfigError(f"{path}, line {number} is no trace line: {line[:60]!r}") from None


def _field(word: str) -> Field:
    if word.startswith('"'):
        return str(json.loads(word))
    return int(word) if re.fullmatch(r"-?\d+", word) else word


def _compare_cases(first: Case, second: Case) -> tuple[bool, list[str]]:
    ours, theirs = _run(first, None), _run(second, None)
    lines = [f"A: {_verdict(ours)}", f"B: {_verdict(theirs)}", *_case_difference(first, second)]
    difference = first_difference(ours.steps, theirs.steps)
    if difference is None:
        same = ours.outcome.oracle == theirs.outcome.oracle
        return same, [*lines, "no event differs" + ("" if same else " but the verdicts do")]
    lines += difference.lines(ours.steps, theirs.steps)
    return False, lines + _states(_run(first, difference.first), _run(second, difference.second))


def _run(case: Case, states_at: int | None) -> Observed:
    with planting(case.mutant):
        return observe(case, states_at)


def _verdict(observed: Observed) -> str:
    findings = observed.outcome.findings
    return str(findings[0]) if findings else "passes"


def _case_difference(first: Case, second: Case) -> list[str]:
    """What the two cases have not in common, in the banner's words."""
    ours, theirs = first.banner().splitlines(), second.banner().splitlines()
    return [f"  only A: {line}" for line in ours if line not in theirs] + [
        f"  only B: {line}" for line in theirs if line not in ours
    ]


def _states(ours: Observed, theirs: Observed) -> list[str]:
    """The states of the components at the difference, where they are not the same."""
    if not ours.states or not theirs.states:
        return []
    return ["states there:", *_pairs(ours.states, theirs.states)]


def _pairs(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    named = {line.partition(": ")[0]: line for line in theirs}
    lines = []
    for line in ours:
        name = line.partition(": ")[0]
        other = named.get(name, f"{name}: (not there)")
        lines += (
            [f"  A and B  {line}"] if line == other else [f"  A  {_only(line, other)}", f"  B  {_only(other, line)}"]
        )
    return lines


def _only(line: str, other: str) -> str:
    """The values of a state line that the other one does not have."""
    name, _, values = line.partition(": ")
    elsewhere = set(other.partition(": ")[2].split())
    return f"{name}: {' '.join(value for value in values.split() if value not in elsewhere) or '(nothing else)'}"
