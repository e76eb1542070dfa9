"""Which schemes there are, and how each family of stores is made from the parts of a URL. One table, `SCHEMES`.

A family is a module with a frozen options struct and `open_backend(options)`, which does no I/O. It is imported when a
URL names it, so that nobody needs a client library of a store that he does not use; the module imports its
client when the backend opens, and a missing one is a ConfigError that names the extra to install.

What stands before the `?` fills the *address* fields of the struct; every other field is an option of the URL, by its
name or, for sizes, without `_bytes`. Values are read as everywhere in the configuration: the unit is in the name.

Nothing is held here and nothing is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import SplitResult, unquote

from kvcore.config.sources import Field, fields_of
from kvcore.errors import ConfigError
from kvcore.l2.file import FileBackend
from kvcore.l2.memory import MemoryBackend
from kvcore.l2.wrapped_backend import AnyBackend
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.files import OsFiles

_TOKEN_BYTES = 8

Address = Callable[[SplitResult], Mapping[str, Any]]
"""From the part before the `?` to the struct's fields. ConfigError: it makes no sense for this store."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """`memory:` has none of its own."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """A directory of this process alone; `fsync`: flush each record to the disk before it counts as stored."""

    directory: str
    fsync: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """`guarded`: a deadline and a breaker stand around it unless its URL says otherwise."""

    module: str
    options: str
    address: Address
    guarded: bool = False

    def options_type(self) -> type[Any]:
        found: type[Any] = getattr(import_module(self.module), self.options)
        return found

    def open_backend(self, options: Any) -> AnyBackend:
        """The backend, not yet opened."""
        made: AnyBackend = import_module(self.module).open_backend(options)
        return made


def open_backend(options: MemoryOptions | FileOptions) -> AnyBackend:
    """The two families that live here: see `Scheme.open_backend`."""
    if isinstance(options, MemoryOptions):
        return MemoryBackend()
    files = OsFiles(options.directory, fsync=options.fsync)
    return FileBackend(files, SystemClock().token(_TOKEN_BYTES), f"the directory {options.directory}")


def option_fields(scheme: Scheme, address: Mapping[str, Any]) -> dict[str, Field]:
    """What may stand behind the `?` for this store alone, by the name that is written there."""
    fields = {field.path: field for field in fields_of(scheme.options_type()) if field.path not in address}
    return {path.removesuffix("_bytes"): field for path, field in fields.items()}


def parse_option(name: str, field: Field, text: str) -> Any:
    """One value. ConfigError says which option it belongs to."""
    try:
        return _parse_number(text) if field.kind is float else field.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text[:40]!r} is not a number") from None


def build_options(scheme: Scheme, address: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """The family's struct. ConfigError: it refuses the values itself."""
    return scheme.options_type()(**address, **given)


# -- the part before the question mark


def _no_address(parts: SplitResult) -> Mapping[str, Any]:
    if parts.netloc or parts.path or parts.fragment:
        raise ConfigError("a memory store has no host and no path; write memory: or memory:?capacity=1GiB")
    return {}


def _directory(parts: SplitResult) -> Mapping[str, Any]:
    return {"directory": _absolute(parts)}


def _socket(parts: SplitResult) -> Mapping[str, Any]:
    return {"path": _absolute(parts)}


def _absolute(parts: SplitResult) -> str:
    """The path of a store on this machine's file systems."""
    scheme = parts.scheme
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.fragment:
        raise ConfigError(f"a {scheme} store is named by an absolute path with three slashes: {scheme}:///var/cache/kv")
    path = unquote(parts.path)
    if path.strip("/") == "" or "\0" in path:
        raise ConfigError(f"a {scheme} store needs a directory of its own: {scheme}:///var/cache/kv")
    return path


def _redis(parts: SplitResult) -> Mapping[str, Any]:
    scheme = parts.scheme
    if parts.fragment:
        raise ConfigError(f"a {scheme} store is written {scheme}://:password@host:6379/0")
    found: dict[str, Any] = {"host": parts.hostname or "127.0.0.1", "port": parts.port or 6379}
    found |= {"tls": scheme in ("rediss", "valkeys"), "db": _database(parts)}
    return found | _user_of(parts, "username", "password")


def _redis_socket(parts: SplitResult) -> Mapping[str, Any]:
    return {"unix_path": _absolute(parts._replace(netloc=parts.netloc.rpartition("@")[2]))} | _user_of(
        parts, "username", "password"
    )


def _database(parts: SplitResult) -> int:
    text = parts.path.strip("/")
    if text and not text.isdecimal():
        raise ConfigError(f"the path of a {parts.scheme} store is the number of its database: {parts.scheme}://host/0")
    return int(text or "0")


def _user_of(parts: SplitResult, user: str, password: str) -> dict[str, Any]:
    """What stands before the @; left out where there is nothing, so that the environment or an option may say it."""
    found = {user: parts.username, password: parts.password}
    return {name: unquote(text) for name, text in found.items() if text}


def _bucket(parts: SplitResult) -> Mapping[str, Any]:
    bucket = parts.netloc.rpartition("@")[2]
    if not bucket or parts.fragment:
        raise ConfigError(f"a {parts.scheme} store is written {parts.scheme}://bucket/prefix")
    found = {"kind": parts.scheme, "bucket": bucket, "prefix": unquote(parts.path.strip("/"))}
    return found | _user_of(parts, "access_key_id", "secret_access_key")


def _objects_in_directory(parts: SplitResult) -> Mapping[str, Any]:
    return {"kind": "file", "bucket": _absolute(parts)}


def _objects_in_memory(parts: SplitResult) -> Mapping[str, Any]:
    if parts.netloc or parts.path.strip("/") or parts.fragment:
        raise ConfigError("an object store in memory has no host and no path: objectstore+memory:")
    return {"kind": "memory"}


def _mooncake(parts: SplitResult) -> Mapping[str, Any]:
    if not parts.hostname or parts.username or parts.path.strip("/") or parts.fragment:
        raise ConfigError("a Mooncake store is written mooncake://master:50051")
    return {"master": parts.netloc if parts.port else f"{parts.netloc.rstrip(':')}:{_MOONCAKE_PORT}"}


_MOONCAKE_PORT = 50051
_REDIS = Scheme("kvcore.l2.redis", "RedisOptions", _redis, guarded=True)
_BUCKET = Scheme("kvcore.l2.objectstore", "ObjectStoreOptions", _bucket, guarded=True)

SCHEMES: dict[str, Scheme] = {
    "memory": Scheme(__name__, "MemoryOptions", _no_address),
    "file": Scheme(__name__, "FileOptions", _directory),
    "slab": Scheme("kvcore.l2.slab", "SlabOptions", _directory),
    "fs": Scheme("kvcore.l2.fs", "FsOptions", _directory, guarded=True),
    "redis": _REDIS,
    "rediss": _REDIS,
    "valkey": _REDIS,
    "valkeys": _REDIS,
    "redis+unix": Scheme("kvcore.l2.redis", "RedisOptions", _redis_socket, guarded=True),
    "s3": _BUCKET,
    "gs": _BUCKET,
    "az": _BUCKET,
    "objectstore+file": Scheme("kvcore.l2.objectstore", "ObjectStoreOptions", _objects_in_directory, guarded=True),
    "nixl+ucx": Scheme("kvcore.l2.nixl_ucx", "UcxOptions", _socket, guarded=True),
    "nixl+posix": Scheme("kvcore.l2.nixl", "NixlOptions", _directory, guarded=True),
    "mooncake": Scheme("kvcore.l2.mooncake", "MooncakeOptions", _mooncake, guarded=True),
    "objectstore+memory": Scheme("kvcore.l2.objectstore", "ObjectStoreOptions", _objects_in_memory),
}
