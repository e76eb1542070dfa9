"""Where a report's numbers come from: the command, the seed, the commit, versions, the machine's CPU.

Everything here is read from this process and this machine; a commit only where the package runs from a checkout, and
"unknown" where it does not. `changed` says that the checkout held edits that were not committed.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("kvcore", "numpy", "msgspec", "matplotlib", "jinja2", "torch")
CPUINFO = Path("/proc/cpuinfo")
GIT_SECONDS_MAX = 10


def provenance(seed: int | None, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The `provenance` object of report.json. `arguments`: the command line behind `kvcore`."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    commit, changed = _commit()
    return {
        "command": shlex.join(["kvcore", *words]),
        "seed": seed,
        "commit": commit,
        "changed": changed,
        "versions": {"python": platform.python_version(), **_versions()},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor as it calls itself."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def _commit() -> tuple[str, bool]:
    """(commit, are there edits), of the checkout that this file lies in."""
    top = _git("rev-parse", "--show-toplevel")
    here = Path(__file__).resolve()
    if top is None or not (Path(top) / "pyproject.toml").is_file() or not here.is_relative_to(Path(top) / "reports"):
        return "unknown", False  # not our checkout: the package is installed inside of somebody else's
    return _git("rev-parse", "HEAD") or "unknown", bool(_git("status", "--porcelain", "--untracked-files=no"))


def _git(*words: str) -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=GIT_SECONDS_MAX
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
