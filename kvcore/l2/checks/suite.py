"""All checks, and how one is run: opened, under a deadline, and cleaned up whatever happens.

A check is an async function of a `Bed` that raises `CheckFailedError` (a promise is broken) or `NotApplicableError`
(this store does not make it). Its name is the promise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, unique

from kvcore.errors import KvcoreError
from kvcore.l2.checks import contents, lives, results
from kvcore.l2.checks.bed import Bed, NotApplicableError

Check = Callable[[Bed], Awaitable[None]]

CHECKS: tuple[Check, ...] = (*results.CHECKS, *contents.CHECKS, *lives.CHECKS)


@unique
class Verdict(Enum):
    GOOD = "good"
    BROKEN = "broken"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` says why, where it is not GOOD."""

    name: str
    verdict: Verdict
    text: str = ""


def name_of(check: Check) -> str:
    """The promise in words."""
    name: str = check.__name__
    return name.replace("_", " ")


async def run_check(check: Check, bed: Bed, deadline_s: float) -> Finding:
    """Run one. What it raises becomes a finding; only errors of the program itself come out."""
    try:
        async with asyncio.timeout(deadline_s):
            try:
                await check(bed)
            finally:
                await bed.clean()
    except NotApplicableError as error:
        return Finding(name_of(check), Verdict.NOT_APPLICABLE, str(error))
    except TimeoutError:
        return Finding(name_of(check), Verdict.BROKEN, f"it did not end within {deadline_s:g} s")
    except (KvcoreError, OSError) as error:
        return Finding(name_of(check), Verdict.BROKEN, f"{type(error).__name__}: {error}")
    except ExceptionGroup as group:
        return Finding(name_of(check), Verdict.BROKEN, "; ".join(str(error) for error in group.exceptions))
    return Finding(name_of(check), Verdict.GOOD)
