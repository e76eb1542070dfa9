"""Which faults a store may be given on purpose, how often each strikes, and when: the plan of `kvcore.l2.faulty`.

    fault=l2.torn_write:50              once in 50 times on average
    fault=l2.slow_tail:1:40ms           every time, by up to 40 ms
    fault=l2.full:1:                    every time

Kinds have the names that the simulation gives them, and do the same. Whether a fault strikes is a function of the seed,
the kind and how often that kind has been asked before: the same calls in the same order break the same way. Threads may
ask in any order, so a real run repeats only as far as its threads do.

Who holds: a plan belongs to one opened store; its counts live as long as that. Any thread may ask.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import xxhash

from kvcore.config.values import parse_duration_ns, parse_whole
from kvcore.errors import ConfigError

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000

CALL_FAULTS = {
    "l2.refused": "the adapter refuses a lookup, load or store with an exception",
    "l2.lookup_hang": "a lookup is not answered for so long; what it has locked stays locked",
    "l2.late_lookup": "a lookup is answered so much later",
    "l2.duplicate_completion": "a completed task is announced twice, a completed store also listed twice",
    "l2.lock_lost": "a lock that a lookup has taken is lost, and the record with it",
}
WORK_FAULTS = {
    "l2.slow_tail": "a piece of work takes up to so much longer",
    "l2.hang": "a piece of work is done and answered so much later",
    "l2.late_completion": "a piece of work is done and answered so much later",
    "l2.worker_lost": "a piece of work is not done, and fails so much later",
    "l2.timeout_unknown": "a piece of work is done and reported as timed out",
    "l2.work_lost": "a piece of work is not done and reported as timed out",
    "l2.error_nth": "a piece of work fails as a whole with an I/O error",
}
OPERATION_FAULTS = {
    "l2.partial_batch": "one key of a batch fails with an I/O error",
    "l2.full": "no room: a write ends with ENOSPC",
    "l2.read_only": "a write or a deletion ends with EROFS",
    "l2.unlink_fails": "a record cannot be removed",
    "l2.shortage": "our own process has no descriptor left",
    "l2.key_gone": "a record that a lookup has found is gone before it is loaded",
    "l2.empty": "the store comes back empty: all that was written or found through this adapter is gone",
}
RECORD_FAULTS = {
    "l2.torn_write": "the end of a record that is written is lost",
    "l2.bit_flip_header": "a bit of a record's header flips",
    "l2.bit_flip_payload": "a bit of a record's payload flips",
    "l2.stale_format": "a record of another format version lies there",
    "l2.stale_record": "an older, shorter record of the same key lies there",
    "l2.misdirected": "another key's record lies under a key's name",
    "l2.other_model": "another model's record lies under a key's name",
    "l2.other_tenant": "another tenant's record lies under a key's name",
}
KINDS = {**CALL_FAULTS, **WORK_FAULTS, **OPERATION_FAULTS, **RECORD_FAULTS}
_DEFAULT_NS = {
    "l2.lookup_hang": 30 * _NS_PER_S,
    "l2.late_lookup": 200 * _NS_PER_MS,
    "l2.slow_tail": 40 * _NS_PER_MS,
    "l2.hang": 30 * _NS_PER_S,
    "l2.late_completion": 400 * _NS_PER_MS,
    "l2.worker_lost": 10 * _NS_PER_S,
}


@dataclass(frozen=True, slots=True)
class _Rate:
    one_in: int
    amount_ns: int


class FaultPlan:
    """See the module text. Counting and striking are single steps of the interpreter, so threads need no lock."""

    def __init__(self, rates: dict[str, _Rate], seed: int) -> None:
        self._rates = rates
        self._seed = seed
        self._asked = {kind: count(1) for kind in rates}
        self._struck: dict[str, list[None]] = {kind: [] for kind in rates}

    @classmethod
    def parse(cls, texts: Iterable[str], seed: int) -> FaultPlan:
        """From `KIND:ONE_IN` or `KIND:ONE_IN:DURATION`. ConfigError names the nearest kind."""
        rates: dict[str, _Rate] = {}
        for text in texts:
            kind, _, rest = text.partition(":")
            one_in, _, amount = rest.partition(":")
            _check_kind(kind)
            number = parse_whole(one_in or "1")
            if number < 1:
                raise ConfigError(f"{kind}: once in {number} times makes no sense; 1 is every time")
            rates[kind] = _Rate(number, parse_duration_ns(amount) if amount else _DEFAULT_NS.get(kind, 0))
        return cls(rates, seed)

    @property
    def kinds(self) -> list[str]:
        return list(self._rates)

    @property
    def fired(self) -> Counter[str]:
        """How often each kind has struck."""
        return Counter({kind: len(struck) for kind, struck in self._struck.items()})

    def strikes(self, kind: str) -> bool:
        """Does it strike now? Counted if it does."""
        rate = self._rates.get(kind)
        if rate is None or self._draw(kind) % rate.one_in:
            return False
        self._struck[kind].append(None)
        return True

    def amount_ns(self, kind: str) -> int:
        """How long, for a kind that lasts."""
        return self._rates[kind].amount_ns

    def part_ns(self, kind: str) -> int:
        """Some part of that: mostly little."""
        whole = self._rates[kind].amount_ns
        return whole * (self._draw(kind) % 1000) ** 3 // 1000**3

    def place(self, kind: str, below: int) -> int:
        """Some position in [0, below)."""
        assert below > 0
        return self._draw(kind) % below

    def _draw(self, kind: str) -> int:
        number = next(self._asked[kind])
        return xxhash.xxh3_64_intdigest(f"{self._seed} {kind} {number}".encode())


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)
        raise ConfigError(f"unknown fault {kind[:40]!r}; the nearest one is {near[0]!r}")
