"""Traces by name or path, checked and ready to replay (reports/traces/trace.py has the rules).

    read("conversation")        a known trace, looked for in the folder that KVCORE_TRACES names
    read("generated")           made up on the spot, for a machine that has none; "generated:7" with seed 7
    read("my_trace.jsonl")      a file: Mooncake's format, Azure's CSV or Weka's delta coding, plain or gzip

Nothing is replayed before all of the trace has been read and checked.
"""

from __future__ import annotations

import contextlib
import difflib
import gzip
import os
import zlib
from collections.abc import Generator
from pathlib import Path

from kvcore.errors import ConfigError
from kvcore.reports.traces import azure, mooncake, weka
from kvcore.reports.traces.generator import REQUESTS, generate
from kvcore.reports.traces.trace import REQUESTS_MAX, Request, Trace, checked, dequantised, spread

__all__ = ["KNOWN", "Request", "Trace", "checked", "generate", "read", "spread"]

FOLDER_VARIABLE = "KVCORE_TRACES"
GENERATED = "generated"
KNOWN = {
    "conversation": "conversation_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
    "azure-conversation": "AzureLLMInferenceTrace_conv.csv",
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "weka": "weka_agentic_code_delta.jsonl.gz",
}
WEKA_FIELD = b'"block_size"'


def read(path: str | Path, *, raw_timestamps: bool = False, limit: int | None = None, seed: int = 0) -> Trace:
    """The trace by name or path; its first `limit` requests. `seed` is for what has to be made up (see its notes)."""
    if limit is not None and not 1 <= limit <= REQUESTS_MAX:
        raise ConfigError(f"a limit of {limit} requests cannot be: give from 1 to {REQUESTS_MAX:,}")
    name, _, number = str(path).partition(":")
    if name == GENERATED:
        if number and not number.isdecimal():
            raise ConfigError(f"the seed in {str(path)!r} is no whole number: write generated:7")
        return generate(limit or REQUESTS, int(number or seed))
    file = _file(path)
    trace = checked(_parsed(file, limit, seed))
    return checked(dequantised(trace, raw_timestamps, seed))


def _file(path: str | Path) -> Path:
    """The file that a path or the name of a known trace stands for."""
    file = Path(path)
    if file.is_file():
        return file
    if str(path) in KNOWN:
        folder = os.environ.get(FOLDER_VARIABLE)
        found = Path(folder or ".") / KNOWN[str(path)]
        if found.is_file():
            return found
        raise ConfigError(f"{found} is not here: set {FOLDER_VARIABLE} to the folder of the traces, or use 'generated'")
    near = difflib.get_close_matches(str(path), [*KNOWN, GENERATED], n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join([*KNOWN, GENERATED])}"
    raise ConfigError(f"there is no file {str(path)!r} and no trace of that name: {hint}")


def _parsed(file: Path, limit: int | None, seed: int) -> Trace:
    try:
        with contextlib.closing(_lines(file)) as lines:
            if file.suffix == ".csv":
                return azure.read(lines, file, limit)
            if _is_weka(file):
                return weka.read(lines, file, limit, seed)
            return mooncake.read(lines, file, limit)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read the trace in {file}: {error}") from error


def _lines(file: Path) -> Generator[bytes, None, None]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        yield from opened


def _is_weka(file: Path) -> bool:
    with contextlib.closing(_lines(file)) as lines:
        return WEKA_FIELD in next(lines, b"")
