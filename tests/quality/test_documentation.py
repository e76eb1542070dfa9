"""README and docs: every command is run as printed, every name exists, every quoted output is what is printed.

Theory of operation
-------------------
A command is a line of a ```bash block, or a line of an indented block that begins with a program. It is run in a
folder that belongs to its page: one page is one session, python blocks included (a block that begins with `# NAME.py`
becomes that file). A command ends with status 0, or with the one that its comment names ("exit status 1"). `kvcore
serve` is started, waited for, and stopped when the page is over. `python scripts/...` is run where the tree lies.

`NOT_RUN` lists what is too long or needs another machine, each with the reason, and which test runs it or the like of
it; `AS_ELSEWHERE` the pages that repeat another one, `EXAMPLES` those whose Python code another test runs. Commands
that are not run are read: options must exist, targets of make, scripts and modules too.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import kvcore
from kvcore.cli import command_line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "tests" / "README.md", *(ROOT / "docs").rglob("*.md")])
SECONDS_MAX = 900  # ends a hang; the longest takes a dozen seconds of processor time, on machines with little of it

NOT_RUN = {
    r"make \w": "sets up an environment of its own, or runs the tests that this is a part of; targets are looked up",
    r"git clone ": "the project has no public home yet",
    r"pip install |python -m venv |lowest/bin/": "installs from the network; extras are looked up, bounds are read",
    r"kvcore doctor$": "tests/unit/test_doctor.py runs it",
    r"kvcore sim swarm --seeds 500 ": "takes minutes; tests/quality/test_swarm.py runs a smaller one",
    r"kvcore zoo --only ": "tests/quality/test_zoo.py runs this mutant's recorded case",
    r"kvcore ladder --rungs 5-8 ": "takes minutes; tests/ladder/test_storm_rungs.py runs fewer cases",
    r"python scripts/ladder_coverage.py$": "takes minutes; tests/ladder is what it measures",
    r"python scripts/mutation ": "takes hours; tests/quality/test_mutation.py runs the tool on a small tree",
    r"python scripts/structure.py ": "minutes; tests/quality/test_structure.py runs it on the tree",
    r"python scripts/bench_peers.py": "needs LMCache; tests/unit/test_peers_figures.py runs kvcore's half",
    r"kvcore conformance --peer lmcache ": "needs LMCache; tests/bench/test_conformance_lmcache.py runs it where it is",
    r"kvcore report peers ": "needs figures beside LMCache; tests/reports/test_report_peers.py draws a page",
    r"vllm serve |curl -s localhost:8000/": "needs vLLM and a model; tests/vllm serves with the connector",
    r"\.venv-vllm/bin/python ": "needs vLLM; tests/vllm runs the target with these seeds and edits",
    r"kvcore ladder --target vllm |python -m pytest .*--ladder-target vllm ": "needs vLLM; tests/vllm climbs",
    r"kvcore \w+ .*ipc:///tmp/kvcore/": "a path that others may use; README has the same in a folder of its own",
    r"kvcore serve --listen tcp://0\.0\.0\.0:": "a fixed port, open to all; tests/unit/test_curve.py has its own",
    r"curl \S*\$HTTP/": "not everywhere installed; tests/service/test_operations.py asks for them",
}
AS_ELSEWHERE = {"docs/testing.md": "README.md"}
EXAMPLES = {
    "docs/cost-model.md": "tests/reports/test_documentation.py runs them",
    "docs/layouts.md": "they take an engine's tensors; tests/device/test_discover.py has some",
}
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:kvcore|make|python|pip|pytest|git|curl|vllm|sed|\S+/bin/\w+) ")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fenced(page: Path, languages: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks in these languages, in order."""
    return [(language, text) for language, text in blocks(page) if re.fullmatch(languages, language)]


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """All blocks, in order; the language of an indented one is "indented"."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", text, re.DOTALL | re.MULTILINE):
        yield ("indented", found.group(3)) if found.group(3) else (found.group(1), found.group(2))


def commands(language: str, block: str) -> Iterator[str]:
    """Of a block; a line that ends with a backslash goes on."""
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        line = line.strip()
        if line and not line.startswith("#") and (language == "bash" or PROGRAM.match(line)):
            yield line


def all_commands(page: Path) -> list[str]:
    return [line for language, text in fenced(page, "bash|indented") for line in commands(language, text)]


def reason_not_to_run(line: str) -> str:
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, line)), "")


# ---- run as printed


@contextmanager
def timer(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """End what hangs."""
    running = threading.Timer(seconds, action)
    running.start()
    try:
        yield
    finally:
        running.cancel()


@dataclass
class Session:
    """One page's folder, with what runs in it."""

    folder: Path
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV", "KVCORE"))}
        paths = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])
        return {**found, "PATH": paths, "XDG_RUNTIME_DIR": str(self.folder), "TMPDIR": str(self.folder)}

    def run(self, line: str) -> None:
        if re.match(r"(\S+=\S+ )?kvcore serve(?!.*--print-config)", line):
            self._serve(line)
            return
        status = re.search(r"#.*exit status (\d+)", line)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT if line.startswith("python scripts/") else self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == (int(status.group(1)) if status else 0), f"{line}\n{done.stdout}\n{done.stderr}"
        self.said[line] = done.stdout

    def _serve(self, line: str) -> None:
        """Return when it listens: it says so."""
        command = ["bash", "-c", line.replace("kvcore serve", "exec kvcore serve", 1)]
        server = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True)
        self.servers.append(server)
        assert server.stdout is not None
        with timer(SECONDS_MAX, server.kill):
            said = next((text for text in server.stdout if "listening on" in text), "")
        assert said, f"{line}\nended without listening"

    def python(self, code: str) -> str:
        """Run a block, or keep it as the file that its first line names; what it printed."""
        name = re.match(r"# (\w+\.py)\n", code)
        if name:
            (self.folder / name.group(1)).write_text(code, encoding="utf-8")
            return ""
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
        )
        assert done.returncode == 0, f"{code}\n{done.stderr}"
        return done.stdout

    def close(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=SECONDS_MAX)
            assert server.returncode == 0


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session(tmp_path)
    try:
        yield made
    finally:
        made.close()


def steps(page: Path) -> list[tuple[str, str]]:
    """(language, text) of what is run: python blocks whole, of others the commands that are not left out."""
    found = []
    for language, text in fenced(page, "bash|indented|python"):
        if language == "python":
            found.append((language, text))
        else:
            found += [("bash", line) for line in commands(language, text) if not reason_not_to_run(line)]
    return found


RUN = [page for page in PAGES if steps(page) and named(page) not in {**AS_ELSEWHERE, **EXAMPLES}]


@pytest.mark.parametrize("page", RUN, ids=named)
def test_the_commands_of_a_page_run_as_printed(page: Path, session: Session) -> None:
    for language, text in steps(page):
        if language == "python":
            said = re.findall(r"print\(.*\)(?:  # (.*))?", text)
            printed = session.python(text).splitlines()
            assert [line for line, wanted in zip(printed, said, strict=True) if wanted not in ("", line)] == []
        else:
            session.run(text)
    claimed = re.search(r"Of more than ([\d,]+) tokens none differs", page.read_text(encoding="utf-8"))
    if claimed:
        assert tokens_compared(session.said["kvcore demo --out demo"]) > int(claimed.group(1).replace(",", ""))


def tokens_compared(demo: str) -> int:
    """The sum of a column of the demo's first table."""
    table = demo.partition("verdict\n")[2].partition("\n\n")[0]
    return sum(int(line[26:37].replace(",", "")) for line in table.splitlines())


def test_every_reason_not_to_run_is_needed_and_no_page_is_forgotten() -> None:
    lines = {named(page): all_commands(page) for page in PAGES}
    everything = [line for page in lines.values() for line in page]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in everything)] == []
    bare = {page: {re.split(r"\s+#", line)[0] for line in there} for page, there in lines.items()}
    assert [line for page, other in AS_ELSEWHERE.items() for line in bare[page] - bare[other]] == []
    assert {"README.md", "docs/server.md", "docs/your-connector.md", "docs/peers.md"} <= {named(page) for page in RUN}


def test_a_test_that_a_reason_names_exists() -> None:
    named_files = re.findall(r"tests/\S+\.py", " ".join([*NOT_RUN.values(), *EXAMPLES.values()]))
    assert named_files
    assert [name for name in named_files if not (ROOT / name).is_file()] == []


# ---- quoted output


def masked(line: str) -> str:
    """Figures and names of requests come from the workload, which is another one where a trace lies beside the tree."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*", "N", line)).strip()


def test_the_ladders_explanation_of_the_toy_is_what_it_prints(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcore.ladder.climb import climb_all
    from kvcore.ladder.options import LadderOptions
    from kvcore.ladder.table import render

    (code,) = [text for _, text in fenced(ROOT / "docs/your-connector.md", "python") if text.startswith("# toy.py")]
    session.python(code)
    monkeypatch.syspath_prepend(str(session.folder))
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    monkeypatch.setattr(LadderOptions, "default_trace", lambda self: None)  # as in a clone that stands alone
    printed = render(climb_all(LadderOptions(connector="toy:Toy"))).splitlines()
    sys.modules.pop("toy")
    known = {masked(line) for line in printed}
    for page in ("README.md", "docs/your-connector.md"):
        quoted = [line for _, text in fenced(ROOT / page, "text") for line in text.splitlines() if line]
        assert any("rung 4" in line for line in quoted)
        assert [line for line in quoted if masked(line) not in known] == []


# ---- shown and read: options, targets, scripts, modules


def shown_commands() -> Iterator[tuple[str, str]]:
    """(page, command) of every line that begins as one of our commands, in whatever block; without comment."""
    for page in PAGES:
        for language, text in blocks(page):
            for line in commands("text" if language == "bash" else language, text):
                if re.match(r"kvcore|make|python|\.venv", line):
                    yield named(page), line.split("  ")[0].split(" #")[0]


SHOWN = list(shown_commands())


def options_of(parser: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """Of the command that these words name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
            return options_of(action.choices[words[0]], words[1:])
    return {flag for action in parser._actions for flag in action.option_strings}


def test_options_of_shown_commands_exist() -> None:
    parser = command_line()
    known = {
        name for action in parser._actions if isinstance(action, argparse._SubParsersAction) for name in action.choices
    }
    wrong = []
    for page, line in SHOWN:
        words = line.replace("[", " ").replace("]", " ").split()
        if words[0] != "kvcore":
            continue
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        unknown = words[1] not in known and not words[1].startswith("-")
        if unknown or flags - options_of(parser, words[1:]):
            wrong.append((page, line))
    assert wrong == []
    assert len(SHOWN) > 30


def test_targets_scripts_and_modules_of_shown_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wrong = []
    for page, line in SHOWN:
        words = line.split()
        if words[0] == "make":
            wanted = [word for word in words[1:] if "=" not in word]
            wrong += [(page, line)] if set(wanted) - targets else []
        elif words[0].endswith("python") and words[1].endswith(".py"):
            wrong += [(page, line)] if not (ROOT / words[1]).is_file() else []
        elif words[0].endswith("python") and words[1] == "-m" and words[2].startswith("kvcore."):
            wrong += [(page, line)] if importlib.util.find_spec(words[2]) is None else []
    assert wrong == []


def test_extras_of_shown_installations_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {
        name
        for page in PAGES
        for each in re.findall(r"kvcore\[([\w,-]+)\]", page.read_text())
        for name in each.split(",")
    }
    assert asked
    assert asked <= set(extras)


# ---- names

NAME = re.compile(r"`([a-z_][a-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)+)`")
FILES = (
    ".py",
    ".md",
    ".txt",
    ".json",
    ".png",
    ".mmd",
    ".toml",
    ".jsonl",
    ".csv",
    ".html",
    ".js",
    ".so",
    ".h",
    ".cu",
    ".key",
)
NO_CODE = {"kvcore.commands", "kvcore.load", "kvcore.store"}  # an entry-point group, and spans
EVERY_NAME = ("docs/walkthroughs.md", "docs/architecture.md", "docs/operations.md")


def exists(name: str) -> bool:
    """Whether a dotted name is a module of kvcore, or something in one. What needs an absent package is believed."""
    try:
        found, rest = nearest_module(name.removeprefix("kvcore.").split("."))
        for part in rest:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("kvcore")
    return found is not kvcore


def nearest_module(parts: list[str]) -> tuple[object, list[str]]:
    """The longest part of a dotted name that is a module, and what is left."""
    for length in range(len(parts), 0, -1):
        module = ".".join(["kvcore", *parts[:length]])
        try:
            return importlib.import_module(module), parts[length:]
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "?"):
                raise
    return kvcore, parts


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_names_of_the_code_exist(page: Path) -> None:
    names = {name for name in NAME.findall(page.read_text(encoding="utf-8")) if not name.endswith(FILES)}
    if named(page) not in EVERY_NAME:
        names = {name for name in names if name.startswith("kvcore.")} - NO_CODE
    assert sorted(name for name in names if not exists(name)) == []


def test_a_name_that_does_not_exist_is_seen() -> None:
    assert exists("l1.L1Cache.finish_write")
    assert exists("kvcore.ladder.Connector")
    assert not exists("l1.L1Cache.finish_writing")
    assert not exists("l7.L1Cache")


def test_every_finding_stands_in_the_index() -> None:
    folder = ROOT / "docs" / "findings"
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert [
        page.name for page in folder.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index
    ] == []


def test_readme_is_short() -> None:
    """What is longer than three readers have patience for belongs into docs."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170


def test_quoting_in_printed_commands_is_the_shells() -> None:
    for page in PAGES:
        for _, text in fenced(page, "bash"):
            for line in commands("bash", text):
                assert shlex.split(line, comments=True)
