"""`ZOO`: all mutants by name, collected from the modules that hold them by theme."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from kvcore.errors import ConfigError
from kvcore.ladder.zoo import contract, copies, identity, l2, leases, liveness, lost, pages, prefix, staging
from kvcore.ladder.zoo.mutant import Mutant

NEAR_MAX = 3
_THEMES = (copies, pages, prefix, contract, leases, staging, l2, identity, liveness, lost)


def _by_name(mutants: Iterable[Mutant]) -> dict[str, Mutant]:
    found: dict[str, Mutant] = {}
    for mutant in mutants:
        assert mutant.name not in found, f"two mutants are called {mutant.name}"
        found[mutant.name] = mutant
    return found


ZOO: dict[str, Mutant] = _by_name(mutant for theme in _THEMES for mutant in theme.MUTANTS)


def find_mutant(name: str) -> Mutant:
    """The mutant of that name. Raises `ConfigError` that names those that are like it."""
    if name not in ZOO:
        near = [each for each in ZOO if name in each][:NEAR_MAX] or get_close_matches(name, ZOO, NEAR_MAX, 0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "kvcore zoo --list names them all"
        raise ConfigError(f"the zoo has no mutant {name!r}; {hint}")
    return ZOO[name]
