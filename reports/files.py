"""Files that people name: read whole, but never more of them than there can be any use for.

A size is not asked for but found out by reading: a device (`/dev/zero`) or a pipe (`<(...)`) has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

from kvcore.errors import ConfigError


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """All of a file. OSError where it cannot be read, ConfigError where it is too large."""
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ConfigError(f"{path} is larger than {bytes_max >> 20} MiB: is it the right file?")
    return data


def bounded_lines(file: BufferedIOBase, path: Path, bytes_max: int) -> Iterator[bytes]:
    """The lines of a file; ConfigError at one that is too long (compressed zeros are one line, and endless)."""
    for number, line in enumerate(iter(lambda: file.readline(bytes_max + 1), b""), 1):
        if len(line) > bytes_max:
            raise ConfigError(f"{path}, line {number} is longer than {bytes_max >> 20} MiB: is it the right file?")
        yield line
