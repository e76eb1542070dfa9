"""`Patch`: plants edits in functions of the production code and takes them out again. No file is edited.

Theory of operation
-------------------
A function is found by its name ("kvcore.l1:L1Cache._publish": module, then attributes), its source is read, the old
text is replaced by the new, and the result is compiled. What is exchanged is the function's *code object*, not the
function: whoever has imported it by name, or keeps a bound method of it, runs the mutated code as well.

1. The source is compiled inside a class of the owner's name, so that private names are mangled as in the original and a
   `super()` without arguments finds its class. Only the function's code object is taken out; decorators, defaults and
   annotations stay the original's.
2. The new code must close over the same variables as the old one, in the same order (in practice none or `__class__`).
3. A function is refused unless its source is the one that the zoo was written against (`sources.json` holds a digest
   per function, blind to comments, docstrings and layout), and unless the old text stands in it exactly once. Both
   refusals name the function. After a look at the mutants of a changed function, `python -m kvcore.ladder.zoo.pins`
   takes the new digests down.
4. The edits of one function are applied together, in order, each to the outcome of the one before.

Who holds: a `Patch` holds the original code objects from `rewrite` to `undo`. Nothing is announced. `undo` gives them
back, in reverse order.

Rejected: replacing functions by hand-written copies (they drift away from the original unnoticed), and `setattr` on
modules (names that were imported before keep the original).
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import importlib
import inspect
import io
import json
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from kvcore.errors import ConfigError
from kvcore.ladder.zoo.mutant import Edit

PINS_PATH = Path(__file__).with_name("sources.json")
_ONLY_IN = "kvcore."
_NEVER_IN = ("kvcore.sim", "kvcore.ladder", "kvcore.reports")


class Patch:
    """See the module text."""

    def __init__(self) -> None:
        self._originals: list[tuple[FunctionType, CodeType]] = []

    def rewrite(self, edits: Sequence[Edit]) -> None:
        """Plant all edits. `ConfigError`: one of them does not fit; then none is planted."""
        try:
            for target in dict.fromkeys(edit.target for edit in edits):
                self._plant(target, [edit for edit in edits if edit.target == target])
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Give every function its own code back."""
        while self._originals:
            function, code = self._originals.pop()
            function.__code__ = code

    def _plant(self, target: str, edits: Sequence[Edit]) -> None:
        owner, function = find(target)
        text = source_of(target)
        _check_pin(target)
        for edit in edits:
            text = _replaced(text, edit)
        code = compiled(text, owner, function, target)
        self._originals.append((function, function.__code__))
        function.__code__ = code


def _replaced(text: str, edit: Edit) -> str:
    count = text.count(edit.old)
    if count != 1:
        raise ConfigError(f"{edit.target} holds the text to be replaced {count} times, not once: {edit.old!r}")
    return text.replace(edit.old, edit.new)


def find(target: str) -> tuple[str, FunctionType]:
    """The name of the class that owns the function ("" for a module's own) and the function itself."""
    module_name, _, path = target.partition(":")
    if not module_name.startswith(_ONLY_IN) or module_name.startswith(_NEVER_IN):
        raise ConfigError(f"{target} is not production code; the zoo changes nothing else")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    try:
        for each in classes:
            owner = getattr(owner, each)
        found = vars(owner)[name]
    except (AttributeError, KeyError):
        raise ConfigError(f"{target} does not exist (any more); the zoo has to be brought up to date") from None
    function = _unwrapped(found)
    if function is None:
        raise ConfigError(f"{target} is no plain function, method or property")
    return (classes[-1] if classes else ""), function


def _unwrapped(found: Any) -> FunctionType | None:
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    return found if isinstance(found, FunctionType) and not hasattr(found, "__wrapped__") else None


@cache
def source_of(target: str) -> str:
    """The function's own text, as it stands in the file, without its common indentation."""
    _, function = find(target)
    return textwrap.dedent(inspect.getsource(function))


def compiled(text: str, owner: str, function: FunctionType, target: str) -> CodeType:
    """The code object of `text`, fit to be run by `function`."""
    if owner:
        text = f"class {owner}:\n" + textwrap.indent(text, " ")
    original = function.__code__
    flags = original.co_flags & __future__.annotations.compiler_flag
    try:
        module = compile(text, f"<zoo: {target}>", "exec", flags=flags, dont_inherit=True)
    except SyntaxError as error:
        raise ConfigError(f"{target}: the mutated text is no Python: {error}") from None
    code = next(each for each in _codes(module) if each.co_name == function.__name__)
    if code.co_freevars != original.co_freevars:
        raise ConfigError(f"{target}: the mutated code closes over {code.co_freevars}, not {original.co_freevars}")
    if code.co_argcount != original.co_argcount or code.co_kwonlyargcount != original.co_kwonlyargcount:
        raise ConfigError(f"{target}: the mutated code takes other arguments")
    return code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Code objects inside `code`, outermost first."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    yield from inner
    for each in inner:
        yield from _codes(each)


# --- the sources the zoo was written against -----------------------------------------------------------------------


def digest_of(target: str) -> str:
    """Of what the function does: its text without comments, docstring, blanks and line breaks."""
    return hashlib.blake2b(_bare(source_of(target)).encode(), digest_size=8).hexdigest()


def _bare(text: str) -> str:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines[first.lineno - 1 : first.end_lineno] = [""]
    return "".join("".join(lines).split())


@cache
def pins() -> dict[str, str]:
    """Digest per function, as it was when the mutants of it were last looked at."""
    found: dict[str, str] = json.loads(PINS_PATH.read_text()) if PINS_PATH.exists() else {}
    return found


def _check_pin(target: str) -> None:
    if pins().get(target) != digest_of(target):
        raise ConfigError(
            f"{target} has changed since its mutants were written; look at them in kvcore/ladder/zoo, then take the "
            "new source down: python -m kvcore.ladder.zoo.pins"
        )


def write_pins(targets: Iterable[str]) -> list[str]:
    """Take down the sources of now; the functions whose digest was another one."""
    fresh = {target: digest_of(target) for target in sorted(set(targets))}
    changed = [target for target, digest in fresh.items() if pins().get(target) != digest]
    PINS_PATH.write_text(json.dumps(fresh, indent=1) + "\n")
    pins.cache_clear()
    return changed
