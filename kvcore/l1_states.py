"""The states of one L1 slot, as a table. `kvcore.l1` interprets it; the diagram in the docs is drawn from it."""

from __future__ import annotations

from enum import Enum, unique

from kvcore.memory import SlotState


@unique
class Event(Enum):
    __hash__ = object.__hash__  # by identity; Enum's own runs in Python, and the table is asked in every batch

    PUBLISH = "publish"  # the first finish_write of a key
    DISCARD = "discard"  # finish_write of a key that is resident already
    GIVE_UP = "give up"  # abort_write, or the write lease ran out
    REMOVE = "remove"  # deleted, evicted, or temporary and without a reader
    QUIET = "quiet"  # the last I/O hold has ended


TRANSITIONS: dict[tuple[SlotState, Event, bool], SlotState] = {
    # (state, event, an I/O hold is open) -> state. What is not listed cannot happen.
    (SlotState.STAGING, Event.PUBLISH, False): SlotState.RESIDENT,
    (SlotState.STAGING, Event.DISCARD, False): SlotState.FREE,
    (SlotState.STAGING, Event.GIVE_UP, False): SlotState.FREE,
    (SlotState.STAGING, Event.GIVE_UP, True): SlotState.DRAINING,
    (SlotState.RESIDENT, Event.REMOVE, False): SlotState.FREE,
    (SlotState.RESIDENT, Event.REMOVE, True): SlotState.DRAINING,
    (SlotState.DRAINING, Event.QUIET, False): SlotState.FREE,
}
