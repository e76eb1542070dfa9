"""The trace of a run: every event with its time, label and fields, hashed as it happens.

Theory of operation
-------------------
Same seed and same commit must give the same trace; the trace's hash says so in 32 characters. Two kinds of records
go into it:

    *events*   `event(label, *fields)`: time in ns, a fixed label, and fields that are strings, integers or bytes.
               Each is encoded as one MessagePack array. MessagePack values end by themselves, so the encoding of a
               sequence of events is injective. Integers beyond 64 bits (presence masks) go in as an extension type.
    *picks*    which ready entry the loop ran next: its sequence number, and the time whenever time has moved. The
               loop appends bare integers to `picks`; they are hashed as 64-bit words, before the next event or every
               few thousand picks. A time is stored as its complement (negative), so a word is a time or a pick and
               never both. A word of its own announces each event, so that where the blocks of picks end does not
               matter: reading `hash` in the middle of a run changes nothing.

    1.  `event` first hashes the picks that came before it, so the order of the two kinds is part of the hash.
    2.  It then hashes the encoded event, and, only if asked for, keeps it and writes it as a line of text.
    3.  Last it calls the subscribers, found by the label: an event that nobody wants costs one look into a dict. An
        exception of a subscriber (an oracle that found a violation) must not enter the code that is being watched,
        which could swallow it: it goes to `on_error`, which ends the run.

Rejected: `repr` of the fields (default reprs hold addresses), `marshal` (differs between versions), one hash update
per pick (three times the price of the pick itself).

A `Trace` is held by whoever made it, usually the loop, and outlives the loop. `mute` stops it while a dead world is
being cleared away.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple, TextIO

import msgspec
import xxhash

Field = str | int | bytes

_BIG_INTEGER = 1  # MessagePack extension code
_EVENT_FOLLOWS = array("q", [-(2**63)]).tobytes()  # a word that is no pick and no time


class TraceEvent(NamedTuple):
    """One event as subscribers and readers see it."""

    time_ns: int
    label: str
    fields: tuple[Field, ...]

    def line(self) -> str:
        """One line of text: time, label, fields."""
        return " ".join([str(self.time_ns), self.label, *map(_text, self.fields)])


Subscriber = Callable[[TraceEvent], None]


def _text(field: Field) -> str:
    if isinstance(field, bytes):
        return "0x" + field.hex()
    if isinstance(field, str) and (not field or not field.isprintable() or " " in field or '"' in field):
        return msgspec.json.encode(field).decode()
    return str(field)


def _plain(field: Field) -> Field | msgspec.msgpack.Ext:
    """The field as MessagePack can carry it."""
    if type(field) is int and not -(2**63) <= field < 2**63:
        return msgspec.msgpack.Ext(_BIG_INTEGER, field.to_bytes(field.bit_length() // 8 + 1, "little", signed=True))
    return field


def _time_zero() -> int:
    return 0


def _raise(error: BaseException) -> None:
    raise error


class Trace:
    """Collects the events of one run. Satisfies `kvcore.ports.Tracer`."""

    __slots__ = (
        "_encode",
        "_everything",
        "_hasher",
        "_keep",
        "_muted",
        "_of_label",
        "_text_to",
        "event_count",
        "events",
        "keep_picks",
        "now_ns",
        "on_error",
        "picks",
    )

    def __init__(self, *, keep: bool = False, text_to: TextIO | None = None, keep_picks: bool = False) -> None:
        self.events: list[TraceEvent] = []
        self.picks: list[int] = []  # filled by the loop, emptied here
        self.event_count = 0
        self.keep_picks = keep_picks  # the loop then adds a named "pick" event for each pick
        self.now_ns: Callable[[], int] = _time_zero
        self.on_error: Callable[[BaseException], None] = _raise
        self._keep = keep or keep_picks
        self._text_to = text_to
        self._everything: list[Subscriber] = []  # who hears of labels that nobody named
        self._of_label: dict[str, list[Subscriber]] = {}
        self._muted = False
        self._hasher = xxhash.xxh3_128()
        self._encode = msgspec.msgpack.Encoder().encode

    def subscribe(self, subscriber: Subscriber, *labels: str) -> None:
        """Call `subscriber` with every event, or only with those that carry one of the `labels`."""
        for label in labels:
            self._of_label.setdefault(label, [*self._everything]).append(subscriber)
        for listeners in () if labels else (self._everything, *self._of_label.values()):
            listeners.append(subscriber)

    def event(self, label: str, *fields: Field) -> None:
        if self._muted:
            return
        if self.picks:
            self.flush_picks()
        time_ns = self.now_ns()
        try:
            encoded = self._encode((time_ns, label, fields))
        except OverflowError:
            encoded = self._encode((time_ns, label, tuple(map(_plain, fields))))
        self._hasher.update(_EVENT_FOLLOWS + encoded)
        self.event_count += 1
        listeners = self._of_label.get(label, self._everything)
        if listeners or self._keep or self._text_to is not None:
            self._publish(TraceEvent(time_ns, label, fields), listeners)

    def _publish(self, event: TraceEvent, listeners: list[Subscriber]) -> None:
        if self._keep:
            self.events.append(event)
        if self._text_to is not None:
            self._text_to.write(event.line() + "\n")
        for subscriber in listeners:
            try:
                subscriber(event)
            except Exception as error:
                self.on_error(error)

    def flush_picks(self) -> None:
        """Hash the picks that have gathered."""
        picks = self.picks
        if not picks:
            return
        self._hasher.update(array("q", picks))
        picks.clear()

    def mute(self) -> None:
        """Forget everything from here on; the hash stands."""
        self.flush_picks()
        self._muted = True

    @property
    def hash(self) -> str:
        """The hash of everything so far, as 32 hexadecimal digits."""
        self.flush_picks()
        return self._hasher.hexdigest()
