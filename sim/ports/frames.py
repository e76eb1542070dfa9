"""What a frame of the wire protocol says, in a few words for the trace: operation, subject, number of the request.

A torn frame, one of another version or none at all is "?": the network carries whatever it is given.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from kvcore.service.protocol import HEADER_BYTES, read_header


class _Body(msgspec.Struct):
    """The fields that say what a message is about. Others are skipped."""

    op: str = "?"
    session: str = ""
    tag: str = ""


_decode = msgspec.msgpack.Decoder(_Body).decode


@lru_cache(maxsize=256)  # a message is named twice: when it is sent and when it arrives
def name_of(payload: bytes) -> str:
    """For example "lookup r3 #17"; its reply is "ack #17"."""
    header = read_header(payload)
    if header is None:
        return "?"
    try:
        body = _decode(memoryview(payload)[HEADER_BYTES:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return f"? #{header.request_id}"
    subject = body.session or body.tag
    return f"{body.op} {subject} #{header.request_id}" if subject else f"{body.op} #{header.request_id}"
