"""The `kvcore` command: finds its subcommands, turns errors into one clear line, and sets the exit status.

Subcommands of the outer packages register through the entry-point group `kvcore.commands`: each entry is a function
that takes the subparsers object and adds itself with `set_defaults(run=...)`. `run(arguments)` returns the exit status.

Exit status: 0 done and good, 1 done and bad (a ladder that failed), 2 unusable input (nothing was started or written).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from typing import NoReturn

from kvcore.config.values import parse_size
from kvcore.errors import CallerError, ConfigError, KvcoreError

USAGE_ERROR = 2


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing the whole usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


def parse_bytes(text: str) -> int:
    """`512`, `64KiB`, `8GiB` as bytes, for `type=`. Raises `argparse.ArgumentTypeError` for anything else."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="kvcore", description="A KV cache for LLM serving whose correctness can be shown.")
    parser.add_argument("--version", action="version", version=f"kvcore {version('kvcore')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser)
    for entry in sorted(entry_points(group="kvcore.commands"), key=lambda entry: entry.name):
        entry.load()(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except CallerError as error:
        print(f"kvcore {arguments.command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KvcoreError as error:
        print(f"kvcore {arguments.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"kvcore {arguments.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
