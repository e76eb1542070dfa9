"""CURVE keys: who may talk to a server that listens beyond this machine.

A key pair lies in two files: `NAME.key` (public, may be shown) and `NAME.key_secret` (0600; whoever reads it is NAME),
in ZeroMQ's certificate format. `make_keys` makes both and never writes over an existing one.

A server has one pair and a directory with the public keys of the clients it serves; whoever has no key there does not
get through the handshake and never reaches the message layer. A client has its own pair and the server's public key,
so neither side can be impersonated. Traffic is encrypted. KV bytes do not travel here (shared memory has no network),
but hashes and salts do.

Who holds: the transport keeps the keys for its life; files are the operator's. ZeroMQ asks an authenticator in the same
context (`Gatekeeper`), a task on the loop; `close` of the transport ends it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from kvcore.errors import ConfigError

SECRET_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"


@dataclass(frozen=True, slots=True)
class CurveServer:
    """`clients`: the public keys that may connect."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]

    @classmethod
    def load(cls, secret_file: Path, clients: Path) -> CurveServer:
        """From the server's secret file and a directory of clients' `.key` files."""
        public, secret = _load_pair(secret_file)
        if not clients.is_dir():
            raise ConfigError(f"{clients} is no directory of client keys (*{PUBLIC_SUFFIX})")
        known = frozenset(_load_public(path) for path in sorted(clients.glob(f"*{PUBLIC_SUFFIX}")))
        if not known:
            raise ConfigError(f"{clients} holds no client key (*{PUBLIC_SUFFIX}); nobody could ever connect")
        return cls(public, secret, known)


@dataclass(frozen=True, slots=True)
class CurveClient:
    """`server`: the public key of the one server that is believed."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, secret_file: Path, server: Path) -> CurveClient:
        """From the client's secret file and the server's `.key` file."""
        public, secret = _load_pair(secret_file)
        return cls(_load_public(server), public, secret)


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """A new pair `name`; the public and the secret file. Refuses a name that exists."""
    public_file, secret_file = directory / (name + PUBLIC_SUFFIX), directory / (name + SECRET_SUFFIX)
    for path in (public_file, secret_file):
        if path.exists():
            raise ConfigError(f"{path} exists already; it is not written over")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = zmq.curve_keypair()
    _write(public_file, f'curve\n    public-key = "{public.decode()}"\n', 0o644)
    _write(secret_file, f'curve\n    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n', 0o600)
    return public_file, secret_file


def _write(path: Path, text: str, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "w") as file:
        file.write(text)


def _load_pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path} holds no secret key; give the {SECRET_SUFFIX} file")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path} can be read by others; chmod 600 it, and make new keys if others had access")
    return public, secret


def _load_public(path: Path) -> bytes:
    return _load(path)[0]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{path} is no CURVE key file; `kvcore keys DIR NAME` makes a pair") from None


class Gatekeeper:
    """Answers ZeroMQ's question who may connect, for every socket of one context. Made on the running loop."""

    def __init__(self, context: zmq.Context[Any], clients: frozenset[bytes]) -> None:
        self._clients = clients
        self.refused = 0
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback("*", self)
        self._authenticator.start()

    def callback(self, _domain: str, key: bytes) -> bool:
        """May the holder of this public key connect? Called by the authenticator."""
        known = key in self._clients
        self.refused += not known
        return known

    def close(self) -> None:
        self._authenticator.stop()
