"""Mooncake Store: a pool of memory on many machines, as a store behind L2.

    mooncake://master:50051?lease_s=10&admin=master:9003

One Mooncake object per record, written from two pieces of memory (header and payload) in one call, and read back into
two. Names are those of `kvcore.l2.objectstore_names`, so a listing says which keys there are.

Write, per piece of a batch: ask which keys are there (one call; those get a lease, they are in use just now). One of
the record's length is PRESENT. One of another length is removed. The rest is put in one call; Mooncake shows an object
when it is whole. To a put of an existing key it answers "done" and keeps the old bytes, so the question comes first.
No space is FULL: objects with a lease cannot be evicted, and trying again at once does not help.

Read: one call for the batch, unless a key occurs twice in it: Mooncake would fill only the last of its buffers and call
all of them done (0.3.13). The answer is the object's length, or a code. When the lengths differ the transfer fails,
which looks like a lost node: then the length is asked for, and the header is read alone to say what is wrong. Keys
whose lease ends during the call (it waits for a lost node) are asked for once more; with `lease_s` above
`transfer_timeout_s` that stays rare.

Copies between the caller's buffer and the network: none where the buffer lies in a region given to `register_region`
(the arena: register it once); one through a registered frame elsewhere, and for small payloads everywhere: header and
payload then lie behind each other, and each further piece of an object costs Mooncake more (40 us, 0.3.13) than a
copy of 64 KiB does. Mooncake's TCP transport copies into its node's
memory by itself, RDMA does not copy.

Lock strength: LEASE. What was found or read stays for `lease_s` as far as eviction goes; a node that dies takes its
objects with it. A lookup of keys that nobody reads keeps them in memory all the same, so do not ask without need.

Capacity: the nodes'. The master evicts by itself; a `capacity` here limits what this cluster keeps beside others.
Restart: of this process, nothing is lost; of a node, its objects are; of the master, all are (without its HA mode), and
the nodes report back within about a second. Scan and usage need the master's HTTP side and take no lease; with
`admin=off` both are empty.

Discard: Mooncake's objects have no version. The record is read once more, and removed if it is still bad. A good one
that is put between the two calls (a millisecond) is lost, which is a miss.

Limits: a client for TCP listens on all addresses (Mooncake's choice), so keep it in a private network. Its log goes
to stderr. Timeouts: see `kvcore.l2.mooncake_client`.

Who holds: buffers stay the caller's, and no native call touches them after it has returned (also after its timeout: the
connection is gone by then). Results announce; `delete`, `discard` and the master's eviction free.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2 import mooncake_client as codes
from kvcore.l2.adapter import STORED, L2Usage, LockKind, LockStrength, StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.mooncake_client import MooncakeClient, MooncakeOptions, address, check_options, failure, pointer
from kvcore.l2.objectstore_names import below, joined, key_of_name, object_name
from kvcore.l2.shared_backend import Stored

_BATCH_KEYS = 512
_BATCH_BYTES = 64 * 1024 * 1024  # two calls at once cost the client a third more CPU time than one twice as long
_IN_PLACE_BYTES_MIN = 256 * 1024  # smaller payloads are copied beside their header
_PLACES_MAX = 16 * 1024
_ADMIN_PORT = 9003
_ADMIN_NAMES = 32  # per request: names are long, and so would be the URL
_PLAIN = re.compile(r"[\w./-]+", re.ASCII)
_METRIC = re.compile(r"^(master_\w+) (\d+)$", re.ASCII | re.MULTILINE)

Order = tuple[ObjectKey, memoryview]


class _Place(NamedTuple):
    """Where a record is, and what its header is made of. Costly (10 us): kept from the lookup to the load."""

    name: str
    header_bytes: int
    template: envelope.Template


@dataclass(slots=True)
class _Pieces:
    """Where the records of one call lie in registered memory: header and payload of each.

    Where both are in the frame they lie behind each other, as one piece.
    """

    places: list[_Place]
    heads: list[memoryview] = field(default_factory=list)
    payloads: list[memoryview] = field(default_factory=list)
    pointers: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [place.name for place in self.places]


class MooncakeBackend:
    """`kvcore.l2.shared_backend.SharedBackend` over one Mooncake cluster."""

    batch_keys = _BATCH_KEYS
    batch_bytes = _BATCH_BYTES

    def __init__(self, options: MooncakeOptions) -> None:
        check_options(options)
        self._options = options
        self.lock_strength = LockStrength(LockKind.LEASE, options.lease_s)
        self._regions: list[memoryview] = []
        self._place = lru_cache(_PLACES_MAX)(partial(_place, options.prefix))
        self._client: MooncakeClient | None = None
        self._closed = False

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return self._place(key).header_bytes + payload_bytes

    def register_region(self, region: memoryview) -> None:
        """Buffers inside `region` (the arena) are used as they lie. It is held until the client has ended."""
        self._regions.append(region)
        if self._client is not None:
            self._client.register_region(region)

    def open(self) -> None:
        """One at a time. It may take seconds, so `close` does not wait for it: then this one ends its client itself."""
        if self._closed:
            raise StoreError("the Mooncake store is closed")
        if self._client is None:
            client = MooncakeClient(self._options)
            self._client = client
            for region in list(self._regions):
                client.register_region(region)
        self._end_if_closed()

    def close(self) -> None:
        self._closed = True
        self._regions.clear()  # the client holds those that it knows
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        client = self._client
        if self._closed and client is not None:
            client.close()

    # --- batches -------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
        found = self._ready().exist([self._name(key) for key in keys])
        return [failure(code, "look") if code < 0 else code == 1 for code in found]

    def write(self, orders: Sequence[Order]) -> list[StoreAnswer | Exception]:
        client = self._ready()
        places = [self._place(key) for key, _ in orders]
        there = client.exist([place.name for place in places])
        if not any(there):
            return self._put(client, orders, places)
        answers = [self._is_there(client, order, code) for order, code in zip(orders, there, strict=True)]
        missing = [order for order, answer in zip(orders, answers, strict=True) if answer is None]
        put = iter(self._put(client, missing, [self._place(key) for key, _ in missing]) if missing else ())
        return [next(put) if answer is None else answer for answer in answers]

    def read(self, orders: Sequence[Order]) -> list[Defect | Exception | None]:
        client = self._ready()
        if len({key for key, _ in orders}) == len(orders):
            return self._read(client, orders)
        return [self._read(client, [order])[0] for order in orders]

    def _read(self, client: MooncakeClient, orders: Sequence[Order]) -> list[Defect | Exception | None]:
        with self._laid_out(client, orders, [self._place(key) for key, _ in orders]) as pieces:
            got = _get(client, pieces)
            return [self._judge(client, pieces, at, *order, got[at]) for at, order in enumerate(orders)]

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        client = self._ready()
        return [self._removed(client, self._name(key)) for key in keys]

    def discard(self, key: ObjectKey, defect: Defect) -> None:
        client = self._ready()
        size = client.size(self._name(key))
        if size == codes.NOT_FOUND:
            return
        if size >= 0 and defect is not Defect.OTHER_SIZE and self._is_good(key, size):
            return
        error = self._removed(client, self._name(key))
        if error is not None:
            raise error

    def scan(self) -> Iterator[Stored]:
        prefix = self._options.prefix
        there = [name for name in self._admin("/get_all_keys").split() if below(prefix, name) != name]
        names = filter(_PLAIN.fullmatch, there)  # others are not ours, and would have to be part of a URL
        while page := list(islice(names, _ADMIN_NAMES)):
            sizes = _sizes(self._admin("/batch_query_keys?keys=" + ",".join(page)))
            for name in page:
                if name in sizes:
                    yield Stored(key_of_name(below(prefix, name)), below(prefix, name), sizes[name])

    def usage(self) -> L2Usage:
        """The whole cluster's, as the master says it."""
        figures = {name: int(value) for name, value in _METRIC.findall(self._admin("/metrics"))}
        return L2Usage(
            figures.get("master_allocated_bytes", 0),
            figures.get("master_total_capacity_bytes"),
            figures.get("master_key_count", 0),
            0,
        )

    # --- one record ----------------------------------------------------------------------------------------------

    def _is_there(self, client: MooncakeClient, order: Order, code: int) -> StoreAnswer | Exception | None:
        """None: it is not, write it."""
        if code <= 0:
            return None if code == 0 else failure(code, "look")
        key, payload = order
        size = client.size(self._name(key))
        if size == self.record_bytes(key, len(payload)):
            return StoreAnswer.PRESENT
        return None if size == codes.NOT_FOUND else self._removed(client, self._name(key))

    def _put(
        self, client: MooncakeClient, orders: Sequence[Order], places: list[_Place]
    ) -> list[StoreAnswer | Exception]:
        with self._laid_out(client, orders, places) as pieces:
            for (_, payload), place, head, target in zip(orders, pieces.places, pieces.heads, pieces.payloads):
                if target is not payload:
                    target[:] = payload  # first, so that the checksum reads what the copy has left in the CPU's cache
                head[:] = envelope.header_by(place.template, target)
            done = client.put(pieces.names, pieces.pointers, pieces.sizes)
            return [STORED if code == 0 else _refusal(code) for code in done]

    def _judge(
        self, client: MooncakeClient, pieces: _Pieces, at: int, key: ObjectKey, into: memoryview, got: int
    ) -> Defect | Exception | None:
        head, payload = pieces.heads[at], pieces.payloads[at]
        if got < 0:
            if got in (codes.BAD_PARAMETERS, codes.TRANSFER_FAILED):
                got = self._other_length(client, pieces, at, got)
            if got in (codes.NOT_FOUND, codes.NOT_READY):
                return Defect.MISSING
            if got < 0:
                return failure(got, "read")
        if payload is not into and got == len(head) + len(into):
            into[:] = payload  # first, for the same reason as in `_put`
        return envelope.check_record_by(pieces.places[at].template, key, head, into, got)

    def _other_length(self, client: MooncakeClient, pieces: _Pieces, at: int, code: int) -> int:
        """The object's length with its header read, where that is what was wrong; otherwise the code."""
        size = client.size(pieces.places[at].name)
        if size < 0 or size == sum(pieces.sizes[at]):
            return code if size != codes.NOT_FOUND else size
        wanted = min(size, len(pieces.heads[at]))
        got = client.get_start(pieces.places[at].name, pieces.pointers[at][0], wanted)
        return size if got == wanted else got

    def _is_good(self, key: ObjectKey, size: int) -> bool:
        payload_bytes = size - envelope.header_bytes(key)
        return payload_bytes >= 0 and self.read([(key, memoryview(bytearray(payload_bytes)))])[0] is None

    def _removed(self, client: MooncakeClient, name: str) -> StoreError | None:
        code = client.remove(name)
        return None if code in (0, codes.NOT_FOUND) else failure(code, "remove")

    # --- memory --------------------------------------------------------------------------------------------------

    @contextmanager
    def _laid_out(self, client: MooncakeClient, orders: Sequence[Order], places: list[_Place]) -> Iterator[_Pieces]:
        """Headers, and payloads that do not stay where they are, in a frame, one behind the other."""
        pieces = _Pieces(places)
        in_place = [self._in_place(client, view) for _, view in orders]
        copied_bytes = sum(len(view) for (_, view), stays in zip(orders, in_place) if not stays)
        with client.frame(copied_bytes + sum(place.header_bytes for place in places)) as frame:
            memory, start = frame.data, int(frame.__array_interface__["data"][0])
            at = 0
            for (_, header_bytes, _), (_, view), pointer_there in zip(places, orders, in_place):
                split = at + header_bytes
                end = split if pointer_there else split + len(view)
                pieces.heads.append(memory[at:split])
                pieces.payloads.append(view if pointer_there else memory[split:end])
                pieces.pointers.append([start + at, pointer_there] if pointer_there else [start + at])
                pieces.sizes.append([split - at, len(view)] if pointer_there else [end - at])
                at = end
            yield pieces

    def _in_place(self, client: MooncakeClient, view: memoryview) -> int:
        """Where the payload lies if the client can use it there, otherwise 0."""
        if len(view) < _IN_PLACE_BYTES_MIN:
            return 0
        first = pointer(view)
        return first if client.is_registered(first, len(view)) else 0

    # --- the rest ------------------------------------------------------------------------------------------------

    def _admin(self, path: str) -> str:
        """What the master's HTTP side answers; nothing where it is off. OSError, StoreError: it does not answer."""
        if self._options.admin == "off":
            return ""
        host, port = _admin_address(self._options)
        connection = http.client.HTTPConnection(host, port, timeout=self._options.connect_timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise StoreError("the Mooncake master's HTTP side does not speak HTTP") from error
        finally:
            connection.close()
        if response.status != 200:
            raise StoreError(f"the Mooncake master's HTTP side answers {response.status}")
        return text

    def _ready(self) -> MooncakeClient:
        client = self._client
        if client is None or self._closed:
            raise StoreError("the Mooncake store is not open")
        return client

    def _name(self, key: ObjectKey) -> str:
        return self._place(key).name


def _place(prefix: str, key: ObjectKey) -> _Place:
    template = envelope.template_of(key)
    return _Place(joined(prefix, object_name(key)), template.header_bytes, template)


def _get(client: MooncakeClient, pieces: _Pieces) -> list[int]:
    """One call for all, and a second one for those whose lease ended while the first waited for a lost node."""
    got = client.get(pieces.names, pieces.pointers, pieces.sizes)
    again = [at for at, code in enumerate(got) if code == codes.LEASE_ENDED]
    if again:
        names = [pieces.places[at].name for at in again]
        second = client.get(names, [pieces.pointers[at] for at in again], [pieces.sizes[at] for at in again])
        for at, code in zip(again, second, strict=True):
            got[at] = code
    return got


def _refusal(code: int) -> StoreAnswer | Exception:
    if code == codes.NO_SPACE:
        return StoreAnswer.FULL
    return StoreAnswer.RETRY if code in (codes.EXISTS, codes.NOT_READY) else failure(code, "store")


def _admin_address(options: MooncakeOptions) -> tuple[str, int]:
    if options.admin:
        return address(options.admin, "admin")
    return address(options.master, "master")[0], _ADMIN_PORT


def _sizes(text: str) -> dict[str, int]:
    """Length by name, from the master's answer. What it does not know (any more) is left out."""
    try:
        data = json.loads(text)["data"]
        return {name: int(one["values"][0]["size_"]) for name, one in data.items() if one["ok"] and one["values"]}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StoreError("the Mooncake master's HTTP side answers something unknown") from error


def open_backend(options: MooncakeOptions) -> MooncakeBackend:
    """The backend of these options. ConfigError: they can never work. No I/O before `open`."""
    return MooncakeBackend(options)
