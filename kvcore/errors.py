"""Exceptions, named by blame.

    KvcoreError
    +- CallerError      the caller's mistake: wrong argument, wrong order (also a ValueError)
    |  +- ConfigError   a configuration that cannot work; the command line exits with status 2
    +- PeerError        the other side of a connection broke the protocol
    +- StoreError       an L2 store misbehaved or is unreachable
    +- OutOfRoomError   no memory or no disk space where the caller cannot go on without
    +- InternalError    our own bug; please report it

All take positional arguments only, so that they survive pickling between processes. The text says
what happened, the likely cause, and what to do. Ordinary outcomes are not exceptions but
`kvcore.answers.Answer` values.
"""

from __future__ import annotations


class KvcoreError(Exception):
    """Base of everything kvcore raises on purpose."""


class CallerError(KvcoreError, ValueError):
    """The caller passed something that cannot work."""


class ConfigError(CallerError):
    """A configuration that cannot work; nothing was started and nothing written."""


class PeerError(KvcoreError):
    """The peer broke the protocol or speaks another version of it."""


class StoreError(KvcoreError):
    """An L2 store failed in a way that is not a plain miss."""


class OutOfRoomError(KvcoreError):
    """Memory or disk space ran out where the caller cannot go on without it."""


class InternalError(KvcoreError):
    """A state that must not exist: a bug in kvcore."""
