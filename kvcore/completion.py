"""`kvcore completion bash|zsh|fish`: a script that completes what is typed after `kvcore`.

Theory of operation
-------------------
The parser is walked once, and every command becomes a `Place`: its words ("sim replay"), the commands below it, its
options, and what its arguments are. A script is those places as a table in the shell's own language, and one small
function that finds the place of a command line: it takes the words that lead from place to place and skips all others.
So a script starts no Python, and is as old as the installation that printed it.

What an option takes is read from the parser: its choices; a folder where the metavar is DIR, a file where values become
a `Path`; else the shell offers nothing.

Rejected: shtab and argcomplete. The first knows bash, zsh and tcsh, the second starts Python at every TAB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Takes = Literal["nothing", "value", "file", "folder"]
_ABOUT_CHARS_MAX = 60


@dataclass(frozen=True, slots=True)
class Option:
    """One flag with its spellings; `choices` where it takes one of a few words."""

    flags: tuple[str, ...]
    about: str
    takes: Takes
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A command: `path` are its words without `kvcore`, `below` the commands that may follow, with their one line."""

    path: str
    below: dict[str, str] = field(default_factory=dict)
    options: list[Option] = field(default_factory=list)
    takes: Takes = "nothing"
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """All that may be typed here."""
        return [*self.below, *self.choices, *(flag for option in self.options for flag in option.flags)]


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    about = "print a script for your shell"
    parser = commands.add_parser("completion", help=about, description=_DESCRIPTION, formatter_class=_AS_WRITTEN)
    parser.add_argument("shell", choices=sorted(SHELLS))
    parser.set_defaults(run=run)


_AS_WRITTEN = argparse.RawDescriptionHelpFormatter
_DESCRIPTION = """\
Print a script that completes commands, options and files.

  bash   kvcore completion bash > ~/.local/share/bash-completion/completions/kvcore
  zsh    kvcore completion zsh > DIR/_kvcore       (a folder of $fpath)
  fish   kvcore completion fish > ~/.config/fish/completions/kvcore.fish
"""


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from kvcore.cli import command_line  # which has found this command, and is complete by now

    print(SHELLS[arguments.shell](list(places(command_line()))), end="")
    return 0


# ---- the parser as places


def places(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Place]:
    """The parser's place and all below it, depth first."""
    place = Place(path)
    inner: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = action.choices
            place.below.update((choice.dest, _short(choice.help)) for choice in action._choices_actions)
        elif action.option_strings:
            place.options.append(Option(tuple(action.option_strings), _short(action.help), _takes(action), _of(action)))
    positional = [action for action in parser._get_positional_actions() if action.dest != argparse.SUPPRESS]
    if positional and not inner:
        place = Place(path, place.below, place.options, _takes(positional[0]), _of(positional[0]))
    yield place
    for name, below in inner.items():
        yield from places(below, f"{path} {name}".strip())


def _takes(action: argparse.Action) -> Takes:
    if action.nargs == 0:
        return "nothing"
    if action.metavar == "DIR":
        return "folder"
    return "file" if action.type is Path or action.metavar == "FILE" else "value"


def _of(action: argparse.Action) -> tuple[str, ...]:
    return tuple(map(str, action.choices)) if action.choices else ()


def _short(text: str | None) -> str:
    """What fits beside a word."""
    words = " ".join((text or "").replace("%%", "%").split())
    return words if len(words) <= _ABOUT_CHARS_MAX else f"{words[: _ABOUT_CHARS_MAX - 3]}..."


def _with_values(place: Place) -> Iterator[tuple[Option, str]]:
    for option in place.options:
        if option.takes != "nothing":
            yield from ((option, flag) for flag in option.flags)


def _quoted(text: str) -> str:
    """As one word of bash, zsh and fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "'\\''") + "'"


# ---- bash and zsh: the same search for the place

_FIND = """\
    local place="" word
    for word in "${before[@]}"; do
        case "$place $word" in
            %(steps)s) place="${place:+$place }$word" ;;
        esac
    done
"""


def _find(all_places: list[Place]) -> str:
    steps = [f"{place.path} {name}" for place in all_places for name in place.below]
    return _FIND % {"steps": "|".join(map(_quoted, steps))}


def bash(all_places: list[Place]) -> str:
    """A script for bash 3.2 and later."""
    lines = ["# kvcore for bash: written by `kvcore completion bash`", "_kvcore() {"]
    lines += ['    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"']
    lines += ['    local before=("${COMP_WORDS[@]:1:COMP_CWORD-1}")', _find(all_places).rstrip("\n")]
    lines += ['    case "$place $previous" in']
    for place in all_places:
        for option, flag in _with_values(place):
            lines.append(f"        {_quoted(f'{place.path} {flag}')}) {_bash(option.takes, option.choices)}; return ;;")
    lines += ["    esac", '    case "$place" in']
    for place in all_places:
        known = _bash("value", tuple(place.words))
        more = (
            f'; [[ "$current" == -* ]] || {{ {_bash(place.takes, (), "+")}; }}'
            if place.takes in ("file", "folder")
            else ""
        )
        lines.append(f"        {_quoted(place.path)}) {known}{more} ;;")
    return "\n".join([*lines, "    esac", "}", "complete -o default -F _kvcore kvcore", ""])


def _bash(takes: Takes, words: tuple[str, ...], add: str = "") -> str:
    what = f"-W {_quoted(' '.join(words))}" if words else {"file": "-f", "folder": "-d"}.get(takes, "-W ''")
    names = "" if words or takes == "value" else "; compopt -o filenames 2>/dev/null"  # bash 3.2 has none
    return f'COMPREPLY{add}=($(compgen {what} -- "$current")){names}'


def zsh(all_places: list[Place]) -> str:
    """A script for zsh, to be sourced after compinit or put into a folder of $fpath as `_kvcore`."""
    lines = ["#compdef kvcore", "# kvcore for zsh: written by `kvcore completion zsh`", "_kvcore() {"]
    lines += ["    local -a before known", '    before=("${(@)words[2,CURRENT-1]}")', _find(all_places).rstrip("\n")]
    lines += ['    case "$place ${words[CURRENT-1]}" in']
    for place in all_places:
        for option, flag in _with_values(place):
            lines.append(f"        {_quoted(f'{place.path} {flag}')}) {_zsh(option.takes, option.choices)}; return ;;")
    lines += ["    esac", '    case "$place" in']
    for place in all_places:
        more = f" {_zsh(place.takes, place.choices)};" if place.takes != "nothing" else ""
        lines += [f"        {_quoted(place.path)})", f"            known=({' '.join(_described(place))})"]
        lines += [f"            _describe kvcore known;{more} ;;"]
    lines += ["    esac", "}"]
    return "\n".join([*lines, '[[ "${funcstack[1]}" == _kvcore ]] && _kvcore "$@" || compdef _kvcore kvcore', ""])


def _zsh(takes: Takes, words: tuple[str, ...]) -> str:
    return f"compadd -- {' '.join(words)}" if words else {"file": "_files", "folder": "_files -/"}.get(takes, "true")


def _described(place: Place) -> Iterator[str]:
    yield from (_quoted(f"{name}:{about}") for name, about in place.below.items())
    for option in place.options:
        yield from (_quoted(f"{flag}:{option.about}") for flag in option.flags)


# ---- fish

_FISH = """\
# kvcore for fish: written by `kvcore completion fish`
function __kvcore_at
    set -l place ''
    for word in (commandline -opc)[2..]
        set -l next (string trim "$place $word")
        if contains -- $next %(paths)s
            set place $next
        end
    end
    test "$place" = "$argv[1]"
end
complete -c kvcore -f
"""


def fish(all_places: list[Place]) -> str:
    """A script for fish 3 and later."""
    text = _FISH % {"paths": " ".join(_quoted(place.path) for place in all_places if place.path)}
    lines = [line for place in all_places for line in _fish(place)]
    return text + "\n".join([*lines, ""])


def _fish(place: Place) -> Iterator[str]:
    here = "complete -c kvcore -n " + _quoted(f'__kvcore_at "{place.path}"')
    for name, about in place.below.items():
        yield f"{here} -a {_quoted(name)} -d {_quoted(about)}"
    if place.choices:
        yield f"{here} -a {_quoted(' '.join(place.choices))}"
    elif place.takes in ("file", "folder"):
        yield f"{here} -F"
    for option in place.options:
        spelled = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
        value = f" -a {_quoted(' '.join(option.choices))}" if option.choices else _FISH_VALUES[option.takes]
        required = {"nothing": "", "file": " -r"}.get(option.takes, " -x")
        yield f"{here} {spelled}{required}{value} -d {_quoted(option.about)}"


_FISH_VALUES: dict[Takes, str] = {
    "nothing": "",
    "value": "",
    "file": " -F",
    "folder": " -a '(__fish_complete_directories)'",
}

SHELLS: dict[str, Callable[[list[Place]], str]] = {"bash": bash, "fish": fish, "zsh": zsh}
