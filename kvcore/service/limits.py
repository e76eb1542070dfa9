"""Limits of the message layer, stated in one place and enforced by every transport.

A message carries hashes, masks and answers, never KV bytes: a batch of 100,000 cells, each a group and a 32-byte hash,
is about 4 MB. Exceeding the limit is the sending caller's mistake; a peer that does so is disconnected.
"""

from __future__ import annotations

from kvcore.errors import CallerError

MESSAGE_BYTES_MAX = 16 << 20
QUEUE_MESSAGES_MAX = 4096  # per connection and direction; beyond it `send` answers False


def check_message(payload: bytes, bytes_max: int) -> None:
    """Raise `CallerError` for what a transport does not carry."""
    if not isinstance(payload, bytes):
        raise CallerError(f"a message is bytes, not {type(payload).__name__}")
    if len(payload) > bytes_max:
        raise CallerError(f"a message of {len(payload)} bytes exceeds the limit of {bytes_max}; split the batch")
