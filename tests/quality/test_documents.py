"""The documents that belong to a release are there, complete and in order, and no link in any of them is dead."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]  # in the order of Keep a Changelog
ADR = ("Context", "Decision", "Rejected")


def links(text: str) -> list[str]:
    """Where the links of a page go, those to the world excepted. Code is not looked at."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [link for link in LINK.findall(text) if not link.startswith(("http://", "https://", "mailto:"))]


def anchors(text: str) -> set[str]:
    """What a link may name after `#`: headings, as the usual hosts write them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        wanted = text if not path else target.read_text() if target.suffix == ".md" and target.exists() else ""
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(wanted)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_link_is_dead(page: Path) -> None:
    assert dead(page, page.read_text()) == []


def test_a_dead_link_is_seen() -> None:
    text = (
        "# A heading, here\n[a](LICENSE) [b](gone.md) [c](#a-heading-here) [d](#gone) [e](https://x.org) `[f](no.md)`"
    )
    assert dead(ROOT / "README.md", text) == ["gone.md", "#gone"]


def test_the_licence_is_the_whole_text() -> None:
    """Apache-2.0 as its authors publish it, appendix included; only spaces at the ends do not count."""
    words = " ".join((ROOT / "LICENSE").read_text().split())
    assert words.startswith("Apache License Version 2.0, January 2004")
    assert words.endswith(
        "See the License for the specific language governing permissions and limitations under the License."
    )
    assert hashlib.sha256(words.encode()).hexdigest() == LICENCE_SHA256


LICENCE_SHA256 = "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"


def test_every_decision_record_is_in_the_index() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    records = sorted(path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert re.findall(r"\((\d{4}-[a-z0-9-]+\.md)\)", index) == records
    assert [name[:4] for name in records] == [f"{number:04}" for number in range(1, len(records) + 1)]


@pytest.mark.parametrize("record", sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")), ids=lambda path: path.stem[:4])
def test_a_decision_record_has_its_parts(record: Path) -> None:
    text = record.read_text()
    assert text.startswith(f"# {record.name[:4]}: ")
    assert re.search(r"^Date: \d{4}-\d\d-\d\d\. Status: (accepted|replaced by \d{4})\.$", text, flags=re.MULTILINE)
    assert all(f"\n## {part}\n" in text for part in ADR) or "Rejected: " in text, "a very short one may be a paragraph"
    assert len(text.splitlines()) <= 90, "one page"


def sections_of(text: str) -> dict[str, list[str]]:
    """Version -> the kinds of changes it lists, in order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            found[line] = []
        elif line.startswith("### "):
            found[list(found)[-1]].append(line.removeprefix("### "))
    return found


def test_the_changelog_is_in_order() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sections = sections_of(text)
    assert next(iter(sections)).startswith(f"## [{version}]"), (
        "the newest stands first and is the one of pyproject.toml"
    )
    for kinds in sections.values():
        assert kinds == [kind for kind in SECTIONS if kind in kinds], "each kind once, in this order"
        assert kinds
    entries = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(set(entries)) == len(entries) > 20


def test_the_package_says_that_it_has_types() -> None:
    """One marker at the top covers all packages below it (PEP 561): sim, ladder and reports install below kvcore."""
    assert (ROOT / "kvcore" / "py.typed").read_bytes() == b""
