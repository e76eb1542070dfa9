"""The `kvcore` command: finds its subcommands, turns errors into one clear line, and sets the exit status.

Subcommands register through the entry-point group `kvcore.commands`: each entry is a function that takes the subparsers
object and adds itself with `set_defaults(run=...)`. `run(arguments)` returns the exit status. So the core finds the
commands of the outer packages without importing them, and another package can add its own, which stand under "More".

Exit status: 0 done and good, 1 done and bad (a ladder that failed), 2 unusable input (nothing was started or written),
130 interrupted. `kvcore sim replay` adds 125, this revision cannot judge the case, for `git bisect run`.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points, version
from typing import NoReturn

from kvcore.config.values import parse_size
from kvcore.errors import CallerError, ConfigError, KvcoreError

DONE, BAD, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Begin here": ("demo", "doctor"),
    "Show that it is right": ("ladder", "storm", "sim", "zoo", "conformance"),
    "Decide whether it pays": ("report", "bench"),
    "Run it": ("serve", "ping", "status", "clear", "keys", "store"),
    "This command line": ("completion",),
}
"""What `kvcore --help` puts together. A name that nothing has registered is left out."""

_EPILOG = """\
Examples
  kvcore demo                                            half a minute, and you have seen all of it
  kvcore ladder --jobs 2                                 climb with kvcore's own cache
  kvcore ladder --connector mypackage.cache:Connector    climb with yours
  kvcore serve --l1 8GiB --l2 file:///var/cache/kv       run a cache server
  kvcore report breakeven --model Llama-3.1-8B           when is loading cheaper?

Exit status
  0  done, and good
  1  done, and bad: a rung failed, a bug was found, a store or server did not answer
  2  unusable input: one line says why; nothing was started, nothing written
  125  only `kvcore sim replay`, `shrink`, `diff`, `show`: this revision cannot judge the case
  130  interrupted

`kvcore COMMAND --help` tells more. The manual is docs/ in the repository.
"""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing the whole usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


class _CommandLine(OneLineParser):
    """The whole command line. Its help has the commands in groups, one line each."""

    def format_help(self) -> str:
        about = dict(_abouts(self))
        width = max(map(len, about))
        blocks = [f"{self.format_usage().rstrip()}\n\n{self.description}"]
        for title, names in _grouped(about).items():
            blocks.append("\n".join([title, *(f"  {name:<{width}}  {about[name]}" for name in names)]))
        blocks.append("Options\n  -h, --help  this text; after a command, its own\n  --version   the version")
        return "\n\n".join([*blocks, _EPILOG])


def _abouts(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Every command with its one line."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((choice.dest, choice.help or "") for choice in action._choices_actions)


def _grouped(names: Mapping[str, str]) -> dict[str, list[str]]:
    known = {name for group in GROUPS.values() for name in group}
    groups = {title: [name for name in group if name in names] for title, group in GROUPS.items()}
    groups["More"] = [name for name in names if name not in known]
    return {title: group for title, group in groups.items() if group}


def parse_bytes(text: str) -> int:
    """`512`, `64KiB`, `8GiB` as bytes, for `type=`. Raises `argparse.ArgumentTypeError` for anything else."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def command_line() -> argparse.ArgumentParser:
    """The parser of everything that is installed."""
    parser = _CommandLine(prog="kvcore", description="A KV cache for LLM serving whose correctness can be shown.")
    parser.add_argument("--version", action="version", version=f"kvcore {version('kvcore')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser)
    for entry in sorted(entry_points(group="kvcore.commands"), key=lambda entry: entry.name):
        entry.load()(commands)
    _describe(parser)
    return parser


def _describe(parser: argparse.ArgumentParser) -> None:
    """A command that says nothing more about itself begins its help with its one line."""
    abouts = dict(_abouts(parser))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                about = abouts.get(name, "")
                below.description = below.description or f"{about[:1].upper()}{about[1:]}."
                _describe(below)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    try:
        arguments = command_line().parse_args(argv)
    except KeyboardInterrupt:  # on a busy machine the commands take a while to load
        print("kvcore: interrupted", file=sys.stderr)
        return INTERRUPTED
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except CallerError as error:
        print(f"kvcore {arguments.command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KvcoreError as error:
        print(f"kvcore {arguments.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        print(f"kvcore {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return BAD
    return status


def _nobody_reads() -> bool:
    """Whether the reader of our pipe (head, less) has seen enough. Then what is still to be printed goes nowhere."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


if __name__ == "__main__":
    sys.exit(main())
