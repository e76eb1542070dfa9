"""`ZOO`: all mutants by name, collected from the modules that hold them by theme."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.errors import ConfigError
from kvcore.ladder.zoo import contract, copies, identity, l2, leases, liveness, prefix, staging
from kvcore.ladder.zoo.mutant import Mutant

_THEMES = (copies, prefix, contract, leases, staging, l2, identity, liveness)


def _by_name(mutants: Iterable[Mutant]) -> dict[str, Mutant]:
    found: dict[str, Mutant] = {}
    for mutant in mutants:
        assert mutant.name not in found, f"two mutants are called {mutant.name}"
        found[mutant.name] = mutant
    return found


ZOO: dict[str, Mutant] = _by_name(mutant for theme in _THEMES for mutant in theme.MUTANTS)


def find_mutant(name: str) -> Mutant:
    """The mutant of that name. Raises `ConfigError` that names the likely ones."""
    if name not in ZOO:
        near = [each for each in ZOO if name in each] or list(ZOO)
        raise ConfigError(f"the zoo has no mutant {name!r}; there are {', '.join(near)}")
    return ZOO[name]
