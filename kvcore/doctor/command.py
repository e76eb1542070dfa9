"""`kvcore doctor`: the findings, then what works here and what does not.

Exit status: 0 nothing is broken, 1 something is (what is merely absent breaks nothing), 2 a store's URL cannot be
understood.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from kvcore.doctor import machine, packages, stores
from kvcore.doctor.finding import USES, Finding, Use, lacking

_SIGNS = {"ok": "ok", "absent": "-", "broken": "BROKEN"}
_WIDTH = 120


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    about = "what works on this machine, what does not, and what to do"
    parser = commands.add_parser("doctor", help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("stores", nargs="*", metavar="URL", help="an L2 store to open and close, as serve --l2 would")
    parser.add_argument("--json", action="store_true", help="write the findings as JSON to standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look, print, and answer with the exit status."""
    asked = stores.look(arguments.stores)
    findings = [*packages.look(), *machine.look(), *asked]
    if arguments.json:
        print(json.dumps(to_json(findings), indent=1))
    else:
        print("\n".join(report(findings)))
    return 1 if any(finding.state == "broken" for finding in findings) else 0


def to_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Findings and uses as a value."""
    return {
        "kvcore": version("kvcore"),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "uses": [{"name": use.name, "works": not lacking(use, findings)} for use in USES],
    }


def report(findings: Sequence[Finding]) -> Iterator[str]:
    """The whole text, line by line."""
    yield f"kvcore {version('kvcore')}"
    yield ""
    width = max(len(finding.name) for finding in findings if not finding.name.startswith("store "))
    for finding in findings:
        yield from _lines(finding, width)
    yield ""
    yield "What you can do here"
    for use in USES:
        yield _use(use, findings)
    broken = [finding.name for finding in findings if finding.state == "broken"]
    yield ""
    yield f"broken: {', '.join(broken)}" if broken else "nothing is broken"


def _lines(finding: Finding, width: int) -> Iterator[str]:
    head = f"{_SIGNS[finding.state]:<7}{finding.name:<{width}}  "
    text = textwrap.wrap(finding.text, _WIDTH - len(head)) or [""]
    advice = textwrap.wrap(f"-> {finding.advice}", _WIDTH - len(head)) if finding.advice else []
    for number, line in enumerate([*text, *advice]):
        yield f"{head if number == 0 else ' ' * len(head)}{line}".rstrip()


def _use(use: Use, findings: Sequence[Finding]) -> str:
    needs = lacking(use, findings)
    return f"  {'no ' if needs else 'yes'}  {use.name}" + (f": needs {', '.join(needs)}" if needs else "")
