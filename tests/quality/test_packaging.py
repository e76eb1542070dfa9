"""What a user installs: the wheel is built, looked into, and used in environments that see nothing of this checkout.

An environment is a fresh venv with the wheel installed by pip. Its dependencies are links to the ones installed here,
package by package, so that no network is needed and the editable install of this checkout stays out of sight.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CELL = "full/r1/inproc/sync"
COMPILES = bool(shutil.which("cmake") and (shutil.which("ninja") or shutil.which("make")) and shutil.which("c++"))
LIBRARIES = {"kvcore/device/libkvcore_copy.so"} if COMPILES else set()
LIBRARIES |= {"kvcore/device/libkvcore_copy_cuda.so"} if COMPILES and shutil.which("nvcc") else set()
BUILD = ("-m", "build", "--no-isolation", *(() if COMPILES else ("-Cwheel.cmake=false",)))

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def requirements(extra: str = "") -> list[str]:
    """What pyproject.toml asks for."""
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return [Requirement(text).name for text in texts]


def closure(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions of these names and of all they need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        assert name != PROJECT["name"]
        found[name] = importlib.metadata.distribution(name)
        needed = [Requirement(text) for text in found[name].requires or ()]
        waiting += [item.name for item in needed if item.marker is None or item.marker.evaluate({"extra": ""})]
    return found


def link_distributions(names: Iterable[str], target: Path) -> None:
    """Link every top-level file and folder of these distributions into `target`."""
    target.mkdir()
    for distribution in closure(names).values():
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        assert tops, f"{distribution.name} lists no files"
        for top in sorted(tops):
            (target / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


def clean_run(folder: Path, command: Sequence[str | Path], **more: str) -> subprocess.CompletedProcess[str]:
    """Run in `folder` without what this process inherited about Python; compiling CUDA is what takes longest."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "COV"))}
    env = {**kept, **more}
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, check=False, timeout=900)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source archive, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    built = clean_run(folder, [sys.executable, *BUILD, "--outdir", str(folder), str(ROOT)])
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Sequence[str]], Run]:
    """Make an environment with the wheel and these distributions; the answer runs its commands."""

    def make(name: str, distributions: Sequence[str]) -> Run:
        home = tmp_path_factory.mktemp(name)
        venv.create(home / "venv", symlinks=True)
        python = home / "venv" / "bin" / "python"
        link_distributions(distributions, home / "dependencies")
        installed = clean_run(
            home,
            [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q", wheel],
        )
        assert installed.returncode == 0, installed.stderr
        (packages,) = home.glob("venv/lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(f"{home / 'dependencies'}\n")
        (home / "elsewhere").mkdir()

        def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            return clean_run(home / "elsewhere", [python.parent / program, *arguments])

        return run

    return make


@pytest.fixture(scope="module")
def bare(environment: Callable[[str, Sequence[str]], Run]) -> Run:
    """`pip install kvcore`, beside a pytest that happens to be there."""
    return environment("bare", [*requirements(), "pytest"])


@pytest.fixture(scope="module")
def with_sim(environment: Callable[[str, Sequence[str]], Run]) -> Run:
    """`pip install 'kvcore[sim]'`."""
    return environment("sim", [*requirements(), *requirements("sim")])


# --- the wheel -----------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {name for name in names if name.partition("/")[0] == f"kvcore-{PROJECT['version']}.dist-info"}
    expected = {
        prefix + path.relative_to(ROOT).as_posix()
        for folder, prefix in (("kvcore", ""), ("sim", "kvcore/"), ("ladder", "kvcore/"), ("reports", "kvcore/"))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "samples"} & set(path.parts)
    }
    assert names - metadata == expected | LIBRARIES
    assert {"kvcore/data/key_vectors.json", "kvcore/py.typed", "kvcore/sim/loop.py"} <= expected
    assert wheel.name.endswith("-py3-none-any.whl") is not bool(LIBRARIES)


def test_the_source_archive_holds_what_the_wheel_is_built_from(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        tops = {name.split("/")[1] for name in opened.getnames() if name.count("/") >= 1}
    assert {"kvcore", "sim", "ladder", "reports", "pyproject.toml", "README.md"} <= tops
    assert tops & {"tests", "docs", "scripts", ".types", ".venv", ".git"} == set()


def test_both_archives_are_small(dist: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in dist.iterdir()}
    assert len(sizes) == 2
    assert sizes[next(name for name in sizes if name.endswith(".tar.gz"))] < 3 << 19, sizes
    assert max(sizes.values()) < 2 << 20, sizes  # the CUDA runtime in the library


def test_without_a_compiler_the_wheel_is_built_without_the_libraries(dist: Path, tmp_path: Path) -> None:
    if not COMPILES:
        pytest.skip("there is none here: all other tests of this file show it")
    (archive,) = dist.glob("*.tar.gz")
    command = [sys.executable, *BUILD, "--wheel", "--outdir", str(tmp_path), str(archive_folder(archive, tmp_path))]
    built = clean_run(tmp_path, command, CC="/bin/false", CXX="/bin/false")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "built WITHOUT its compiled copies" in built.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert not [name for name in opened.namelist() if name.endswith(".so")]


def archive_folder(archive: Path, target: Path) -> Path:
    """The sources as the archive has them."""
    with tarfile.open(archive) as opened:
        opened.extractall(target, filter="data")
    return target / archive.name.removesuffix(".tar.gz")


# --- without simpy -------------------------------------------------------------------------------------------------


def test_what_runs_is_the_wheel_and_not_this_checkout(bare: Run) -> None:
    done = bare("python", "-c", "import kvcore, kvcore.sim, sys; print(kvcore.__file__, kvcore.sim.__file__, sys.path)")
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout
    assert done.stdout.count("site-packages/kvcore/") == 2


def test_the_command_says_its_version(bare: Run) -> None:
    for command in (["python", "-m", "kvcore.cli"], ["kvcore"]):
        done = bare(*command, "--version")
        assert (done.returncode, done.stdout) == (0, f"kvcore {PROJECT['version']}\n"), done.stderr


def test_the_cache_works_without_simpy(bare: Run, load_script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    code = load_script("release_check").CACHE + 'print("simpy" in sys.modules)'
    done = bare("python", "-c", code, str(tmp_path / "l2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["8 [b'KV of 1-', b'KV of 5-']", "False"]


def test_without_simpy_the_ladder_says_in_one_line_what_to_install(bare: Run) -> None:
    done = bare("kvcore", "ladder")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "simpy" in line
    assert "pip install 'kvcore[sim]'" in line


def test_without_simpy_pytest_starts_with_our_plugin(bare: Run) -> None:
    done = bare("python", "-W", "error", "-m", "pytest", "--help")
    assert done.returncode == 0, done.stderr
    assert "--ladder-target" in done.stdout


# --- with simpy ----------------------------------------------------------------------------------------------------


def test_the_ladder_of_the_wheel_climbs_in_another_directory(with_sim: Run) -> None:
    done = with_sim("kvcore", "ladder", "--rungs", "0-2", "--cell", CELL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: pass" in done.stdout


def test_the_suite_is_found_by_its_package_name(with_sim: Run) -> None:
    done = with_sim("python", "-m", "pytest", "--pyargs", "kvcore.ladder.suite", "-m", "ladder", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_climb.py::test_cache_changes_no_output[" in done.stdout


OPTIONAL = {"mooncake", "obstore", "redis", "torch", "vllm"}  # what other extras install
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error.name.partition(".")[0])
"""


def test_every_module_of_the_wheel_can_be_imported(with_sim: Run, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        paths = [name for name in archive.namelist() if name.startswith("kvcore/") and name.endswith(".py")]
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    assert len(modules) > 100
    done = with_sim("python", "-W", "error", "-c", IMPORT_ALL, *modules)
    assert done.returncode == 0, done.stderr
    missing = set(done.stdout.split())
    assert missing <= OPTIONAL
