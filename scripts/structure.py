"""`make structure`: how the tree is built, in figures. Fails when a gate is broken; the rest is for a reader to judge.

    python scripts/structure.py                    the working tree
    python scripts/structure.py --revision REV     a commit, for before and after
    python scripts/structure.py --coverage         also: what unit and machine tests reach in the pure core (minutes)
    python scripts/structure.py --json             everything, `{"schema": 1, ...}`

Gates: no module over 800 lines, no import cycle among modules as they are loaded. (The import contracts are a gate of
`make check`; tests/quality/test_source_rules.py is stricter about length.) Everything else is an aim: a figure that
misses it wants a reason, and docs/structure.md gives one for each of the ten worst.

What is counted. *Lines* are lines of the file; *code* leaves out empty lines, comments and docstrings. The *pure core*
is what the import contract of pyproject.toml calls pure. A *function* runs from its `def` to its last line, docstring
included, and a nested one counts by itself as well as in the one around it. An *import cycle* is a set of modules that
need each other while they are loaded. Imports inside functions and under `TYPE_CHECKING` are no part of it: sets that
need each other only with those are told, and are no gate. A package counts as its `__init__.py`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTER = ("sim", "ladder", "reports")
BESIDE = ("tests", "scripts")
KERNELS = (".cpp", ".cu", ".h", ".hpp", ".cuh", ".py")
CONTRACT = "the pure modules "
SCHEMA = 1

MODULE_LINES_MAX = 800  # the gate
PURE_LINES_AIM, MEDIAN_AIM, P90_AIM, ASSERTS_AIM = 5000, 10, 40, 15
WORST = 10


@dataclass(frozen=True, slots=True)
class Function:
    """One function: `kvcore.l1:L1.reserve`."""

    name: str
    lines: int


@dataclass(frozen=True, slots=True)
class Module:
    """One file of Python, by its name as installed (files beside the package: by their path)."""

    name: str
    lines: int
    code: int
    asserts: int
    functions: tuple[Function, ...]
    loaded: frozenset[str]  # imports while it is loaded
    imports: frozenset[str]  # those, and the ones inside functions and for types


# --- one file ------------------------------------------------------------------------------------------------------


def code_lines(text: str, module: ast.Module) -> int:
    """Lines that hold code: neither empty, nor comment, nor docstring."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in quiet:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docstring_lines(module))


def docstring_lines(module: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def functions_of(name: str, module: ast.Module) -> Iterator[Function]:
    def walk(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(f"{name}:{prefix}{child.name}", (child.end_lineno or child.lineno) - child.lineno + 1)
            named = child.name if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else ""
            yield from walk(child, f"{prefix}{named}." if named else prefix)

    return walk(module, "")


def imports_of(module: ast.Module, whole: bool) -> frozenset[str]:
    """What a module imports while it is loaded, or as a whole, as dotted names; `from a import b` is `a.b`."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(module.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not whole:
            waiting += node.orelse
        elif whole or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return frozenset(found)


def module_of(name: str, path: Path) -> Module:
    text = path.read_text()
    parsed = ast.parse(text)
    asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(parsed))
    functions = tuple(functions_of(name, parsed))
    imports = (imports_of(parsed, whole=False), imports_of(parsed, whole=True))
    return Module(name, len(text.splitlines()), code_lines(text, parsed), asserts, functions, *imports)


# --- the tree ------------------------------------------------------------------------------------------------------


def modules_in(root: Path) -> dict[str, Module]:
    """Every module of the package, by its name as installed."""
    found = {}
    for folder, prefix in (("kvcore", ""), *((name, "kvcore.") for name in OUTER)):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = prefix + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = module_of(name, path)
    return found


def files_beside(root: Path) -> dict[str, int]:
    """Lines of what is no part of the package, per folder."""
    lines = {folder: sum(map(lines_of, (root / folder).rglob("*.py"))) for folder in BESIDE}
    return lines | {"kernels": sum(lines_of(path) for path in (root / "kernels").rglob("*") if path.suffix in KERNELS)}


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def pure_names(root: Path) -> set[str]:
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (entry for entry in contracts if entry["name"].startswith(CONTRACT))
    return set(contract["source_modules"])


def package_of(name: str, pure: set[str]) -> str:
    """The row that a module is counted in: its package, and for the top of kvcore whether it is pure."""
    parts = name.split(".")
    if len(parts) == 1 or (len(parts) == 2 and name in pure):
        return "kvcore, pure" if name in pure else "kvcore, shell"
    return ".".join(parts[:2]) if parts[1] in OUTER or len(parts) > 2 else "kvcore, shell"


def cycles(imports: dict[str, frozenset[str]]) -> list[list[str]]:
    """Sets of modules that import each other, or (of one) itself; `imports` has a row for every module there is."""
    edges = {name: sorted(_modules_named(wanted, imports)) for name, wanted in imports.items()}
    reach = {name: _reachable(name, edges) for name in imports}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in imports}
    return sorted(list(group) for group in groups if group)


def _modules_named(wanted: frozenset[str], imports: dict[str, frozenset[str]]) -> set[str]:
    """`a.b` is the module of that name, or else a name in module `a`."""
    named = {name if name in imports else name.rpartition(".")[0] for name in wanted}
    return named & imports.keys()


def _reachable(start: str, edges: dict[str, list[str]]) -> set[str]:
    """What can be reached from `start` over one import or more."""
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += edges[name]
    return seen


def p90(values: list[int]) -> int:
    return sorted(values)[len(values) * 9 // 10]


# --- the report ----------------------------------------------------------------------------------------------------


def measure(root: Path) -> dict[str, Any]:
    """Every figure, as JSON has it."""
    modules, pure = modules_in(root), pure_names(root)
    core = [modules[name] for name in sorted(pure)]
    packages: dict[str, dict[str, int]] = {}
    for name, module in modules.items():
        row = packages.setdefault(package_of(name, pure), {"modules": 0, "lines": 0, "code": 0})
        for key, value in (("modules", 1), ("lines", module.lines), ("code", module.code)):
            row[key] += value
    functions = {
        part: [function for module in chosen for function in module.functions]
        for part, chosen in {
            "pure core": core,
            "kvcore": _part(modules, ""),
            **{n: _part(modules, n) for n in OUTER},
        }.items()
    }
    lines = sum(module.lines for module in core)
    return {
        "schema": SCHEMA,
        "packages": packages,
        "beside": files_beside(root),
        "pure": {
            "modules": len(core),
            "lines": lines,
            "code": sum(module.code for module in core),
            "asserts": sum(module.asserts for module in core),
            "asserts_per_1000_lines": 1000 * sum(module.asserts for module in core) / lines,
            "longest": [_brief(module) for module in sorted(core, key=lambda module: -module.lines)[:WORST]],
        },
        "functions": {part: _lengths(found) for part, found in functions.items()},
        "longest_modules": [_brief(m) for m in sorted(modules.values(), key=lambda module: -module.lines)[:WORST]],
        "cycles": cycles({name: module.loaded for name, module in modules.items()}),
        "cycles_with_late_imports": cycles({name: module.imports for name, module in modules.items()}),
    }


def _part(modules: dict[str, Module], outer: str) -> list[Module]:
    """The modules of one outer package, or (`""`) of the core."""
    if outer:
        return [module for name, module in modules.items() if name.startswith(f"kvcore.{outer}")]
    return [module for name, module in modules.items() if name.split(".")[1:2] not in [[part] for part in OUTER]]


def _brief(module: Module) -> dict[str, Any]:
    return {"name": module.name, "lines": module.lines, "code": module.code, "asserts": module.asserts}


def _lengths(found: list[Function]) -> dict[str, Any]:
    lengths = [function.lines for function in found]
    longest = sorted(found, key=lambda function: -function.lines)[:WORST]
    worst = [asdict(function) for function in longest]
    return {"count": len(found), "median": median(lengths), "p90": p90(lengths), "longest": worst}


def broken_gates(report: dict[str, Any]) -> list[str]:
    """What must not be: each in one line."""
    problems = [f"import cycle: {' -> '.join([*cycle, cycle[0]])}" for cycle in report["cycles"]]
    for module in report["longest_modules"]:
        if module["lines"] > MODULE_LINES_MAX:
            problems.append(f"{module['name']} has {module['lines']} lines, more than {MODULE_LINES_MAX}")
    return problems


def show(report: dict[str, Any]) -> None:
    """The report in Markdown."""
    pure, functions = report["pure"], report["functions"]
    print("| package | modules | lines | code |\n| --- | ---: | ---: | ---: |")
    for name, row in sorted(report["packages"].items()):
        print(f"| {name} | {row['modules']} | {row['lines']} | {row['code']} |")
    for name, lines in report["beside"].items():
        print(f"| {name}/ |  | {lines} |  |")
    core, aim = f"{pure['lines']} lines, {pure['code']} of code", f"(aim: under {PURE_LINES_AIM})"
    print(f"\npure core: {pure['modules']} modules, {core} {aim}; ", end="")
    print(f"{pure['asserts_per_1000_lines']:.1f} asserts per 1,000 lines (aim: {ASSERTS_AIM})\n")
    print(f"| functions of | count | median (aim {MEDIAN_AIM}) | p90 (aim {P90_AIM}) |\n| --- | ---: | ---: | ---: |")
    for part, row in functions.items():
        print(f"| {part} | {row['count']} | {row['median']:g} | {row['p90']} |")
    everywhere = [function for row in list(functions.values())[1:] for function in row["longest"]]
    longest = sorted(everywhere, key=lambda function: -function["lines"])[:WORST]
    _table("longest modules", report["longest_modules"])
    _table("longest modules of the pure core", pure["longest"])
    _table("longest functions", longest)
    _table("longest functions of the pure core", functions["pure core"]["longest"])
    if "coverage" in report:
        _show_coverage(report["coverage"])
    print(*(f"\nGATE BROKEN: {problem}" for problem in broken_gates(report)), sep="", end="")
    print(f"\nimport cycles: {len(report['cycles'])}; longest module: {report['longest_modules'][0]['lines']} lines")
    for names in report["cycles_with_late_imports"]:
        print(f"late imports (in functions, for types) close a ring of: {', '.join(names)}")


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n| {title} | lines |\n| --- | ---: |")
    print(*(f"| `{row['name']}` | {row['lines']} |" for row in rows), sep="\n")


# --- coverage ------------------------------------------------------------------------------------------------------


def coverage_of(root: Path, jobs: int) -> dict[str, Any]:
    """The share of the pure core's statements that tests/unit and tests/machines reach.

    With few examples of each property: what takes thousands to be reached is luck, not cover, and counted lines cost
    twice the time.
    """
    with tempfile.TemporaryDirectory() as folder:
        data, config, out = (Path(folder) / name for name in ("data", "coveragerc", "coverage.json"))
        files = sorted(name.replace(".", "/") + ".py" for name in pure_names(root))
        config.write_text(
            "\n".join(["[run]", f"data_file = {data}", "include =", *(f"    {file}" for file in files)]) + "\n"
        )
        tests = ["-m", "pytest", "-n", str(jobs), "tests/unit", "tests/machines", "--hypothesis-profile=brief"]
        measure_it = ["--cov", f"--cov-config={config}", f"--cov-report=json:{out}"]
        ran = subprocess.run([sys.executable, *tests, *measure_it], cwd=root, check=False, stdout=sys.stderr)
        found = json.loads(out.read_text())
    covered = {name: _summary(row["summary"]) for name, row in found["files"].items()}
    silent = {file: (0, 0, 0.0) for file in files if file not in covered}
    return {"percent": found["totals"]["percent_covered"], "passed": ran.returncode == 0, "modules": covered | silent}


def _summary(summary: dict[str, Any]) -> tuple[int, int, float]:
    """(statements, reached, percent)."""
    return summary["num_statements"], summary["covered_lines"], summary["percent_covered"]


def _show_coverage(coverage: dict[str, Any]) -> None:
    print(f"\ncoverage of the pure core by unit and machine tests: {coverage['percent']:.1f} %")
    if not coverage["passed"]:
        print("(SOME OF THEM FAILED: what they would have reached is missing)")
    print("\n| least covered | statements | reached | % |\n| --- | ---: | ---: | ---: |")
    for name, (statements, reached, percent) in sorted(coverage["modules"].items(), key=lambda row: row[1][2])[:WORST]:
        print(f"| `{name}` | {statements} | {reached} | {percent:.1f} |")


# --- the command ---------------------------------------------------------------------------------------------------


def export(revision: str, target: Path) -> Path:
    """The tree as it was committed."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(target, filter="data")
    return target


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="structure", description=__doc__.split("\n")[0])
    parser.add_argument("--revision", help="look at this commit instead of the working tree")
    parser.add_argument("--coverage", action="store_true", help="run the unit and machine tests of the working tree")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.revision and arguments.coverage:
        parser.error("--coverage runs the tests of the working tree, not of a revision")
    with tempfile.TemporaryDirectory() as folder:
        report = measure(export(arguments.revision, Path(folder)) if arguments.revision else ROOT)
    if arguments.coverage:
        report["coverage"] = coverage_of(ROOT, arguments.jobs)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 1 if broken_gates(report) else 0


if __name__ == "__main__":
    sys.exit(main())
