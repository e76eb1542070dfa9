"""Looking into a store without an adapter: list its records, judge them one by one, delete them. Blocking.

Both families look alike from here. Records are read as they lie in the store and judged by their envelope first; then
the codecs of the URL undo what they did, nearest to the store first, and judge too: a record whose key mark does not
agree, or that does not expand to what it says, is bad.

To look must cost nothing. A directory in which there is no store is an error, not a new and empty store; and a limit in
the URL that is smaller than what lies there evicts nothing (`as_it_lies`).

Who holds: this object the opened backend, until `close`. One thread.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey, key_text
from kvcore.l2 import envelope, file, fs, slab_files
from kvcore.l2.backend import Scan
from kvcore.l2.envelope import Defect
from kvcore.l2.open import StoreSpec
from kvcore.l2.slab import SlabOptions
from kvcore.l2.wrapped_backend import is_exclusive, is_shared

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """One thing in the store. `key` None: it is not a record that can be read; only its name is known."""

    key: ObjectKey | None
    name: str
    record_bytes: int
    stored_bytes: int  # of the payload, as codecs have made it
    age_s: float | None = None


_MARKERS = (file.MARKER_NAME, fs.MARKER_NAME, slab_files.MARKER_NAME)


def as_it_lies(spec: StoreSpec) -> StoreSpec:
    """The same store without limits, and with all the room that it has taken: opening it evicts nothing."""
    if not isinstance(spec.options, SlabOptions):
        return spec.limited(None, None)
    taken_bytes = slab_files.allocated_bytes(spec.options.directory)
    return spec.limited(max(spec.options.capacity_bytes, taken_bytes), None)


def _check_there(spec: StoreSpec) -> None:
    directory = getattr(spec.options, "directory", None)
    if directory is not None and not any(os.path.exists(os.path.join(directory, name)) for name in _MARKERS):
        raise StoreError(f"there is no store in {directory}, or none that you may see; look at the path")


def open_shown(spec: StoreSpec, opening: Callable[[], T]) -> T:
    """What `opening` gives. StoreError, which names the store: it does not answer."""
    try:
        return opening()
    except (OSError, StoreError) as error:
        raise StoreError(f"{spec.shown} does not answer: {error}") from error


class Inspector:
    """See the module text. Raises what opening a store raises, with OSErrors made StoreErrors."""

    def __init__(self, spec: StoreSpec) -> None:
        self.shown = spec.shown
        _check_there(spec)
        self._backend = as_it_lies(spec).unopened()
        self._codecs = spec.codecs()
        self._scan: Scan | None = open_shown(spec, self._backend.open)
        self.removed = Counter(self._scan.defects if self._scan is not None else {})
        """Bad records that the store has removed by itself: an exclusive one at opening, `fs` while it is listed."""

    def records(self) -> Iterator[Listed]:
        backend = self._backend
        if not is_shared(backend):
            assert self._scan is not None
            for found in self._scan.records:
                yield Listed(found.key, key_text(found.key), found.record_bytes, found.payload_bytes)
            return
        for stored in backend.scan():
            if stored.removed is not None:
                self.removed[stored.removed] += 1
                continue
            head_bytes = envelope.header_bytes(stored.key) if stored.key is not None else 0
            yield Listed(
                stored.key, stored.name, stored.record_bytes, max(0, stored.record_bytes - head_bytes), stored.age_s
            )

    def judge(self, listed: Listed) -> Defect | Exception | None:
        """Read it whole. None: it is good, or it has gone meanwhile."""
        if listed.key is None:
            return Defect.FOREIGN
        try:
            stored = memoryview(bytearray(listed.stored_bytes))
        except MemoryError:
            return StoreError(f"its {listed.stored_bytes} bytes are more than there is memory for")
        verdict = self._read(listed.key, stored)
        if verdict is Defect.MISSING:
            return None
        return self._decoded(listed.key, stored) if verdict is None else verdict

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        backend = self._backend
        if is_shared(backend):
            return backend.delete(keys)
        assert is_exclusive(backend)
        return [_outcome(backend.delete, key) for key in keys]

    def close(self) -> None:
        self._backend.close()

    def _read(self, key: ObjectKey, into: memoryview) -> Defect | Exception | None:
        backend = self._backend
        if is_shared(backend):
            return backend.read([(key, into)])[0]
        assert is_exclusive(backend)
        try:
            return backend.read(key, into)
        except OSError as error:
            return error

    def _decoded(self, key: ObjectKey, stored: memoryview) -> Defect | None:
        for codec in reversed(self._codecs):
            length = codec.payload_bytes(len(stored), stored[: codec.frame_bytes])
            if length is None or length > _EXPANDED_MAX * max(1, len(stored)):
                return Defect.FOREIGN
            payload = memoryview(bytearray(length))
            defect = codec.decode(key, stored, payload)
            if defect is not None:
                return defect
            stored = payload
        return None


_EXPANDED_MAX = 1 << 14
"""Nothing real is compressed further than this; what says so is not given the memory for it."""


def _outcome(delete: Callable[[ObjectKey], None], key: ObjectKey) -> Exception | None:
    try:
        delete(key)
    except (OSError, StoreError) as error:
        return error
    return None
