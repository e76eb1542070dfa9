"""How much of the core the ladder alone covers: `pytest -m ladder` with pytest-cov.

Prints the total, the modules under the floor and the functions that are not reached at all; fails under the floor, or
when the ladder itself fails. The core is `kvcore/` without what no climb is for (`OMIT`): engine adapters, device code,
ZeroMQ, stores other than memory and plain files with what wraps them, commands, and the server as a process. Those have
suites of their own. With `--data FILE` the numbers come from an earlier run's coverage data.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).resolve().parent.parent
FLOOR_PERCENT = 90.0
OMIT = (
    "*/sim/*",
    "*/ladder/*",
    "*/reports/*",
    "kvcore/connectors/vllm/*",
    "kvcore/connectors/page_check.py",
    "kvcore/connectors/registration.py",
    "kvcore/device/*",
    "kvcore/service/zmq_transport.py",
    # stores, and what wraps them
    *(
        f"kvcore/l2/{name}*.py"
        for name in ("fs", "mooncake", "nixl", "objectstore", "redis", "shared", "slab", "wrapped")
    ),
    *(f"kvcore/l2/{name}.py" for name in ("activity", "breaker", "compress", "deadline", "guards", "keyed", "late")),
    *(f"kvcore/l2/{name}.py" for name in ("coded", "faults", "faulty", "ledger", "retry")),
    # commands, and the server as a process
    *(f"kvcore/{name}/*" for name in ("bench", "doctor", "operations", "l2/checks")),
    *(f"kvcore/{name}.py" for name in ("completion", "l2/command", "l2/inspect")),
    *(
        f"kvcore/service/{name}.py"
        for name in ("command", "curve", "front", "host", "operator", "remote", "serve_config")
    ),
    *(
        f"kvcore/runtime/{name}.py"
        for name in ("chance", "child", "deaths", "loops", "populate", "wall", "worker_pages")
    ),
)


def write_config(path: Path) -> None:
    lines = ["[run]", "source = kvcore", "omit ="]
    path.write_text("\n".join([*lines, *(f"    {pattern}" for pattern in OMIT)]) + "\n")


def run_ladder(data: Path, config: Path, jobs: int) -> bool:
    command = [sys.executable, "-m", "pytest", "-m", "ladder", "-n", str(jobs), "tests/ladder"]
    measure = ["--cov=kvcore", f"--cov-config={config}", "--cov-report="]
    environment = {**os.environ, "COVERAGE_FILE": str(data)}
    return subprocess.run([*command, *measure], cwd=ROOT, env=environment, check=False).returncode == 0


def functions(path: Path) -> Iterator[tuple[str, set[int]]]:
    """(qualified name, lines of its body) of every function in a file."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, set[int]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, set(range(child.body[0].lineno, (child.end_lineno or 0) + 1))

    return walk(ast.parse(path.read_text()), "")


def report(data: Path, config: Path) -> float:
    """Print everything; the total in percent."""
    coverage = Coverage(data_file=str(data), config_file=str(config))
    coverage.load()
    statements_total = missed_total = 0
    low: list[str] = []
    unreached: list[str] = []
    for path in map(Path, sorted(coverage.get_data().measured_files())):
        _, statements, _, missing, _ = coverage.analysis2(str(path))
        name = path.relative_to(ROOT).as_posix()
        statements_total += len(statements)
        missed_total += len(missing)
        percent = 100 * (1 - len(missing) / max(1, len(statements)))
        if percent < FLOOR_PERCENT:
            low.append(f"  {name:<42}{len(statements):5} statements {percent:6.1f} %")
        lost = [each for each, lines in functions(path) if (body := lines & set(statements)) and body <= set(missing)]
        if lost:
            unreached.append(f"  {name}: {', '.join(lost)}")
    total = 100 * (1 - missed_total / max(1, statements_total))
    print(f"\nmodules below {FLOOR_PERCENT:.0f} %", *low, sep="\n")
    print("\nfunctions that the ladder does not reach", *unreached, sep="\n")
    print(f"\nthe ladder covers {statements_total - missed_total} of {statements_total} statements: {total:.2f} %")
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data", type=Path, help="report on this coverage data, run nothing")
    arguments = parser.parse_args()
    os.chdir(ROOT)  # where the patterns and the data's relative names begin
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "coveragerc"
        write_config(config)
        data = arguments.data or Path(scratch) / "data"
        passed = arguments.data is not None or run_ladder(data, config, arguments.jobs)
        enough = report(data, config) >= FLOOR_PERCENT
    return 0 if passed and enough else 1


if __name__ == "__main__":
    sys.exit(main())
