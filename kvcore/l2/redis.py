"""Redis and Valkey as a shared store: one string per object, name and record as everywhere.

    name      `prefix` + `key_text(key)`: safe characters, 200 at most, one namespace of one database
    record    the envelope's header and the payload, set by one SET, so it is there as a whole or not at all
    lock      NONE: the server may evict or expire anything at any time. A lookup counts as use for its LRU
    capacity  `maxmemory` of the server and its policy. allkeys-lru and the like: what is gone is a miss. noeviction: a
              store is answered FULL, and nobody makes room: give the adapter a `capacity` below `maxmemory`, and then
              its ledger evicts what is oldest. (A record takes a few hundred bytes more memory than its length.)
    restart   what the server has kept (RDB, AOF); we only find it. A store that is PRESENT renews its `ttl_s`
    limits    512 MiB per record (the protocol's); Redis Cluster is refused (MOVED), Sentinel is not asked; the time for
              name resolution is the system's; of several addresses of one name each may take `connect_timeout_s`

Copies: payloads go from the caller's buffer to the socket and back with no copy of ours (`kvcore.l2.redis_wire`);
with TLS the library copies once. One exchange carries a whole piece: its commands at once, then its answers. Only to a
server on this machine the values of a store go one after the other, with their answers between.

Write. First STRLEN of each key is asked for (one round trip for a piece), then the header where the length is right: if
it is intact and the key's, the answer is PRESENT. The others are SET. OOM is FULL. READONLY (a server that became a
replica) and MISCONF are errors worth another try, on new connections. A command that the server does not allow us
(NOPERM) or a value it finds too long is FAILED.

Read. GET, straight into the buffers; length and checksum are judged by the envelope.

Discard. WATCH, read the whole record again, judge it by itself; only if it is still bad MULTI, UNLINK, EXEC, which the
server does not carry out if somebody has set the key since the WATCH. A record that was intact and of another length is
removed only while its length is the one that was seen. So a newer record always survives.

Scan. SCAN, on a connection whose reads are not counted as use (CLIENT NO-TOUCH, from Redis 7.2); age is the idle time.

Rejected: a client library (makes a fresh `bytes` per value, 2 to 7 times slower; hidden retries of 10 s); SET NX (sends
the whole value to learn that it is there); EXISTS with several keys (gives only a count); Lua (not allowed everywhere).

Who holds: the pool its connections, the server the records. `close` closes idle connections, others go as calls end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias, TypeGuard, TypeVar

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey, key_text
from kvcore.l2 import envelope
from kvcore.l2.adapter import L2Usage, LockKind, LockStrength, StoreAnswer
from kvcore.l2.envelope import Defect, Header
from kvcore.l2.redis_pool import RedisOptions, RedisPool
from kvcore.l2.redis_wire import (
    BULK_BYTES_MAX,
    Answer,
    Deadline,
    ErrorAnswer,
    Part,
    Wire,
    command,
    command_with_value,
    opening_of,
    packed,
)
from kvcore.l2.shared_backend import Stored
from kvcore.l2.shared_work import cut
from kvcore.ports import Clock
from kvcore.runtime.clock import SystemClock

T = TypeVar("T")
R = TypeVar("R")

_MS_PER_S = 1000
_HEAD_BYTES = 1024  # read by the scan; longer headers are read a second time
_SCAN_COUNT = 500
_PLACES_MAX = 16 * 1024
_SEND_BYTES = 512 * 1024
_UNANSWERED = StoreError("the Redis store has not answered")
_SKIP_BYTES_MAX = 8 * 1024 * 1024  # what is longer than expected by more than this is not read to its end

__all__ = ["RedisBackend", "RedisOptions", "open_backend"]


def open_backend(options: RedisOptions) -> RedisBackend:
    """No I/O: that begins with `RedisBackend.open`."""
    return RedisBackend(options, SystemClock())


class RedisBackend:
    """`kvcore.l2.shared_backend.SharedBackend`; see the module text. Threads may share it."""

    lock_strength = LockStrength(LockKind.NONE)
    batch_keys = 64
    batch_bytes = 8 * 1024 * 1024

    def __init__(self, options: RedisOptions, clock: Clock) -> None:
        self._options = options
        self._pool = RedisPool(options, clock)
        self._prefix = options.prefix.encode()
        self.expiry = [] if options.ttl_s is None else [b"PX", b"%d" % round(options.ttl_s * _MS_PER_S)]
        self.closing = packed(self.expiry)
        self.place = lru_cache(_PLACES_MAX)(partial(_place, self._prefix, len(self.expiry)))
        self._lengths_seen: dict[ObjectKey, int] = {}  # of records with another length than asked for, until `discard`

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return self.place(key).header_bytes + payload_bytes

    def open(self) -> None:
        """PING, and a read to see whether we may and whether it is a cluster that sends us elsewhere."""
        for answer in self._ask([command(b"PING"), command(b"STRLEN", self._prefix + b"probe")]):
            if isinstance(answer, ErrorAnswer):
                raise self._pool.refuse(answer)

    def close(self) -> None:
        self._pool.close()

    # --- find, write, read ---------------------------------------------------------------------------------------

    def find(self, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
        def one(wire: Wire, deadline: Deadline, key: ObjectKey) -> bool | Exception:
            length = wire.answer(deadline)
            if isinstance(length, int):
                return length >= self.place(key).header_bytes
            return False if _is_other_type(length) else self.trouble(length)

        return self._each(keys, [self.place(key).strlen for key in keys], one)

    def write(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[StoreAnswer | Exception]:
        writing = _Writing(self, [(self.place(key), key, payload) for key, payload in orders])
        error = self._exchange(writing.talk, sum(len(payload) for _, payload in orders))
        return writing.answers(error)

    def read(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
        commands = [self.place(key).get for key, _ in orders]
        more_bytes = sum(len(into) for _, into in orders)
        return self._each(orders, commands, self._read_one, more_bytes)

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        def one(wire: Wire, deadline: Deadline, key: ObjectKey) -> Exception | None:
            answer = wire.answer(deadline)
            return None if isinstance(answer, int) else self.trouble(answer)

        return self._each(keys, [command(b"UNLINK", self._name(key)) for key in keys], one)

    def _read_one(
        self, wire: Wire, deadline: Deadline, order: tuple[ObjectKey, memoryview]
    ) -> Defect | Exception | None:
        key, into = order
        length = wire.bulk_length(deadline)
        if length is None:
            return Defect.MISSING
        if isinstance(length, ErrorAnswer):
            return Defect.FOREIGN if _is_other_type(length) else self.trouble(length)
        place = self.place(key)
        head_bytes = place.header_bytes
        head = wire.take(min(length, head_bytes), deadline).ljust(head_bytes, b"\0")
        rest = max(0, length - head_bytes)
        wire.fill(into[:rest], deadline)
        rest -= min(rest, len(into))
        if rest > _SKIP_BYTES_MAX:
            wire.close()
        else:
            wire.skip(rest, deadline)
            wire.end_bulk(deadline)
        defect = envelope.check_record_by(place.template, key, head, into, length)
        if defect is Defect.OTHER_SIZE:
            self._lengths_seen[key] = length
        return defect

    # --- discard -------------------------------------------------------------------------------------------------

    def discard(self, key: ObjectKey, defect: Defect) -> None:
        seen_bytes = self._lengths_seen.pop(key, None)
        name = self._name(key)
        with closing(self._pool.connect()) as wire:
            self._say(wire, [command(b"WATCH", name)])
            [length] = self._say(wire, [command(b"STRLEN", name)])
            if _is_length(length):
                [record] = self._say(wire, [command(b"GET", name)], length)
                if not isinstance(record, bytes) or not _is_good(key, record, defect, seen_bytes):
                    self._say(wire, [command(b"MULTI"), command(b"UNLINK", name), command(b"EXEC")])
            elif _is_other_type(length):
                self._say(wire, [command(b"MULTI"), command(b"UNLINK", name), command(b"EXEC")])
            elif length != 0:
                raise self.trouble(length)

    def _say(self, wire: Wire, commands: Sequence[Sequence[Part]], more_bytes: int = 0) -> list[Answer]:
        """An exchange on a connection of our own. StoreError for an error answer, save that of another type."""
        answers = _asked(wire, commands, self._pool.deadline(more_bytes))
        for answer in answers:
            if isinstance(answer, ErrorAnswer) and not _is_other_type(answer):
                raise self.trouble(answer)
        return answers

    # --- scan and usage ------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Stored]:
        with closing(self._pool.connect()) as wire:
            self._ask_on(wire, [command(b"CLIENT", b"NO-TOUCH", b"ON")])  # an older server does not know it
            cursor = b"0"
            pattern = _escaped(self._prefix) + b"*"
            while True:
                [page] = self._say(wire, [command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_COUNT)])
                cursor, names = _scan_page(page)
                yield from self._describe(wire, names)
                if cursor == b"0":
                    return

    def _describe(self, wire: Wire, names: Sequence[bytes]) -> Iterator[Stored]:
        commands: list[list[Part]] = []
        for name in names:
            commands.append(command(b"OBJECT", b"IDLETIME", name))
            commands.append(command(b"STRLEN", name))
            commands.append(command(b"GETRANGE", name, b"0", b"%d" % (_HEAD_BYTES - 1)))
        answers = self._ask_on(wire, commands)
        for position, name in enumerate(names):
            idle_s, length, head = answers[3 * position : 3 * position + 3]
            if _is_length(length) and isinstance(head, bytes):  # gone meanwhile, or another type
                # Whole seconds, rounded down: taken as they are, every scan would make what lies there the youngest.
                age_s = idle_s + 1.0 if isinstance(idle_s, int) else None
                yield Stored(self._key_of(wire, name, head), name.decode("utf-8", "replace"), length, age_s)

    def _key_of(self, wire: Wire, name: bytes, head: bytes) -> ObjectKey | None:
        header = envelope.parse_header(head)
        if isinstance(header, Header) and header.header_bytes > len(head) == _HEAD_BYTES:
            [more] = self._ask_on(wire, [command(b"GETRANGE", name, b"0", b"%d" % (header.header_bytes - 1))])
            head = more if isinstance(more, bytes) else head
        key = _decoded(header, head)
        return key if key is not None and self._name(key) == name else None

    def usage(self) -> L2Usage:
        info, objects = self._ask([command(b"INFO", b"memory"), command(b"DBSIZE")])
        fields = _info_fields(info)
        return L2Usage(
            fields.get("used_memory", 0), fields.get("maxmemory") or None, objects if isinstance(objects, int) else 0, 0
        )

    # --- inside --------------------------------------------------------------------------------------------------

    def _name(self, key: ObjectKey) -> bytes:
        return self.place(key).name

    def _ask(self, commands: Sequence[Sequence[Part]]) -> list[Answer]:
        return self._pool.exchange(lambda wire, deadline: _asked(wire, commands, deadline))

    def _ask_on(self, wire: Wire, commands: Sequence[Sequence[Part]]) -> list[Answer]:
        return _asked(wire, commands, self._pool.deadline(0))

    def _each(
        self,
        orders: Sequence[T],
        commands: Sequence[Sequence[Part]],
        one: Callable[[Wire, Deadline, T], R | Exception],
        count_bytes: int = 0,
    ) -> list[R | Exception]:
        """One exchange with a result per order. What breaks it off is the result of those not yet answered."""
        results: list[R | Exception] = []

        def talk(wire: Wire, deadline: Deadline) -> None:
            results.clear()  # on the second try
            wire.send(commands, deadline)
            for order in orders:
                results.append(one(wire, deadline, order))

        error = self._exchange(talk, count_bytes)
        return results + [error or _UNANSWERED] * (len(orders) - len(results))

    def _exchange(self, talk: Callable[[Wire, Deadline], None], count_bytes: int) -> Exception | None:
        """What has broken it off."""
        try:
            self._pool.exchange(talk, count_bytes)
        except (OSError, StoreError) as error:
            return error
        except ConfigError as error:  # it has let us in before
            return _as_store_error(error)
        return None

    def refusal(self, answer: Answer) -> StoreAnswer | Exception:
        """Of a SET."""
        if not isinstance(answer, ErrorAnswer):
            return self.trouble(answer)
        if answer.code == "OOM":
            return StoreAnswer.FULL
        if answer.code == "NOPERM" or "maximum allowed size" in answer.text:
            return StoreAnswer.FAILED
        return self.trouble(answer)

    def trouble(self, answer: Answer) -> StoreError:
        if not isinstance(answer, ErrorAnswer):
            return StoreError(f"the Redis store {self._options.where} answered something unexpected")
        if answer.code == "READONLY":
            self._pool.renew()
        refused = self._pool.refuse(answer)
        return refused if isinstance(refused, StoreError) else _as_store_error(refused)


class _Place(NamedTuple):
    """Where a record is, what its header is made of, and the commands that name it. Costly, so it is kept."""

    name: bytes
    header_bytes: int
    template: envelope.Template
    strlen: list[Part]
    get: list[Part]
    set_opening: bytes


def _place(prefix: bytes, words_after_value: int, key: ObjectKey) -> _Place:
    name = prefix + key_text(key).encode()
    set_opening = opening_of([b"SET", name], words_after_value)
    template = envelope.template_of(key)
    strlen, get = command(b"STRLEN", name), command(b"GET", name)
    return _Place(name, template.header_bytes, template, strlen, get, set_opening)


_Order: TypeAlias = tuple[_Place, ObjectKey, memoryview]


class _Writing:
    """One piece of writing: ask what is there, then SET the rest.

    Values are sent one by one, small ones a few together. While the server takes them in, the checksums of the next
    are made. On this machine these are sent once it has answered: what waits in the sockets' buffers has left the
    processor's cache when it is read. Over a network each answer would cost a round trip, and they are read at the end.
    """

    def __init__(self, backend: RedisBackend, orders: Sequence[_Order]) -> None:
        self._backend = backend
        self._orders = orders
        self._expiry = backend.expiry
        self._results: list[StoreAnswer | Exception | None] = [None] * len(orders)

    def answers(self, error: Exception | None) -> list[StoreAnswer | Exception]:
        return [error or _UNANSWERED if result is None else result for result in self._results]

    def talk(self, wire: Wire, deadline: Deadline) -> None:
        self._results = [None] * len(self._orders)
        wire.send([self._question(place) for place, _, _ in self._orders], deadline)
        first = self._command(0)  # while the server looks
        same_length = self._lengths(wire, deadline)
        wire.send([self._header_question(position) for position in same_length], deadline)
        for position in same_length:
            if _is_intact(self._orders[position][1], wire.answer(deadline)):
                self._results[position] = StoreAnswer.PRESENT
        missing = [position for position, result in enumerate(self._results) if result is None]
        sizes = [len(self._orders[position][2]) for position in missing]
        sent: list[int] = []
        for piece in cut(missing, sizes, len(missing) or 1, _SEND_BYTES):
            commands = [self._command(position) if position else first for position in piece]
            if wire.near:
                self._settle(sent, wire, deadline)
                sent = []
            wire.send(commands, deadline)
            sent += piece
        self._settle(sent, wire, deadline)

    def _settle(self, sent: list[int], wire: Wire, deadline: Deadline) -> None:
        for position in sent:
            answer = wire.answer(deadline)
            self._results[position] = StoreAnswer.STORED if answer == "OK" else self._backend.refusal(answer)

    def _question(self, place: _Place) -> list[Part]:
        return place.strlen + command(b"PEXPIRE", place.name, self._expiry[1]) if self._expiry else place.strlen

    def _lengths(self, wire: Wire, deadline: Deadline) -> list[int]:
        """The positions where something of the right length is."""
        same: list[int] = []
        for position, (place, _, payload) in enumerate(self._orders):
            length = wire.answer(deadline)
            if self._expiry:
                wire.answer(deadline)
            if isinstance(length, ErrorAnswer) and not _is_other_type(length):
                self._results[position] = self._backend.trouble(length)
            elif length and length == place.header_bytes + len(payload):
                same.append(position)
        return same

    def _header_question(self, position: int) -> list[Part]:
        place = self._orders[position][0]
        return command(b"GETRANGE", place.name, b"0", b"%d" % (place.header_bytes - 1))

    def _command(self, position: int) -> list[Part]:
        place, _, payload = self._orders[position]
        head = envelope.header_by(place.template, payload)
        return command_with_value(place.set_opening, head, payload, self._backend.closing)


def _asked(wire: Wire, commands: Sequence[Sequence[Part]], deadline: Deadline) -> list[Answer]:
    wire.send(commands, deadline)
    return [wire.answer(deadline) for _ in commands]


def _as_store_error(error: ConfigError) -> StoreError:
    made = StoreError(str(error))
    made.__cause__ = error
    return made


def _is_length(answer: Answer) -> TypeGuard[int]:
    """Of something that is there. A length that no value has would become a wait, or memory, without an end."""
    return isinstance(answer, int) and 0 < answer <= BULK_BYTES_MAX


def _is_other_type(answer: Answer) -> bool:
    """Somebody else's list or hash has our name."""
    return isinstance(answer, ErrorAnswer) and answer.code == "WRONGTYPE"


def _is_intact(key: ObjectKey, head: Answer) -> bool:
    """By its header, of a record of the right length; only a read sees the payload."""
    if not isinstance(head, bytes):
        return False
    header = envelope.parse_header(head)
    return isinstance(header, Header) and header.header_bytes == len(head) and _decoded(header, head) == key


def _decoded(header: Header | Defect, head: bytes) -> ObjectKey | None:
    """The key that a header names. None: it cannot be read."""
    key = envelope.object_key_of(header, head) if isinstance(header, Header) else header
    return None if isinstance(key, Defect) else key


def _is_good(key: ObjectKey, record: bytes, defect: Defect, seen_bytes: int | None) -> bool:
    """Whether the record may stay after a read that found `defect`."""
    split = envelope.header_bytes(key)
    payload = memoryview(bytearray(record[split:]))
    judged = envelope.check_record(key, record[:split].ljust(split, b"\0"), payload, len(record))
    return judged is None and not (defect is Defect.OTHER_SIZE and len(record) == seen_bytes)


def _escaped(prefix: bytes) -> bytes:
    """As a pattern that matches only itself."""
    return b"".join(b"\\" + bytes([byte]) if byte in b"*?[]^-\\" else bytes([byte]) for byte in prefix)


def _scan_page(answer: Answer) -> tuple[bytes, list[bytes]]:
    match answer:
        case [bytes(cursor), list(names)]:
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise StoreError("the Redis store answered something unexpected to SCAN")


def _info_fields(info: Answer) -> dict[str, int]:
    text = info.decode("utf-8", "replace") if isinstance(info, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}
