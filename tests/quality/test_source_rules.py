"""Rules that the sources keep, read from the sources: no run of the code can show that one is broken somewhere."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import os
import pickle
import statistics
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import KvcoreError
from kvcore.service.protocol import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
OUTER = ("sim", "ladder", "reports")

# The asyncio shell, and what does blocking work or drives it through ports. Every other module of the core is pure and
# stands in the import contracts of pyproject.toml.
SHELL = {
    "kvcore.__main__",
    "kvcore.bench.command",
    "kvcore.bench.echo",
    "kvcore.bench.figures",
    "kvcore.bench.server",
    "kvcore.budget_line",
    "kvcore.cli",
    "kvcore.completion",
    "kvcore.config.sources",
    "kvcore.connectors.interface",
    "kvcore.connectors.jobs",
    "kvcore.connectors.page_check",
    "kvcore.connectors.pages",
    "kvcore.connectors.registration",
    "kvcore.connectors.scheduler",
    "kvcore.connectors.worker",
    "kvcore.deadlines",
    "kvcore.device.capability",
    "kvcore.device.cpu_engine",
    "kvcore.device.cuda_engine",
    "kvcore.device.cuda_runtime",
    "kvcore.device.discover",
    "kvcore.device.examples",
    "kvcore.device.movers",
    "kvcore.device.native",
    "kvcore.device.paged",
    "kvcore.device.reference",
    "kvcore.device.selftest",
    "kvcore.doctor.command",
    "kvcore.doctor.finding",
    "kvcore.doctor.machine",
    "kvcore.doctor.packages",
    "kvcore.doctor.stores",
    "kvcore.inprocess",
    "kvcore.l2.checks.bed",
    "kvcore.l2.checks.contents",
    "kvcore.l2.checks.lives",
    "kvcore.l2.checks.results",
    "kvcore.l2.checks.suite",
    "kvcore.l2.coded",
    "kvcore.l2.command",
    "kvcore.l2.compress",
    "kvcore.l2.deadline",
    "kvcore.l2.faults",
    "kvcore.l2.faulty",
    "kvcore.l2.inspect",
    "kvcore.l2.keyed",
    "kvcore.l2.open_options",
    "kvcore.l2.open_schemes",
    "kvcore.l2.retry",
    "kvcore.l2.file",
    "kvcore.l2.backed",
    "kvcore.l2.indexed",
    "kvcore.l2.runner",
    "kvcore.l2.guards",
    "kvcore.l2.late",
    "kvcore.l2.memory",
    "kvcore.l2.open",
    "kvcore.l2.mooncake",
    "kvcore.l2.mooncake_client",
    "kvcore.l2.nixl",
    "kvcore.l2.nixl_agent",
    "kvcore.l2.nixl_pool_server",
    "kvcore.l2.nixl_pool_wire",
    "kvcore.l2.nixl_ucx",
    "kvcore.l2.objectstore",
    "kvcore.l2.objectstore_client",
    "kvcore.l2.pump",
    "kvcore.l2.redis",
    "kvcore.l2.redis_pool",
    "kvcore.l2.redis_wire",
    "kvcore.l2.shared",
    "kvcore.l2.shared_removal",
    "kvcore.l2.shared_scan",
    "kvcore.l2.shared_work",
    "kvcore.l2.fs",
    "kvcore.l2.slab",
    "kvcore.l2.slab_files",
    "kvcore.l2.slab_recovery",
    "kvcore.l2.work",
    "kvcore.loads",
    "kvcore.lookup_job",
    "kvcore.operations.http",
    "kvcore.operations.logs",
    "kvcore.operations.metrics",
    "kvcore.operations.spans",
    "kvcore.prefetch",
    "kvcore.service.client",
    "kvcore.service.command",
    "kvcore.service.connection",
    "kvcore.service.curve",
    "kvcore.service.debts",
    "kvcore.service.front",
    "kvcore.service.host",
    "kvcore.service.introduction",
    "kvcore.service.local",
    "kvcore.service.operator",
    "kvcore.service.page_client",
    "kvcore.service.pings",
    "kvcore.service.remote",
    "kvcore.service.scheduler_client",
    "kvcore.service.serve_config",
    "kvcore.service.server",
    "kvcore.service.server_config",
    "kvcore.service.worker_operations",
    "kvcore.service.worker_client",
    "kvcore.service.zmq_transport",
    "kvcore.storage",
    "kvcore.writeback",
}
# Whole folders of it: the real ports, and the adapters to one engine each.
SHELL_FOLDERS = ("kvcore.runtime.", "kvcore.connectors.vllm.")
# What an extra of pyproject.toml installs; a module that needs it is looked at where it is installed.
OPTIONAL = {"lmcache", "mooncake", "nixl_cu12", "obstore", "redis", "torch", "vllm"}
CLOCKS_AND_CHANCE = {"datetime", "random", "secrets", "time", "uuid"}
FENCE = {"kvcore.sim.fence"}  # it replaces them
STREAMS = {"kvcore.sim.streams"}  # seeded generators are made there, and only there
# A swarm of so many seconds, and workers that have died: neither decides what a seed does.
SECONDS = {"kvcore.ladder.swarm.swarm", "kvcore.ladder.swarm.worker"}
DRAWS_OF_OS = {"urandom", "getrandom"}
# Definitions only, or input that is hostile and therefore handled instead of asserted.
FEW_ASSERTIONS = {"kvcore.ports", "kvcore.service.protocol"}


@cache
def sources() -> dict[str, Path]:
    """Every module of the package by its name as installed, `kvcore.sim.loop` for sim/loop.py."""
    found = {}
    for folder, prefix in (("kvcore", ""), *((name, "kvcore.") for name in OUTER)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[prefix + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text())


def core() -> list[str]:
    return [name for name in sources() if not name.startswith(tuple(f"kvcore.{outer}" for outer in OUTER))]


def is_package(module: str) -> bool:
    return sources()[module].name == "__init__.py"


def broken(rule: Callable[[ast.Module], list[int]], modules: list[str]) -> dict[str, list[int]]:
    """Module name -> lines that break the rule."""
    assert len(modules) > 10
    return {module: lines for module in modules if (lines := rule(tree(module)))}


def lines_in(rule: Callable[[ast.Module], list[int]], text: str) -> list[int]:
    return sorted(rule(ast.parse(textwrap.dedent(text))))


def contract(name_part: str) -> dict[str, Any]:
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [entry for entry in configured if name_part in entry["name"]]
    return found


def fresh_python(code: str, cwd: Path) -> list[str]:
    """The lines that a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- which module belongs where ------------------------------------------------------------------------------------


def test_every_module_of_the_core_is_either_pure_or_shell() -> None:
    pure = set(contract("the pure modules")["source_modules"])
    modules = {name for name in core() if not is_package(name) and not name.startswith(SHELL_FOLDERS)}
    assert pure & SHELL == set()
    assert modules - pure - SHELL == set(), "put new modules into the contract in pyproject.toml or into SHELL here"
    assert pure | SHELL <= modules, "named, but there is no such module"


def test_the_contract_about_the_outer_packages_names_the_whole_core() -> None:
    expected = {name for name in core() if name.count(".") == 1}
    assert set(contract("none of the outer packages")["source_modules"]) == expected


def test_every_folder_of_the_package_has_an_init_file() -> None:
    """Without one the import contracts do not look into it."""
    folders = {path.parent for path in sources().values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@cache
def check_script() -> Any:
    """scripts/check.py as a module."""
    specification = importlib.util.spec_from_file_location("check_script", ROOT / "scripts" / "check.py")
    assert specification is not None
    assert specification.loader is not None
    check = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(check)
    return check


def _farm_with(path: str, text: str | None, tmp_path: Path) -> Path:
    """A link farm in which one module of the core has this text, or is gone."""
    check_script().link_farm(ROOT, tmp_path / "farm")
    module = tmp_path / "farm" / "kvcore" / path
    module.unlink()
    if text is not None:
        module.write_text(text)
    return tmp_path / "farm"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("placement.py", "import time\n"),
        ("placement.py", "from kvcore.runtime.clock import SystemClock\n"),
        ("writeback.py", "import kvcore.sim.loop\n"),
        ("placement.py", None),
    ],
    ids=["the clock", "the clock through another module", "the simulation", "a module that is gone"],
)
def test_the_import_contracts_find(path: str, text: str | None, tmp_path: Path, capfd: Any) -> None:
    assert not check_script().check_contracts(farm=_farm_with(path, text, tmp_path))
    assert "kvcore." + Path(path).stem in capfd.readouterr().out


def test_the_import_contracts_hold_where_nothing_was_planted(tmp_path: Path) -> None:
    check_script().link_farm(ROOT, tmp_path)
    assert check_script().check_contracts(farm=tmp_path)


@pytest.mark.parametrize(
    ("text", "status", "passes"),
    [
        ("", 0, True),
        ("anything", 1, False),
        ("a.py:1: unused variable 'x' (60% confidence)", 3, True),
        ("a.py:1: unused variable 'x' (100% confidence)", 3, False),
        ("a.py:1: unused function 'f' (60% confidence)", 3, False),
        ("a.py:1: unused variable 'x' (60% confidence)", 1, False),
    ],
)
def test_a_tool_passes_when_it_found_nothing_but_fields(text: str, status: int, passes: bool) -> None:
    check = check_script()
    tool = [sys.executable, "-S", "-c", f"import sys; print({text!r}); sys.exit({status})"]
    assert check.run("tool", tool, ignore=check.FIELDS) is passes


# --- names that must not exist -------------------------------------------------------------------------------------


def test_the_outer_folders_are_only_ever_imported_as_parts_of_kvcore(tmp_path: Path) -> None:
    code = f"""
import importlib, sys
for name in {sorted(sources())}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in {sorted(OPTIONAL)}:
            raise
print(*sorted(set(sys.modules) & {{"sim", "ladder", "reports", "tests", "kernels", "scripts"}}))
print(sum(name.startswith("kvcore.sim.") for name in sys.modules))
"""
    strangers, simulation = fresh_python(code, tmp_path)
    assert strangers == ""
    assert int(simulation) > 30


def test_importing_kvcore_alone_loads_next_to_nothing(tmp_path: Path) -> None:
    code = "import sys, kvcore; print(*(name for name in sys.modules if name.startswith(('kvcore', 'numpy', 'simpy'))))"
    assert fresh_python(code, tmp_path) == ["kvcore"]


def test_the_pytest_plugin_imports_nothing_but_pytest(tmp_path: Path) -> None:
    code = """
import sys, pytest
before = set(sys.modules)
import kvcore.ladder.plugin
print(*sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names))
"""
    assert fresh_python(code, tmp_path) == ["kvcore kvcore.ladder kvcore.ladder.plugin"]


# --- clocks, chance and order --------------------------------------------------------------------------------------


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in {"import_module", "__import__"}:
            yield str(node.args[0].value)


def _reads_a_clock_or_draws(allowed: frozenset[str] = frozenset()) -> Callable[[ast.Module], list[int]]:
    def rule(module: ast.Module) -> list[int]:
        lines = []
        for node in ast.walk(module):
            names = {name.partition(".")[0] for name in _imported(node)} & CLOCKS_AND_CHANCE - allowed
            draws = isinstance(node, ast.Attribute) and node.attr in DRAWS_OF_OS
            draws |= any(name in {f"os.{draw}" for draw in DRAWS_OF_OS} for name in _imported(node))
            numpy_random = isinstance(node, ast.Attribute) and node.attr == "random" and _is_numpy(node.value)
            numpy_random |= any(name.startswith("numpy.random") for name in _imported(node))
            if names or draws or numpy_random:
                lines.append(node.lineno)  # type: ignore[attr-defined]
        return lines

    return rule


def _is_numpy(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"np", "numpy"}


def test_the_core_reads_clocks_and_draws_only_behind_its_ports() -> None:
    """Measurements, and the time in front of a line of the log, decide nothing."""
    outside = ("kvcore.runtime", "kvcore.bench", "kvcore.operations.logs")
    modules = [name for name in core() if not name.startswith(outside)]
    assert broken(_reads_a_clock_or_draws(), modules) == {}


def test_the_simulation_reads_no_clock_and_draws_only_from_named_streams() -> None:
    modules = [name for name in sources() if name.startswith("kvcore.sim") and name not in FENCE | STREAMS]
    assert broken(_reads_a_clock_or_draws(), modules) == {}
    assert _reads_a_clock_or_draws(frozenset({"random"}))(tree("kvcore.sim.streams")) == []


def test_the_ladder_measures_only_processor_time() -> None:
    """Where the engine is the simulated one; around a real one, its targets do as it needs."""
    real = ("kvcore.ladder.targets.vllm", "kvcore.ladder.targets.torch", "kvcore.ladder.storm")
    real += ("kvcore.ladder.conformance.lmcache_peer",)
    modules = [name for name in sources() if name.startswith("kvcore.ladder") and not name.startswith(real)]
    assert broken(_reads_a_clock_or_draws(frozenset({"time"})), modules) == {}
    used = {
        node.attr
        for name in modules
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    }
    assert used == {"process_time", "monotonic"}
    assert {name for name in modules if "time.monotonic" in sources()[name].read_text()} == SECONDS


def test_the_rule_about_clocks_sees_every_spelling() -> None:
    text = """\
    import time
    import datetime as d
    from datetime import datetime
    from time import monotonic as now
    from os import urandom
    x = os.getrandom(4)
    y = np.random.default_rng()
    from numpy import random
    z = importlib.import_module("random")
    from kvcore.sim.clock import time
    """
    assert lines_in(_reads_a_clock_or_draws(), text) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def _uses_addresses(module: ast.Module) -> list[int]:
    """`id(x)` and `hash(x)` differ between runs; `__hash__` itself may combine."""
    inside = {
        id(node)
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef) and function.name == "__hash__"
        for node in ast.walk(function)
    }
    return [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Name)
        and node.id in {"id", "hash"}
        and isinstance(node.ctx, ast.Load)
        and id(node) not in inside
    ]


def _orders_by_address(module: ast.Module) -> list[int]:
    """A set taken in its own order, and `key=id` or `key=hash`."""
    lines = []
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg == "key" and getattr(node.value, "id", "") in {"id", "hash"}:
            lines.append(node.value.lineno)
        taken = node.iter if isinstance(node, ast.For | ast.comprehension) else None
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"list", "tuple", "next", "iter"}:
            taken = node.args[0] if node.args else None
        if isinstance(taken, ast.Set | ast.SetComp) or (
            isinstance(taken, ast.Call) and getattr(taken.func, "id", "") in {"set", "frozenset"}
        ):
            lines.append(taken.lineno)
    return lines


def test_nothing_in_the_core_depends_on_addresses() -> None:
    assert broken(_uses_addresses, core()) == {}


def test_nothing_is_ordered_by_address_or_hash() -> None:
    assert broken(_orders_by_address, list(sources())) == {}


def test_the_rules_about_addresses_see_what_they_are_for() -> None:
    assert lines_in(_uses_addresses, "a = id(b)\nc = hash\nid = 3\nd.id(4)\n") == [1, 2]
    assert lines_in(_uses_addresses, "class C:\n    def __hash__(self):\n        return hash(self.x)\n") == []
    text = """\
    sorted(a, key=id)
    for x in {1, 2}: pass
    y = [x for x in set(a)]
    z = list(frozenset(a))
    for x in sorted(set(a)): pass
    """
    assert lines_in(_orders_by_address, text) == [1, 2, 3, 4]


# --- threads -------------------------------------------------------------------------------------------------------

_STARTS_THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "run_in_executor", "to_thread", "start_new_thread"}
_STARTS_THREADS |= {"ThreadingMixIn", "ThreadingHTTPServer", "ThreadingTCPServer", "ThreadingUDPServer"}
_LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "Event"}
THREADS = {"kvcore.operations.http"}  # and kvcore.runtime
# Each of them is proven under the scheduler of tests/threads/.
LOCKS = {
    "kvcore.l2.nixl_ucx",
    "kvcore.l2.slab",
    "kvcore.runtime.calls",
    "kvcore.runtime.loop_thread",
    "kvcore.runtime.notice",
    "kvcore.runtime.streams",
}


def _names(names: set[str], modules: frozenset[str]) -> Callable[[ast.Module], list[int]]:
    """Lines that use one of `names` of one of `modules` (of anything that is no module: as an attribute)."""

    def rule(module: ast.Module) -> list[int]:
        lines = []
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in modules:
                lines += [node.lineno for alias in node.names if alias.name in names]
            elif isinstance(node, ast.Attribute) and node.attr in names:
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if owner != "asyncio" or node.attr == "to_thread":
                    lines.append(node.lineno)
        return lines

    return rule


_starts_threads = _names(
    _STARTS_THREADS, frozenset({"threading", "concurrent", "_thread", "asyncio", "http", "socketserver"})
)
_makes_locks = _names(_LOCKS, frozenset({"threading", "multiprocessing"}))


def test_threads_are_started_only_in_the_runtime_and_by_the_http_server() -> None:
    modules = [name for name in core() if not name.startswith("kvcore.runtime") and name not in THREADS]
    assert broken(_starts_threads, modules) == {}


def test_locks_are_only_where_they_are_proven() -> None:
    device_events = {"kvcore.device.cuda_runtime"}  # torch's, not threading's
    assert set(broken(_makes_locks, core())) == LOCKS | device_events


def test_the_rules_about_threads_see_every_spelling() -> None:
    text = """\
    from threading import Thread
    from concurrent.futures import ThreadPoolExecutor as Pool
    threading.Thread(target=f)
    await asyncio.to_thread(f)
    loop.run_in_executor(None, f)
    from http.server import ThreadingHTTPServer
    import threading
    from concurrent.futures import Future
    threading.get_ident()
    """
    assert lines_in(_starts_threads, text) == [1, 2, 3, 4, 5, 6]
    assert lines_in(_makes_locks, "a = threading.Lock()\nfrom threading import Event\nb = asyncio.Event()\n") == [1, 2]


# --- exceptions ----------------------------------------------------------------------------------------------------

SAMPLES = {"str": "text", "int": 7, "ErrorCode": ErrorCode.TOO_LARGE}


def imported(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        return object


@cache
def exceptions() -> list[type[BaseException]]:
    """Every exception class of the package."""
    return [
        value
        for name in sources()
        for value in vars(imported(name)).values()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == name
    ]


def _arguments(error: type[BaseException]) -> list[Any]:
    """One value for each argument. Exceptions without a constructor of their own take a text."""
    if "__init__" not in vars(error):
        return ["text"]
    parameters = list(inspect.signature(error).parameters.values())
    assert all(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters), error
    return [SAMPLES[parameter.annotation] for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


def _survives(error: BaseException, duplicate: BaseException) -> bool:
    same = type(duplicate) is type(error) and duplicate.args == error.args and str(duplicate) == str(error)
    return same and vars(duplicate) == vars(error)


def test_exceptions_survive_pickling() -> None:
    assert sum(issubclass(error, KvcoreError) for error in exceptions()) >= 7
    for error in exceptions():
        raised = error(*_arguments(error))
        assert _survives(raised, pickle.loads(pickle.dumps(raised))), error
        assert _survives(raised, copy.copy(raised)), error


def test_an_exception_that_forgets_its_arguments_is_found() -> None:
    class ForgetfulError(KvcoreError):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class ReduceOnly(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(f"{code}: {text}")

    with pytest.raises(TypeError):
        copy.copy(ForgetfulError("text"))
    with pytest.raises(TypeError):
        copy.copy(ReduceOnly(7, "text"))


# --- size and shape ------------------------------------------------------------------------------------------------


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name in sources() if not ast.get_docstring(tree(name))] == []


def test_modules_stay_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in sources().items()}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


def _function_lengths(modules: list[str]) -> list[int]:
    return sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for name in modules
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@pytest.mark.parametrize("part", ["kvcore", "kvcore.sim", "kvcore.ladder"])
def test_functions_stay_short(part: str) -> None:
    modules = core() if part == "kvcore" else [name for name in sources() if name.startswith(part)]
    lengths = _function_lengths(modules)
    assert len(lengths) > 50
    assert statistics.median(lengths) <= 10
    assert lengths[len(lengths) * 9 // 10] < 40


def _assertions(module: str) -> tuple[int, int]:
    count = sum(isinstance(node, ast.Assert) for node in ast.walk(tree(module)))
    return count, len(sources()[module].read_text().splitlines())


def test_the_pure_core_asserts_what_it_believes() -> None:
    counts = {name: _assertions(name) for name in contract("the pure modules")["source_modules"]}
    total, lines = (sum(column) for column in zip(*counts.values(), strict=True))
    assert total / lines * 1000 >= 15
    silent = {name for name, (count, length) in counts.items() if length > 150 and count / length * 1000 < 5}
    assert silent <= FEW_ASSERTIONS


def test_compound_assertions_are_split() -> None:
    """`assert a and b` does not say which one was wrong."""

    def rule(module: ast.Module) -> list[int]:
        return [
            node.lineno
            for node in ast.walk(module)
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        ]

    assert lines_in(rule, "assert a and b\nassert a or b\n") == [1]
    assert broken(rule, list(sources())) == {}


# --- what is committed ---------------------------------------------------------------------------------------------


def test_no_file_is_left_unfinished() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error", "XX" + "X")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("kvcore", *OUTER, "tests", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(mark in line for mark in marks)
    ]
    assert found == []


def test_no_file_names_a_place_of_one_machine() -> None:
    places = tuple(f"/{name}/" for name in ("work", "home", "root", "Users"))
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name[0] != "." and name not in {"build", "dist", "__pycache__"}]
        for name in names:
            if name.endswith((".py", ".md", ".toml")) or name == "Makefile":
                text = (Path(folder) / name).read_text()
                found += [f"{name}: {place}" for place in places if place in text and name != "test_source_rules.py"]
    assert found == []
