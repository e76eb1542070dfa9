"""The answers the core gives per key.

Expected outcomes are values of this enum, never exceptions: a full cache, a key that is being
written by somebody else or a lease that has run out are everyday life. Exceptions
(`kvcore.errors`) are for misuse of an interface and for our own mistakes.
"""

from __future__ import annotations

from enum import Enum, unique


@unique
class Answer(Enum):
    """What happened to one key of one batch call."""

    RESERVED = "reserved"  # a staging buffer or a read lease was granted
    RESIDENT = "resident"  # the key is already published; nothing to write
    BUSY = "busy"  # same (key, tag) staged twice, or its copy has not ended
    NO_SPACE = "no_space"  # nothing unprotected is left to evict, or the tenant's quota is full
    PUBLISHED = "published"  # staging became resident
    DISCARDED = "discarded"  # somebody else had published first; our buffer was dropped
    ABORTED = "aborted"  # staging was given up and never became visible
    EXPIRED = "expired"  # the lease had run out; the call changed nothing
    UNKNOWN = "unknown"  # no such key, lease or reservation under this identity
    LOCKED = "locked"  # a lease or an I/O hold protects the object
    RELEASED = "released"  # a lease was given back
    DELETED = "deleted"  # the object is gone
    MISMATCH = "mismatch"  # same key, other size or layout: refused and counted
