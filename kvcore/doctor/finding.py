"""`Finding`: one fact about this machine, with what to do where it is not as it should be; and what people do with it.

Theory of operation
-------------------
The doctor looks at single things (`machine`, `packages`, `stores`) and each look gives findings. A finding is

    ok       as it should be
    absent   not here, and nothing is wrong with that: some uses need it
    broken   something that kvcore cannot do without, or that was asked for by name

`USES` says in users' words which findings a use of kvcore needs; a use works when none of them is absent or broken. A
finding that nobody has made counts as absent, so a use can never look possible because a look was forgotten.

Nothing is held. A look never raises for what it finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`name` is short and the same on every machine; `advice` is empty where nothing has to be done."""

    name: str
    state: State
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """Something that people do with kvcore. `needs`: names of findings."""

    name: str
    needs: tuple[str, ...]


USES = (
    Use("in-process cache; file, slab, fs and redis stores", ("Python", "dependencies")),
    Use("kvcore serve, and engines beside it", ("Python", "dependencies", "Linux", "shared memory")),
    Use("its /metrics, and a faster loop", ("extra serve",)),
    Use("kvcore ladder, sim, zoo", ("dependencies", "extra sim")),
    Use("kvcore conformance", ("dependencies", "extra conformance")),
    Use("kvcore report", ("dependencies", "extra reports")),
    Use("kvcore demo, with its picture", ("dependencies", "extra sim", "extra reports")),
    Use("ladder --target torch, storm, report calibrate", ("Linux", "shared memory", "extra sim", "extra torch")),
    Use("KV pages on the CPU, by compiled copies", ("compiled CPU copies",)),
    Use("KV pages on a GPU", ("CUDA copies", "GPU")),
    Use("the connector in vLLM", ("Linux", "extra vllm")),
    Use("s3://, gs://, az:// stores", ("extra s3",)),
    Use("mooncake:// stores", ("extra mooncake",)),
    Use("nixl+posix:// stores", ("extra nixl",)),
    Use("compress=zstd", ("extra compress",)),
    Use("spans to OpenTelemetry", ("extra otel",)),
)


def lacking(use: Use, findings: Sequence[Finding]) -> list[str]:
    """The needs of a use that are not met; empty: it works."""
    states: Mapping[str, State] = {finding.name: finding.state for finding in findings}
    return [need for need in use.needs if states.get(need, "absent") != "ok"]
