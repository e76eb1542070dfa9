"""`kvcore report ladder`: what ladder, swarm and zoo have shown, on one page.

Each of the three JSON files is optional, one is needed. Nothing is run here. The verdict is bad if any of them failed;
what was not given is said, because a page about a ladder without its zoo has not shown that it would see a bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.reports.kinds.results import LadderFile, Mutant, Rung, SwarmFile, ZooFile, read
from kvcore.reports.page import Bars, Column, Matrix, Report, Table, Value, words
from kvcore.reports.page.document import Chart
from kvcore.reports.page.prefix import picture

RUNG_COLUMNS = (
    Column("rung", "Rung"),
    Column("name", "What it is"),
    Column("verdict", "Verdict", "verdict", "pass: no problem, and all floors of the rung reached"),
    Column("runs", "Runs", "count", "requests of the rungs 0 to 4 and the replay, cases of the storm rungs"),
    Column("tokens_compared", "Tokens compared", "count", "with the reference, one by one"),
    Column("loads_verified", "Loads verified", "count", "loaded cells whose bytes were compared before use"),
    Column("mismatches", "Tokens that differ", "count", "from the reference"),
    Column(
        "hit_share", "Hit share", "share", "tokens loaded / tokens that a cache which forgot nothing could have loaded"
    ),
    Column("preemptions", "Preemptions", "count", "requests that lost their blocks and came back"),
    Column("deaths", "Deaths", "count", "processes that died in cases which were then served to the end"),
    Column("problems", "Problems"),
)
FAULT_COLUMNS = (
    Column("kind", "Fault", "code"),
    Column("fired", "Fired", "count", "seeds in which the fault took effect"),
    Column("enabled", "Enabled", "count", "seeds whose case had the fault"),
    Column("share", "Share", "share", "fired / enabled"),
)
MARK_COLUMNS = (
    Column("mark", "Rare state", "code"),
    Column("times", "Met", "count", "times, over all seeds; a dash where the file does not say"),
    Column("common", "Common", "text", "a swarm of some hundred seeds must meet it"),
    Column("about", "What happened"),
)
ZOO_COLUMNS = (
    Column("name", "Planted bug", "code"),
    Column(
        "kind",
        "Kind",
        "text",
        "bug: must be caught; hard: rarely seen by design; safe: a removal that must not be seen",
    ),
    Column("verdict", "Verdict", "verdict", "pass: a bug that was caught, a safe removal that was not"),
    Column("oracle", "Caught by", "code"),
    Column("density", "Per 1,000 seeds", "number", "catches / seeds run * 1000"),
    Column("density_low", "From", "number", "95 % interval of the density"),
    Column("density_high", "To", "number", "95 % interval of the density"),
    Column("first_seed", "First seed", "count", "that caught it"),
    Column("seeds_run", "Seeds", "count", "run until enough catches were seen, or all of them"),
    Column("faults_min", "Faults left", "count", "fault events after the first catch was minimised"),
    Column("reason", "Why it is a bug"),
)


@dataclass(frozen=True, slots=True)
class Files:
    """What was given."""

    ladder: LadderFile | None
    swarm: SwarmFile | None
    zoo: ZooFile | None

    @property
    def good(self) -> bool:
        """As the files say, and as their figures do: a page that names a failure is no good one."""
        verdicts = [file.verdict for file in (self.ladder, self.swarm, self.zoo) if file is not None]
        failed = (self.ladder and _failed(self.ladder)) or (self.swarm and self.swarm.failures)
        return all(verdict == "pass" for verdict in verdicts) and not failed


def read_files(ladder: Path | None, swarm: Path | None, zoo: Path | None) -> Files:
    """All of them, checked."""
    if ladder is swarm is zoo is None:
        raise ConfigError("give at least one of --ladder, --swarm and --zoo: files that the commands wrote with --json")
    return Files(
        None if ladder is None else read(ladder, LadderFile, "--ladder"),
        None if swarm is None else read(swarm, SwarmFile, "--swarm"),
        None if zoo is None else read(zoo, ZooFile, "--zoo"),
    )


def build(files: Files) -> Report:
    """The report."""
    parts = [
        *(_ladder_parts(files.ladder) if files.ladder else []),
        *(_swarm_parts(files.swarm) if files.swarm else []),
        *(_zoo_parts(files.zoo) if files.zoo else []),
    ]
    seed = files.ladder.seed if files.ladder else files.swarm.first_seed if files.swarm else None
    return Report(
        "ladder",
        "Does the cache change any output, and would we see it?",
        tuple(_verdict(files)),
        good=files.good,
        tables=tuple(part for part in parts if isinstance(part, Table)),
        charts=tuple(part for part in parts if not isinstance(part, Table)),
        widgets=(picture(),),
        records=list(_records(files)),
        notes=tuple(_notes(files)),
        seed=seed,
    )


def _verdict(files: Files) -> Iterator[str]:
    if files.ladder:
        yield _ladder_sentence(files.ladder)
    if files.swarm:
        yield _swarm_sentence(files.swarm)
    if files.zoo:
        yield _zoo_sentence(files.zoo)
    absent = [name for name in ("ladder", "swarm", "zoo") if getattr(files, name) is None]
    if absent:
        yield f"Not shown here: {words.listed(absent)}."


def _ladder_sentence(file: LadderFile) -> str:
    compared = sum(rung.tokens_compared for rung in file.rungs)
    differing = sum(rung.mismatches for rung in file.rungs)
    failed = _failed(file)
    where = f"{words.count(len(file.cells), 'configuration')} on target {file.target}"
    if failed or file.verdict != "pass":
        said = (
            f"{'rung' if len(failed) == 1 else 'rungs'} {words.listed(failed)} failed"
            if failed
            else "the ladder failed"
        )
        return f"The ladder does not hold: {said} ({words.count(differing, 'token')} of {compared:,} differ; {where})."
    return f"The ladder holds: no token of {compared:,} differs on {words.count(len(file.rungs), 'rung')} ({where})."


def _failed(file: LadderFile) -> list[str]:
    return [rung.rung for rung in file.rungs if rung.verdict != "pass" or rung.mismatches]


def _swarm_sentence(file: SwarmFile) -> str:
    fired = sum(bool(row.get("fired")) for row in file.faults.values())
    found = "found nothing" if file.failures == 0 else f"found something in {words.count(file.failures, 'seed')}"
    lacking = f" But: {'; '.join(file.problems)}." if file.problems else ""
    return (
        f"The swarm {found}: {words.count(file.seeds, 'seed')} at {words.digits(file.seeds_per_s)} per second "
        f"({words.digits(file.seeds_per_cpu_s)} per CPU second), {fired} of {len(file.faults)} kinds of faults fired, "
        f"{file.sometimes.hit} of {file.sometimes.total} rare states met.{lacking}"
    )


def _zoo_sentence(file: ZooFile) -> str:
    bugs = [mutant for mutant in file.mutants if mutant.kind != "safe"]
    safe = [mutant for mutant in file.mutants if mutant.kind == "safe"]
    caught, seen = sum(mutant.caught for mutant in bugs), sum(mutant.caught for mutant in safe)
    text = f"{caught} of {words.count(len(bugs), 'planted bug')} {'is' if len(bugs) == 1 else 'are'} caught"
    text += f", the median one after {words.count(round(file.first_catch_median), 'seed')}" if caught else ""
    text += f"; {seen} of {len(safe)} safe removals raise an alarm" if safe else ""
    return f"{text}.{f' But: {words.listed(file.problems)}.' if file.problems else ''}"


def _records(files: Files) -> Iterator[dict[str, Any]]:
    """Every configuration and every mutant, one a line."""
    if files.ladder:
        yield from ({"part": "ladder", **cell} for cell in files.ladder.cells)
    if files.zoo:
        for mutant in files.zoo.mutants:
            yield {"part": "zoo", **{name: getattr(mutant, name) for name in mutant.__struct_fields__}}


def _notes(files: Files) -> Iterator[str]:
    if files.ladder and files.ladder.trace_hash:
        yield f"Trace hash of the ladder: {files.ladder.trace_hash} (the same on every machine)."
    if files.swarm:
        yield from (f"Reproduce: {line}" for line in files.swarm.reproduce[:20])
    if files.zoo:
        yield from (f"{mutant.name}: {mutant.note}" for mutant in files.zoo.mutants if mutant.note)


# ---- ladder


def _ladder_parts(file: LadderFile) -> list[Table | Chart]:
    rows = [_rung_row(rung) for rung in file.rungs]
    parts: list[Table | Chart] = [Table("rungs", "Rungs", RUNG_COLUMNS, rows, ("rung",))]
    storm = [rung for rung in file.rungs if rung.faults]
    if storm:
        parts.append(_storm_faults(storm))
    return parts


def _rung_row(rung: Rung) -> dict[str, Value]:
    return {
        "rung": rung.rung,
        "name": rung.name,
        "verdict": rung.verdict,
        "runs": rung.requests if rung.requests is not None else rung.cases,
        "tokens_compared": rung.tokens_compared,
        "loads_verified": rung.loads_verified,
        "mismatches": rung.mismatches,
        "hit_share": rung.hit_share,
        "preemptions": rung.preemptions,
        "deaths": rung.deaths,
        "problems": "; ".join(rung.problems),
    }


def _storm_faults(rungs: list[Rung]) -> Table:
    columns = (
        Column("rung", "Rung"),
        Column("kind", "Fault", "code"),
        Column("fired", "Fired", "count", "cases in which it took effect"),
        Column("enabled", "Enabled", "count", "cases that had it"),
        Column("effects", "Effects", "count", "times it took effect"),
    )
    rows: list[dict[str, Value]] = [
        {"rung": rung.rung, "kind": kind, **{name: row.get(name, 0) for name in ("fired", "enabled", "effects")}}
        for rung in rungs
        for kind, row in rung.faults.items()
    ]
    return Table("rung_faults", "Faults of the storm rungs", columns, rows, ("rung", "kind"), bar="effects")


# ---- swarm


def _swarm_parts(file: SwarmFile) -> list[Table | Chart]:
    faults = sorted(file.faults.items(), key=lambda item: (-item[1].get("fired", 0), item[0]))
    rows = [_fault_row(kind, row) for kind, row in faults]
    fired = tuple(float(row.get("fired", 0)) for _, row in faults)
    enabled = tuple(float(row.get("enabled", 0)) for _, row in faults)
    return [
        Table("speed", "The swarm", _SPEED_COLUMNS, [_speed_row(file)], ("first_seed",)),
        Table("faults", "Faults fired", FAULT_COLUMNS, rows, ("kind",), bar="fired"),
        _marks(file),
        Bars(
            "faults_fired",
            "Faults: seeds in which they took effect, of the seeds that had them",
            "Seeds",
            tuple(kind for kind, _ in faults),
            fired,
            enabled,
        ),
    ]


_SPEED_COLUMNS = (
    Column("first_seed", "First seed", "count", "the others follow it"),
    Column("seeds", "Seeds", "count", "cases drawn and run"),
    Column("failures", "Failures", "count", "seeds with a finding"),
    Column("seeds_per_s", "Seeds per second", "number", "seeds / seconds by the clock"),
    Column(
        "seeds_per_cpu_s",
        "Per CPU second",
        "number",
        "seeds, those run twice counted twice / CPU seconds of all workers",
    ),
    Column("tokens_compared", "Tokens compared", "count", "with the reference, one by one"),
    Column("bytes_checked", "Bytes checked", "bytes", "of KV, against what is right"),
    Column("loads_verified", "Loads verified", "count", "loaded cells whose bytes were compared before use"),
)


def _speed_row(file: SwarmFile) -> dict[str, Value]:
    return {column.name: getattr(file, column.name) for column in _SPEED_COLUMNS}


def _fault_row(kind: str, row: dict[str, int]) -> dict[str, Value]:
    fired, enabled = row.get("fired", 0), row.get("enabled", 0)
    return {"kind": kind, "fired": fired, "enabled": enabled, "share": fired / enabled if enabled else None}


def _marks(file: SwarmFile) -> Table:
    from kvcore.sim.marks import all_marks

    marks = all_marks()
    rows: list[dict[str, Value]] = [
        {
            "mark": mark.name,
            "times": file.sometimes.counts.get(mark.name, 0) if file.sometimes.counts else _told(file, mark.name),
            "common": "yes" if mark.common else "no",
            "about": mark.about,
        }
        for mark in marks.values()
    ]
    note = f"{file.sometimes.hit} of {file.sometimes.total} met."
    return Table("rare_states", "Rare states", MARK_COLUMNS, rows, ("mark",), note)


def _told(file: SwarmFile, mark: str) -> int | None:
    """Without counts the file only names common states that were not met."""
    return 0 if mark in file.sometimes.unseen else None


# ---- zoo


def _zoo_parts(file: ZooFile) -> list[Table | Chart]:
    rows = [_mutant_row(mutant) for mutant in file.mutants]
    caught = any(mutant.caught for mutant in file.mutants)
    note = f"The median first catch takes {words.count(round(file.first_catch_median), 'seed')}." if caught else ""
    matrix = _kill_matrix(file)
    parts: list[Table | Chart] = [Table("zoo", "Planted bugs", ZOO_COLUMNS, rows, ("name",), note, bar="density")]
    return [*parts, matrix] if matrix.rows and matrix.columns else parts


def _mutant_row(mutant: Mutant) -> dict[str, Value]:
    return {
        "name": mutant.name,
        "kind": mutant.kind,
        "verdict": "fail" if mutant.problem else "pass",
        "oracle": mutant.oracle,
        "density": mutant.density_per_1000,
        "density_low": mutant.density_interval[0],
        "density_high": mutant.density_interval[1],
        "first_seed": mutant.first_seed,
        "seeds_run": mutant.seeds_run,
        "faults_min": mutant.faults_min,
        "reason": mutant.problem or mutant.reason,
    }


def _kill_matrix(file: ZooFile) -> Matrix:
    """Mutants by oracle: how often which one saw which bug. A frame: this oracle was expected to."""
    mutants = [mutant for mutant in file.mutants if mutant.kind != "safe"]
    seen = {oracle for mutant in mutants for oracle in (*mutant.oracles, *mutant.expected)}
    oracles = tuple(sorted(seen))
    values = tuple(tuple(_count(mutant.oracles.get(oracle)) for oracle in oracles) for mutant in mutants)
    marked = tuple((row, oracles.index(oracle)) for row, mutant in enumerate(mutants) for oracle in mutant.expected)
    return Matrix(
        "kill_matrix",
        "Kill matrix: catches of each planted bug by oracle",
        tuple(mutant.name for mutant in mutants),
        oracles,
        values,
        marked,
        "A frame: this oracle was expected to see the bug. The first one to fire counts; safe removals are left out.",
    )


def _count(catches: int | None) -> float | None:
    return None if catches is None else float(catches)
