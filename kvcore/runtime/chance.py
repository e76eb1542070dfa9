"""Bytes that nobody can guess or repeat: for what must be new in every life. Nothing in a decision is drawn here."""

from __future__ import annotations

import os


def fresh_bytes(count: int) -> bytes:
    """`count` bytes from the operating system."""
    return os.urandom(count)
