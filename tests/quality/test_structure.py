"""The structure report: what it counts, that its gates can fail, and that the tree passes them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (
    '[[tool.importlinter.contracts]]\nname = "the pure modules know nothing"\nsource_modules = ["kvcore.pure"]\n'
)
PURE = '''"""A module.

Two lines.
"""

import os  # a comment beside code counts as code


class Box:
    def open(self) -> str:
        """Docstring."""
        assert os

        # a comment
        def inner() -> str:
            return """text
            in two lines"""

        return inner()
'''


@pytest.fixture
def structure(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("structure")


def plant(root: Path, files: dict[str, str]) -> Path:
    """A small tree: pyproject.toml, one pure module, and these files."""
    for path, text in {"pyproject.toml": PYPROJECT, "kvcore/pure.py": PURE, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for folder in ("sim", "ladder", "reports"):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "__init__.py").write_text("def one() -> int:\n    return 1\n")
    return root


def test_lines_code_functions_and_assertions_are_counted(structure: ModuleType, tmp_path: Path) -> None:
    report = structure.measure(plant(tmp_path, {"kvcore/l2/store.py": "x = 1\n\n\n", "tests/test_a.py": "\n\n"}))
    assert report["packages"]["kvcore, pure"] == {"modules": 1, "lines": 19, "code": 8}
    assert report["packages"]["kvcore.l2"] == {"modules": 1, "lines": 3, "code": 1}
    assert report["packages"]["kvcore.sim"] == {"modules": 1, "lines": 2, "code": 2}
    assert report["beside"]["tests"] == 2
    assert (report["pure"]["asserts"], report["pure"]["asserts_per_1000_lines"]) == (1, pytest.approx(1000 / 19))
    functions = report["functions"]["pure core"]
    assert functions["longest"] == [
        {"name": "kvcore.pure:Box.open", "lines": 10},
        {"name": "kvcore.pure:Box.open.inner", "lines": 3},
    ]
    assert (functions["median"], functions["p90"]) == (6.5, 10)


def test_the_tree_passes_its_gates(structure: ModuleType, capsys: Any) -> None:
    assert structure.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert structure.broken_gates(report) == []
    assert report["pure"]["modules"] > 50
    assert report["packages"]["kvcore.sim"]["modules"] > 50


def test_a_long_module_breaks_a_gate(structure: ModuleType, tmp_path: Path) -> None:
    at_limit = structure.measure(plant(tmp_path, {"sim/long.py": "x = 1\n" * 800}))
    assert structure.broken_gates(at_limit) == []
    over = structure.measure(plant(tmp_path, {"sim/long.py": "x = 1\n" * 801}))
    assert structure.broken_gates(over) == ["kvcore.sim.long has 801 lines, more than 800"]


@pytest.mark.parametrize(
    "files",
    [
        {"kvcore/a.py": "import kvcore.b\n", "kvcore/b.py": "from kvcore import a\n"},
        {
            "kvcore/a.py": "from kvcore.b import x\n",
            "kvcore/b.py": "try:\n    from kvcore.a import y\nfinally:\n    x = 1\n",
        },
        {"kvcore/a.py": "from kvcore.b import x\n", "kvcore/b.py": "class C:\n    from kvcore.a import y\n"},
    ],
    ids=["modules", "names, one in a try", "in a class"],
)
def test_an_import_cycle_breaks_a_gate(structure: ModuleType, files: dict[str, str], tmp_path: Path) -> None:
    report = structure.measure(plant(tmp_path, files))
    assert structure.broken_gates(report) == ["import cycle: kvcore.a -> kvcore.b -> kvcore.a"]


def test_late_imports_close_no_cycle_and_are_told(structure: ModuleType, tmp_path: Path) -> None:
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvcore.a\nelse:\n    import kvcore.pure\n"
    report = structure.measure(plant(tmp_path, {"kvcore/a.py": "def f():\n    import kvcore.b\n", "kvcore/b.py": late}))
    assert report["cycles"] == []
    assert report["cycles_with_late_imports"] == [["kvcore.a", "kvcore.b"]]


def test_a_name_in_a_package_is_the_module_of_that_name_where_there_is_one(structure: ModuleType) -> None:
    """`from kvcore.a import b` inside `kvcore.a.c` is no import of the package's own names when `kvcore.a.b` exists."""
    source = ast.parse("from kvcore.a import b\n")
    imports = {"kvcore.a": frozenset({"kvcore.a.c.name"}), "kvcore.a.b": frozenset[str]()}
    imports["kvcore.a.c"] = structure.imports_of(source, whole=False)
    assert structure.cycles(imports) == []
    del imports["kvcore.a.b"]
    assert structure.cycles(imports) == [["kvcore.a", "kvcore.a.c"]]
