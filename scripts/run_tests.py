"""`make test`: every part in turn, with its time. Fails if any part failed; runs them all first."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

STORM_RUNGS = "tests/ladder/test_storm_rungs.py"  # the swarm under another name
STEAL = ("--dist", "worksteal")  # where single tests take half a minute: nobody idles while another has a list of them

PARTS = (
    ("unit + machines", ["tests/unit", "tests/machines", "tests/threads"]),
    ("conformance", ["tests/conformance"]),
    ("simulation", ["tests/sim"]),
    ("swarm", [*STEAL, "tests/quality/test_swarm.py", "tests/quality/test_sweeps.py", STORM_RUNGS]),
    ("zoo", ["tests/quality/test_zoo.py"]),
    (
        "quality",
        [
            "tests/quality",
            "--ignore-glob=*/test_swarm.py",
            "--ignore-glob=*/test_sweeps.py",
            "--ignore-glob=*/test_zoo.py",
        ],
    ),
    ("ladder", [*STEAL, "tests/ladder", f"--ignore={STORM_RUNGS}"]),
    ("service", ["tests/service"]),
    ("stores", ["tests/stores"]),
    ("device", ["tests/device"]),
    ("reports", ["tests/reports"]),
    ("storm", ["tests/storm"]),
    ("ladder torch", ["tests/torch"]),
)


def run_part(name: str, paths: list[str], jobs: int) -> tuple[bool, float]:
    """Run one part with pytest; whether it passed, and its seconds."""
    print(f"== {name}", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), *paths]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return code == 0, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", help="run just the part with this name")
    arguments = parser.parse_args()
    results = [
        (name, *run_part(name, paths, arguments.jobs)) for name, paths in PARTS if arguments.only in (None, name)
    ]
    print("\npart                  verdict   seconds")
    for name, passed, seconds in results:
        print(f"{name:<22}{'ok' if passed else 'FAILED':<10}{seconds:7.1f}")
    return 0 if results and all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
