"""The wire protocol between the engine's side and a cache server. Pure.

Theory of operation
-------------------
A frame is a fixed binary header and a MessagePack body (one tagged msgspec struct):

    magic "KV" | version u8 | request id u64 | connection u64 | incarnation u64 | body

The header is not MessagePack on purpose: a frame whose body is cut off, unknown or of another protocol version still
tells *which request* it was, so the sender gets an error it can match instead of silence.

* request id: chosen by the client, strictly increasing per `Connection` object, never 0 (0 in an error reply means
  "your request id could not be read"). The reply repeats it. A server executes each id at most once.
* connection: a random number of the client's `Connection` object. A reply for another object is not ours, also when a
  transport identity is used again.
* incarnation: in a request, the server life the client shook hands with (0 in HELLO); in a reply, the server's own.
  A request that names another life is refused before anything is looked at, so nothing that was granted by a server
  before its restart can be used after it.

Every request gets exactly one reply. LOOKUP's is an acknowledgement only; whatever takes time is asked for again with
QUERY. KV bytes never travel: STORE and RETRIEVE answer with (offset, size, slot generation) in a named segment.

    request                     replies
    HELLO                       WELCOME
    LOOKUP                      ACK
    QUERY                       PENDING | READY(lengths) | FAILED(reason) | UNKNOWN
    SETTLE RELEASE END          DONE | UNKNOWN
    REGISTER UNREGISTER PING    DONE
    STORE                       RESERVED(answers, slots)
    COMMIT ABORT                FINISHED(answers)
    RETRIEVE                    GRANTED(slots)
    LOAD_DONE                   FINISHED(answers)
    STATUS CLEAR                STATUS_REPLY, CLEARED       the operator's: they need no handshake
    (any)                       ERROR(code, message)

`epoch` in the session operations is the client's own count of lookups. RELEASE and END mean "everything of this session
up to this epoch", so a resent one can never hit a later life of a reused request id. QUERY and SETTLE name one exactly.

Versioned: another version is refused with both numbers in the text, never guessed. Unknown fields are refused too: a
field that one side believes to matter must not be dropped silently by the other.

Rejected: pickle (executes what a peer sends); one byte string per bit set element; a reply without the incarnation (a
client would learn of a restart only when something it needs is gone).

Who holds, announces, frees: messages are values; nobody frees anything because of decoding one.
"""

from __future__ import annotations

import struct
from enum import Enum, unique
from typing import Annotated, Any, NamedTuple

import msgspec

from kvcore.answers import Answer
from kvcore.errors import CallerError, PeerError

PROTOCOL_VERSION = 2
"""Raised with every change that an older peer would misread."""

_MAGIC = b"KV"
_HEADER = struct.Struct(">2sBQQQ")
HEADER_BYTES = _HEADER.size

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Hash = Annotated[bytes, msgspec.Meta(min_length=1)]
Slots = list[tuple[Count, Count, Count] | None]  # (offset, size, slot generation); None: not granted


@unique
class ErrorCode(Enum):
    """Why a request was not carried out. The last group is made by the client itself and never travels."""

    MALFORMED = "malformed"  # not a frame, or its body does not decode
    TOO_LARGE = "too_large"  # over one of the server's limits
    VERSION = "version"  # another protocol version
    UNKNOWN_OPERATION = "unknown_operation"
    INVALID = "invalid"  # decodes, and cannot be carried out as it is
    MISMATCH = "mismatch"  # handshake: the two sides are configured differently
    HELLO_REQUIRED = "hello_required"  # this connection is not known here (any more)
    STALE_INCARNATION = "stale_incarnation"  # meant for an earlier life of this server
    DUPLICATE = "duplicate"  # this request id has been executed, or a later one has
    BASE_MISMATCH = "base_mismatch"  # LOOKUP: send all hashes
    UNKNOWN_WORKER = "unknown_worker"  # register first
    UNKNOWN_TAG = "unknown_tag"  # no such store is open
    BUSY = "busy"  # a table is full; later may work
    INTERNAL = "internal"  # our own bug

    TIMEOUT = "timeout"  # local: no reply in time
    DISCONNECTED = "disconnected"  # local: the transport did not take the message
    RESTARTED = "restarted"  # local: the server has a new incarnation
    CLOSED = "closed"  # local: the connection was closed


class Header(NamedTuple):
    version: int
    request_id: int
    connection: int
    incarnation: int


class GroupShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `ObjectGroup` as it travels."""

    kind: str
    block_tokens: int
    bytes_per_block: int
    window_tokens: int | None


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both sides must agree on before a single hash is exchanged.

    It describes the whole layout, so a server that was started without one can take it from its first client.
    """

    hash_mode: str
    hash_version: int
    chunk_tokens: int
    model_name: Annotated[str, msgspec.Meta(max_length=4096)]
    namespace_digest: bytes
    layout_fingerprint: str
    ranks: int
    groups: Annotated[tuple[GroupShape, ...], msgspec.Meta(max_length=256)]
    placement_mode: str
    servers: int

    def difference(self, other: Identity) -> str:
        """The first field in which `other` differs, with both values; "" when they agree."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: the server has {_readable(ours)}, the client has {_readable(theirs)}"
        return ""


def _readable(value: object) -> str:
    return (value.hex() if isinstance(value, bytes) else repr(value))[:200]


class ServerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one peer may ask of a server. Over a limit: an error reply, nothing done."""

    frame_bytes_max: int = 8 << 20
    batch_cells_max: int = 8192
    chunks_per_session_max: int = 65_536
    hash_bytes_max: int = 64
    name_chars_max: int = 256  # session, worker and tag names
    salt_chars_max: int = 256
    sessions_max: int = 65_536
    workers_max: int = 1024
    open_per_worker_max: int = 65_536  # stores plus reads that are open at the same time
    connections_max: int = 4096
    lookup_timeout_ms_max: int = 600_000
    worker_silence_ns: int = 30_000_000_000  # who has something open and says nothing for so long is reaped


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    """Base of everything that travels."""


# --- requests -------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    identity: Identity
    server_index: Count


class Lookup(Message, frozen=True, tag="lookup"):
    """`hashes` follow the first `base` hashes of the session's list; `base_hash` is the last of those ("" if none)."""

    session: Name
    generation: Count
    epoch: Count
    base: Count
    base_hash: bytes
    hashes: list[Hash]
    prompt_tokens: Count
    skip_chunks: Count
    salt: str
    timeout_ms: Count


class Query(Message, frozen=True, tag="query"):
    session: Name
    generation: Count
    epoch: Count


class Settle(Message, frozen=True, tag="settle"):
    """Keep what `length` chunks need, give back the rest."""

    session: Name
    generation: Count
    epoch: Count
    length: Count


class Release(Message, frozen=True, tag="release"):
    session: Name
    generation: Count
    epoch: Count


class EndSession(Message, frozen=True, tag="end_session"):
    session: Name
    epoch: Count


class Register(Message, frozen=True, tag="register"):
    """`process` names the worker's process, so that its death can be proven (`kvcore.runtime.deaths`); may be empty."""

    worker: Name
    rank: Count
    process: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Unregister(Message, frozen=True, tag="unregister"):
    """The worker ends in good order: none of its copies is running."""

    worker: Name


class Ping(Message, frozen=True, tag="ping"):
    worker: Name


class Store(Message, frozen=True, tag="store"):
    worker: Name
    tag: Name
    rank: Count
    salt: str
    cells: list[tuple[Count, Hash]]  # (group, chunk hash)


class Commit(Message, frozen=True, tag="commit"):
    """Bit i of `done` (little endian): cell i is complete. Granted cells without their bit are aborted."""

    worker: Name
    tag: Name
    done: bytes


class Abort(Message, frozen=True, tag="abort"):
    worker: Name
    tag: Name


class Retrieve(Message, frozen=True, tag="retrieve"):
    """`ticket` is the worker's own number for this read; LOAD_DONE names it."""

    worker: Name
    ticket: Count
    session: Name
    generation: Count
    rank: Count
    cells: list[tuple[Count, Count]]  # (group, chunk index)


class LoadDone(Message, frozen=True, tag="load_done"):
    """The copies of the cells with bit i in `done` have ended."""

    worker: Name
    ticket: Count
    done: bytes


class Status(Message, frozen=True, tag="status"):
    pass


class Clear(Message, frozen=True, tag="clear"):
    pass


# --- replies --------------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    limits: ServerLimits


class Ack(Message, frozen=True, tag="ack"):
    pass


class Pending(Message, frozen=True, tag="pending"):
    pass


class Ready(Message, frozen=True, tag="ready"):
    lengths: bytes  # bit L (little endian): L chunks can be served by what is held under lease


class Failed(Message, frozen=True, tag="failed"):
    reason: str


class Unknown(Message, frozen=True, tag="unknown"):
    pass


class Done(Message, frozen=True, tag="done"):
    pass


class Reserved(Message, frozen=True, tag="reserved"):
    segment: str
    answers: list[Answer]
    slots: Slots


class Finished(Message, frozen=True, tag="finished"):
    answers: list[Answer]


class Granted(Message, frozen=True, tag="granted"):
    segment: str
    slots: Slots


class StatusReply(Message, frozen=True, tag="status_reply"):
    counters: dict[str, int]


class Cleared(Message, frozen=True, tag="cleared"):
    objects: Count


class Error(Message, frozen=True, tag="error"):
    code: ErrorCode
    message: str


Request = (
    Hello
    | Lookup
    | Query
    | Settle
    | Release
    | EndSession
    | Register
    | Unregister
    | Ping
    | Store
    | Commit
    | Abort
    | Retrieve
    | LoadDone
    | Status
    | Clear
)
Reply = (
    Welcome
    | Ack
    | Pending
    | Ready
    | Failed
    | Unknown
    | Done
    | Reserved
    | Finished
    | Granted
    | StatusReply
    | Cleared
    | Error
)

OPERATIONS: frozenset[str] = frozenset(str(kind.__struct_config__.tag) for kind in Request.__args__)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class UndecodableError(PeerError):
    """A body that is no request or no reply; arguments: the error code and a text."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def pack(header: Header, message: Message) -> bytes:
    """One frame."""
    assert header.version == PROTOCOL_VERSION
    return _HEADER.pack(_MAGIC, *header) + _encoder.encode(message)


def read_header(payload: bytes) -> Header | None:
    """The header of any frame of any version, or None when this is no frame of ours."""
    if len(payload) < HEADER_BYTES:
        return None
    magic, version, request_id, connection, incarnation = _HEADER.unpack_from(payload)
    if magic != _MAGIC:
        return None
    return Header(version, request_id, connection, incarnation)


def read_request(payload: bytes) -> Request:
    """The request behind the header; `UndecodableError` with the code to answer otherwise."""
    body = memoryview(payload)[HEADER_BYTES:]
    try:
        return _request_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UndecodableError(_code_of(body), f"this is not a request: {error}") from None


def read_reply(payload: bytes) -> Reply:
    """The reply behind the header; `UndecodableError` when it is none."""
    try:
        return _reply_decoder.decode(memoryview(payload)[HEADER_BYTES:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UndecodableError(ErrorCode.MALFORMED, f"this is not a reply: {error}") from None


def _code_of(body: memoryview) -> ErrorCode:
    """Tell an operation we do not know from a body that is broken. Decodes without a schema, so it trusts nothing."""
    try:
        loose: Any = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ErrorCode.MALFORMED
    operation = loose.get("op") if isinstance(loose, dict) else None
    if isinstance(operation, str) and operation not in OPERATIONS:
        return ErrorCode.UNKNOWN_OPERATION
    return ErrorCode.MALFORMED


def stands_alone(message: Request) -> bool:
    """A request that builds on nothing that a life of the server had granted."""
    return isinstance(message, Store) or (isinstance(message, Lookup) and message.base == 0)


def subject_of(message: Request) -> tuple[str, str] | None:
    """The session or the store that a message is about."""
    for name in ("session", "tag"):
        value = getattr(message, name, None)
        if isinstance(value, str):
            return name, value
    return None


def pack_bits(bits: int) -> bytes:
    """A bit set as little-endian bytes, as short as it goes."""
    if bits < 0:
        raise CallerError(f"a bit set is not negative: {bits}")
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_bits(data: bytes) -> int:
    return int.from_bytes(data, "little")
