"""`write_failure`: one directory per failure, with everything that a person needs to understand and repeat it.

    README.txt            what failed, in words; read this first. Its last line repeats the failure.
    case.json             the case as it failed: configuration, requests, faults and schedule, all explicit
    trace.txt             its trace: time in ns, process, label, fields
    minimised.json        the least case that the same oracle is the first to fail
    minimised-trace.txt   its trace, with "> " before the step that is violated
    difference.txt        where it first differs from the nearest run that passes, and how that one was found
    sequence.mmd          a Mermaid sequence diagram of the minimised run around the violation
    chart.txt             the same for a terminal
    states.txt            every component in one line, at the moment of the violation
    perfetto.json         the minimised run for ui.perfetto.dev

Everything but `case.json` and `trace.txt` is about the minimised case. A case that passes when it is run again is
written down as such: that is a finding about determinism, or the mutant was not planted.

Who holds: nobody; the directory is the caller's. Files of an earlier failure in the same place are replaced.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from kvcore.ladder.repro.difference import Neighbour, nearest_passing, without_the_mutant
from kvcore.ladder.repro.line import CASE_FILE, MINIMISED_FILE, command_for
from kvcore.ladder.repro.observe import Observed, observe, planting
from kvcore.ladder.repro.show import mermaid_chart, terminal_chart
from kvcore.ladder.repro.shrink import RUNS, SECONDS, CaseShrinker, describe
from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.sim.charts import perfetto
from kvcore.sim.charts.steps import Step

CHART_WIDTH = 120
_TEXT_LINES_MAX = 40  # a wait-for graph can be long; the finding in trace.txt has all of it

ORACLES = {
    "bytes": "bytes under a key, or KV that a request attends to, are not what the model computes for them",
    "output": "generated tokens differ from the reference",
    "blocks": "an engine block was written while a copy that reads or writes it was still running",
    "visibility": "something was readable that had not been published, or was published after its end",
    "leases": "a lease or a hold was not returned exactly once, or was left at rest",
    "memory": "used and free bytes do not add up",
    "prefix": "a promised prefix is not what brute force over the present and protected cells allows",
    "plan": "a cell was loaded twice or without a lock at its source, or a lock was not returned",
    "lost": "something that had been computed, and could be there, is in no tier",
    "quota": "a tenant has more than its share",
    "identity": "two namespaces or layouts that differ share a name",
    "quiet": "something failed where nothing can fail",
    "pages": "a server copied from or to pages that it had closed",
    "liveness": "something that still lived did not finish, come to rest or serve again in its time",
    "counters": "counters contradict each other or what was moved",
    "crash": "an exception ended the world",
    "server": "a request made a server raise",
    "determinism": "two runs of one case had different traces",
}
"""What each oracle says, for readers who have never seen one."""


def write_failure(
    case: Case, outcome: Outcome, path: Path, *, runs: int = RUNS, budget_s: float | None = SECONDS
) -> Path:
    """Minimise, compare, draw and write everything into the directory `path`; answers `path`. Plants the case's
    mutant. `outcome` is the run that failed; `runs` and `budget_s` bound the minimising."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    with planting(case.mutant):
        shrinker = CaseShrinker(case, runs=runs, budget_s=budget_s)
        minimised = shrinker.run()
        original, small = observe(case), observe(minimised)
        neighbour = nearest_passing(small) if small.outcome.findings else None
    twin = without_the_mutant(small) if case.mutant and small.outcome.findings else None
    differences = _differences(small, neighbour, twin)
    files = {
        CASE_FILE: case.to_json(),
        "trace.txt": original.text,
        MINIMISED_FILE: minimised.to_json(),
        "minimised-trace.txt": _marked(small.steps),
        "difference.txt": _text(differences),
        "sequence.mmd": mermaid_chart(small),
        "chart.txt": terminal_chart(small, CHART_WIDTH),
        "states.txt": _text(small.states or ["no state was taken: nothing was found in this run"]),
        "perfetto.json": perfetto.render(small.steps),
        "README.txt": _text(summary(outcome, shrinker, small, differences)),
    }
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8")
    return path


def _text(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _marked(steps: Sequence[Step]) -> str:
    """The trace, with a mark before what is violated."""
    return "".join(f"{'> ' if step.label == 'finding' else '  '}{step.line()}\n" for step in steps)


def _differences(small: Observed, neighbour: Neighbour | None, twin: Neighbour | None) -> list[str]:
    if not small.outcome.findings:
        return ["The run passes; there is nothing to compare it with."]
    if neighbour is None:
        lines = ["No run near this one passes: every small change of the case that was tried fails, too."]
    else:
        how = f"{neighbour.how} ({neighbour.tried} neighbours tried)"
        lines = [f"The nearest run that passes is the same case {how}.", *_parting(small, neighbour)]
    if twin is not None:
        lines += ["", "Without the mutant the same case passes.", *_parting(small, twin)]
    elif small.case.mutant:
        lines += ["", "WITHOUT THE MUTANT THE SAME CASE FAILS, TOO: this is not the mutant's failure."]
    return lines


def _parting(small: Observed, neighbour: Neighbour) -> list[str]:
    if neighbour.difference is None:
        return ["No event differs but the fault and what was found: the failure is in what the events carry."]
    return neighbour.difference.lines(small.steps, neighbour.observed.steps, ("failing", "passing"))


# ---- in words


def summary(outcome: Outcome, shrinker: CaseShrinker, small: Observed, differences: Sequence[str]) -> list[str]:
    """What failed, where, and what is left of the case. The last line repeats it."""
    near = [line for line in differences if not line.startswith("    ")]  # without what came before
    left = _left(shrinker, small) if shrinker.failure else shrinker.log
    lines = [*_what(outcome, small), "", *left, "", *near, ""]
    lines += [
        "Look at chart.txt first, then difference.txt, states.txt and minimised-trace.txt; sequence.mmd and",
        "perfetto.json are the same run as pictures. case.json and trace.txt are the run as it failed at first.",
        "",
        f"To repeat the first failure:  {command_for(shrinker.case)}",
        "To repeat the minimised one from a clean checkout (python -m pip install -e .):",
        command_for(small.case),
    ]
    return lines


def _what(outcome: Outcome, small: Observed) -> list[str]:
    findings = small.outcome.findings or outcome.findings
    if not findings:
        return ["PASSES: nothing was found in this run."]
    finding = findings[0]
    lines = [f"FAILED, oracle {finding.oracle}: {ORACLES.get(finding.oracle, 'see the text of the finding')}."]
    said = f"Found at {finding.time_ns / 1000:.1f} us of virtual time: {finding.text}".splitlines()
    lines += [part for line in said[:_TEXT_LINES_MAX] for part in textwrap.wrap(line, CHART_WIDTH)]
    index = next((index for index, step in enumerate(small.steps) if step.label == "finding"), None)
    if index is not None and index:
        lines += [f"It is step {index} of {len(small.steps)}, right after:", f"  {small.steps[index - 1].line()}"]
    if not small.outcome.findings:
        lines.append("Run again, the same case PASSES: the failure depends on something outside the case.")
    return lines


def _left(shrinker: CaseShrinker, small: Observed) -> list[str]:
    return [
        f"The case had {describe(shrinker.case)}.",
        f"Minimised, the same oracle is the first to fail with {describe(small.case)}.",
        f"({shrinker.budget.runs} runs{', all that were allowed' if shrinker.budget.spent else ''})",
        *[f"  {line}" for line in small.case.banner().splitlines()],
    ]
