"""What processes use and what they leave behind, as the kernel tells it (/proc, /dev/shm): descriptors, threads,
segments, processes. And what a server at rest may not hold any more.

Only what this storm has made is looked at: other servers of the same machine are nobody's business here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHM = "/dev/shm/"  # nosec B108


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process. `descriptors`: how many of each kind."""

    descriptors: dict[str, int]
    threads: int

    @property
    def files(self) -> int:
        return sum(self.descriptors.values())

    def growth_since(self, before: Usage, threads_more: int = 0) -> str:
        """Empty: nothing has grown, but for so many threads that may still be started."""
        more = Counter(self.descriptors) - Counter(before.descriptors)
        texts = [f"{count} more {kind}" for kind, count in sorted(more.items())] if self.files > before.files else []
        if self.threads > before.threads + threads_more:
            texts.append(f"{self.threads - before.threads} more threads")
        return ", ".join(texts)


def usage_of(pid: int) -> Usage:
    """Raises `OSError` when the process has gone."""
    kinds: Counter[str] = Counter()
    directory = Path(f"/proc/{pid}/fd")
    for entry in os.listdir(directory):
        with suppress(FileNotFoundError):
            kinds[_kind(os.readlink(directory / entry))] += 1
    return Usage(dict(kinds), len(os.listdir(f"/proc/{pid}/task")))


def _kind(target: str) -> str:
    """A pidfd, a socket, an eventfd...; other files by their names."""
    head, separator, _ = target.partition(":[")
    return head if separator else target


def segment_of(pid: int) -> str:
    """The segment that a server has made; empty if none is mapped."""
    with open(f"/proc/{pid}/maps") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if f" {_SHM}kvcore-" in line}
    return Path(min(paths)).name.split()[0] if paths else ""


def segments_left(names: Iterable[str]) -> list[str]:
    return [name for name in names if name and os.path.exists(_SHM + name)]


def processes_left(pids: Iterable[int], directory: Path) -> list[str]:
    """Of these processes, and of any whose command line names our directory: those that still run."""
    left = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            command = _command_of(int(entry))
            if (int(entry) in set(pids) and _parent_of(int(entry)) == os.getpid()) or str(directory) in command:
                left.append(f"{entry} ({command[:80]})")
    return left


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _parent_of(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def unrest(state: dict[str, Any], workers: int) -> str:
    """What a server of a calm engine with so many workers still holds beyond `Fleet.settle`; empty if nothing."""
    server, l1 = state["server"], state["storage"]["l1"] if state["storage"] else {}
    if server is None:
        return ""
    left = {name: l1[name] for name in ("bytes_draining", "bytes_staging", "quarantined_bytes")}
    left["sessions"] = server["sessions"]
    left["workers that are not ours"] = max(0, server["workers"] - workers)
    return ", ".join(f"{name} {count}" for name, count in left.items() if count)
