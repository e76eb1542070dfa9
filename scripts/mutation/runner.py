"""Runs the tests against a copy of the tree, one mutant at a time, in a forked child.

    tree/           the copy; only files in it are ever changed
    tree/.types/    the package as users see it: `kvcore` with `sim`, `ladder` and `reports` in it (links into the copy)

The parent imports pytest, Hypothesis and the libraries once and none of kvcore. Each child is a fork of it, so it pays
for none of that again, and imports the package anew. It leads a session of its own, which is killed whole after it:
nothing that a test started stays behind. Time limits are of CPU, so a busy machine kills no mutant; a child that waits
instead of working is ended by the clock.

An editable install of kvcore would be found before the copy. The child drops its finder; `sitecustomize.py` in
`.types` does the same in interpreters that tests start. `guard` shows that the copy is what is tested.

Compiled files are written by the first runs, without a mutant, and only read afterwards. A mutated file gets a time of
its own, the restored one its old one, so no stale compiled file is ever taken.
"""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from check import link_farm
from hypothesis import HealthCheck, Phase, settings

FOLDERS = ("kvcore", "sim", "ladder", "reports", "tests", "scripts", "docs")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md")
LIBRARIES = ("hypothesis.stateful", "numpy", "msgspec", "blake3", "xxhash", "zmq.asyncio", "simpy", "prometheus_client")
OPTIONS = ("-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark", "-p", "no:pytest_cov")
EXAMPLES = 30  # of each property, as far as a test does not ask for another number
MUTATED, ORIGINAL = "mutated", "original"  # in the copy: which file is mutated now, and what it was
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
MEMORY_BYTES = 6 << 30  # a mutant that asks for more fails
WAIT_PER_CPU = 10  # a child may last this many times its CPU limit

SITE = """\
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one run of tests. `how`: passed, test, import, timeout or crash; `by`: the first that failed."""

    how: str
    by: str
    cpu_s: float

    @property
    def killed(self) -> bool:
        return self.how != "passed"


def copy_tree(root: Path, tree: Path) -> None:
    """Copy what the tests need, and lay out the package in `.types`."""
    for folder in FOLDERS:
        shutil.copytree(root / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    for file in FILES:
        shutil.copy2(root / file, tree / file)
    link_farm(tree, tree / ".types")
    (tree / ".types" / "sitecustomize.py").write_text(SITE)


def prepare() -> None:
    """Load what every child needs, and choose how Hypothesis searches: the same each time, none shrunk."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for library in LIBRARIES:
        importlib.import_module(library)
    settings.register_profile(
        "mutation",
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")
    assert "kvcore" not in sys.modules


def run_tests(tree: Path, tests: tuple[str, ...], cpu_s: float, write_compiled: bool = False) -> Verdict:
    """Run `tests` in a child until the first fails. Not more than `cpu_s` of CPU."""
    note = tree / "first_failure"
    note.write_text("")
    child = os.fork()
    if child == 0:
        _in_child(tree, tests, cpu_s, write_compiled, note)
    status, used = _await_child(child, cpu_s * WAIT_PER_CPU)
    by = note.read_text()
    return Verdict(_how(status, by), by, used)


@contextmanager
def mutated_file(tree: Path, path: Path, source: str, serial: int) -> Iterator[None]:
    """Put `source` in place of a file, and the file back in the end; also when this process dies, see `recover`."""
    shutil.copy2(path, tree / ORIGINAL)
    (tree / MUTATED).write_text(str(path.relative_to(tree)))
    path.write_text(source)
    os.utime(path, (serial, serial))  # long ago, and different each time
    try:
        yield
    finally:
        recover(tree)


def recover(tree: Path) -> None:
    """Put back the file that is mutated, if any is."""
    note = tree / MUTATED
    if note.exists():
        shutil.copy2(tree / ORIGINAL, tree / note.read_text())
        note.unlink()


def guard(tree: Path, module: str) -> None:
    """Show that a module that cannot be imported from the copy fails the tests: the copy is what they test."""
    path = tree / (module.replace(".", "/") + ".py")
    with mutated_file(tree, path, "raise ImportError('the copy is tested')\n", 1):
        if not run_tests(tree, ("tests/unit/test_allocator.py",), 60).killed:
            raise SystemExit("the tests do not import kvcore from the copy: a score would mean nothing")


def _in_child(tree: Path, tests: tuple[str, ...], cpu_s: float, write_compiled: bool, note: Path) -> None:
    """Become the test process. Does not return."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(tree)
        log = os.open(tree / "last_run.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 2))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.dont_write_bytecode = not write_compiled
        exec(SITE)
        sys.path.insert(0, str(tree / ".types"))
        os.environ["PYTHONPATH"] = str(tree / ".types")
        os.environ.pop("HYPOTHESIS_PROFILE", None)
        code = int(pytest.main([*OPTIONS, *tests], plugins=[_FirstFailure(note)]))
    finally:
        os._exit(code)


class _FirstFailure:
    """Writes down the first test, or the first file that could not be collected, that failed."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._note.read_text():
            self._note.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._note.read_text():
            self._note.write_text(f"import of {report.nodeid}")


def _await_child(child: int, wait_s: float) -> tuple[int, float]:
    """Its wait status and its seconds of CPU. Nothing of its session lives on."""
    end = time.monotonic() + wait_s
    try:
        while time.monotonic() < end and os.waitid(os.P_PID, child, ENDED) is None:
            time.sleep(0.02)
    finally:  # it is not reaped yet, so its number is certainly its own
        _kill_session(child)
        _, status, usage = os.wait4(child, 0)
    return status, usage.ru_utime + usage.ru_stime


def _kill_session(child: int) -> None:
    """The child itself too: it may not lead its session yet. What has ended is not changed by it."""
    for kill in (os.killpg, os.kill):
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _how(status: int, by: str) -> str:
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "crash"
    code = os.WEXITSTATUS(status)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit("no test was collected; is a row of scripts/mutation/targets.py out of date?")
    if code == 0:
        return "passed"
    return "test" if by and not by.startswith("import of ") else "import"
