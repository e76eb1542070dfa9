"""`make check`: formatter, linter, types, import contracts, dead code. Stops at nothing, fails if any failed.

The outer folders install as parts of the package (`sim` as `kvcore.sim`). Type checkers and import-linter look at the
tree, so a git-ignored farm of links (`.types/kvcore/...`) gives them the layout that users import.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FARM = ROOT / ".types"
OUTER = ("sim", "ladder", "reports")


def link_farm() -> None:
    """Build .types/kvcore: a link per entry of kvcore/ and one per outer folder."""
    package = FARM / "kvcore"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {entry.name: entry for entry in (ROOT / "kvcore").iterdir() if entry.name != "__pycache__"}
    wanted |= {name: ROOT / name for name in OUTER}
    for entry in package.iterdir():
        if entry.is_symlink() and entry.name not in wanted:
            entry.unlink()
    for name, target in wanted.items():
        link = package / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(target, package))


def run(name: str, command: str, *arguments: str, cwd: Path = ROOT, **env: str) -> bool:
    """Run one tool of this environment; print its name, verdict and time."""
    start = time.monotonic()
    tool = Path(sys.executable).parent / command
    result = subprocess.run([tool, *arguments], cwd=cwd, env={**os.environ, **env}, check=False)
    verdict = "ok" if result.returncode == 0 else "FAILED"
    print(f"{name:<24}{verdict:<8}{time.monotonic() - start:6.1f} s", flush=True)
    return result.returncode == 0


def main() -> int:
    link_farm()
    ok = [
        run("ruff format", "ruff", "format", "--check", "-q", "."),
        run("ruff", "ruff", "check", "-q", "."),
        run("mypy --strict", "mypy", "--strict", "-p", "kvcore", cwd=FARM, MYPYPATH=str(FARM)),
        run("import contracts", "lint-imports", PYTHONPATH=str(FARM)),
        run("dead code", "vulture"),
    ]
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
