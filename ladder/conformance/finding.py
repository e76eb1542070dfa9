"""What a search has found: differences, each with the shortest run that shows it, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.ladder.conformance.play import Step

SCHEMA = 1
WIDTH = 42


@dataclass(frozen=True, slots=True)
class Difference:
    """`run` ends with the step that differs. `on_its_clock`: did the same run differ there too? None: not tried."""

    call: str
    expected: str
    said: str
    run: tuple[Step, ...]
    consequence: bool = False
    on_its_clock: bool | None = None

    def lines(self) -> Iterator[str]:
        kind = " (consequence of the step marked above it)" if self.consequence else ""
        yield f"{self.call}: the contract says {self.expected!r}, the peer {self.said!r}{kind}"
        for step in self.run:
            mark = " " if step.agrees else "!"
            yield f"    {mark} {step.move!s:<{WIDTH}} {step.expected_text:<22} {step.said_text}"
        if self.on_its_clock is not None:
            yield f"    {'the same' if self.on_its_clock else 'NOT seen'} on the peer's own clock"

    def to_json(self) -> dict[str, Any]:
        return {
            "call": self.call,
            "expected": self.expected,
            "said": self.said,
            "consequence": self.consequence,
            "on_its_clock": self.on_its_clock,
            "run": [
                {"move": str(s.move), "expected": s.expected_text, "said": s.said_text, "agrees": s.agrees}
                for s in self.run
            ],
        }


@dataclass(frozen=True, slots=True)
class Coarse:
    """One word of the peer that stands for several of the contract. `runs`: one that ends with each."""

    call: str
    word: str
    runs: tuple[tuple[str, tuple[str, ...]], ...]

    def lines(self) -> Iterator[str]:
        yield f"{self.call}: the peer says {self.word!r} where the contract tells {_listed(self.runs)} apart"
        for meaning, run in self.runs:
            yield f"      {meaning:<12} {'; '.join(run)}"

    def to_json(self) -> dict[str, Any]:
        runs = {meaning: list(run) for meaning, run in self.runs}
        return {"call": self.call, "word": self.word, "runs": runs}


@dataclass(frozen=True, slots=True)
class PrefixDifference:
    """A lookup, and what both make of it."""

    call: str
    what: str
    lookup: str
    expected: str
    said: str

    def lines(self) -> Iterator[str]:
        yield f"{self.call}: {self.what}"
        yield f"      {self.lookup}"
        yield f"      contract: {self.expected}"
        yield f"      peer:     {self.said}"

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of it. `prefix` None: the peer has no such rule."""

    name: str
    runs: int
    lookups: int
    differences: tuple[Difference, ...]
    coarse: tuple[Coarse, ...]
    prefix: tuple[PrefixDifference, ...] | None

    @property
    def same(self) -> bool:
        return not (self.differences or self.coarse or self.prefix)

    def lines(self) -> Iterator[str]:
        runs, lookups = f"{self.runs:,} runs", f"{self.lookups:,} lookups"
        yield f"{self.name} against the contract of L1 ({runs}) and the prefix rule ({lookups})"
        yield from _numbered("What happens differs", self.differences)
        yield from _numbered("Words that say less", self.coarse)
        if self.prefix is None:
            yield "The prefix rule was not compared: the peer has none."
        else:
            yield from _numbered("The prefix rule differs", self.prefix)
        yield "the same contract" if self.same else f"{self._count()} differences"

    def _count(self) -> int:
        return len(self.differences) + len(self.coarse) + len(self.prefix or ())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "peer": self.name,
            "runs": self.runs,
            "lookups": self.lookups,
            "same": self.same,
            "differences": [each.to_json() for each in self.differences],
            "coarse": [each.to_json() for each in self.coarse],
            "prefix": None if self.prefix is None else [each.to_json() for each in self.prefix],
        }


def _numbered(title: str, found: Sequence[Difference | Coarse | PrefixDifference]) -> Iterator[str]:
    if not found:
        return
    yield ""
    yield f"{title}:"
    for number, each in enumerate(found, 1):
        head, *rest = each.lines()
        yield f"{number:>3}. {head}"
        yield from (f"  {line}" for line in rest)
    yield ""


def _listed(runs: Sequence[tuple[str, Any]]) -> str:
    return " and ".join(meaning for meaning, _ in runs)
