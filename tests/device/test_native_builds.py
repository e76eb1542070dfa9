"""Which compiled copies are there, what is said of those that are not, and the check of the CUDA sources."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from kvcore.device import native
from kvcore.device.capability import Capability, capability, runs_on
from kvcore.device.native import CPU_LIBRARY, CUDA_LIBRARY, CpuKernels, CudaKernels, find_library
from kvcore.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="NOT CHECKED: no nvcc here")


@cache
def script() -> ModuleType:
    """scripts/kernels.py."""
    specification = importlib.util.spec_from_file_location("kvcore_kernels_script", ROOT / "scripts" / "kernels.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installation that had no compiler."""
    monkeypatch.setattr(native, "find_library", lambda name: None)


def test_an_installation_without_a_compiler_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    without_libraries(monkeypatch)
    with pytest.raises(ConfigError, match=r"built without libkvcore_copy\.so: install a C\+\+17 compiler"):
        CpuKernels()
    with pytest.raises(ConfigError, match=r"built without libkvcore_copy_cuda\.so: install the CUDA toolkit"):
        CudaKernels()
    found = capability()
    assert "compiler" in found.native
    assert "nvcc" in found.cuda
    assert "compiler" in str(found)


def test_what_can_be_used_is_called_ready() -> None:
    assert str(Capability("", "no device", "")).splitlines() == [
        "compiled CPU copies  ready",
        "CUDA library         no device",
        "torch                ready",
    ]


def test_the_module_tells_it_on_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcore.device.capability"], text=True, capture_output=True, check=True
    )
    assert [line[:20].strip() for line in done.stdout.splitlines()] == ["compiled CPU copies", "CUDA library", "torch"]


def test_the_installed_libraries_speak_this_version() -> None:
    """Fails in an editable install whose libraries are older than the sources: install again."""
    if find_library(CPU_LIBRARY) is None:
        pytest.skip("NOT CHECKED: this kvcore was built without its compiled copies")
    CpuKernels()
    if find_library(CUDA_LIBRARY) is not None:
        assert set(CudaKernels().architectures) >= {80, 90}


@pytest.mark.parametrize(
    ("device", "runs"),
    [
        ((8, 0), True),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 3), True),
        ((12, 0), True),
        ((7, 5), False),
        ((6, 1), False),
    ],
)
def test_a_device_is_served_by_its_major_version_or_by_ptx(device: tuple[int, int], runs: bool) -> None:
    assert runs_on((80, 90, 100), device) is runs
    assert not runs_on((), device)


@needs_nvcc
@pytest.mark.slow
def test_the_kernels_compile_for_three_architectures_and_spill_nothing() -> None:
    assert script().check() == []


@needs_nvcc
@pytest.mark.slow
def test_kernels_that_spill_or_warn_are_found() -> None:
    spilling = script().check(["-G"])  # nothing is inlined, nothing kept in registers
    assert any("spills" in each and "spill_bytes=0" not in each for each in spilling), spilling
    (said,) = script().check(["-Xptxas", "--no-such-option"])
    assert "no-such-option" in said


def test_a_report_that_is_out_of_date_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = script()
    monkeypatch.setattr(kernels, "version", lambda nvcc: "13.0.88")
    rows = [
        kernels.Resources(number, operation, 64, 0, 0)
        for number in (80, 90, 100)
        for operation in ("gather", "scatter")
    ]
    report = f"text\n{kernels.table('nvcc', rows)}\nmore"
    assert kernels.complaints("nvcc", rows, report) == []
    assert "--report" in str(kernels.complaints("nvcc", rows, report.replace("| 64 |", "| 40 |")))
    assert "no table" in str(kernels.complaints("nvcc", rows, "text"))
    assert "not of" in str(kernels.complaints("nvcc", rows[1:], report))


def test_without_nvcc_the_check_is_skipped_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert script().check() == []
    assert capsys.readouterr().out.startswith("NOT CHECKED: no nvcc")
