"""What a simulated run gives: one record per request, and what the machines did.

Times are in seconds, bytes are of a whole replica (every rank's copy counted). For each completed request
hit_tokens + computed_tokens = input_tokens; a prompt that is found whole still has its last token computed, so its
loaded bytes are those of one token more than its hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcore.reports.percentiles import percentile
from kvcore.reports.serving.setting import Setting
from kvcore.reports.slo import Ending, Goodput, Outcome, Slo, goodput

FORMULAS = {
    "ttft_s": "time of the first output token - arrival, with the host's fixed time per request",
    "tpot_s": "(time of the last output token - time of the first) / (output tokens - 1); 0 for one token",
    "e2e_s": "time of the last output token - arrival, with the host's fixed time per request",
    "hit_rate": "sum of hit tokens / sum of input tokens, completed requests",
    "found_rate": "sum of tokens that could have been loaded / sum of input tokens, completed requests",
    "gpu_busy": "time in steps / duration of the run, mean of the workers",
    "link_busy": "time in transfers / duration of the run, per tier, mean of its lines",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are None for a request that failed (too long for the GPUs' memory).

    `decision` is `kvcore.admission.Reason` as text, or "always", "never", "split".
    """

    arrival_s: float
    worker: int
    input_tokens: int
    output_tokens: int
    found_tokens: int
    hit_tokens: int
    computed_tokens: int
    loaded_bytes: int
    decision: str
    ending: Ending
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None

    def outcome(self) -> Outcome:
        return Outcome(self.ending, self.output_tokens, self.ttft_s, self.tpot_s, self.e2e_s)


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one tier's lines carried."""

    tier: str
    loads: int
    loaded_bytes: int
    busy: float


@dataclass(frozen=True, slots=True)
class ServingResult:
    """A run over a trace. `notes` says what was done to the trace and what the simulation leaves out."""

    setting: Setting
    trace: str
    notes: tuple[str, ...]
    records: tuple[Record, ...]
    duration_s: float
    gpu_busy: float
    links: tuple[LinkUse, ...]
    evictions: int
    steps: int

    def completed(self) -> Iterator[Record]:
        return (record for record in self.records if record.ending is Ending.COMPLETED)

    def mean(self, field: Callable[[Record], float | None]) -> float | None:
        """Mean of a time over the completed requests; None if there are none."""
        values = [value for record in self.completed() if (value := field(record)) is not None]
        return sum(values) / len(values) if values else None

    def percentile(self, field: Callable[[Record], float | None], percent: float) -> float | None:
        """None for too few samples (reports/percentiles.py)."""
        return percentile([value for record in self.completed() if (value := field(record)) is not None], percent)

    @property
    def ttft_mean_s(self) -> float | None:
        return self.mean(lambda record: record.ttft_s)

    @property
    def hit_rate(self) -> float:
        return self._share(lambda record: record.hit_tokens)

    @property
    def found_rate(self) -> float:
        return self._share(lambda record: record.found_tokens)

    def _share(self, tokens: Callable[[Record], int]) -> float:
        asked = sum(record.input_tokens for record in self.completed())
        return sum(map(tokens, self.completed())) / asked if asked else 0.0

    def goodput(self, slo: Slo | None) -> Goodput | None:
        """Goodput under an objective; None without one."""
        return goodput(map(Record.outcome, self.records), slo, max(self.duration_s, 1e-9))

    def decisions(self) -> dict[str, int]:
        """Requests by decision, in the order of first occurrence."""
        counts: dict[str, int] = {}
        for record in self.records:
            counts[record.decision] = counts.get(record.decision, 0) + 1
        return counts
