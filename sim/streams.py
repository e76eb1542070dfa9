"""Named random streams: everything random in a run comes from one seed, through one stream per consumer.

Theory of operation
-------------------
A run has one seed. Each consumer (schedule, workload, network, storage, device, faults, ...) draws from a stream of
its own, and the stream's state is derived from (seed, name) alone:

    1.  digest = blake3("kvcore.sim.stream/1" | length of seed | seed | length of name | name)
    2.  the digest, as an integer, seeds one Mersenne Twister
    3.  every helper is built on its `getrandbits`

So a new stream changes no draw of an old one, the order in which streams are first used does not matter, and one
more draw in one consumer leaves all others as they were. Only integers are drawn: chances are fractions, delays are
nanoseconds. `getrandbits` after an integer seed is the one part of `random` whose values are the same on every
Python version; `shuffle`, `sample` and `randrange` have changed before, so they are not used.

Rejected: one shared generator (a draw more anywhere changes everything), `hash(name)` (differs between
interpreters), floats (rounding reaches decisions).

The streams are held by the loop; nobody frees them.
"""

from __future__ import annotations

import random
from collections.abc import MutableSequence, Sequence
from typing import Any, TypeVar

import blake3

T = TypeVar("T")

_DOMAIN = b"kvcore.sim.stream/1"


def _length_prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def derive_seed(seed: int, name: str) -> int:
    """256 bits that depend on the seed and the name and nothing else."""
    parts = _length_prefixed(str(seed).encode()) + _length_prefixed(name.encode())
    return int.from_bytes(blake3.blake3(_DOMAIN + parts).digest(), "little")


class RandomStream:
    """Integers from one seeded source. All bounds are inclusive where two are given."""

    __slots__ = ("getrandbits", "name")

    def __init__(self, seed: int, name: str) -> None:
        self.name = name
        self.getrandbits = random.Random(derive_seed(seed, name)).getrandbits

    def sample_index(self, count: int) -> int:
        """Uniform in 0..count-1. With `count` 1 nothing is drawn."""
        assert count > 0
        if count == 1:
            return 0
        bits = (count - 1).bit_length()
        value = self.getrandbits(bits)
        while value >= count:
            value = self.getrandbits(bits)
        return value

    def randint(self, lo: int, hi: int) -> int:
        """Uniform in lo..hi, both included."""
        assert lo <= hi
        return lo + self.sample_index(hi - lo + 1)

    def random_ns(self, lo_ns: int, hi_ns: int) -> int:
        """A duration in nanoseconds, uniform in lo_ns..hi_ns."""
        return self.randint(lo_ns, hi_ns)

    def tail_ns(self, lo_ns: int, hi_ns: int) -> int:
        """A duration whose magnitude is uniform: mostly near `lo_ns`, now and then near `hi_ns`."""
        assert 0 <= lo_ns <= hi_ns
        spread = hi_ns - lo_ns
        bits = self.sample_index(spread.bit_length() + 1)
        return lo_ns + min(self.getrandbits(bits) if bits else 0, spread)

    def chance(self, numerator: int, denominator: int) -> bool:
        """True in `numerator` of `denominator` cases."""
        assert 0 <= numerator <= denominator
        assert denominator > 0
        return self.sample_index(denominator) < numerator

    def pick(self, sequence: Sequence[T]) -> T:
        """One element, uniform. The sequence must not be empty."""
        return sequence[self.sample_index(len(sequence))]

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Fisher-Yates, in place."""
        for last in range(len(items) - 1, 0, -1):
            other = self.sample_index(last + 1)
            items[last], items[other] = items[other], items[last]

    def token_bytes(self, nbytes: int) -> bytes:
        return self.getrandbits(8 * nbytes).to_bytes(nbytes, "little") if nbytes else b""


class Streams:
    """The streams of one run by name; made at first use, the same object afterwards."""

    __slots__ = ("_streams", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, RandomStream] = {}

    def __getitem__(self, name: str) -> RandomStream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = RandomStream(self.seed, name)
        return stream
