"""`make release-check`: would what we publish work for somebody who has nothing but it? Minutes; needs the registries.

    python scripts/release_check.py                   the last commit
    python scripts/release_check.py --revision REV    another one
    python scripts/release_check.py --uncommitted     the files as they lie here, without what git ignores
    python scripts/release_check.py --keep FOLDER     leave the archives there

The tree is taken from git, so nothing that merely lies around in a checkout can help or harm. Then, each with its time:

1. `archives`    source archive and wheel, with the build requirements that pyproject.toml declares, in isolation
2. `contents`    the wheel holds what git has in the package, and the libraries; neither archive holds anything private
3. `same again`  a wheel built from the tree itself is the wheel built from the source archive, file by file
4. `metadata`    valid, licence expression and text, readme, links to the world only, every extra
5. `bare`        the wheel alone in a fresh environment: version, a cache that stores and loads, every module can be
                 imported unless an extra is named, and commands that need one say so in one line
6. `demo`        with the extras of the demo: `kvcore demo`, or a small climb where there is no such command
7. `uninstall`   nothing of kvcore is left, and nothing was written into the user's home

An environment is a venv; PATH holds its programs and the system's, HOME an empty folder. CC and CXX are `/bin/false`
there, so nothing can be compiled by the way. Stops at the first step that fails, and says what it saw.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent
OUTER = ("sim", "ladder", "reports")
LIBRARY = re.compile(r"kvcore/device/libkvcore_copy(_cuda)?\.(so|dylib)")
PRIVATE = re.compile(
    r"(^|/)(\.[^/]+|tests?|docs|scripts|samples|__pycache__|node_modules|build|dist|conftest\.py|"
    r"[^/]*\.(pyc|pyo|pem|key|env|log|orig|rej|sqlite|coverage))(/|$)"
)
ALLOWED_IN_SOURCES = {".gitignore"}
PLACES = re.compile(rb"/(?:home|root|Users|work|tmp/pip)[-/][A-Za-z0-9_.]+/")
DEMO_EXTRAS = ("sim", "reports")
STEP_S_MAX = 900

CACHE = """
import sys
from kvcore import Cache
with Cache.open(namespace="m", chunk_tokens=4, chunk_bytes=8, l1_bytes=1 << 20, l2="file://" + sys.argv[1]) as cache:
    cache.store([1, 2, 3, 4, 5, 6, 7, 8], [b"KV of 1-", b"KV of 5-"])
    assert cache.flush()
with Cache.open(namespace="m", chunk_tokens=4, chunk_bytes=8, l1_bytes=1 << 20, l2="file://" + sys.argv[1]) as cache:
    print(cache.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9]), cache.retrieve([1, 2, 3, 4, 5, 6, 7, 8, 9]))
"""
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error.name.partition(".")[0])
"""


class Failed(Exception):
    """A step saw what must not be."""


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of one check, and what lies in it. Whoever made it removes it."""

    folder: Path

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def dist(self) -> Path:
        return self.folder / "dist"

    @property
    def again(self) -> Path:
        return self.folder / "again"

    @property
    def environment(self) -> Path:
        return self.folder / "environment"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def wheel(self) -> Path:
        return one(self.dist.glob("*.whl"))

    @property
    def archive(self) -> Path:
        return one(self.dist.glob("*.tar.gz"))

    @property
    def project(self) -> dict[str, object]:
        found: dict[str, object] = tomllib.loads((self.tree / "pyproject.toml").read_text())["project"]
        return found

    @property
    def packages(self) -> Path:
        return one(self.environment.glob("lib/python*/site-packages"))


def one(found: Iterable[Path]) -> Path:
    paths = sorted(found)
    if len(paths) != 1:
        raise Failed(f"one file was expected: {[path.name for path in paths]}")
    return paths[0]


def expect(condition: object, text: str) -> None:
    if not condition:
        raise Failed(text)


def run(command: Sequence[str | Path], cwd: Path, **env: str) -> str:
    """Run a command that has to succeed; what it printed."""
    done = attempt(command, cwd, **env)
    expect(
        done.returncode == 0, f"{' '.join(map(str, command))} exits with {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def attempt(command: Sequence[str | Path], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command without what this process inherited about Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "COV"))}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **env}, text=True, capture_output=True, check=False, timeout=STEP_S_MAX
    )


def inside(place: Place, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the fresh environment, in an empty folder, without a compiler."""
    programs = place.environment / "bin"
    env = {"HOME": str(place.home), "PATH": f"{programs}:/usr/bin:/bin", "CC": "/bin/false", "CXX": "/bin/false"}
    work = place.folder / "elsewhere"
    work.mkdir(exist_ok=True)
    return attempt([programs / program, *arguments], work, **env)


def install(place: Place, *wanted: str | Path) -> None:
    python = place.environment / "bin" / "python"
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--disable-pip-version-check",
        "install",
        "-q",
    ]
    run([*pip, *wanted], place.folder)


# --- the archives --------------------------------------------------------------------------------------------------


def export(place: Place, revision: str) -> None:
    """Step 0: the tree as it was committed."""
    command = ["git", "archive", revision]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(place.tree, filter="data")


def export_uncommitted(place: Place) -> None:
    """Step 0 otherwise: the tree as it lies here."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # not what was removed and is still in the index
            (place.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place.tree / name)


def archives(place: Place) -> str:
    run([sys.executable, "-m", "build", "--outdir", place.dist, place.tree], place.folder)
    return ", ".join(f"{path.name} {path.stat().st_size >> 10} KiB" for path in sorted(place.dist.iterdir()))


def wheel_files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as opened:
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith("/")}


def archive_files(path: Path) -> dict[str, bytes]:
    """The files of the source archive by their path in it."""
    files = {}
    with tarfile.open(path) as opened:
        for member in opened.getmembers():
            content = opened.extractfile(member)
            if content is not None:
                files[member.name.partition("/")[2]] = content.read()
    return files


def expected_in_wheel(tree: Path) -> set[str]:
    """What git has in the four folders of the package, samples of reports excepted."""
    return {
        prefix + path.relative_to(tree).as_posix()
        for folder, prefix in (("kvcore", ""), *((name, "kvcore/") for name in OUTER))
        for path in (tree / folder).rglob("*")
        if path.is_file() and "samples" not in path.parts
    }


def private(names: Iterable[str]) -> list[str]:
    """Names that no archive should hold. The package may have folders for tests' sake: only names are judged here."""
    return [name for name in names if PRIVATE.search(name) and PurePosixPath(name).name not in ALLOWED_IN_SOURCES]


def places_named(files: dict[str, bytes]) -> list[str]:
    """Files whose text names a folder of somebody's machine. Compiled libraries are looked into as well."""
    return [name for name, content in files.items() if PLACES.search(content)]


def contents(place: Place) -> str:
    wheel, sources = wheel_files(place.wheel), archive_files(place.archive)
    package = {name for name in wheel if not name.partition("/")[0].endswith(".dist-info")}
    expected = expected_in_wheel(place.tree)
    expect(expected <= package, f"missing in the wheel: {sorted(expected - package)}")
    strangers = [name for name in sorted(package - expected) if not LIBRARY.fullmatch(name)]
    expect(not strangers, f"in the wheel and not in git: {strangers}")
    for files in (wheel, sources):
        expect(not private(files), f"private: {private(files)}")
        expect(not places_named(files), f"names a place on a machine: {places_named(files)}")
    expect({"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= sources.keys(), "the source archive lacks a text")
    expect("kvcore/py.typed" in package, "no py.typed")
    libraries = sorted(name.rpartition("/")[2] for name in package - expected)
    return f"{len(package)} files, libraries: {', '.join(libraries) or 'NONE (no compiler here)'}"


def same_again(place: Place) -> str:
    run([sys.executable, "-m", "build", "--wheel", "--outdir", place.again, place.tree], place.folder)
    first, second = wheel_files(place.wheel), wheel_files(one(place.again.glob("*.whl")))
    expect(first.keys() == second.keys(), f"file lists differ: {sorted(first.keys() ^ second.keys())}")
    compared = [name for name in first if not LIBRARY.fullmatch(name) and not name.endswith(("/RECORD", "/WHEEL"))]
    different = [name for name in compared if first[name] != second[name]]
    expect(not different, f"contents differ: {different}")
    return f"{len(compared)} files are equal"


def metadata(place: Place) -> str:
    files = wheel_files(place.wheel)
    (text,) = (content for name, content in files.items() if name.endswith(".dist-info/METADATA"))
    found = Metadata.from_email(text, validate=True)
    project = place.project
    expect(found.version and str(found.version) == project["version"], f"version {found.version}")
    expect(found.license_expression == "Apache-2.0", f"licence {found.license_expression}")
    expect(any(name.endswith("licenses/LICENSE") for name in files), "the licence's text is missing")
    expect(found.description_content_type == "text/markdown", f"readme as {found.description_content_type}")
    expect(len(found.description or "") > 1000, "the readme is missing")
    links = (found.project_urls or {}).values()
    expect(all(link.startswith("https://") for link in links), f"links {list(links)}")
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    expect(set(found.provides_extra or ()) == set(extras), f"extras {found.provides_extra}")
    return f"metadata {found.metadata_version}, {len(extras)} extras, {len(found.requires_dist or ())} requirements"


# --- the environment -----------------------------------------------------------------------------------------------


def module_names(files: Iterable[str]) -> list[str]:
    paths = [name for name in files if name.startswith("kvcore/") and name.endswith(".py")]
    return [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in sorted(paths)]


def bare(place: Place) -> str:
    venv.create(place.environment)
    place.home.mkdir()
    install(place, place.wheel)
    version = inside(place, "kvcore", "--version")
    expect(version.stdout == f"kvcore {place.project['version']}\n", f"--version: {version.stdout}{version.stderr}")
    cache = inside(place, "python", "-c", CACHE, place.folder / "l2")
    expect(cache.stdout == "8 [b'KV of 1-', b'KV of 5-']\n", f"the cache: {cache.stdout}{cache.stderr}")
    modules = module_names(wheel_files(place.wheel))
    imported = inside(place, "python", "-W", "error", "-c", IMPORT_ALL, *modules)
    expect(imported.returncode == 0, f"imports: {imported.stderr}")
    missing = dict(line.split() for line in imported.stdout.splitlines())
    core = [name for name in missing if not name.startswith(("kvcore.sim", "kvcore.ladder", "kvcore.reports"))]
    unexpected = sorted(set(missing.values()) - importable(place))
    expect(not unexpected, f"imports of what no extra brings: {unexpected}")
    ladder = inside(place, "kvcore", "ladder")
    expect(ladder.returncode == 2 and "kvcore[sim]" in ladder.stderr, f"the ladder without simpy: {ladder.stderr}")
    return f"{len(modules) - len(missing)} of {len(modules)} modules need no extra; of the core {len(core)} do: {core}"


def importable(place: Place) -> set[str]:
    """The import names that extras bring, from the table of docs/dependencies.md."""
    rows = (place.tree / "docs" / "dependencies.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows if row.startswith("| `")]
    return {name.strip(" `") for row in cells if len(row) > 1 for name in row[1].split(",")}


def demo(place: Place) -> str:
    extras = ",".join(DEMO_EXTRAS)
    install(place, f"kvcore[{extras}] @ {place.wheel.as_uri()}")
    done = inside(place, "kvcore", "demo")
    expect(done.returncode == 0, f"kvcore demo: {done.returncode}\n{done.stdout}{done.stderr}")
    return "the ladder passed, the planted bug was caught"


def uninstall(place: Place) -> str:
    python = place.environment / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "uninstall", "-q", "-y", "kvcore"], place.folder)
    left = [path for path in place.environment.rglob("*") if "kvcore" in path.relative_to(place.environment).as_posix()]
    expect(not left, f"left behind: {sorted(map(str, left))}")
    written = sorted(str(path.relative_to(place.home)) for path in place.home.rglob("*") if path.is_file())
    ours = [name for name in written if "kvcore" in name]
    expect(not ours, f"written into the user's home: {ours}")
    dropped = sorted(path.name for path in (place.folder / "elsewhere").iterdir())
    expect(not dropped, f"left in the folder where commands ran: {dropped}")
    return "nothing is left"


STEPS: tuple[tuple[str, Callable[[Place], str]], ...] = (
    ("archives", archives),
    ("contents", contents),
    ("same again", same_again),
    ("metadata", metadata),
    ("bare", bare),
    ("demo", demo),
    ("uninstall", uninstall),
)


def check(place: Place) -> bool:
    """Run the steps; a line for each. Stops at the first that fails."""
    for name, step in STEPS:
        start = time.monotonic()
        try:
            text, ok = step(place), True
        except (Failed, subprocess.TimeoutExpired) as error:
            text, ok = str(error), False
        print(f"{name:<12}{'ok' if ok else 'FAILED':<8}{time.monotonic() - start:6.1f} s  {text}", flush=True)
        if not ok:
            return False
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="release-check", description=__doc__.split("\n")[0])
    parser.add_argument("--revision", default="HEAD")
    parser.add_argument("--uncommitted", action="store_true", help="the files as they lie here")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the two archives there")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvcore-release-") as folder:
        place = Place(Path(folder))
        if arguments.uncommitted:
            export_uncommitted(place)
        else:
            export(place, arguments.revision)
        ok = check(place)
        if ok and arguments.keep:
            shutil.copytree(place.dist, arguments.keep, dirs_exist_ok=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
