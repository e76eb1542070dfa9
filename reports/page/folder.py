"""One folder per report: index.html, report.json, table.csv, records.jsonl and a PNG per chart.

Theory of operation
-------------------
1. `check_folder` before any work: a folder that exists is refused. `--force` takes an empty one, or one that holds a
   report (a `report.json` with our schema) and nothing beside the files that it names: nothing of anybody else's is
   ever removed. Whether there is a place to write is tried, not asked: for root every folder looks writable. The same
   is asked once more when the report is there to be moved: hours may have gone by.
2. Everything is written into a sibling folder first and moved into place at the end, so that a reader never finds half
   a report, and a failed write leaves the old one as it was. Who frees: `write` removes the sibling on every path.
3. A disk may fill up, or the place vanish, while the work is done. `keep` then writes into the temporary folder of this
   machine instead, so that hours of work are not lost for a full disk.
4. table.csv holds the report's main table, the first one; a further one is `table-NAME.csv`.

    report.json    schema, kind, title, verdict, good, inputs, provenance, notes, missing, tables, charts, files
"""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvcore.errors import ConfigError
from kvcore.reports.files import read_bounded
from kvcore.reports.page.document import Report, Table, drawn
from kvcore.reports.page.html import page
from kvcore.reports.page.png import draw

SCHEMA = 1
PREFIX_LETTERS_MAX = 40
FILE_BYTES_MAX = 256 * 2**20
JSON_NAME = "report.json"
RECORDS_NAME = "records.jsonl"
PAGE_NAME = "index.html"


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a report was written, None for nowhere, and its files. `trouble`: why not where it was asked for."""

    folder: Path | None
    files: list[str]
    trouble: str = ""


def check_folder(path: Path, force: bool) -> None:
    """ConfigError unless a report may be written there."""
    if not _is_there(path):
        _check_parent(path)
    elif not force:
        raise ConfigError(f"{path} exists: name another folder with --out, or replace the report in it with --force")
    elif not path.is_dir() or not _replaceable(path):
        raise ConfigError(f"{path} holds something that is no part of a report: --force replaces reports only")
    elif path.is_symlink() or path.is_mount() or Path.cwd().is_relative_to(path.resolve()):
        what = "a link, a mount point or the folder that you are in"
        raise ConfigError(f"{path} is {what}: it cannot be replaced, so name another folder with --out")
    else:
        _check_parent(path)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"cannot make {path}: {error.strerror or error}") from None
    return True


def _check_parent(path: Path) -> None:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        tempfile.TemporaryDirectory(dir=parent, prefix=_prefix(path)).cleanup()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot make {path}: {parent} is no folder that can be written to ({why})") from None


def _prefix(path: Path) -> str:
    """Of the sibling's name: short, because a name may have 255 bytes and the folder's may have them all."""
    return f".{path.name[:PREFIX_LETTERS_MAX]}."


def _replaceable(path: Path) -> bool:
    """Empty, or a report and nothing else."""
    there = {entry.name for entry in path.iterdir()}
    try:
        return not there or there <= set(read_report(path)["files"])
    except (ConfigError, KeyError, TypeError):
        return False


def read_report(path: Path) -> dict[str, Any]:
    """The report.json of a folder, or of the file itself."""
    file = path / JSON_NAME if path.is_dir() else path
    try:
        tree = msgspec.json.decode(read_bounded(file, FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"cannot read the report in {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no report: {error}") from error
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA or "tables" not in tree:
        raise ConfigError(f"{file} is no report of schema {SCHEMA}: was it written by `kvcore report`?")
    return tree


def keep(report: Report, path: Path, provenance: Mapping[str, Any], force: bool) -> Kept:
    """Write the whole folder, or the same somewhere else where it cannot be written any more."""
    try:
        return Kept(path, write(report, path, provenance, force))
    except ConfigError as error:
        trouble = str(error)
    except OSError as error:
        trouble = f"cannot write {path}: {error.strerror or error}"
    try:
        spare = Path(tempfile.mkdtemp(prefix="kvcore-report-"))
    except OSError as error:
        return Kept(None, [], f"{trouble}, nor into a temporary folder ({error.strerror or error})")
    try:
        return Kept(spare / report.kind, write(report, spare / report.kind, provenance), trouble)
    except OSError as error:
        shutil.rmtree(spare, ignore_errors=True)
        return Kept(None, [], f"{trouble}, nor into {spare} ({error.strerror or error})")


def write(report: Report, path: Path, provenance: Mapping[str, Any], force: bool = False) -> list[str]:
    """Write the whole folder; the names of its files.

    OSError where it cannot be written, ConfigError where it may not be: then what was there is there still.
    """
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=_prefix(path)))
    try:
        new = beside / "new"
        new.mkdir()
        files = _fill(report, new, provenance)
        check_folder(path, force)
        _replace(path, new, beside / "old")
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # whether that works or not: the report is in place, or it is not
    return files


def _replace(path: Path, new: Path, old: Path) -> None:
    """`new` takes the place of what is at `path`, if anything is; that goes to `old`, or back."""
    if not path.exists():
        new.rename(path)
        return
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise


def _fill(report: Report, folder: Path, provenance: Mapping[str, Any]) -> list[str]:
    files = [PAGE_NAME, JSON_NAME]
    for number, table in enumerate(report.tables):
        files.append(_csv(table, folder, "table.csv" if number == 0 else f"table-{table.name}.csv"))
    if report.records:
        lines = (json.dumps(record, allow_nan=False) for record in report.records)
        (folder / RECORDS_NAME).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        files.append(RECORDS_NAME)
    files += [draw(chart, folder / f"{chart.name}.png") for chart in report.charts]
    tree = to_json(report, provenance, files)
    (folder / JSON_NAME).write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / PAGE_NAME).write_text(page(report, provenance, files), encoding="utf-8")
    return files


def _csv(table: Table, folder: Path, name: str) -> str:
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in table.columns])
        writer.writerows([row[column.name] for column in table.columns] for row in table.rows)
    return name


def to_json(report: Report, provenance: Mapping[str, Any], files: list[str]) -> dict[str, Any]:
    """report.json as a value."""
    return {
        "schema": SCHEMA,
        "kind": report.kind,
        "title": report.title,
        "verdict": list(report.verdict),
        "good": report.good,
        "inputs": dict(report.inputs),
        "provenance": dict(provenance),
        "notes": list(report.notes),
        "missing": list(report.missing),
        "tables": [asdict(table) for table in report.tables],
        "charts": [drawn(chart) for chart in report.charts],
        "files": files,
    }
