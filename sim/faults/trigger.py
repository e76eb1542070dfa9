"""`Trigger`: which of the operations that a fault could hit it does hit."""

from __future__ import annotations

from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.faults.scene import Scene


class Trigger:
    """Counts what an event could hit. By time it hits everything until it ends; by count the n-th, and never again.

    Shared by all parts of the world that the event acts on, so that the n-th is the n-th of all of them.
    """

    def __init__(self, scene: Scene, event: FaultEvent) -> None:
        self._scene = scene
        self.event = event
        self._seen = 0

    def comes(self) -> bool:
        """One operation of the kind in question is about to happen. Is it the one? The caller says `fired`."""
        self._seen += 1
        return self.event.nth in (0, self._seen)

    def hits(self) -> bool:
        """As `comes`; the effect is then on record."""
        hit = self.comes()
        if hit:
            self.fired()
        return hit

    def fired(self) -> None:
        self._scene.fired(self.event)
