"""`kvcore conformance`: where does a cache keep another contract than kvcore's L1 and prefix rule?

Progress goes to standard error. Exit status: 0 the same contract, 1 it differs, 2 unusable input: no such peer, or one
that cannot be loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from kvcore.errors import ConfigError
from kvcore.ladder.conformance.child import LMCACHE, load
from kvcore.ladder.conformance.peer import Peer

OWN = "kvcore"


def register(commands: Any) -> None:
    """Add `conformance` to the command line (entry point `kvcore.commands`)."""
    parser = commands.add_parser("conformance", help="hold a cache against the contract of L1 and the prefix rule")
    parser.add_argument(
        "--peer",
        required=True,
        metavar="NAME",
        help=f"{LMCACHE}, {OWN}, or package.module:factory (kvcore.ladder.conformance.peer says what it returns)",
    )
    parser.add_argument("--python", metavar="FILE", help="an interpreter that has the peer, if this one has not")
    parser.add_argument("--examples", default="2000", metavar="N", help="runs without a new difference (default 2000)")
    parser.add_argument("--json", action="store_true", help="write the result as JSON to standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and answer with the exit status."""
    from kvcore.ladder.conformance.search import check_installed, compare

    check_installed()
    if not (arguments.examples.isascii() and arguments.examples.isdigit()) or not int(arguments.examples):
        raise ConfigError(f"--examples takes a number from 1 on, not {arguments.examples!r}")
    with _peer(arguments.peer, arguments.python) as peer:
        print(f"searching: {peer.name}", file=sys.stderr, flush=True)
        found = compare(peer, int(arguments.examples))
    if arguments.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print("\n".join(found.lines()))
    return 0 if found.same else 1


@contextmanager
def _peer(spec: str, python: str | None) -> Iterator[Peer]:
    if python is not None:
        from kvcore.ladder.conformance.remote import remote_peer

        with remote_peer(python, spec) as peer:
            yield peer
    elif spec == OWN:
        from kvcore.ladder.conformance.own import Own

        yield Own()
    else:
        yield _loaded(spec)


def _loaded(spec: str) -> Peer:
    if spec == LMCACHE and find_spec(LMCACHE) is None:
        raise ConfigError(
            "LMCache is not installed here: name an interpreter that has it with --python "
            "(`make bench-peers` makes .venv-peers/bin/python)"
        )
    try:
        peer = load(spec)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot load the peer {spec!r}: {error}") from error
    if not isinstance(peer, Peer):
        missing = [name for name in ("name", "means", "prefix", "cache") if not hasattr(peer, name)]
        raise ConfigError(f"{spec} gave no peer: it has no {missing[0]!r}")
    return peer
