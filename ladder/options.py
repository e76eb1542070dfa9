"""What a climb is asked to do: checked before anything starts, so that bad input costs nothing."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.connectors.admission import MODES
from kvcore.errors import ConfigError
from kvcore.l2.open import parse_store
from kvcore.ladder.matrix import FULL_MATRIX, MatrixCell
from kvcore.ladder.result import expand_rungs, parse_rungs, split_rungs
from kvcore.service.protocol import Transfer

TARGETS = ("sim", "local", "torch", "vllm")
REQUESTS = {"sim": 120, "local": 48, "torch": 40, "vllm": 40}
"""Requests per pass when nobody says otherwise. Real time is dearer than simulated time."""
CHUNK_TOKENS = {"sim": 16, "local": 16, "torch": 16, "vllm": 64}
"""Of the cache, when nobody says otherwise. vLLM has blocks of 32 tokens on a CPU."""
MODELS = ("llama", "gemma3", "gpt-oss", "fingerprint", "fingerprint-window")
"""Of target vllm."""
STORM_CASES = 250
STORM_CASES_MAX = 30_000
"""Cases of each storm rung, besides those that single kinds of faults need."""


@dataclass(frozen=True, slots=True)
class LadderOptions:
    """One run of the ladder. `connector`: None for kvcore's own, else `package.module:Class`.

    `passes` are climbed in each of the `cells`; `storms` are the storm rungs, of `cases` cases each, whose failures are
    written into `artifacts`. `transfer`: who copies KV, kvcore's workers or its servers. `admission`: whether all that
    is found is loaded. `store`: URL of a running store behind the servers of target torch. For target vllm: `model`,
    `window_tokens`, `connector_config` (its `kv_connector_extra_config`) and `engine_config` (arguments of `LLM`).
    """

    target: str = "sim"
    passes: tuple[str, ...] = expand_rungs(range(5))
    seed: int = 0
    trace: Path | None = None
    requests: int = 120
    families: int = 20
    chunk_tokens: int = 16
    l1_bytes: int | None = None
    l2_dir: Path | None = None
    connector: str | None = None
    cells: tuple[MatrixCell, ...] = FULL_MATRIX
    storms: tuple[str, ...] = ()
    cases: int = STORM_CASES
    artifacts: Path | None = None
    transfer: Transfer = "worker"
    admission: str = "always"
    store: str | None = None
    model: str | None = None
    window_tokens: int = 64
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    engine_config: Mapping[str, Any] = field(default_factory=dict)

    def default_trace(self) -> Path | None:
        """The Mooncake conversation trace, where a checkout has it beside itself; else the generator is used."""
        root = Path(__file__).resolve().parent.parent
        found = root.parent / "shared" / "data" / "traces" / "conversation_trace.jsonl"
        return found if found.is_file() else None


def check_target(name: str) -> str:
    """The target's name, or a `ConfigError` naming the nearest."""
    if name in TARGETS:
        return name
    near = difflib.get_close_matches(name, TARGETS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown target {name!r}: this version has {', '.join(TARGETS)}{hint}")


def check_model(name: str | None, target: str, option: str = "--model") -> str | None:
    """One of `MODELS`, for the target that has models to choose from."""
    if name is None:
        return None
    if target != "vllm":
        raise ConfigError(f"{option} is for target vllm; target {target} has a model of its own")
    if name not in MODELS:
        raise ConfigError(f"{option}: no model is called {name!r}; there are {', '.join(MODELS)}")
    return name


def check_mapping(text: str | None, target: str, option: str) -> dict[str, Any]:
    """A JSON object; empty without one."""
    if text is None:
        return {}
    if target != "vllm":
        raise ConfigError(f"{option} is for target vllm")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f'{option} takes a JSON object, such as {{"key": 1}}')
    return found


def check_rungs(text: str, option: str = "--rungs") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The passes to climb, and the storm rungs, for `--rungs`."""
    try:
        return split_rungs(parse_rungs(text))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def check_cases(text: str | None, option: str = "--cases") -> int:
    """How many cases each storm rung gets."""
    if text is None:
        return STORM_CASES
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= STORM_CASES_MAX:
        raise ConfigError(f"{option} takes a whole number from 1 to {STORM_CASES_MAX}, not {text!r}")
    return int(text)


def check_storms(options: LadderOptions) -> None:
    """Raises `ConfigError` where storm rungs are asked of somebody who has none."""
    if not options.storms:
        return
    if options.connector is not None:
        raise ConfigError(
            "rungs 5 to 8 break kvcore's own servers, stores and processes; with --connector the ladder has 0 to 4"
        )
    if options.target != "sim":
        raise ConfigError(f"rungs 5 to 8 need the simulated world; target {options.target} has the rungs 0 to 4")


def check_store(url: str | None, target: str) -> str | None:
    """A URL of a store that processes share, whose records the climb may forget; `ConfigError` otherwise."""
    if url is None:
        return None
    if target != "torch":
        raise ConfigError(f"--store is for target torch; target {target} has stores of its own")
    if not hasattr(parse_store(url).unopened(), "scan"):
        raise ConfigError("--store takes a store that several servers can share: fs://, redis://, s3://, mooncake://")
    return url


def check_transfer(text: str, option: str = "--transfer") -> Transfer:
    """Who copies."""
    if text == "worker":
        return "worker"
    if text == "server":
        return "server"
    raise ConfigError(f"{option} takes worker or server, not {text!r}")


def check_admission(options: LadderOptions, option: str = "--admission") -> None:
    """Raises `ConfigError` for an admission that does not exist, or that nobody would ask."""
    if options.admission not in MODES:
        raise ConfigError(f"{option} takes {' or '.join(MODES)}, not {options.admission!r}")
    if options.admission != "always" and not (options.passes and options.connector is None):
        raise ConfigError(f"{option} is for kvcore's own connector, on the rungs 0 to 4; storm rungs draw one per case")


def check_seed(text: str, option: str = "--seed") -> int:
    """A non-negative integer."""
    if not text.isdigit():
        raise ConfigError(f"{option} takes a whole number from 0 on, not {text!r}")
    return int(text)


def check_cells(names: Sequence[str]) -> tuple[MatrixCell, ...]:
    """The cells to climb; all of them when none is named."""
    try:
        return tuple(MatrixCell.parse(name) for name in names) or FULL_MATRIX
    except ValueError as error:
        raise ConfigError(f"--cell: {error}") from None


def load_connector(path: str) -> Any:
    """Import `package.module:Class`, from the current directory too, as pytest and other runners do."""
    module_name, colon, class_name = path.partition(":")
    if not (colon and module_name and class_name):
        raise ConfigError(f"--connector takes package.module:Class, not {path!r}")
    module = _import_module(module_name)
    found = getattr(module, class_name, None)
    if not callable(found):
        near = difflib.get_close_matches(class_name, [name for name in vars(module) if name[0] != "_"], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--connector: module {module_name} has no class {class_name}{hint}")
    return found


def _import_module(name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except Exception as error:  # their module may raise anything while it is imported
        text = " ".join(str(error).split())
        raise ConfigError(f"--connector: cannot import {name}: {type(error).__name__}: {text}") from None
