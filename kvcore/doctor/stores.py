"""Whether stores answer: each URL is opened as a server would open it, and closed again.

Opening has the effects that it has at every start of a server: a directory is made, an exclusive store is locked and
cleaned of unreadable leftovers. Nothing is written otherwise.

Who holds: each look its own backend. A store that hangs keeps a daemon thread, which ends with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from kvcore.doctor.finding import Finding
from kvcore.errors import KvcoreError
from kvcore.l2.open import StoreSpec, parse_store

PATIENCE_S = 15.0
"""Longer than the connection time-outs of the stores themselves."""


def look(urls: Sequence[str], patience_s: float = PATIENCE_S) -> Iterator[Finding]:
    """One finding per URL. ConfigError, before any is opened: one of them cannot be understood."""
    specs = [parse_store(url) for url in urls]
    return (store(spec, patience_s) for spec in specs)


def store(spec: StoreSpec, patience_s: float) -> Finding:
    """Open it and close it."""
    outcome: list[str] = []
    thread = threading.Thread(target=lambda: outcome.append(_opened(spec)), name="doctor-store", daemon=True)
    thread.start()
    thread.join(patience_s)
    name = f"store {spec.shown}"
    if not outcome:
        return Finding(name, "broken", f"no answer within {patience_s:g} s", "is it up, and is the way to it open?")
    if outcome[0]:
        return Finding(name, "broken", outcome[0], "docs/stores.md says what this store needs")
    return Finding(name, "ok", "opened and closed")


def _opened(spec: StoreSpec) -> str:
    """Why it cannot be opened; empty: it can."""
    try:
        spec.open_backend().close()
    except (KvcoreError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
