"""A peer in another interpreter, as if it were here.

Who holds, announces, frees: `remote_peer` starts the child, which serves until its stdin closes; leaving the block
closes it and waits. A child that ends early is a `ConfigError` with the last line it has written.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvcore.errors import ConfigError, PeerError
from kvcore.ladder.conformance.peer import PrefixRule

CHILD = Path(__file__).with_name("child.py")
PATIENCE_S = 60.0


class Raised(PeerError):
    """The peer raised something there; `kind` is the name of its class."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class _Line:
    """Ask, and wait for the reply."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log

    def reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = [line for line in self._log.read().splitlines() if line.strip()]
            raise ConfigError(f"the peer has ended: {said[-1].strip() if said else 'it said nothing'}")
        return json.loads(line)

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # the reply says more
        reply = self.reply()
        if "raised" in reply:
            raise Raised(reply["raised"])
        return reply["said"]


class _RemoteCache:
    """Every call of `PeerCache` is one line there."""

    def __init__(self, line: _Line, room: int, real: bool) -> None:
        self._line = line
        line.ask("open", room, real)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._line.ask("call", name, *arguments)


class _RemotePrefixRule:
    def __init__(self, line: _Line) -> None:
        self._line = line

    def fold(self, lookup: Mapping[str, Any]) -> Sequence[int]:
        lengths: Sequence[int] = self._line.ask("prefix", "fold", lookup)
        return lengths

    def unfold(self, lookup: Mapping[str, Any], length: int) -> Sequence[Sequence[int]]:
        rows: Sequence[Sequence[int]] = self._line.ask("prefix", "unfold", lookup, length)
        return rows


class RemotePeer:
    """See `kvcore.ladder.conformance.peer.Peer`."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        about = line.ask("about")
        self.name: str = about["name"]
        self.means: Mapping[str, Mapping[str, Sequence[str]]] = about["means"]
        self.prefix: PrefixRule | None = _RemotePrefixRule(line) if about["prefix"] else None
        if about["real"]:
            self.real_cache = lambda room: _RemoteCache(line, room, True)

    def cache(self, room: int) -> Any:
        return _RemoteCache(self._line, room, False)


@contextmanager
def remote_peer(python: str, spec: str) -> Iterator[RemotePeer]:
    """The peer that `spec` names, in the interpreter `python`."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                [python, "-P", str(CHILD), spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        except OSError as error:
            raise ConfigError(f"cannot start {python}: {error.strerror or error}") from error
        with process:
            try:
                line = _Line(process, log)
                line.reply()
                yield _about(line, spec)
            finally:
                _end(process)


def _about(line: _Line, spec: str) -> RemotePeer:
    try:
        return RemotePeer(line)
    except Raised as error:
        raise ConfigError(f"{spec} gave no peer: asked for name, means and prefix it raised {error.kind}") from None


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
        process.wait(PATIENCE_S)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        process.kill()
