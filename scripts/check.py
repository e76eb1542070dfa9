"""`make check`: formatter, linter, types, import contracts, dead code, kernels. Stops at nothing, fails if any failed.

The outer folders install as parts of the package (`sim` as `kvcore.sim`). The tools look at the tree, so a git-ignored
farm of links (`.types/kvcore/...`) gives them the layout that users import. import-linter would find an editable
install first, which puts the repository root itself on the package's path, with the tests and tools in it; it
therefore runs inside the farm and without the site hooks (`python -S`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FARM = ROOT / ".types"
OUTER = ("sim", "ladder", "reports")
IMPORT_LINTER = "from importlinter.cli import lint_imports_command as main; main()"
FINDINGS = 3  # vulture's exit status when it has found something
# Fields of statistics and of messages are read as a whole (metrics, repr, the wire), which vulture does not see.
FIELDS = re.compile(r"unused (variable|attribute) .*\(60% confidence\)")


def link_farm(root: Path = ROOT, farm: Path = FARM) -> None:
    """Build .types/kvcore: a link per entry of kvcore/ and one per outer folder; links to what is gone are removed."""
    package = farm / "kvcore"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {entry.name: entry for entry in (root / "kvcore").iterdir() if entry.name != "__pycache__"}
    wanted |= {name: root / name for name in OUTER}
    for entry in package.iterdir():
        if entry.is_symlink() and entry.name not in wanted:
            entry.unlink()
    for name, target in wanted.items():
        link = package / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(target, package))


def tool(name: str) -> list[str]:
    """The command of a tool that is installed beside this Python."""
    return [str(Path(sys.executable).parent / name)]


def run(name: str, command: Sequence[str], cwd: Path = ROOT, ignore: re.Pattern[str] | None = None, **env: str) -> bool:
    """Run one tool; print what it said if it failed, then its name, verdict and time.

    With `ignore`, a tool that lists findings and exits with 3 for them has failed when one matches not.
    """
    start = time.monotonic()
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, check=False, text=True, capture_output=True)
    text = result.stdout + result.stderr
    ok = result.returncode == 0
    if ignore and result.returncode == FINDINGS:
        text = "".join(line for line in text.splitlines(keepends=True) if not ignore.search(line))
        ok = not text
    if not ok or "NOT CHECKED" in text:
        print(text, end="")
    print(f"{name:<24}{'ok' if ok else 'FAILED':<8}{time.monotonic() - start:6.1f} s", flush=True)
    return ok


def check_contracts(config: Path = ROOT / "pyproject.toml", farm: Path = FARM) -> bool:
    """Check the import contracts of `config` on the package in `farm`."""
    packages = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    command = [sys.executable, "-S", "-c", IMPORT_LINTER, "--no-cache", "--no-logo", str(config)]
    return run("import contracts", command, cwd=farm, PYTHONPATH=os.pathsep.join(packages))


def main() -> int:
    start = time.monotonic()
    link_farm()
    strict = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "-p", "kvcore"]
    ok = [
        run("ruff format", [*tool("ruff"), "format", "--check", "-q", "."]),
        run("ruff", [*tool("ruff"), "check", "-q", "."]),
        run("mypy --strict", [*tool("mypy"), *strict], cwd=FARM, MYPYPATH=str(FARM)),
        check_contracts(),
        run("dead code", tool("vulture"), ignore=FIELDS),
        run("bandit", [*tool("bandit"), "-q", "-ll", "-r", "kvcore"]),
        run("kernels", [sys.executable, "scripts/kernels.py"]),
    ]
    verdict = "ok" if all(ok) else "FAILED"
    print(f"{'all':<24}{verdict:<8}{time.monotonic() - start:6.1f} s")
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
