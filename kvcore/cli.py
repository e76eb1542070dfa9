"""The `kvcore` command: finds its subcommands, turns errors into one clear line, and sets the exit status.

Subcommands register through the entry-point group `kvcore.commands`: each entry is a function that takes the subparsers
object and adds itself with `set_defaults(run=...)`. `run(arguments)` returns the exit status. So the core finds the
commands of the outer packages without importing them, and another package can add its own, which stand under "More".

Exit status: 0 done and good, 1 done and bad (a ladder that failed), 2 unusable input (nothing was started or written),
130 interrupted. `kvcore sim replay` adds 125, this revision cannot judge the case, for `git bisect run`.

What we print may not arrive. A letter that the terminal does not have is printed as an escape; a reader that has seen
enough (head, less) ends us with 1 and no word, a disk without room with 1 and one line; a stream that was
closed before we began takes everything and keeps nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points, version
from typing import NoReturn

from kvcore.config.values import parse_size
from kvcore.errors import CallerError, ConfigError, KvcoreError

DONE, BAD, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Errors of the machine's disks, whoever writes: no traceback would tell more."""

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
                end = "" if about.endswith("?") else "."
                below.description = below.description or f"{about[:1].upper()}{about[1:]}{end}"
                _describe(below)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(argv)
    finally:
        _forget_what_nobody_takes()


def _run(argv: Sequence[str] | None) -> int:
    name = "kvcore"
    try:
        arguments = _parsed(argv)
        name = f"kvcore {arguments.command}"
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except CallerError as error:
        return _ended(USAGE_ERROR, f"{name}: error: {error}")
    except KvcoreError as error:
        return _ended(BAD, f"{name}: {type(error).__name__}: {error}")
    except KeyboardInterrupt:  # on a busy machine it may come before the command is known: they take a while to load
        return _ended(INTERRUPTED, f"{name}: interrupted")
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return BAD
        if error.errno not in NO_ROOM:
            raise
        where = f" {error.filename}" if error.filename else ""
        return _ended(BAD, f"{name}: cannot write{where}: {error.strerror}; make room, then run it again")


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with `words`, the command line as it was given: a report names it."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return command_line().parse_args(words, argparse.Namespace(words=words))
    except SystemExit:  # a help or the version: whether it can be printed at all is found out here
        sys.stdout.flush()
        raise


def _ended(status: int, line: str) -> int:
    """The status holds also where nobody can hear the line."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)
    return status


def _open_what_is_closed() -> None:
    """`>&-`: Python has no stream then, and a `print` to standard error would go to standard output."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open to the end)


def _nobody_reads() -> bool:
    """Whether the reader of our pipe (head, less) has seen enough."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _forget_what_nobody_takes() -> None:
    """What could not be printed goes nowhere: Python would try once more at its end, complain, and end with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
