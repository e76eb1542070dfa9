"""The same bytes under sanitizers, and planted bugs: what the tests of the compiled copies would find.

Each test starts another interpreter, with the sanitizer's runtime before everything else, on the files beside this one.
Memory is of the exact size there, so AddressSanitizer sees a load or store one byte beside it; UBSan sees a vector that
is not aligned to its width, which a GPU would refuse.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
BYTES = "test_bytes"  # the tests that compare bytes
CPU, THREADS, KERNEL = "cpu, small", "cpu, small, threads", "kernel, small"

if shutil.which("g++") is None:
    pytest.skip("NOT CHECKED: no C++ compiler (g++), so there is nothing to sanitize", allow_module_level=True)


def runtime(name: str) -> str:
    """The sanitizer's shared library, which must be loaded before the interpreter's own allocator is used."""
    found = subprocess.run(["g++", f"-print-file-name=lib{name}.so"], text=True, capture_output=True, check=True).stdout
    if not Path(found.strip()).is_file():
        pytest.skip(f"NOT CHECKED: this compiler has no lib{name}")
    return found.strip()


def run(file: str, *options: str, sanitizer: str = "", backend: str = "", kernels: Path = KERNELS) -> tuple[int, str]:
    """pytest's exit status and words, in an interpreter of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    if sanitizer:
        preload = {"address": ("asan", "ubsan"), "thread": ("tsan",)}[sanitizer]
        env |= {"KVCORE_TEST_SANITIZER": sanitizer, "LD_PRELOAD": " ".join(map(runtime, preload))}
        env |= {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    env["KVCORE_TEST_BACKEND"] = backend
    if kernels != KERNELS:
        env["KVCORE_TEST_KERNELS"] = str(kernels)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-s", *options]
    done = subprocess.run([*command, str(HERE / file)], env=env, text=True, capture_output=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_planes_of_any_kind_under_address_and_undefined_behaviour_sanitizers() -> None:
    status, words = run("test_native.py", sanitizer="address")
    assert status == 0, words[-4000:]


@pytest.mark.slow
def test_layouts_of_engines_under_address_and_undefined_behaviour_sanitizers() -> None:
    pytest.importorskip("torch", reason="NOT CHECKED: the layouts of engines are torch tensors")
    status, words = run("test_native_layouts.py", sanitizer="address")
    assert status == 0, words[-4000:]


@pytest.mark.slow
def test_threads_that_share_a_batch_race_for_no_byte() -> None:
    status, words = run("test_native.py", "-k", BYTES, sanitizer="thread", backend=THREADS)
    assert status == 0, words[-4000:]


MUTANTS = {
    "runs lie behind one another": ("address.h", "run * part.run_stride", "run * part.run_bytes", CPU, "", "assert"),
    "outers are joined whatever their stride": (
        "address.h",
        "if (plane.outer_count == 1 || part.outer_stride == part.run_bytes) part.run",
        "part.run",
        CPU,
        "",
        "assert",
    ),
    "whole blocks are not skipped": (
        "address.h",
        "if (skip >= block_tokens) return part.outer_bytes;",
        "if (skip >= block_tokens) return 0;",
        CPU,
        "",
        "assert",
    ),
    "a plane begins where the one before it does": (
        "check.h",
        "if (__builtin_add_overflow(offset, share, &offset))",
        "int64_t end = 0; if (__builtin_add_overflow(offset, share, &end))",
        CPU,
        "",
        "assert",
    ),
    "pieces are joined when the blocks are neighbours": (
        "walk.h",
        "&& chunk_side == run_.chunk_side + uint64_t(run_.bytes)",
        "",
        CPU,
        "",
        "assert",
    ),
    "the ranges of threads overlap": (
        "copy_cpu.cpp",
        "move(batch, prepared, first, total);",
        "move(batch, prepared, 0, total);",
        THREADS,
        "thread",
        "ThreadSanitizer: data race",
    ),
    "the end of a streamed piece is forgotten": (
        "stream_copy.h",
        "  std::memcpy(target + at, source + at, size_t(bytes - at));",
        "",
        CPU,
        "",
        "assert",
    ),
    "a streamed piece goes on behind its end": (
        "stream_copy.h",
        "for (; at + 2 * kLine <= bytes; at += 2 * kLine) stream_two_lines",
        "for (; at + kLine <= bytes; at += 2 * kLine) stream_two_lines",
        CPU,
        "address",
        "ERROR: AddressSanitizer",
    ),
    "a tile is always full": (
        "copy_kernels.cu",
        "tile.last = part.block_bytes - tile.first > kTileBytes ? tile.first + kTileBytes : part.block_bytes;",
        "tile.last = tile.first + kTileBytes;",
        KERNEL,
        "address",
        "heap-buffer-overflow",
    ),
    "vectors do not ask how chunks are aligned": (
        "copy_kernels.cu",
        "bits |= batch.chunks[chunk];",
        "bits |= 0;",
        KERNEL,
        "address",
        "misaligned address",
    ),
    "vectors cross the ends of runs": (
        "copy_kernels.cu",
        "bits |= part.outer_stride | part.run_bytes;",
        "bits |= 0;",
        KERNEL,
        "",
        "assert",
    ),
    "skipped tokens are written by the kernel": (
        "copy_kernels.cu",
        "if (kScatter && tile.skip_bytes && dense",
        "if (kScatter && false && dense",
        KERNEL,
        "",
        "assert",
    ),
    "some tiles are nobody's": (
        "copy_kernels.cu",
        "number += gridDim.x",
        "number += gridDim.x + 1",
        KERNEL,
        "",
        "assert",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    file, good, bad, backend, sanitizer, wanted = MUTANTS[name]
    kernels = planted(tmp_path, file, good, bad)
    status, words = run("test_native.py", "-k", BYTES, sanitizer=sanitizer, backend=backend, kernels=kernels)
    assert status != 0
    assert wanted in words, words[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("id >= batch.num_blocks", "id > batch.num_blocks"),
        ("id < 0 ||", ""),
        ("if (const int32_t status = check_ids(batch, failure)) return status;", ""),
    ],
)
def test_a_check_of_block_ids_that_is_gone_is_missed(good: str, bad: str, tmp_path: Path) -> None:
    kernels = planted(tmp_path, "check.h", good, bad)
    status, words = run("test_native.py", "-k", "does_not_exist and direct", backend="direct", kernels=kernels)
    assert status != 0, words


def planted(tmp_path: Path, file: str, good: str, bad: str) -> Path:
    """A copy of the sources with one change."""
    kernels = Path(shutil.copytree(KERNELS, tmp_path / "kernels"))
    text = (kernels / file).read_text()
    assert text.count(good) == 1
    (kernels / file).write_text(text.replace(good, bad))
    return kernels
