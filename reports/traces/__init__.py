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
from kvcore.reports.files import bounded_lines
from kvcore.reports.traces import azure, mooncake, weka
from kvcore.reports.traces.generator import REQUESTS, generate
from kvcore.reports.traces.trace import REQUESTS_MAX, Request, Trace, checked, dequantised, spread

__all__ = ["KNOWN", "Request", "Trace", "checked", "generate", "named_seed", "read", "spread"]

FOLDER_VARIABLE = "KVCORE_TRACES"
GENERATED = "generated"
SEED_DIGITS_MAX = 18
KNOWN = {
    "conversation": "conversation_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
    "azure-conversation": "AzureLLMInferenceTrace_conv.csv",
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "weka": "weka_agentic_code_delta.jsonl.gz",
}
LINE_BYTES_MAX = 256 * 2**20
WEKA_FIELD = b'"block_size"'


def read(path: str | Path, *, raw_timestamps: bool = False, limit: int | None = None, seed: int = 0) -> Trace:
    """The trace by name or path; its first `limit` requests. `seed` is for what has to be made up (see its notes)."""
    if limit is not None and not 1 <= limit <= REQUESTS_MAX:
        raise ConfigError(f"a limit of {limit} requests cannot be: give from 1 to {REQUESTS_MAX:,}")
    if str(path).partition(":")[0] == GENERATED:
        return generate(limit or REQUESTS, named_seed(path, seed))
    file = _file(path)
    trace = checked(_parsed(file, limit, seed))
    return checked(dequantised(trace, raw_timestamps, seed))


def named_seed(path: str | Path, seed: int) -> int:
    """The seed of a trace: that of `generated:7` is 7, any other's is `seed`."""
    name, _, number = str(path).partition(":")
    if name != GENERATED or not number:
        return seed
    if not (number.isascii() and number.isdigit()) or len(number) > SEED_DIGITS_MAX:
        raise ConfigError(f"the seed in {str(path)[:60]!r} is no whole number: write generated:7")
    return int(number)


def _file(path: str | Path) -> Path:
    """The file that a path or the name of a known trace stands for."""
    file = Path(path)
    if os.path.isfile(file):  # False, not an error, for a name that is too long for any file
        return file
    if str(path) in KNOWN:
        folder = os.environ.get(FOLDER_VARIABLE)
        found = Path(folder or ".") / KNOWN[str(path)]
        if found.is_file():
            return found
        raise ConfigError(f"{found} is not here: set {FOLDER_VARIABLE} to the folder of the traces, or use 'generated'")
    if os.path.exists(file):  # it is read twice, so it cannot be a pipe
        raise ConfigError(f"{file} is no file but a {'folder' if file.is_dir() else 'device or a pipe'}: name one file")
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
        yield from bounded_lines(opened, file, LINE_BYTES_MAX)


def _is_weka(file: Path) -> bool:
    with contextlib.closing(_lines(file)) as lines:
        return WEKA_FIELD in next(lines, b"")
