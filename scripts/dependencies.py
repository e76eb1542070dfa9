"""The page about dependencies, held against pyproject.toml and against what is installed here.

    python scripts/dependencies.py            what does not agree; exit status 1 if anything does not
    python scripts/dependencies.py --write    the table of licences in docs/dependencies.md, anew
    python scripts/dependencies.py --lowest core sim serve    the oldest versions that these extras allow, for pip

A requirement is what pyproject.toml asks for, with its extra and its bound: each needs one row of the page, and each
row one requirement. A licence is read from the metadata of a distribution: its licence expression, else its classifier,
else the first line of what it says. What is not installed keeps the licence that the page gives it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dependencies.md"
FROM, TO = "<!-- licences -->", "<!-- /licences -->"
CORE = "core"
HEADING = "| distribution | imported as |"
# They bring what belongs to an engine's installation; what they need is their business.
LEAVES = {"torch", "vllm", "nixl-cu12"}
# Nothing of ours may need a licence that asks more of its user than these do. `dev` may use what it likes.
FREE = re.compile(r"Apache|MIT|BSD|ISC|PSF|Python Software Foundation|Zlib|MPL|Mozilla|CC0|0BSD|BSL-1\.0")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the page: a distribution, its extras and its bound."""

    name: str
    extras: tuple[str, ...]
    bound: str


# --- pyproject.toml and the page -----------------------------------------------------------------------------------


def requirements_of(pyproject: str) -> dict[str, Row]:
    """What pyproject.toml asks for. One distribution has one bound in all its extras."""
    project = tomllib.loads(pyproject)["project"]
    asked = {CORE: project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, Row] = {}
    for extra, texts in asked.items():
        for wanted in map(Requirement, texts):
            name, bound = canonicalize_name(wanted.name), str(wanted.specifier)
            if name == project["name"]:
                continue
            before = found.get(name, Row(name, (), bound))
            if before.bound != bound:
                raise SystemExit(f"{name} is asked for as {before.bound} and as {bound}")
            found[name] = Row(name, (*before.extras, extra), bound)
    return found


def rows_of(page: str) -> dict[str, Row]:
    """The rows of the page's first table."""
    table = page[page.index(HEADING) :].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    rows = [Row(canonicalize_name(row[0].strip("`")), tuple(row[2].split(", ")), row[3].strip("`")) for row in cells]
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        raise SystemExit(f"two rows for {sorted({name for name in names if names.count(name) > 1})}")
    return {row.name: row for row in rows}


def disagreements(pyproject: str, page: str) -> list[str]:
    """What the page and pyproject.toml say differently, each in a line."""
    wanted, described = requirements_of(pyproject), rows_of(page)
    found = [f"{name} has no row in docs/dependencies.md" for name in sorted(wanted.keys() - described.keys())]
    found += [f"{name} has a row and is not asked for" for name in sorted(described.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & described.keys()):
        ours, theirs = wanted[name], described[name]
        if sorted(ours.extras) != sorted(theirs.extras):
            found.append(f"{name}: extras {', '.join(ours.extras)}; the page says {', '.join(theirs.extras)}")
        if ours.bound != theirs.bound:
            found.append(f"{name}: bound {ours.bound}; the page says {theirs.bound}")
    return found


def lowest(wanted: dict[str, Row], extras: Iterable[str]) -> list[str]:
    """The lower bounds of what these extras ask for, as exact versions."""
    chosen = [row for row in wanted.values() if set(row.extras) & set(extras)]
    assert all(row.bound.startswith(">=") for row in chosen), "every requirement has a lower bound and nothing else"
    return [f"{row.name}=={row.bound.removeprefix('>=')}" for row in chosen]


# --- licences ------------------------------------------------------------------------------------------------------


def licence_of(metadata: Mapping[str, str], classifiers: Iterable[str]) -> str:
    """The licence that a distribution's metadata names; empty if it names none."""
    if expression := metadata.get("License-Expression"):
        return expression
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License :: ")]
    if named:
        return ", ".join(named)
    first: str = (metadata.get("License") or "").strip().partition("\n")[0]
    return first


def closure(name: str, found: dict[str, Distribution]) -> None:
    """Add what is installed of `name` and of all it needs."""
    waiting = [name]
    while waiting:
        name = canonicalize_name(waiting.pop())
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        if name in found:
            continue
        found[name] = installed
        if name not in LEAVES:
            wanted = map(Requirement, installed.requires or ())
            waiting += [item.name for item in wanted if item.marker is None or item.marker.evaluate({"extra": ""})]


def licences(wanted: dict[str, Row]) -> dict[str, tuple[str, list[str]]]:
    """Every installed distribution that the requirements bring: its licence, and the extras that bring it."""
    brought: dict[str, set[str]] = {}
    installed: dict[str, Distribution] = {}
    for row in wanted.values():
        found: dict[str, Distribution] = {}
        closure(row.name, found)
        installed |= found
        for name in found:
            brought.setdefault(name, set()).update(row.extras)
    return {name: (_licence(installed[name]), sorted(extras)) for name, extras in sorted(brought.items())}


def _licence(installed: Distribution) -> str:
    metadata = installed.metadata
    plain = {key: metadata[key] for key in ("License-Expression", "License") if key in metadata}
    return licence_of(plain, metadata.get_all("Classifier") or ())


def not_free(found: dict[str, tuple[str, list[str]]]) -> list[str]:
    """What an installation that serves would bring under a licence that asks for more, or under none."""
    serving = {name: row for name, row in found.items() if set(row[1]) - {"dev", "servers"}}
    return [f"{name}: licence {row[0] or 'not named'}" for name, row in serving.items() if not FREE.search(row[0])]


def written(page: str) -> dict[str, tuple[str, list[str]]]:
    """The table of licences that the page has."""
    lines = page[page.index(FROM) : page.index(TO)].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): (row[1], row[2].split(", ")) for row in cells}


def with_licences(page: str, found: dict[str, tuple[str, list[str]]]) -> str:
    """The page with this table; rows of what is not installed here stay."""
    merged = {**written(page), **found}
    lines = ["| distribution | licence | brought by |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {licence} | {', '.join(extras)} |" for name, (licence, extras) in sorted(merged.items())]
    return page[: page.index(FROM)] + "\n".join([FROM, *lines, ""]) + page[page.index(TO) :]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dependencies", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table of licences")
    parser.add_argument("--lowest", nargs="+", metavar="EXTRA", help="print the oldest versions that these allow")
    arguments = parser.parse_args(argv)
    pyproject, page = (ROOT / "pyproject.toml").read_text(), PAGE.read_text()
    wanted = requirements_of(pyproject)
    if arguments.lowest:
        print(*lowest(wanted, arguments.lowest))
        return 0
    found = licences(wanted)
    if arguments.write:
        page = with_licences(page, found)
        PAGE.write_text(page)
    unlisted = [f"{name} has no licence in docs/dependencies.md" for name in found.keys() - written(page).keys()]
    problems = [*disagreements(pyproject, page), *not_free(found), *sorted(unlisted)]
    print(*problems, f"{len(found)} distributions looked at, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
