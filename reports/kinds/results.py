"""The JSON that `kvcore ladder`, `kvcore sim swarm` and `kvcore zoo` write (schema 1), as far as a page shows it.

What a field is not named here is not read, so these may grow. A file of another kind or schema, or half a file, is
refused with the field that is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvcore.errors import ConfigError

SCHEMA = 1
FILE_BYTES_MAX = 256 * 2**20


class Rung(msgspec.Struct, frozen=True):
    """A rung 0 to 4 counts requests, a storm rung cases; each has only its own fields."""

    rung: str
    name: str
    verdict: str
    problems: list[str] = []
    requests: int | None = None
    cases: int | None = None
    tokens_compared: int = 0
    loads_verified: int = 0
    stores_verified: int | None = None
    mismatches: int = 0
    preemptions: int | None = None
    deaths: int | None = None
    hit_share: float | None = None
    faults: dict[str, dict[str, int]] = {}
    sometimes: dict[str, Any] = {}


class LadderFile(msgspec.Struct, frozen=True):
    """`kvcore ladder --json`."""

    schema: int
    target: str
    rungs: list[Rung]
    cells: list[dict[str, Any]]
    seed: int
    verdict: str
    trace_hash: str = ""


class SwarmMarks(msgspec.Struct, frozen=True):
    """`counts`: by mark, how often; left out by versions that do not write it."""

    hit: int
    total: int
    unseen: list[str]
    counts: dict[str, int] = {}


class SwarmFile(msgspec.Struct, frozen=True):
    """`kvcore sim swarm --json`."""

    schema: int
    first_seed: int
    seeds: int
    failures: int
    seeds_per_s: float
    seeds_per_cpu_s: float
    faults: dict[str, dict[str, int]]
    sometimes: SwarmMarks
    verdict: str
    bytes_checked: int = 0
    loads_verified: int = 0
    tokens_compared: int = 0
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
    seeds_run: int
    catches: int
    oracles: dict[str, int]
    density_per_1000: float
    density_interval: tuple[float, float]
    faults_min: int | None = None
    reason: str = ""
    note: str = ""
    problem: str = ""


class ZooFile(msgspec.Struct, frozen=True):
    """`kvcore zoo --json`."""

    schema: int
    mutants: list[Mutant]
    first_catch_median: float
    problems: list[str]
    verdict: str


File = TypeVar("File", LadderFile, SwarmFile, ZooFile)


def read(path: Path, kind: type[File], option: str) -> File:
    """One file, or a ConfigError that says what is wrong with it."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{option}: {path} is larger than {FILE_BYTES_MAX >> 20} MiB")
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        made = {LadderFile: "kvcore ladder", SwarmFile: "kvcore sim swarm", ZooFile: "kvcore zoo"}[kind]
        raise ConfigError(f"{option}: {path} is not what `{made} --json` writes: {error}") from error
    if found.schema != SCHEMA:
        raise ConfigError(f"{option}: {path} has schema {found.schema}, this version reads schema {SCHEMA}")
    return found
