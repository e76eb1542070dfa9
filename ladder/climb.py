"""Runs the cells of a climb, one after the other or in worker processes, then the storm rungs, and puts the results
together.

Bad input is found before the first cell starts: the trace is read, and every configuration is built once.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import shlex
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcore.config.values import redact_url
from kvcore.errors import ConfigError
from kvcore.ladder.configure import configure
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions, check_storms
from kvcore.ladder.result import CellResult, LadderResult, cell_from_json, cell_to_json, combined_hash
from kvcore.ladder.swarm_rungs.result import StormResult
from kvcore.sim.workload import Workload, load_workload

Progress = Callable[[str], None]


def cells_for(options: LadderOptions) -> tuple[MatrixCell, ...]:
    """The cells of `options` that its target climbs in. Raises `ConfigError` for options the target cannot serve."""
    target = _target(options)
    target.check(options)
    cells: tuple[MatrixCell, ...] = target.cells(options)
    return cells


def climb_all(options: LadderOptions, jobs: int = 1, progress: Progress | None = None) -> LadderResult:
    """Climb every cell, then the storm rungs. Raises `ConfigError` before anything has started if the input cannot be
    used."""
    check_storms(options)
    result = _climb_cells(options, jobs, progress) if options.passes else _nothing_climbed(options)
    if options.storms:
        result.storms = _climb_storms(options, jobs, progress)
        result.trace_hash = combined_hash(result.cells, result.storms)
    return result


def _nothing_climbed(options: LadderOptions) -> LadderResult:
    return LadderResult(_name(options), f"{options.cases} drawn cases per rung", [], "", options.seed)


def _climb_storms(options: LadderOptions, jobs: int, progress: Progress | None) -> list[StormResult]:
    with _needs(options.target):
        from kvcore.ladder.swarm_rungs.climb import StormOptions, climb_storms
    storms = StormOptions(options.storms, options.seed, options.cases, jobs, artifacts=options.artifacts)
    return climb_storms(storms, progress)


def _climb_cells(options: LadderOptions, jobs: int, progress: Progress | None) -> LadderResult:
    cells = cells_for(options)
    if not cells:
        known = ", ".join(map(str, _target(options).CELLS[:6]))
        raise ConfigError(f"target {_name(options)} climbs in none of the chosen configurations, but in {known}, ...")
    for cell in cells if options.target != "vllm" else ():
        configure(cell, options)
    workload = _workload(options)
    results = []
    for result in _results(options, cells, workload, jobs):
        results.append(result)
        if progress is not None:
            progress(f"[{len(results)}/{len(cells)}] {result.cell}: {result.verdict} ({result.cpu_s:.1f} s CPU)")
    return LadderResult(_name(options), workload.describe(), results, combined_hash(results), options.seed)


def _workload(options: LadderOptions) -> Workload:
    if options.trace is not None and not options.trace.is_file():
        raise ConfigError(f"--trace: there is no file {options.trace}")
    path = options.trace or options.default_trace()
    few = options.target == "vllm"  # there, a small run climbs with fewer families
    families = min(options.families, options.requests // 2) if few else options.families
    return _load(path, options.seed, options.requests, families, options.chunk_tokens)


@lru_cache(maxsize=2)
def _load(path: Path | None, seed: int, requests: int, families: int, chunk_tokens: int) -> Workload:
    """Once per process: reading and checking a whole trace takes half a second."""
    return load_workload(path, seed, requests=requests, families=families, chunk_tokens=chunk_tokens)


def _name(options: LadderOptions) -> str:
    return options.connector or options.target


def _target(options: LadderOptions) -> Any:
    """The module of `kvcore.ladder.targets`: `CELLS`, `check`, `cells` and `climb_cell`."""
    name = "stranger" if options.connector and options.target != "vllm" else options.target
    with _needs(name):
        return importlib.import_module(f"kvcore.ladder.targets.{name}")


@contextmanager
def _needs(target: str) -> Iterator[None]:
    """What is imported in here may be missing: a `ConfigError` says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"target {target} needs {error.name}, which is not installed: pip install 'kvcore[sim]'"
        ) from None


def _results(
    options: LadderOptions, cells: tuple[MatrixCell, ...], workload: Workload, jobs: int
) -> Iterator[CellResult]:
    climb = _target(options).climb_cell
    if jobs <= 1 or len(cells) == 1:
        for cell in cells:
            yield climb(cell, options, workload, _reproduce(cell, options))
        return
    with ProcessPoolExecutor(min(jobs, len(cells)), multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(_climb_in_child, cell, options) for cell in cells]
        for future in pending:
            yield cell_from_json(json.loads(future.result()))


def _climb_in_child(cell: MatrixCell, options: LadderOptions) -> str:
    result = _target(options).climb_cell(cell, options, _workload(options), _reproduce(cell, options))
    return json.dumps(cell_to_json(result))


def _shown(store: str | None) -> str | None:
    """Without its secrets: the line is for logs."""
    return None if store is None else redact_url(store)


def _reproduce(cell: MatrixCell, options: LadderOptions) -> str:
    """A command line that climbs just this cell again."""
    parts = [f"kvcore ladder --target {options.target} --seed {options.seed} --cell {cell}"]
    for flag, value in (
        ("--trace", options.trace),
        ("--connector", options.connector),
        ("--l1", options.l1_bytes),
        ("--l2", options.l2_dir),
        ("--store", _shown(options.store)),
        ("--transfer", options.transfer if options.transfer != "worker" else None),
        ("--admission", options.admission if options.admission != "always" else None),
        ("--model", options.model),
        ("--connector-config", _quoted(options.connector_config)),
        ("--engine-config", _quoted(options.engine_config)),
    ):
        parts += [f"{flag} {value}"] if value is not None else []
    parts.append(f"--chunk-tokens {options.chunk_tokens} --requests {options.requests}")
    return " ".join(parts)


def _quoted(mapping: Mapping[str, Any]) -> str | None:
    return shlex.quote(json.dumps(mapping)) if mapping else None
