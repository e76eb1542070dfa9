"""One request on its way through a worker."""

from __future__ import annotations

from kvcore.reports.serving.cache import Choice, Held
from kvcore.reports.serving.link import Haul
from kvcore.reports.serving.setting import Policy
from kvcore.reports.traces.trace import Request


class Job:
    """One request on one worker. `at`: tokens of the prompt in the GPU; `todo`: tokens of this stage to compute."""

    __slots__ = (
        "arrival_s",
        "at",
        "choice",
        "decision",
        "found_tokens",
        "front",
        "haul",
        "hauls",
        "held",
        "hit_tokens",
        "index",
        "loaded_bytes",
        "loading",
        "output_tokens",
        "prompt_tokens",
        "todo",
        "token_first_s",
        "token_last_s",
        "worker",
    )

    def __init__(self, index: int, request: Request, arrival_s: float, held: Held | None) -> None:
        self.index = index
        self.arrival_s = arrival_s
        self.prompt_tokens = request.input_tokens
        self.output_tokens = request.output_tokens
        self.held = held
        self.worker = 0
        self.at = 0
        self.todo = request.input_tokens
        self.front = 0
        self.loading = False
        self.choice: Choice | None = None
        self.hauls: list[tuple[int, int]] = []
        self.haul: Haul | None = None
        self.found_tokens = self.hit_tokens = self.loaded_bytes = 0
        self.decision = Policy.NEVER.value
        self.token_first_s: float | None = None
        self.token_last_s: float | None = None
