"""A case in one line of text, for a command line, an issue or a commit message; and finding the case a user means.

    kvcase1.<base64url of zlib of JSON>

The digit is the version of this encoding; the case inside carries its own schema. JSON is written with sorted keys, so
equal cases give equal lines.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError
from kvcore.ladder.swarm.case import SCHEMA, Case

PREFIX = "kvcase1."
CASE_FILE = "case.json"
MINIMISED_FILE = "minimised.json"
_ANY_LINE = re.compile(r"kvcase\d+\.")
_JSON_BYTES_MAX = 1 << 24


class CannotJudge(Exception):
    """This revision cannot run the case; the argument says why."""


class _Version(msgspec.Struct):
    schema: int


def to_line(case: Case) -> str:
    """The case as one word without spaces or quotes."""
    packed = zlib.compress(msgspec.json.encode(case, order="deterministic"), 9)
    return PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def from_line(line: str) -> Case:
    """The inverse of `to_line`; raises as `case_from`."""
    word = line.strip()
    if not word.startswith(PREFIX):
        raise CannotJudge(f"a case in one line begins with {PREFIX!r} here; {word[:8]!r} is of another revision")
    data = word[len(PREFIX) :]
    try:
        packed = base64.b64decode(data + "=" * (-len(data) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, _JSON_BYTES_MAX)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ConfigError(f"the line is damaged ({error}); was it copied as a whole?") from None
    if not unpacker.eof:
        raise ConfigError("the line is damaged (it ends too soon); was it copied as a whole?")
    return case_from(text)


def case_from(text: bytes) -> Case:
    """A case from its JSON. `ConfigError`: this is none. `CannotJudge`: it is one of another revision, with another
    schema or with fields that this one does not know."""
    try:
        schema = msgspec.json.decode(text, type=_Version).schema
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"not a case: {error}") from None
    if schema != SCHEMA:
        raise CannotJudge(f"the case has schema {schema}, this revision reads schema {SCHEMA}")
    try:
        return Case.from_json(text)
    except ConfigError as error:
        raise CannotJudge(f"the case is of another revision: {error}") from None


def find_case(given: str, prefer_minimised: bool = False) -> Case:
    """The case that a user names: a line, a file, or the directory of a failure. Raises as `case_from`."""
    if _ANY_LINE.match(given.strip()):  # a file of such a name can be given as ./NAME
        return from_line(given)
    return case_from(_read(_file_of(Path(given), prefer_minimised)))


def _file_of(path: Path, prefer_minimised: bool) -> Path:
    if not path.is_dir():
        return path
    minimised = path / MINIMISED_FILE
    return minimised if prefer_minimised and minimised.is_file() else path / CASE_FILE


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot read a case from {path}: {reason}; give a case.json, its directory, or a line"
        ) from None


def command_for(case: Case) -> str:
    """What reproduces the case from a clean checkout: its seed where that says everything, else the whole case."""
    from kvcore.ladder.swarm.draw import draw_case  # pulls in the whole catalogue of faults

    planted = f" --mutant {case.mutant}" if case.mutant else ""
    for transfer in ("", case.config.transfer):
        if case == draw_case(case.seed, mutant=case.mutant, transfer=transfer):
            copies = f" --transfer {transfer}" if transfer else ""
            return f"kvcore sim run --seed {case.seed}{copies}{planted}"
    return f"kvcore sim replay {to_line(case)}"
