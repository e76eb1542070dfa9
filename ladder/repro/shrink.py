"""Minimising a failing case: fewer faults, then less to do, then a plainer world, then a plainer schedule.

Theory of operation
-------------------
A candidate counts only if the *same oracle fires first* as in the case that was given; another failure is another
bug. A crash is the same if its exception is of the same kind.
In this order, because each stage makes the questions of the next ones cheaper:

    1. first in, first out   one run: without random ties everything after is easier to read
    2. faults                ddmin over the fault events; parts that "stay dead" but have no fault left are forgotten
    3. requests              ddmin over the requests of both workloads
    4. operations            chunks, tail and output tokens of each request; arrival, tenant and priority
    5. configuration         every value towards the default of `EpisodeConfig`: all deadlines at once, all delays, then
                             one by one; fewer servers and ranks, fewer stores, plain groups
    6. faults again          what the rest of the case needed may be needed no more; those that are left begin at once
    7. other seeds           removing a fault also moves every later draw of delays and ties, so that a failure can go
                             away by luck. For each fault that is left, the case without it is tried with a few other
                             seeds of its delays; the case then has that seed.
    8. schedule              the ties are recorded as "first in, first out except at these", and ddmin over those

The stages are repeated as long as they make progress and the budget lasts. Runs are counted, remembered and bounded
(`kvcore.sim.shrink`). As long as the bound on seconds is not met, the same case gives the same result everywhere.

Who holds: `CaseShrinker` holds the judge with all answers; the mutant stays planted for the whole of `shrink_case`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvcore.ladder.repro.line import CannotJudge
from kvcore.ladder.repro.observe import judge, planting
from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig, Schedule
from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.shrink import Budget, BudgetSpent, Judge, ddmin, descend, lowest

RUNS = 400
SECONDS = 120.0
"""Of processor time. Only a run that fails by not ending takes long enough to meet this before `RUNS`."""
FAULTS_GOAL = 5
SEEDS_TRIED = 3
_ROUNDS = 2
_SEED_STEP = 1 << 32  # far from the seeds that a swarm counts through

_EXCEPTION = re.compile(r"\w+")

Edit = Callable[[Case], Case | None]

_DEFAULTS = EpisodeConfig()
_PLAIN_REQUEST: dict[str, Any] = {"time_ns": 0, "salt": "", "priority": 0, "tail_tokens": 0}
_DEADLINES = (
    "lookup_timeout_ns", "server_timeout_ns", "linger_ns", "request_timeout_ns", "hello_interval_ns", "resend_ns",
    "resend_ns_max", "resends_max", "lease_ns", "store_deadline_ns", "store_attempts_max", "store_backoff_ns",
    "session_idle_ns", "store_lease_ns", "close_deadline_ns", "idle_step_ns",
)  # fmt: skip
_SIZES: dict[str, Callable[[Any], int]] = {
    "servers": int,
    "ranks": int,
    "l2": len,
    "groups": lambda groups: groups.count("+"),
}
_DELAYS = ("page_ns", "load_page_ns", "l2_latency_ns", "reconnect_ns")


def shrink_case(case: Case, *, runs: int = RUNS, budget_s: float | None = SECONDS) -> Case:
    """The smallest failing case that the budget finds; `case` itself if it passes. Plants the case's mutant."""
    return CaseShrinker(case, runs=runs, budget_s=budget_s).run()


class CaseShrinker:
    """One minimisation. `log` says, stage by stage, what is left; `failure` is what must fail first."""

    def __init__(self, case: Case, *, runs: int = RUNS, budget_s: float | None = SECONDS) -> None:
        self.case = case
        self.best = case
        self.failure = ""
        self.log: list[str] = []
        self._said = case
        self.budget = Budget(runs, budget_s, time.process_time)
        self._holds: Judge[Case] = Judge(self._fails_the_same_way, self.budget, msgspec.msgpack.encode)

    def run(self) -> Case:
        """Shrink as far as the budget goes."""
        with planting(self.case.mutant):
            self.failure = first_failure(self.case)
            if not self.failure:
                self.log.append("the case passes; there is nothing to shrink")
                return self.case
            for number in range(_ROUNDS):
                before = self.best
                self._stages(number)
                if self.best == before or self.budget.spent:
                    break
        return self.best

    def _stages(self, number: int) -> None:
        self._edits("first in, first out", [_fifo])
        self._faults()
        self._requests()
        self._operations()
        self._edits("configuration", _configuration_edits(self.best.config))
        self._faults()
        self._edits("fault details", [_plainer(index) for index in range(len(self.best.faults)) if index < FAULTS_GOAL])
        if not self.best.schedule.exceptions:
            self._other_seeds()
        if number == 0 or self.best.schedule.kind == "replay":
            self._schedule()

    def _fails_the_same_way(self, case: Case) -> bool:
        try:
            return first_failure(case) == self.failure
        except CannotJudge:  # a configuration that does not fit together
            return False

    def _say(self, stage: str) -> None:
        if self.best != self._said:
            self.log.append(f"{stage}: {describe(self.best)} ({self.budget.runs} runs)")
            self._said = self.best

    # ---- the stages

    def _edits(self, stage: str, edits: Iterable[Edit]) -> None:
        self.best = descend(self.best, list(edits), self._holds)
        self._say(stage)

    def _faults(self) -> None:
        base = self.best
        kept = ddmin(base.faults, lambda faults: self._holds(with_faults(base, faults)))
        self.best = with_faults(base, kept)
        self._say("faults")

    def _requests(self) -> None:
        base = self.best
        every = [(number, request) for number in range(2) for request in (base.requests, base.second)[number]]
        kept = ddmin(every, lambda some: self._holds(_with_requests(base, some)))
        self.best = _with_requests(base, kept)
        self._say("requests")

    def _operations(self) -> None:
        for field in ("requests", "second"):
            for index in range(len(getattr(self.best, field))):
                self._one_request(field, index)
        self._say("operations")

    def _one_request(self, field: str, index: int) -> None:
        for name, plain in _PLAIN_REQUEST.items():
            self._try(_with_request(self.best, field, index, **{name: plain}))
        request = _request(self.best, field, index)
        if len(request.chunks) > 1:
            self._least(1, len(request.chunks), field, index, lambda count: {"chunks": request.chunks[:count]})
        if request.output_tokens > 1:
            self._least(1, request.output_tokens, field, index, lambda count: {"output_tokens": count})

    def _try(self, candidate: Case) -> None:
        self.best = descend(self.best, [lambda _: candidate], self._holds, rounds=1)

    def _least(self, floor: int, value: int, field: str, index: int, values: Callable[[int], dict[str, Any]]) -> None:
        """Lower one number of one request as far as it goes."""
        base = self.best

        def with_count(count: int) -> Case:
            return _with_request(base, field, index, **values(count))

        self.best = with_count(lowest(floor, value, lambda count: self._holds(with_count(count))))

    def _other_seeds(self) -> None:
        """For every fault that is left, the last first: the case without it, under other delays."""
        try:
            for index in reversed(range(len(self.best.faults))):
                self._without_under_other_seeds(index)
        except BudgetSpent:
            pass
        self._say("other seeds")

    def _without_under_other_seeds(self, index: int) -> None:
        base = self.best
        smaller = with_faults(base, [*base.faults[:index], *base.faults[index + 1 :]])
        for number in range(1, SEEDS_TRIED + 1):
            candidate = msgspec.structs.replace(smaller, seed=self.case.seed + number * _SEED_STEP)
            if self._holds(candidate):
                self.best = candidate
                return

    def _schedule(self) -> None:
        base = self.best if self.best.schedule.kind == "replay" else self._recorded(self.best)
        if base is None:
            return
        every = sorted(base.schedule.exceptions.items())
        kept = ddmin(every, lambda some: self._holds(_replaying(base, some)))
        self.best = _replaying(base, kept)
        self._say("schedule")

    def _recorded(self, case: Case) -> Case | None:
        """The same run as an explicit schedule; None where it is first in, first out already."""
        if case.schedule.kind == "fifo":
            return None
        outcome = judge(case, record_ties=True)
        recorded = msgspec.structs.replace(case, schedule=Schedule("replay", exceptions=outcome.ties))
        try:
            return recorded if self._holds(recorded) else None
        except BudgetSpent:
            return None


def first_failure(case: Case) -> str:
    """The oracle that fires first, for a crash with the kind of its exception; "" if none. Raises `CannotJudge`."""
    findings = judge(case).findings
    if not findings:
        return ""
    kind = _EXCEPTION.match(findings[0].text) if findings[0].oracle == "crash" else None
    return findings[0].oracle + (f" {kind.group()}" if kind else "")


def describe(case: Case) -> str:
    """How large a case is, in a few words."""
    chunks = sum(len(request.chunks) for request in (*case.requests, *case.second))
    ties = f" with {len(case.schedule.exceptions)} exceptions" if case.schedule.kind == "replay" else ""
    return (
        f"{len(case.faults)} faults, {len(case.requests)}+{len(case.second)} requests of {chunks} chunks,"
        f" {settings_of(case)} settings, {case.schedule.kind} schedule{ties}"
    )


def settings_of(case: Case) -> int:
    """How many values of the configuration are not the default."""
    values, defaults = msgspec.structs.asdict(case.config), msgspec.structs.asdict(_DEFAULTS)
    return sum(values[name] != defaults[name] for name in values)


def with_faults(case: Case, faults: Iterable[FaultEvent]) -> Case:
    """The case with these faults only. What stays dead must still have one."""
    kept = tuple(faults)
    targets = {event.target for event in kept}
    return msgspec.structs.replace(case, faults=kept, dead=tuple(name for name in case.dead if name in targets))


def _with_requests(case: Case, some: Iterable[tuple[int, CaseRequest]]) -> Case:
    kept = list(some)
    return msgspec.structs.replace(
        case,
        requests=tuple(request for number, request in kept if number == 0),
        second=tuple(request for number, request in kept if number == 1),
    )


def _request(case: Case, field: str, index: int) -> CaseRequest:
    return (case.requests if field == "requests" else case.second)[index]


def _with_request(case: Case, field: str, index: int, **values: Any) -> Case:
    requests = list(case.requests if field == "requests" else case.second)
    requests[index] = msgspec.structs.replace(requests[index], **values)
    return msgspec.structs.replace(case, **{field: tuple(requests)})


def _replaying(case: Case, exceptions: Iterable[tuple[int, int]]) -> Case:
    return msgspec.structs.replace(case, schedule=Schedule("replay", exceptions=dict(exceptions)))


def _fifo(case: Case) -> Case | None:
    return (
        None if case.schedule.kind in ("fifo", "replay") else msgspec.structs.replace(case, schedule=Schedule("fifo"))
    )


def _plainer(index: int) -> Edit:
    """The fault from the beginning on, and at the first operation."""

    def edit(case: Case) -> Case | None:
        event = case.faults[index]
        until_ns = event.until_ns and event.until_ns - event.at_ns
        plainer = msgspec.structs.replace(event, at_ns=0, until_ns=until_ns, nth=min(event.nth, 1))
        return with_faults(case, [*case.faults[:index], plainer, *case.faults[index + 1 :]])

    return edit


def _configuration_edits(config: EpisodeConfig) -> list[Edit]:
    """The largest steps first. `config` is where it starts: what is the default there needs no edit."""
    values = msgspec.structs.asdict(config)
    defaults = msgspec.structs.asdict(_DEFAULTS)
    changed = [name for name in values if values[name] != defaults[name]]
    edits = [_to_default(changed)]
    edits += [_to_default([name for name in names if name in changed]) for names in (_DEADLINES, _DELAYS)]
    edits += [_set(servers=0), _set(servers=1), _set(ranks=1), _set(l2=()), _set(l2=("memory",)), _set(l2=("file",))]
    edits += [_set(groups="full"), _set(groups="full+window"), _set(num_blocks=_DEFAULTS.num_blocks)]
    return edits + [_to_default([name]) for name in changed if name not in ("servers", "ranks", "l2", "groups")]


def _to_default(names: list[str]) -> Edit:
    defaults = msgspec.structs.asdict(_DEFAULTS)
    return _set(**{name: defaults[name] for name in names})


def _set(**values: Any) -> Edit:
    """Change the configuration; not where one of the values would be no simpler than the present one."""

    def edit(case: Case) -> Case | None:
        for name, size in _SIZES.items():
            if name in values and size(values[name]) > size(getattr(case.config, name)):
                return None
        return msgspec.structs.replace(case, config=msgspec.structs.replace(case.config, **values))

    return edit
