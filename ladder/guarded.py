"""Climbing where code that is not ours, or a machine that is not simulated, may do anything: raise, or never come back.

The rung in which that happens fails with a line that says so, and ends the climb.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence

from kvcore.errors import ConfigError
from kvcore.ladder.result import RungResult
from kvcore.ladder.rungs import Stage


async def climb_guarded(stage: Stage, passes: Sequence[str], pass_seconds_max: float) -> list[RungResult]:
    """The passes in order, up to the first that fails."""
    results: list[RungResult] = []
    for rung in passes:
        results += await _one_pass(stage, rung, pass_seconds_max)
        if results[-1].verdict != "pass":
            break
    return results


async def _one_pass(stage: Stage, rung: str, seconds_max: float) -> list[RungResult]:
    try:
        async with asyncio.timeout(seconds_max) as deadline:
            return await stage.climb([rung])
    except ConfigError:
        raise
    except Exception as error:
        if deadline.expired():
            return [RungResult(rung, problems=[f"[liveness] not over after {seconds_max:g} s"])]
        return [RungResult(rung, problems=[f"[crash] {say(error)}"])]


def say(error: BaseException) -> str:
    """What was raised and where, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({frame[0].filename}, line {frame[0].lineno}, in {frame[0].name})" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
