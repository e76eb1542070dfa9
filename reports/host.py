"""A host as the cost sees it: the peak rates of its GPUs and which share of them an engine reaches.

`flops`, `hbm_Bps` and `link_Bps` are per GPU; `gpus` makes a tensor-parallel replica, whose GPUs share the work and the
weights. The model adds no cost of communication between them: `parallel_efficiency` below 1 does, for who has measured
it. At 1 the prefill of a replica is as fast as it could be, so the model rather recommends to recompute.

`efficiency_linear` and `efficiency_attention` are shares of the peak (MFU), `efficiency_hbm` of the memory's rate.
`step_s` is the fixed cost of one engine step (launches, scheduling), `request_s` that of one request outside of the
steps (HTTP, tokens, the first token's way back), which both ways of getting a prefix pay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore.errors import ConfigError
from kvcore.reports.numbers import check_count, check_not_negative, check_positive, check_text

GPUS_MAX = 4096
RATE_MAX = 1e20


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One kind of GPU, `gpus` of them per replica. Rates per second and GPU; `unsure` names fields to check."""

    gpu: str
    flops: float
    hbm_Bps: float
    hbm_bytes: float
    link_Bps: float
    gpus: int = 1
    efficiency_linear: float = 0.66
    efficiency_attention: float = 0.56
    efficiency_hbm: float = 0.8
    parallel_efficiency: float = 1.0
    step_s: float = 0.0005
    request_s: float = 0.0
    source: str = ""
    unsure: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_text("gpu", self.gpu)
        check_count("gpus", self.gpus, 1, GPUS_MAX)
        for field in ("flops", "hbm_Bps", "hbm_bytes", "link_Bps"):
            check_positive(field, getattr(self, field), RATE_MAX)
        for field in ("efficiency_linear", "efficiency_attention", "efficiency_hbm", "parallel_efficiency"):
            check_positive(field, getattr(self, field), 1.0)
        for field in ("step_s", "request_s"):
            check_not_negative(field, getattr(self, field), 60.0)
        if self.flops < 1e9:
            raise ConfigError(f"flops {self.flops:.4g} are below 1e9: given in TFLOP/s? Write 989e12 for 989 TFLOP/s")

    def replica(self, gpus: int) -> Host:
        """The same GPUs as one tensor-parallel replica."""
        return replace(self, gpus=gpus)

    def linear_flops(self) -> float:
        """FLOP/s of the replica in matrix products, as reached."""
        return self.flops * self.gpus * self.parallel_efficiency * self.efficiency_linear

    def attention_flops(self) -> float:
        """FLOP/s of the replica in causal attention, as reached."""
        return self.flops * self.gpus * self.parallel_efficiency * self.efficiency_attention

    def memory_Bps(self) -> float:
        """Bytes per second that the replica reads from its HBM, as reached."""
        return self.hbm_Bps * self.gpus * self.efficiency_hbm
