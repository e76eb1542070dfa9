"""Models, hosts and tiers by name: the tables of this package, and a user's own file over them.

Theory of operation
-------------------
The tables lie beside this file as `models.json`, `hosts.json` and `tiers.json`; each entry has its `source`, and
`unsure` names the fields that nobody has confirmed. A user's file (`.json` or `.toml`) has the same lists under
`models`, `hosts` and `tiers`, any of them left out; an entry with a known name replaces ours as a whole, so that no
field of ours hides in a user's model. The fields are those of `Model`, `Host` and `Tier`, whose own checks apply.

Names are compared without case and without a remark in brackets ("DeepSeek-V3 (MLA)" is "deepseek-v3"). A name may be
cut at a hyphen where only one entry is left: "H100" is "H100-SXM". Otherwise the nearest names are suggested.

Everything is read before anything is computed: a bad file is refused as a whole, with the entry and the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvcore.errors import ConfigError
from kvcore.reports.files import read_bounded
from kvcore.reports.host import Host
from kvcore.reports.model import Model
from kvcore.reports.tier import Tier

Entry = TypeVar("Entry", Model, Host, Tier)
SECTIONS = ("models", "hosts", "tiers")
FILE_BYTES_MAX = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Parameters:
    """Everything by name, in the order of the tables. Make one with `builtin` or `read`."""

    models: Mapping[str, Model]
    hosts: Mapping[str, Host]
    tiers: Mapping[str, Tier]

    def model(self, name: str) -> Model:
        return _find(self.models, name, "model")

    def host(self, name: str) -> Host:
        return _find(self.hosts, name, "host")

    def tier(self, name: str) -> Tier:
        return _find(self.tiers, name, "tier")

    def over(self, base: Parameters) -> Parameters:
        """These entries over those of `base`."""
        return Parameters(
            _merged(base.models, self.models), _merged(base.hosts, self.hosts), _merged(base.tiers, self.tiers)
        )


def builtin() -> Parameters:
    """The tables of this package."""
    tables = {}
    for section in SECTIONS:
        text = (files(__name__) / f"{section}.json").read_text(encoding="utf-8")
        tables[section] = json.loads(text)[section]
    return _parameters(tables, "the built-in tables")


def read(path: Path | str | None) -> Parameters:
    """The built-in tables with the user's file over them; None: the tables alone."""
    if path is None:
        return builtin()
    file = Path(path)
    return _parameters(_tree(file), str(file)).over(builtin())


def _tree(file: Path) -> Mapping[str, Any]:
    try:
        text = read_bounded(file, FILE_BYTES_MAX).decode()
        tree = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the parameters in {file}: {error.strerror or error}") from error
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply for a file of parameters") from None
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, ConfigError):
            raise
        kind = "TOML" if file.suffix == ".toml" else "JSON"
        raise ConfigError(f"{file} is not {kind} (a .toml file is read as TOML, any other as JSON): {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold an object with any of the lists {', '.join(SECTIONS)}")
    return tree


def _parameters(tree: Mapping[str, Any], where: str) -> Parameters:
    for key in tree:
        if key not in (*SECTIONS, "note"):
            raise ConfigError(f"{where}: unknown section {key!r}{_nearest(key, SECTIONS)}")
    return Parameters(
        dict(_entries(tree, "models", Model, "name", where)),
        dict(_entries(tree, "hosts", Host, "gpu", where)),
        dict(_entries(tree, "tiers", Tier, "name", where)),
    )


def _entries(
    tree: Mapping[str, Any], section: str, kind: type[Entry], named: str, where: str
) -> Iterator[tuple[str, Entry]]:
    rows = tree.get(section, [])
    if not isinstance(rows, list):
        raise ConfigError(f"{where}: {section} must be a list of entries")
    seen: set[str] = set()
    for at, row in enumerate(rows):
        place = f"{where}: {section}[{at}]"
        if not isinstance(row, dict):
            raise ConfigError(f"{place} must be an object with fields")
        entry = _entry(row, kind, f"{place} ({row.get(named, 'without a ' + named)})")
        name = str(getattr(entry, named))
        if _plain(name) in seen:
            raise ConfigError(f"{place}: {name!r} is there twice")
        seen.add(_plain(name))
        yield name, entry


def _entry(row: Mapping[str, Any], kind: type[Entry], place: str) -> Entry:
    known = [field.name for field in dataclasses.fields(kind)]
    for key in row:
        if key not in known:
            raise ConfigError(f"{place}: unknown field {key!r}{_nearest(key, known)}")
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from error


def _merged(base: Mapping[str, Entry], over: Mapping[str, Entry]) -> dict[str, Entry]:
    replaced = {_plain(name) for name in over}
    return {name: entry for name, entry in base.items() if _plain(name) not in replaced} | dict(over)


def _find(entries: Mapping[str, Entry], name: str, kind: str) -> Entry:
    wanted = _plain(name)
    by_name = {_plain(known): entry for known, entry in entries.items()}
    if wanted in by_name:
        return by_name[wanted]
    begun = [entry for known, entry in by_name.items() if wanted and known.startswith(wanted + "-")]
    if len(begun) == 1:
        return begun[0]
    raise ConfigError(f"unknown {kind} {name!r}{_nearest(name, list(entries))} (--parameters adds your own)")


def _plain(name: str) -> str:
    return name.partition("(")[0].strip().casefold()


def _nearest(name: str, known: list[str] | tuple[str, ...]) -> str:
    plain = {_plain(one): one for one in known}
    near = difflib.get_close_matches(_plain(name), list(plain), n=3, cutoff=0.5)
    if near:
        return f": did you mean {' or '.join(repr(plain[one]) for one in near)}?"
    return f": known are {', '.join(known)}"
