"""The machine: system, shared memory, compilers, copies, GPU, and whether every command can be loaded.

Who holds: a look at shared memory makes a segment of a page and removes it; a look at the GPU runs `nvidia-smi` for at
most ten seconds.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points

from kvcore.device.capability import capability
from kvcore.doctor.finding import Finding
from kvcore.errors import KvcoreError
from kvcore.runtime.shared_memory import SharedArena

SHARED = "/dev/shm"  # nosec B108
PAGE_BYTES = 4096
SERVER_L1_BYTES = 1 << 30
"""What `kvcore serve` reserves when nobody says otherwise."""
_SECONDS = 10


def look() -> Iterator[Finding]:
    """All of it."""
    yield system()
    yield shared_memory()
    yield commands()
    yield tool("C++ compiler", ("c++", "g++", "clang++"), "kvcore's own copies, when it is installed from source")
    yield tool("cmake", ("cmake",), "the same; pip brings it for the time of a build")
    yield tool("nvcc", ("nvcc",), "CUDA copies, when kvcore is installed from source", "install the CUDA toolkit")
    yield gpu()
    found = capability()
    yield _copies("compiled CPU copies", found.native, "torch or numpy moves the bytes instead")
    yield _copies("CUDA copies", found.cuda, "needed where KV lies on a GPU")


def system() -> Finding:
    """Linux runs everything, macOS the core and the simulation."""
    text = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} processors"
    if platform.system() == "Linux":
        return Finding("Linux", "ok", text)
    advice = "core, sim, zoo and reports work here; servers and storms want Linux"
    return Finding("Linux", "absent" if platform.system() == "Darwin" else "broken", text, advice)


def shared_memory() -> Finding:
    """A segment can be made, and the server's default L1 has room."""
    try:
        SharedArena(PAGE_BYTES).close()
    except (KvcoreError, OSError) as error:
        advice = "mount a tmpfs on /dev/shm; in a container, give it --shm-size"
        return Finding("shared memory", "broken", f"no segment can be made: {error}", advice)
    if not os.path.isdir(SHARED):
        return Finding("shared memory", "ok", "a segment can be made")
    space = os.statvfs(SHARED)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    text = f"{gibibytes(free)} of {gibibytes(total)} in {SHARED} are free"
    if free >= SERVER_L1_BYTES:
        return Finding("shared memory", "ok", text)
    advice = (
        f"serve with a smaller --l1, or enlarge it: mount -o remount,size=SIZE {SHARED}; docker run --shm-size SIZE"
    )
    return Finding("shared memory", "absent", text, advice)


def gibibytes(count: int) -> str:
    """Rounded, for people."""
    return f"{count / (1 << 30):.1f} GiB"


def commands() -> Finding:
    """Every command that is registered, ours and others', can be loaded."""
    broken = []
    names = []
    for entry in sorted(entry_points(group="kvcore.commands"), key=lambda entry: entry.name):
        names.append(entry.name)
        try:
            entry.load()
        except Exception as error:  # whatever somebody else's module does when it is imported
            broken.append(f"{entry.name} ({entry.value}): {type(error).__name__}: {error}")
    if broken:
        return Finding("commands", "broken", "; ".join(broken), "reinstall what registers it, or uninstall it")
    return Finding("commands", "ok", ", ".join(names))


def tool(name: str, programs: Sequence[str], about: str, advice: str = "") -> Finding:
    """A program on the PATH, with the line of `--version` that has its version."""
    found = next(filter(None, map(shutil.which, programs)), None)
    if found is None:
        return Finding(name, "absent", f"not on the PATH; it builds {about}", advice or f"install {name}")
    lines = [line for line in _output([found, "--version"]) if any(letter.isdigit() for letter in line)]
    shown = next((line for line in lines if "release" in line or "version" in line), lines[0] if lines else "")
    return Finding(name, "ok", f"{found}: {shown}".rstrip(": "))


def gpu() -> Finding:
    """What the driver sees."""
    program = shutil.which("nvidia-smi")
    asked = [program or "", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    lines = _output(asked) if program else []
    if not lines:
        text = "nvidia-smi sees none" if program else "no nvidia-smi on the PATH"
        return Finding("GPU", "absent", text, "nothing to do on a machine without one; else install its driver")
    return Finding("GPU", "ok", "; ".join(lines))


def _output(command: Sequence[str]) -> list[str]:
    """Its lines; none where it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _copies(name: str, reason: str, about: str) -> Finding:
    if not reason:
        return Finding(name, "ok", "ready")
    return Finding(name, "absent", f"{reason} ({about})", _COPIES_ADVICE[name])


_COPIES_ADVICE = {
    "compiled CPU copies": "install a C++17 compiler, then: pip install --force-reinstall --no-deps kvcore",
    "CUDA copies": "with nvcc on the PATH: pip install --force-reinstall --no-deps kvcore; and a torch built for CUDA",
}
