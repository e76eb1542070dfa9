"""The state of every component in one line each, at one moment of a run.

Read from the components' own `statistics()` and `describe()`, in the middle of whatever they were doing. A component
that cannot answer there says so in its line; it must not end the run that is being explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvcore.ladder.swarm.episode import Episode
from kvcore.sim.charts.states import state_line


def state_lines(episode: Episode) -> list[str]:
    """One line per component, in the order in which data flows."""
    found: dict[str, list[object]] = {}
    for name, state in _states(episode):
        found.setdefault(name, []).append(state)
    return [state_line(name, *states) for name, states in found.items()]


def _states(episode: Episode) -> Iterator[tuple[str, object]]:
    yield "engine", _asked(lambda: episode.engine.scheduler.describe())
    yield "engine", _asked(lambda: episode.engine.statistics())
    for rank, device in enumerate(episode.devices):
        counts = {
            "blocks_being_read": len(device.inflight_reads()),
            "blocks_being_written": len(device.inflight_writes()),
        }
        yield f"device{rank}", counts
    for process in episode.world.processes:
        yield f"process {process.name}", f"{'up' if process.alive else 'down'}, life {process.incarnation}"
    parts = episode.stack.states()
    while (part := _asked(lambda: next(parts, None))) is not None:
        yield part if isinstance(part, tuple) else ("stack", part)
        if not isinstance(part, tuple):
            return


def _asked(question: Callable[[], object]) -> object:
    """The answer, or what went wrong."""
    try:
        return question()
    except Exception as error:
        return f"(cannot answer now: {error!r})"
