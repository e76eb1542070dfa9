"""`Child`: a process of our own, started, watched for its first line, and always ended by its own process id.

The one way in which benchmarks, the ladder and tests start processes; `ServerChild` is a `kvcore serve`. A child says
`ready` (and more, if it likes) on its standard output when it can be used; what it says on standard error goes to a
file, of which the last lines are shown when it fails.

Who holds: whoever started it. Who announces: the first line. Who frees: `stop` or `kill`, both may be called twice.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from kvcore.errors import ConfigError, InternalError

# Only what hangs takes so long: on a machine that does nothing else a start takes a second or two, an end less.
STARTS_IN_S = 180.0
ENDS_IN_S = 60.0
_TAIL_CHARS = 2000
_TERM = signal.SIGTERM
_HTTP = "health and metrics on "
_LISTENING = "listening on "


class Child:
    """`python -m module arguments...`, with its standard error in `log`."""

    def __init__(self, log: Path, module: str, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**clean, **(environ or {})},
            )
        self._text = b""

    @property
    def text(self) -> str:
        """What it has said on standard error so far."""
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def line_with(self, text: str, timeout_s: float = STARTS_IN_S) -> str:
        """The first line that contains `text`. Raises `ConfigError` with the child's last words if none comes."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while True:
            *lines, self._text = self._text.split(b"\n")
            found = next((line for line in lines if text.encode() in line), None)
            if found is not None:
                self._text = b"\n".join([*lines[lines.index(found) + 1 :], self._text])
                return found.decode()
            ready, _, _ = select.select([fd], [], [], timeout_s)
            more = os.read(fd, 1 << 16) if ready else b""
            if not more:
                raise ConfigError(f"a process did not start ({self._process.args!r}): {self.last_words()}")
            self._text += more

    def last_words(self) -> str:
        return self.text[-_TAIL_CHARS:].strip() or "it said nothing"

    def signal(self, number: int) -> None:
        """To a child that may have ended by itself."""
        if self.alive:
            self._process.send_signal(number)

    def stop(self, timeout_s: float = ENDS_IN_S, number: int = _TERM) -> int:
        """Tell it to end, wait; its exit status. `InternalError` when it does not end, after killing it."""
        self.signal(number)
        return self.ended(timeout_s)

    def ended(self, timeout_s: float) -> int:
        """Wait for the end of a child that was told; as `stop`. Not told twice: its handler may be gone by then."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise InternalError(f"process {self.pid} did not end in {timeout_s:g} s: {self.last_words()}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class ServerChild(Child):
    """`kvcore serve` with these arguments. `address` and `http` are empty until `started` has returned."""

    def __init__(self, log: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(log, "kvcore.cli", "serve", *arguments, environ=environ)
        self.address = ""
        self.http = ""

    def started(self) -> Self:
        """Wait until it listens. Raises `ConfigError` with its last words when it does not."""
        line = self.line_with(" on ")
        if _HTTP in line:
            self.http = line.partition(_HTTP)[2].split()[0]
            line = self.line_with(_LISTENING)
        self.address = line.partition(_LISTENING)[2].split()[0]
        return self


def stop_all(children: Sequence[Child], timeout_s: float) -> list[int]:
    """All at once, so that one slow child does not keep the others; their exit statuses."""
    for child in children:
        child.signal(signal.SIGTERM)
    return [child.ended(timeout_s) for child in children]
