"""Where a configuration comes from: a flag, else a `KVCORE_*` variable, else the TOML file, else the default.

Theory of operation
-------------------
A configuration is a frozen dataclass whose fields are plain values or further such structs (*sections*, one per
component); a field with `internal` in its metadata is set by code only. Every other plain field has a path,
`storage.lease_ns`, and with it

    a TOML key         lease_ns in [storage]
    a variable         KVCORE_STORAGE_LEASE_NS
    a flag             what the command line calls it; it hands over a mapping from paths

1. All four sources are read into one table path -> (value, origin), the weakest first.
2. A key, table or variable that no field has is an error that names the nearest one, and so is a value of another kind.
   Nothing has been started then. One exception: of a Kubernetes service that is called "kvcore" or "kvcore-...", every
   pod beside it is told in variables that begin with our prefix; nobody has set those.
3. The struct is built from the table; its own checks (`__post_init__`) have the last word.

`render` prints the whole configuration as TOML that can be read back, each line with its origin. URLs lose their
passwords on the way, so what is printed can be shown to others.

Who holds: a `Loaded` is a value; nobody frees it. Rejected: one environment variable with JSON inside (cannot be set by
hand without a mistake); ignoring unknown keys (a misspelt limit is then no limit).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from kvcore.config import values
from kvcore.errors import ConfigError

T = TypeVar("T")

PREFIX = "KVCORE_"
ENVIRONMENT_OF_TESTS = frozenset(
    {
        "KVCORE_DOMINANCE",
        "KVCORE_KILL_CYCLES",
        "KVCORE_LADDER_FINGERPRINT",
        "KVCORE_PEERS_PYTHON",
        "KVCORE_REPEATS",
        "KVCORE_TEST_BACKEND",
        "KVCORE_TEST_KERNELS",
        "KVCORE_TEST_SANITIZER",
        "KVCORE_TRACES",
    }
)
"""Variables that are ours and configure no component."""
_SERVICE_ADDRESS = re.compile(
    r"\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Field:
    """One plain value of a configuration."""

    path: str
    kind: Any  # the annotation, without None
    optional: bool

    @property
    def variable(self) -> str:
        return PREFIX + self.path.replace(".", "_").upper()

    def parse(self, text: str) -> Any:
        """The value that `text` means, by the field's type and the unit in its name."""
        if self.optional and text.strip().lower() in ("", "none"):
            return None
        if self.kind is bool:
            return values.parse_flag(text)
        if self.kind is int:
            if self.path.endswith("_bytes"):
                return values.parse_size(text)
            return values.parse_duration_ns(text) if self.path.endswith("_ns") else values.parse_whole(text)
        return values.parse_list(text) if self.is_list else text

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    def accept(self, value: Any) -> Any:
        """A value that has a type of its own (from TOML or from code)."""
        if self.is_list and isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
            return tuple(value)
        if self.kind is int and isinstance(value, str):
            return self.parse(value)
        wanted = str if self.is_list else self.kind
        if (value is None and self.optional) or (type(value) is wanted and not self.is_list):
            return value
        raise ConfigError(f"{value!r} is no {'list of texts' if self.is_list else wanted.__name__}")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A configuration and, per path, where its value came from."""

    value: T
    origins: Mapping[str, str]

    def render(self) -> str:
        """TOML that reads back as the same configuration, but for secrets."""
        lines: list[str] = []
        _render(self.value, "", self.origins, lines)
        return "\n".join(lines) + "\n"


def fields_of(kind: type[Any], prefix: str = "") -> Iterator[Field]:
    """All plain fields of a configuration struct, sections included."""
    hints = get_type_hints(kind)
    for name in _names(kind):
        annotation, optional = _without_none(hints[name])
        if _is_struct(annotation):
            yield from fields_of(annotation, f"{prefix}{name}.")
        else:
            yield Field(prefix + name, annotation, optional)


def load(
    kind: type[T],
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Loaded[T]:
    """Read all sources. Raises `ConfigError` with one line that says what is wrong and where."""
    fields = {field.path: field for field in fields_of(kind)}
    given: dict[str, tuple[Any, str]] = {}
    if file is not None:
        _take_file(file, fields, given)
    _take_environment(environ or {}, fields, given)
    for path, value in (flags or {}).items():
        given[path] = (_checked(path, fields[path], value, "the command line"), "flag")
    return Loaded(_build(kind, "", given), {path: origin for path, (_, origin) in given.items()})


# -- the sources


def _take_file(file: Path, fields: Mapping[str, Field], given: dict[str, tuple[Any, str]]) -> None:
    try:
        tree = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    for path, value in _leaves(tree, "", fields):
        given[path] = (_checked(path, _known(path, fields, str(file)), value, str(file)), str(file))


def _leaves(tree: Mapping[str, Any], prefix: str, fields: Mapping[str, Field]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and prefix + name not in fields:
            yield from _leaves(value, f"{prefix}{name}.", fields)
        else:
            yield prefix + name, value


def _take_environment(
    environ: Mapping[str, str], fields: Mapping[str, Field], given: dict[str, tuple[Any, str]]
) -> None:
    by_variable = {field.variable: field for field in fields.values()}
    for variable, text in sorted(environ.items()):
        if variable.startswith(PREFIX) and variable not in ENVIRONMENT_OF_TESTS and not _of_a_service(variable, text):
            field = _known(variable, by_variable, "the environment")
            given[field.path] = (_parsed(variable, field, text), variable)


def _of_a_service(variable: str, text: str) -> bool:
    """Kubernetes has set it. NAME_PORT alone could be a setting that is misspelt, but for what it says."""
    said = variable.endswith("_PORT") and "://" in text
    return said or _SERVICE_ADDRESS.fullmatch(variable) is not None


def _known(name: str, known: Mapping[str, Field], where: str) -> Field:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ConfigError(f"{where}: unknown setting {name}; the nearest one is {near[0]}")


def _parsed(name: str, field: Field, text: str) -> Any:
    try:
        return field.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _checked(path: str, field: Field, value: Any, where: str) -> Any:
    try:
        return field.accept(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {path}: {error}") from None


# -- structs


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct))


def _names(kind: type[Any]) -> list[str]:
    """The fields that a person may set."""
    if issubclass(kind, msgspec.Struct):
        return [info.name for info in msgspec.structs.fields(kind)]
    return [item.name for item in dataclasses.fields(kind) if not item.metadata.get("internal")]


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False


def _build(kind: type[T], prefix: str, given: Mapping[str, tuple[Any, str]]) -> T:
    hints = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name in _names(kind):
        annotation, _ = _without_none(hints[name])
        if _is_struct(annotation):
            arguments[name] = _build(annotation, f"{prefix}{name}.", given)
        elif prefix + name in given:
            arguments[name] = given[prefix + name][0]
    return kind(**arguments)


# -- printing


def _render(value: Any, prefix: str, origins: Mapping[str, str], lines: list[str]) -> None:
    plain = [name for name in _names(type(value)) if not _is_struct(type(getattr(value, name)))]
    if prefix:
        lines += ["", f"[{prefix[:-1]}]"]
    for name in plain:
        path = prefix + name
        text = _toml(getattr(value, name))
        lines.append(f"{'# ' if text is None else ''}{name} = {text or 'none'}  # {origins.get(path, 'default')}")
    for name in _names(type(value)):
        if name not in plain:
            _render(getattr(value, name), f"{prefix}{name}.", origins, lines)


def _toml(value: Any) -> str | None:
    """None: TOML has no way to write it, so the line becomes a comment."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(part) or "" for part in value) + "]"
    return json.dumps(values.redact_url(value)) if isinstance(value, str) else str(value)
