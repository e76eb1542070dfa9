"""Proof that another process has died: the only thing that ends a worker's holds when it does not do so itself.

Theory of operation
-------------------
A worker names its process when it registers: `pid:start:namespace`. A pid alone proves nothing - it is used again, and
in another container it means somebody else - so the server takes it only if

1. the pid namespace is its own (`/proc/self/ns/pid`), and
2. a process with that pid exists and was started at that very tick (`/proc/PID/stat`), seen *after* a pidfd on it was
   opened: the pidfd then stands for that process and no other, for ever.

The pidfd becomes readable when the process has ended, which the loop notices. Whoever cannot be named like this
(another container, another system) is never proven dead; its memory stays quarantined until it says so itself.

Who holds: `DeathWatch` the descriptors. Who announces: the loop, by the callback, once. Who frees: the announcement,
`forget`, or `close`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

_START_FIELD = 19  # of /proc/PID/stat behind the command's closing parenthesis: field 22 of proc(5)


def this_process() -> str:
    """The name of this process for `DeathWatch`; empty where processes cannot be named."""
    try:
        pid = os.getpid()
        return f"{pid}:{_start_ticks(pid)}:{_namespace()}"
    except (OSError, ValueError, IndexError):
        return ""


class DeathWatch:
    """See the module text. On the loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fds: dict[str, int] = {}  # by key of the watch

    def watch(self, key: str, process: str, died: Callable[[], object]) -> bool:
        """Call `died` when `process` has ended (at the next turn if it has already). False: its death cannot be proven.

        A second watch under the same key replaces the first.
        """
        self.forget(key)
        fd = _open(process)
        if fd is None:
            return False
        self._fds[key] = fd
        self._loop.add_reader(fd, self._ended, key, died)
        return True

    def forget(self, key: str) -> None:
        fd = self._fds.pop(key, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for key in list(self._fds):
            self.forget(key)

    def __len__(self) -> int:
        return len(self._fds)

    def _ended(self, key: str, died: Callable[[], object]) -> None:
        self.forget(key)
        died()


def _open(process: str) -> int | None:
    """A pidfd that certainly stands for `process`."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        pid_text, start, namespace = process.split(":")
        pid = int(pid_text)
        if namespace != _namespace():
            return None
        fd = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return None
    with suppress(OSError, ValueError, IndexError):
        if str(_start_ticks(pid)) == start:
            return fd
    os.close(fd)
    return None


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid").replace(":", "")


def _start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[_START_FIELD])
