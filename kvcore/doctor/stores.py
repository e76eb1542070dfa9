"""Whether stores answer: each URL is opened as a server would open it, and closed again.

Opening has the effects that it has at every start of a server: a directory is made, an exclusive store is locked and
cleaned of unreadable leftovers. Nothing is written otherwise.

Who holds: each look its own backend. A store that hangs keeps a daemon thread, which ends with the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.doctor.finding import Finding
from kvcore.errors import KvcoreError
from kvcore.l2.open import StoreSpec, parse_store
from kvcore.runtime.calls import answer_within

PATIENCE_S = 15.0
"""Longer than the connection time-outs of the stores themselves."""


def look(urls: Sequence[str], patience_s: float = PATIENCE_S) -> Iterator[Finding]:
    """One finding per URL. ConfigError, before any is opened: one of them cannot be understood."""
    specs = [parse_store(url) for url in urls]
    return (store(spec, patience_s) for spec in specs)


def store(spec: StoreSpec, patience_s: float) -> Finding:
    """Open it and close it."""
    problem = answer_within(patience_s, lambda: _opened(spec), "doctor-store")
    name = f"store {spec.shown}"
    if problem is None:
        return Finding(name, "broken", f"no answer within {patience_s:g} s", "is it up, and is the way to it open?")
    if problem:
        return Finding(name, "broken", problem, "docs/stores.md says what this store needs")
    return Finding(name, "ok", "opened and closed")


def _opened(spec: StoreSpec) -> str:
    """Why it cannot be opened; empty: it can."""
    try:
        spec.open_backend().close()
    except (KvcoreError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
