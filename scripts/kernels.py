"""The copy kernels outside the package's own build: their check with nvcc, their report, the builds of the tests.

    scripts/kernels.py            compile for sm_80, sm_90 and sm_100; fails on a warning, a spill or a stack frame, or
                                  when the table of docs/kernels.md is not what this nvcc says. Part of `make check`
    scripts/kernels.py --report   write that table

Without nvcc the check is skipped, and says so. Resources depend on the compiler, so the table is only compared where
nvcc's version is the one that it names.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels"
REPORT = ROOT / "docs" / "kernels.md"
ARCHITECTURES = (80, 90, 100)
THREADS = 256  # of a block, as in copy_kernels.cu
REGISTERS = 65536  # of one multiprocessor, on all three architectures
MARKS = ("<!-- resources: written by scripts/kernels.py --report -->", "<!-- end of resources -->")

_ENTRY = re.compile(r"Compiling entry function '\w*copy_tilesILb([01])E\w*' for 'sm_(\d+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel needs on one architecture."""

    architecture: int
    operation: str
    registers: int
    stack_bytes: int
    spill_bytes: int

    def row(self) -> str:
        blocks = min(2048 // THREADS, REGISTERS // (self.registers * THREADS))
        return (
            f"| sm_{self.architecture} | {self.operation} | {self.registers} | {self.stack_bytes} | "
            f"{self.spill_bytes} | {blocks * THREADS} of 2048 |"
        )


def compile_kernels(nvcc: str, extra: Sequence[str] = ()) -> str:
    """What ptxas says of the kernels. Raises CalledProcessError with the compiler's words."""
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++17", "-O3", "-Xptxas", "-v", "-Werror", "all-warnings", *codes, *extra]
        command += ["-fatbin", "-o", f"{folder}/kernels.fatbin", str(SOURCES / "copy_kernels.cu")]
        done = subprocess.run(command, check=True, text=True, capture_output=True)
    return done.stdout + done.stderr


def resources(text: str) -> list[Resources]:
    """From ptxas's words, sorted. Functions that were not inlined are told of behind the kernel, and count to it."""
    found = []
    for part in re.split(r"(?=Compiling entry function)", text):
        entry, registers = _ENTRY.search(part), _REGISTERS.search(part)
        if entry and registers:
            numbers = [[int(number) for number in each] for each in _SPILLS.findall(part)]
            stack, spilled = sum(each[0] for each in numbers), sum(each[1] + each[2] for each in numbers)
            operation = "scatter" if entry[1] == "1" else "gather"
            found.append(Resources(int(entry[2]), operation, int(registers[1]), stack, spilled))
    return sorted(found, key=lambda each: (each.architecture, each.operation))


def table(nvcc: str, found: Sequence[Resources]) -> str:
    head = "| architecture | kernel | registers | stack bytes | spilled bytes | threads per multiprocessor |"
    rows = "\n".join(each.row() for each in found)
    return f"{MARKS[0]}\nnvcc {version(nvcc)}, -O3:\n\n{head}\n|---|---|---|---|---|---|\n{rows}\n{MARKS[1]}"


def version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], check=True, text=True, capture_output=True).stdout
    number = re.search(r"release [\d.]+, V([\d.]+)", text)
    return number[1] if number else "of an unknown version"


def complaints(nvcc: str, found: Sequence[Resources], report: str) -> list[str]:
    """What is wrong with these kernels, and with the report on them."""
    wanted = [(number, operation) for number in ARCHITECTURES for operation in ("gather", "scatter")]
    bad = [f"spills or has a stack frame: {each}" for each in found if each.spill_bytes or each.stack_bytes]
    if [(each.architecture, each.operation) for each in found] != wanted:
        bad.append(f"ptxas told of {found}, not of {wanted}")
    written = _written(report)
    if written is None or "nvcc" not in written:
        bad.append(f"{REPORT.name} has no table")
    elif f"nvcc {version(nvcc)}," in written and written != table(nvcc, found):
        bad.append(f"the table of {REPORT.name} is not what this nvcc says: run scripts/kernels.py --report")
    return bad


def _written(report: str) -> str | None:
    start, end = report.find(MARKS[0]), report.find(MARKS[1])
    return report[start : end + len(MARKS[1])] if 0 <= start < end else None


def check(extra: Sequence[str] = ()) -> list[str]:
    """What is wrong; empty also where there is no nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("NOT CHECKED: no nvcc here, so nobody knows whether the CUDA kernels compile and spill nothing")
        return []
    try:
        return complaints(nvcc, resources(compile_kernels(nvcc, extra)), REPORT.read_text())
    except subprocess.CalledProcessError as error:
        return [error.stdout + error.stderr]


def write_report() -> int:
    nvcc = shutil.which("nvcc")
    text = REPORT.read_text()
    written = _written(text)
    if nvcc is None or written is None:
        print("needs nvcc, and the marks in the document")
        return 1
    REPORT.write_text(text.replace(written, table(nvcc, resources(compile_kernels(nvcc)))))
    return 0


# ---- builds of the tests: the same sources on the CPU --------------------------------------------------------------

FLAGS = ("-std=c++17", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wno-unknown-pragmas")
SANITIZERS = {
    "": ("-O1",),
    "address": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    "thread": ("-O1", "-fsanitize=thread"),
}


def build_for_tests(
    source: str, *, sanitizer: str = "", small: bool = False, sources: Path = SOURCES, cache: Path = ROOT / "build"
) -> Path:
    """Compile `copy_cpu.cpp` or `emulated.cpp`; the library. Built once per content, also by processes side by side.

    `small`: with tiles, shares and thresholds so small that few bytes take every path.
    """
    compiler = os.environ.get("CXX", "g++")
    flags = [*FLAGS, *SANITIZERS[sanitizer], *(["-DKVCORE_SMALL"] if small else [])]
    digest = hashlib.sha256(repr((compiler, flags, source)).encode())
    for path in sorted(sources.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    library = cache / "kernels-for-tests" / f"{Path(source).stem}-{digest.hexdigest()[:16]}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        building = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *flags, "-o", str(building), str(sources / source)], check=True)
        building.replace(library)
    return library


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="write the table of docs/kernels.md")
    if parser.parse_args(arguments).report:
        return write_report()
    bad = check()
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
