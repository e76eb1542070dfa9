"""Making a failing case smaller, by edits that can be written on a command line.

    drop=r3      without request r3              cut=r1:20   r1 has only the first 20 tokens of its prompt
    out=r1:4     r1 generates 4 tokens           now=r1      r1 arrives before the first step
    keep=r1      r1 is not aborted               passes=1, layers=1, errors=0, resets=0, prefix=0

An edit is kept when the smaller case still fails in one of the original ways. Greedy, the largest edits first, until
nothing helps or the attempts are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvcore.errors import ConfigError
from kvcore.ladder.targets.vllm_scheduler.case import Case, CaseRequest, without

ATTEMPTS_MAX = 120


def apply_edits(case: Case, edits: Sequence[str]) -> Case:
    for edit in edits:
        case = _apply(case, edit)
    return case


def _apply(case: Case, edit: str) -> Case:
    name, _, value = edit.partition("=")
    request_id, _, number = value.partition(":")
    if name == "drop":
        return without(case, request_id)
    if name in ("cut", "out", "now", "keep"):
        changed = [_apply_to(r, name, number) if r.request_id == request_id else r for r in case.requests]
        return replace(case, requests=tuple(changed))
    if name == "passes":
        return replace(case, passes=int(value))
    if name == "layers":
        return replace(case, layers=int(value))
    if name == "errors":
        return replace(case, load_error_rate=0.0)
    if name == "prefix":
        return replace(case, prefix_cache=bool(int(value)))
    if name == "resets":
        return replace(case, reset_steps=())
    raise ConfigError(f"unknown edit {edit!r}; see the text of kvcore.ladder.targets.vllm_scheduler.shrink")


def _apply_to(request: CaseRequest, name: str, number: str) -> CaseRequest:
    if name == "cut":
        return replace(request, prompt=request.prompt[: int(number)])
    if name == "out":
        return replace(request, output_tokens=int(number))
    if name == "now":
        return replace(request, step=0)
    return replace(request, abort_step=None)


def shrink(case: Case, kinds_of: Callable[[Case], frozenset[str]]) -> tuple[list[str], Case]:
    """The edits that were kept, and the case they lead to. `kinds_of` runs a case: in which ways it fails."""
    wanted, edits, attempts = kinds_of(case), list[str](), 0
    progress = True
    while progress:
        progress = False
        for edit in _candidates(case):
            if attempts == ATTEMPTS_MAX:
                return edits, case
            attempts += 1
            smaller = _apply(case, edit)
            if smaller != case and kinds_of(smaller) & wanted:
                case, progress = smaller, True
                edits.append(edit)
                break
    return edits, case


def _candidates(case: Case) -> Iterator[str]:
    for request in case.requests if len(case.requests) > 1 else ():
        yield f"drop={request.request_id}"
    yield from ("passes=1",) if case.passes > 1 else ()
    yield from ("layers=1",) if case.layers > 1 else ()
    yield from ("errors=0",) if case.load_error_rate else ()
    yield from ("resets=0",) if case.reset_steps else ()
    for request in case.requests:
        name = request.request_id
        if request.abort_step is not None:
            yield f"keep={name}"
        if request.step:
            yield f"now={name}"
        if request.output_tokens > 1:
            yield f"out={name}:{request.output_tokens // 2}"
        if len(request.prompt) > 1:
            yield f"cut={name}:{len(request.prompt) // 2}"
