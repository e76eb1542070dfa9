"""The JSON that `kvcore ladder`, `kvcore sim swarm` and `kvcore zoo` write (schema 1), as far as a page shows it.

What a field is not named here is not read, so these may grow. A file of another kind or schema, or half a file, is
refused with the field that is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvcore.errors import ConfigError
from kvcore.reports.files import read_bounded

SCHEMA = 1
FILE_BYTES_MAX = 256 * 2**20


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Figure = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class Rung(msgspec.Struct, frozen=True):
    """A rung 0 to 4 counts requests, a storm rung cases; each has only its own fields."""

    rung: str
    name: str
    verdict: str
    problems: list[str] = []
    requests: Count | None = None
    cases: Count | None = None
    tokens_compared: Count = 0
    loads_verified: Count = 0
    stores_verified: Count | None = None
    mismatches: Count = 0
    preemptions: Count | None = None
    deaths: Count | None = None
    hit_share: Figure | None = None
    faults: dict[str, dict[str, Count]] = {}
    sometimes: dict[str, Any] = {}


class LadderFile(msgspec.Struct, frozen=True):
    """`kvcore ladder --json`."""

    schema: int
    target: str
    rungs: Annotated[list[Rung], msgspec.Meta(min_length=1)]
    cells: list[dict[str, Any]]
    seed: int
    verdict: str
    trace_hash: str = ""


class SwarmMarks(msgspec.Struct, frozen=True):
    """`counts`: by mark, how often; left out by versions that do not write it."""

    hit: Count
    total: Count
    unseen: list[str]
    counts: dict[str, Count] = {}


class SwarmFile(msgspec.Struct, frozen=True):
    """`kvcore sim swarm --json`."""

    schema: int
    first_seed: int
    seeds: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    failures: Count
    seeds_per_s: Figure
    seeds_per_cpu_s: Figure
    faults: dict[str, dict[str, Count]]
    sometimes: SwarmMarks
    verdict: str
    bytes_checked: Count = 0
    loads_verified: Count = 0
    tokens_compared: Count = 0
    problems: list[str] = []
    reproduce: list[str] = []


class Mutant(msgspec.Struct, frozen=True):
    """One planted bug, as it was seen."""

    name: str
    kind: str
    group: str
    caught: bool
    oracle: str
    expected: list[str]
    first_seed: int | None
    seeds_run: Count
    catches: Count
    oracles: dict[str, Count]
    density_per_1000: Figure
    density_interval: tuple[Figure, Figure]
    faults_min: Count | None = None
    reason: str = ""
    note: str = ""
    problem: str = ""


class ZooFile(msgspec.Struct, frozen=True):
    """`kvcore zoo --json`."""

    schema: int
    mutants: Annotated[list[Mutant], msgspec.Meta(min_length=1)]
    first_catch_median: Figure
    problems: list[str]
    verdict: str


File = TypeVar("File", LadderFile, SwarmFile, ZooFile)


def read(path: Path, kind: type[File], option: str) -> File:
    """One file, or a ConfigError that says what is wrong with it."""
    try:
        found = msgspec.json.decode(read_bounded(path, FILE_BYTES_MAX), type=kind)
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        made = {LadderFile: "kvcore ladder", SwarmFile: "kvcore sim swarm", ZooFile: "kvcore zoo"}[kind]
        raise ConfigError(f"{option}: {path} is not what `{made} --json` writes: {error}") from error
    if found.schema != SCHEMA:
        raise ConfigError(f"{option}: {path} has schema {found.schema}, this version reads schema {SCHEMA}")
    return found
