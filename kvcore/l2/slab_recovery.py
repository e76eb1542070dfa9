"""What a slab store finds at its start: reads the index file, drops what cannot be believed, computes what is free.

 1. Read the slots from front to back. Zeros are free; a whole entry claims its slots; anything else is counted by its
    defect, and its slot alone is free again (what follows is judged for itself).
 2. From the latest entry to the oldest: an entry whose slab is shorter than it needs is TORN, one whose pages a later
    one has taken is TORN too (the machine died before its deletion reached the disk), an older one of the same key
    goes uncounted (it was replaced), and one that lies beyond a capacity that has become smaller goes uncounted.
 3. Erase all that was dropped, cut the slabs to the capacity, and return what is left, oldest first.

A crash in between is harmless: the next start drops the same again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.keys import ObjectKey
from kvcore.l2.envelope import Defect
from kvcore.l2.slab_entry import SLOT_BYTES, Entry, decode_entry, entry_slots
from kvcore.l2.slab_files import SlabFiles, Window
from kvcore.l2.slab_space import Claims, Run

_FREE = bytes(SLOT_BYTES)
_STRIDE = 256  # empty parts of the index are passed in strides
_FREE_STRIDE = bytes(_STRIDE * SLOT_BYTES)

Placed = tuple[Entry, Run]


@dataclass(frozen=True, slots=True)
class Recovered:
    entries: list[Placed]  # in the order of their sequence numbers
    free_pages: list[Run]
    free_slots: list[Run]
    slots_total: int
    defects: dict[Defect, int]


def recover(files: SlabFiles, pages: int, region_slots: int) -> Recovered:
    defects: Counter[Defect] = Counter()
    slots_total = -(-files.slots() // region_slots) * region_slots
    entries, bad = _read_index(files, slots_total, region_slots, defects)
    kept, dropped = _judge(files, entries, pages, defects)
    for slots in [*bad, *(slots for _, slots in dropped)]:
        files.write_slots(slots.start, bytes(slots.count * SLOT_BYTES))
    files.trim()
    free_pages = _free((run for entry, _ in kept for run in entry.runs), pages, files.slab_pages)
    free_slots = _free((slots for _, slots in kept), slots_total, region_slots)
    kept.sort(key=lambda placed: placed[0].sequence)
    return Recovered(kept, free_pages, free_slots, slots_total, dict(defects))


def _read_index(
    files: SlabFiles, slots_total: int, region_slots: int, defects: Counter[Defect]
) -> tuple[list[Placed], list[Run]]:
    window = Window(files)
    entries: list[Placed] = []
    bad: list[Run] = []
    slot = 0
    while slot < slots_total:
        if slot % _STRIDE == 0 and window.at(slot, _STRIDE) == _FREE_STRIDE:
            slot += _STRIDE
            continue
        found = _read_entry(window, files.seed, slot, region_slots)
        if isinstance(found, tuple):
            entries.append(found)
            slot = found[1].end
            continue
        if found is not None:
            defects[found] += 1
            bad.append(Run(slot, 1))
        slot += 1
    return entries, bad


def _read_entry(window: Window, seed: int, slot: int, region_slots: int) -> Placed | Defect | None:
    """The entry that begins in this slot, what is wrong with it, or None: the slot is free."""
    start = window.at(slot, 1)
    if start == _FREE:
        return None
    count = entry_slots(start)
    if isinstance(count, Defect):
        return count
    if slot // region_slots != (slot + count - 1) // region_slots:
        return Defect.FLIPPED
    entry = decode_entry(window.at(slot, count), seed)
    return entry if isinstance(entry, Defect) else (entry, Run(slot, count))


def _judge(
    files: SlabFiles, entries: list[Placed], pages: int, defects: Counter[Defect]
) -> tuple[list[Placed], list[Placed]]:
    kept: list[Placed] = []
    dropped: list[Placed] = []
    claims = Claims(pages)
    seen: set[ObjectKey] = set()
    for placed in sorted(entries, key=lambda placed: placed[0].sequence, reverse=True):
        entry = placed[0]
        replaced, beyond = entry.key in seen, any(run.end > pages for run in entry.runs)
        if not replaced and not beyond and _all_there(files, entry) and claims.claim(entry.runs):
            seen.add(entry.key)
            kept.append(placed)
            continue
        dropped.append(placed)
        if not replaced and not beyond:
            defects[Defect.TORN] += 1
    return kept, dropped


def _all_there(files: SlabFiles, entry: Entry) -> bool:
    """The slabs were long enough before this start has allocated them anew."""
    for run in entry.runs:
        slab, start = divmod(run.start, files.slab_pages)
        if start + run.count > files.slab_pages or start + run.count > files.pages_found(slab):
            return False
    return True


def _free(taken: Iterable[Run], units: int, region_units: int) -> list[Run]:
    claims = Claims(units)
    assert claims.claim(tuple(taken))
    return list(claims.free_runs(region_units))
