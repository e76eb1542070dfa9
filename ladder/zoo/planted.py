"""`planted(name)`: a stretch of code that runs with one mutant in place.

One mutant at a time per process; planting the one that is planted already does nothing, so that a replay inside a
measurement is harmless. Held by the `with` block, which takes the mutant out again whatever happens. Layouts that the
swarm keeps are forgotten at both ends, because what they have worked out belongs to the code that made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.errors import CallerError
from kvcore.ladder.swarm import setting
from kvcore.ladder.zoo.catalogue import find_mutant
from kvcore.ladder.zoo.patch import Patch

_planted: list[str] = []


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the mutant `name` ("": none). Raises `ConfigError` for an unknown one, or one that does not fit."""
    if not name or name in _planted:
        yield
        return
    if _planted:
        raise CallerError(f"{_planted[0]} is planted; {name} would not be judged by itself")
    patch = Patch()
    patch.rewrite(find_mutant(name).edits)
    _planted.append(name)
    setting.forget_models()
    try:
        yield
    finally:
        patch.undo()
        _planted.remove(name)
        setting.forget_models()
