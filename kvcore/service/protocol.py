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
QUERY; a client that will not wait any longer says so there (`hurry`), and repeating that changes nothing. KV bytes
never travel: STORE and RETRIEVE answer with (offset, size, slot generation) in a named segment; STORE_PAGES and
RETRIEVE_PAGES name blocks of the pages that the worker has registered (a segment, and where each group's blocks lie in
it), and the server copies. A cell of these is *running* until COPIED says that it is not: its blocks may be read or
written so long. COPIES may be asked as often as one likes.

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
    STORE_PAGES RETRIEVE_PAGES  COPIED(running, answers)    the server copies between its memory and the worker's pages
    COPIES                      COPIED(running, answers)    how far is it, and do not begin these any more
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
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from kvcore.answers import Answer
from kvcore.errors import CallerError, PeerError
from kvcore.service.shapes import Count, Name
from kvcore.service.shapes import Identity as Identity
from kvcore.service.shapes import PageSegment as PageSegment
from kvcore.service.shapes import ServerLimits as ServerLimits

PROTOCOL_VERSION = 4
"""Raised with every change that an older peer would misread."""

_MAGIC = b"KV"
_HEADER = struct.Struct(">2sBQQQ")
HEADER_BYTES = _HEADER.size

Transfer = Literal["worker", "server"]
"""Who copies KV between the engine's pages and L1."""
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
    BAD_PAGES = "bad_pages"  # a segment that is not to be trusted, or blocks that do not lie in it
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


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    """Base of everything that travels."""


# --- requests -------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """`transfer`: who copies, "worker" or "server"; refused by a server that does not copy."""

    identity: Identity
    server_index: Count
    transfer: Annotated[str, msgspec.Meta(max_length=16)] = "worker"


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
    """`hurry`: a lookup that is pending ends now, and is READY with what it holds."""

    session: Name
    generation: Count
    epoch: Count
    hurry: bool = False


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
    """`process` names the worker's process, so that its death can be proven (`kvcore.runtime.deaths`); may be empty.

    `pages`: where its paged KV lies, if the server shall copy.
    """

    worker: Name
    rank: Count
    process: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pages: PageSegment | None = None


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


class StorePages(Message, frozen=True, tag="store_pages"):
    """Copy these cells out of the worker's blocks and publish them. Block 0 is the engine's null block."""

    worker: Name
    tag: Name
    rank: Count
    salt: str
    cells: list[tuple[Count, Hash, list[Count]]]  # (group, chunk hash, blocks)


class RetrievePages(Message, frozen=True, tag="retrieve_pages"):
    """Copy these cells into the worker's blocks; parts whose block is 0 are left out."""

    worker: Name
    tag: Name
    session: Name
    generation: Count
    rank: Count
    cells: list[tuple[Count, Count, list[Count]]]  # (group, chunk index, blocks)


class Copies(Message, frozen=True, tag="copies"):
    """How far are the copies under this tag? Cells with their bit in `cancel` are not begun any more."""

    worker: Name
    tag: Name
    cancel: bytes = b""


class Status(Message, frozen=True, tag="status"):
    pass


class Clear(Message, frozen=True, tag="clear"):
    pass


# --- replies --------------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """`process` names the server's, as in REGISTER: whoever lets it copy wants proof of its death; may be empty."""

    limits: ServerLimits
    process: str = ""


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


class Copied(Message, frozen=True, tag="copied"):
    """Bit i of `running` (little endian): cell i may still be read or written. `answers` of the others are final."""

    running: bytes
    answers: list[Answer]


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
    | StorePages
    | RetrievePages
    | Copies
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
    | Copied
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


# What decoding raises for bytes that are no message. Older msgspec says TypeError for a map whose key is a map.
_UNREADABLE = (msgspec.DecodeError, RecursionError, TypeError, UnicodeDecodeError)


def read_request(payload: bytes) -> Request:
    """The request behind the header; `UndecodableError` with the code to answer otherwise."""
    body = memoryview(payload)[HEADER_BYTES:]
    try:
        return _request_decoder.decode(body)
    except _UNREADABLE as error:
        raise UndecodableError(_code_of(body), f"this is not a request: {error}") from None


def read_reply(payload: bytes) -> Reply:
    """The reply behind the header; `UndecodableError` when it is none."""
    try:
        return _reply_decoder.decode(memoryview(payload)[HEADER_BYTES:])
    except _UNREADABLE as error:
        raise UndecodableError(ErrorCode.MALFORMED, f"this is not a reply: {error}") from None


def _code_of(body: memoryview) -> ErrorCode:
    """Tell an operation we do not know from a body that is broken. Decodes without a schema, so it trusts nothing."""
    try:
        loose: Any = msgspec.msgpack.decode(body)
    except _UNREADABLE:
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
