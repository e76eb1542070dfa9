"""Which mutants are tried: a random sample, stratified by module, the same for the same seed. Pure but for the sources.

Each module gets a share in proportion to its mutants; within a module every mutant is as likely as any other. Drawn
mutants that are no programs are passed over.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from population import Mutant, mutated


def draw(
    root: Path, population: Mapping[str, Sequence[Mutant]], size: int, seed: int, exclude: set[str]
) -> list[Mutant]:
    """The sample, in an order that is random too: what an interrupted run has done is a fair sample as well."""
    left = {module: [one for one in found if one.name not in exclude] for module, found in population.items()}
    sample = []
    for module, count in shares({module: len(found) for module, found in left.items()}, size).items():
        random.Random(f"{seed} {module}").shuffle(left[module])
        sample += _first_programs(root, left[module], count)
    random.Random(f"{seed}").shuffle(sample)
    return sample


def shares(counts: Mapping[str, int], size: int) -> dict[str, int]:
    """`size` in proportion to the counts: rounded down, the rest to the largest remainders."""
    total = sum(counts.values())
    exact = {name: size * count / total for name, count in counts.items()}
    shared = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shared[name] - exact[name])
    for name in by_remainder[: size - sum(shared.values())]:
        shared[name] += 1
    return shared


def _first_programs(root: Path, order: Iterable[Mutant], count: int) -> list[Mutant]:
    """The first `count` that are programs, and other ones than the original."""
    found: list[Mutant] = []
    for mutant in order:
        if len(found) == count:
            break
        if mutated(root, mutant) is not None:
            found.append(mutant)
    return found
