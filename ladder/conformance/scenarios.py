"""Runs that are played before the search draws its own: named after bugs that caches of this kind have had.

They are long, and chance would need hours for them. Each is what the sentence says, told in moves; whether the peer
leaves the contract in it, and where, is for the run to show.
"""

from __future__ import annotations

from kvcore.ladder.conformance.moves import Move

_K0, _K1, _K2 = (0,), (1,), (2,)


def _published(tag: str, key: tuple[int, ...]) -> list[Move]:
    return [Move("reserve_write", tag, keys=key), Move("write", tag, keys=key), Move("finish_write", tag, keys=key)]


def _read(owner: str, key: tuple[int, ...]) -> list[Move]:
    return [Move("reserve_read", owner=owner, keys=key), Move("read", owner=owner, keys=key)]


_COPYING = [Move("reserve_write", "w1", keys=_K0), Move("begin_copy", "w1", keys=_K0)]
_TEMPORARY = [
    Move("reserve_write", "w1", keys=_K0, temporary=True),
    Move("write", "w1", keys=_K0),
    Move("publish_and_read", "w1", "A", _K0),
]

SCENARIOS: dict[str, list[Move]] = {
    "a copy whose reservation ran out lands in the memory of the next writer with that tag": [
        *_COPYING,
        Move("pass_time", units=2),
        *_published("w1", _K0),
        Move("reserve_read", owner="A", keys=_K0),
        Move("end_copy"),
        Move("read", owner="A", keys=_K0),
    ],
    "a copy that was given up lands in the memory of another object": [
        *_COPYING,
        Move("abort_write", "w1", keys=_K0),
        *_published("w2", _K1),
        Move("reserve_read", owner="A", keys=_K1),
        Move("end_copy"),
        Move("read", owner="A", keys=_K1),
    ],
    "the memory of a copy that was given up counts as used": [
        *_COPYING,
        Move("abort_write", "w1", keys=_K0),
        Move("used"),
    ],
    "an object is read before its copy has ended": [
        *_COPYING,
        Move("finish_write", "w1", keys=_K0),
        Move("reserve_read", owner="A", keys=_K0),
    ],
    "a reader who never had a lease gives one back": [
        *_published("w1", _K0),
        *_read("A", _K0),
        Move("finish_read", owner="B", keys=_K0),
        Move("delete", keys=_K0),
    ],
    "a reader whose lease ran out gives back the lease of another one": [
        *_published("w1", _K0),
        Move("reserve_read", owner="A", keys=_K0),
        Move("pass_time", units=2),
        *_read("B", _K0),
        Move("finish_read", owner="A", keys=_K0),
        Move("delete", keys=_K0),
    ],
    "a second reader keeps the first one's lease alive": [
        *_published("w1", _K0),
        Move("reserve_read", owner="A", keys=_K0),
        Move("pass_time", units=1),
        Move("reserve_read", owner="B", keys=_K0),
        Move("pass_time", units=1),
        Move("finish_read", owner="A", keys=_K0),
    ],
    "a writer whose reservation ran out publishes": [
        *_published("w1", _K0)[:2],
        Move("pass_time", units=2),
        Move("finish_write", "w1", keys=_K0),
    ],
    "writers whose reservations ran out give them up, or publish and read": [
        Move("reserve_write", "w1", keys=_K0),
        Move("reserve_write", "w2", keys=_K0),
        Move("pass_time", units=2),
        Move("abort_write", "w1", keys=_K0),
        Move("publish_and_read", "w2", "A", _K0),
    ],
    "an object is deleted and written again": [
        *_published("w1", _K0),
        Move("delete", keys=_K0),
        *_published("w1", _K0),
        *_read("A", _K0),
    ],
    "two writers of one key, and the second changes what is read": [
        *_published("w1", _K0)[:2],
        *_published("w2", _K0)[:2],
        Move("finish_write", "w1", keys=_K0),
        *_read("A", _K0),
        Move("finish_write", "w2", keys=_K0),
        Move("read", owner="A", keys=_K0),
    ],
    "a durable writer meets a temporary object, whose last reader then leaves": [
        *_TEMPORARY,
        Move("reserve_write", "w2", keys=_K0),
        Move("finish_read", owner="A", keys=_K0),
        Move("reserve_read", owner="B", keys=_K0),
    ],
    "a temporary object is read by two, and the first one leaves": [
        *_TEMPORARY,
        *_read("B", _K0),
        Move("finish_read", owner="A", keys=_K0),
        Move("read", owner="B", keys=_K0),
        Move("finish_read", owner="B", keys=_K0),
        Move("reserve_read", owner="A", keys=_K0),
    ],
    "the lease of a temporary object's only reader runs out": [
        *_TEMPORARY,
        Move("pass_time", units=2),
        Move("reserve_read", owner="B", keys=_K0),
    ],
    "a full cache whose objects nobody reads": [
        *_published("w1", _K0),
        *_published("w1", _K1),
        *_published("w1", _K2),
        Move("reserve_write", "w2", keys=(3,)),
    ],
    "a full cache whose objects are all read": [
        *[move for key in (_K0, _K1, _K2) for move in (*_published("w1", key), *_read("A", key))],
        Move("reserve_write", "w2", keys=(3,)),
        Move("read", owner="A", keys=_K0),
    ],
}
