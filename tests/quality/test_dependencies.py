"""Every dependency has its row in docs/dependencies.md, with its extra, its bound and its licence."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = """
[project]
name = "kvcore"
dependencies = ["Some_Lib>=1.2"]
[project.optional-dependencies]
extra = ["other>=3"]
dev = ["kvcore[extra]", "other>=3"]
"""
PAGE = """
| distribution | imported as | extra | bound | what for | why |
| --- | --- | --- | --- | --- | --- |
| `some-lib` | `some` | core | `>=1.2` | a | b |
| `other` | `other` | extra, dev | `>=3` | a | b |

<!-- licences -->
| `gone` | MIT | dev |
| `pytest` | old | dev |
<!-- /licences -->
"""


@pytest.fixture
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("dependencies")


def test_every_dependency_has_its_row(script: ModuleType) -> None:
    pyproject, page = (ROOT / "pyproject.toml").read_text(), (ROOT / "docs" / "dependencies.md").read_text()
    assert script.disagreements(pyproject, page) == []
    assert len(script.rows_of(page)) > 20


def test_what_serves_has_a_licence_in_the_table_and_a_free_one(script: ModuleType) -> None:
    """By what the page says, so that a release of somebody else's cannot break this test."""
    page = (ROOT / "docs" / "dependencies.md").read_text()
    listed = script.written(page)
    assert script.not_free(listed) == []
    optional = {"vllm"}  # not installed where the table is written
    assert {name for name in script.rows_of(page) if name not in listed} <= optional


def test_a_dependency_has_a_lower_bound_and_no_upper_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    wanted = [item for item in map(Requirement, texts) if item.name != project["name"]]
    assert {item.name for item in wanted if [bound.operator for bound in item.specifier] != [">="]} == set()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"other>=3"]\ndev', '"other>=3", "third>=1"]\ndev', "third has no row in docs/dependencies.md"),
        ('"Some_Lib>=1.2"', "", "some-lib has a row and is not asked for"),
        ("Some_Lib>=1.2", "Some_Lib>=1.3", "some-lib: bound >=1.3; the page says >=1.2"),
        (', "other>=3"]\n', "]\n", "other: extras extra; the page says extra, dev"),
    ],
    ids=["a new one", "one that is gone", "another bound", "another extra"],
)
def test_what_disagrees_is_told(script: ModuleType, old: str, new: str, said: str) -> None:
    assert script.disagreements(PYPROJECT, PAGE) == []
    changed = PYPROJECT.replace(old, new)
    assert changed != PYPROJECT
    assert script.disagreements(changed, PAGE) == [said]


def test_two_bounds_for_one_dependency_are_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="other is asked for as >=3 and as >=4"):
        script.requirements_of(PYPROJECT.replace('"kvcore[extra]", "other>=3"', '"other>=4"'))


def test_the_oldest_versions_can_be_installed_by_name(script: ModuleType) -> None:
    wanted = script.requirements_of(PYPROJECT)
    assert script.lowest(wanted, ["core"]) == ["some-lib==1.2"]
    assert script.lowest(wanted, ["core", "dev"]) == ["some-lib==1.2", "other==3"]


def test_a_licence_is_read_from_expression_classifier_or_text(script: ModuleType) -> None:
    classifiers = ["Programming Language :: Python", "License :: OSI Approved :: MIT License"]
    assert script.licence_of({"License-Expression": "MIT", "License": "long"}, classifiers) == "MIT"
    assert script.licence_of({"License": "Copyright"}, classifiers) == "MIT License"
    assert script.licence_of({"License": "BSD-3-Clause\nlong text"}, ()) == "BSD-3-Clause"
    assert script.licence_of({}, ()) == ""


def test_a_licence_that_asks_for_more_is_found_where_it_serves(script: ModuleType) -> None:
    rows = {"a": ("GPL-3.0", ["dev"]), "b": ("GPL-3.0", ["dev", "s3"]), "c": ("", ["core"]), "d": ("MIT", ["core"])}
    assert script.not_free(rows) == ["b: licence GPL-3.0", "c: licence not named"]


def test_the_table_follows_what_is_installed_and_keeps_the_rest(script: ModuleType) -> None:
    found = script.licences({"pytest": script.Row("pytest", ("dev", "sim"), ">=8.3")})
    assert "MIT" in found["pytest"][0]
    assert found["pluggy"][1] == ["dev", "sim"], "what pytest needs comes with it"
    table = script.written(script.with_licences(PAGE, found))
    assert table["gone"] == ("MIT", ["dev"])
    assert table["pytest"] == found["pytest"]
