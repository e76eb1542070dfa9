"""What the processes of the torch target tell each other: plain msgspec values in MessagePack.

    driver --Serve--> engine --Step--> worker (each rank) --Report--> engine --Answered..., Served--> driver

One message at a time in each direction; whoever dies is noticed by its process, not by a message.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcore.connectors.plan import StepMeta
from kvcore.connectors.views import NO_LOADS, LoadTimes
from kvcore.ladder.targets.torch.pages import Entry
from kvcore.service.protocol import Transfer
from kvcore.sim.engine.config import EngineConfig


class EngineSetup(msgspec.Struct, frozen=True):
    """What every process of one engine is started with, as JSON on its command line."""

    directory: str  # for sockets; private
    model: str
    ranks: int
    chunk_tokens: int
    seed: int
    num_blocks: int
    load_async: bool
    servers: tuple[str, ...]  # addresses
    placement: str
    transfer: Transfer = "worker"
    admission: str = "always"

    def to_text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> EngineSetup:
        return msgspec.json.decode(text, type=cls)

    def socket(self, name: str) -> str:
        return f"ipc://{self.directory}/{name}.sock"


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """One request to the engine."""

    request_id: str
    prompt: tuple[int, ...]
    output_tokens: int
    time_ns: int


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Serve these. `cache`: with the connector, or the engine alone."""

    requests: tuple[Ask, ...]
    config: EngineConfig
    cache: bool


class Answered(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    tokens: tuple[int, ...]


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request was admitted: so many tokens it had, so many of them its own cache had and the connector promised."""

    request_id: str
    tokens: int
    local_tokens: int
    external_tokens: int


class Served(msgspec.Struct, frozen=True, tag=True):
    """All requests have been answered. `counts` as in the rung table, of this pass alone."""

    counts: dict[str, int]
    admissions: tuple[Admission, ...]
    findings: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on."""

    text: str


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step for one worker. `meta` None: the engine runs without a cache."""

    number: int
    entries: tuple[Entry, ...]
    fresh: tuple[int, ...]
    loading: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]
    finished: tuple[str, ...]
    meta: StepMeta | None


class Report(msgspec.Struct, frozen=True, array_like=True):
    """How one worker's share of a step ended. `error`: it cannot go on. Counts only grow."""

    number: int
    sampled: dict[str, int]
    sent: tuple[str, ...]
    received: tuple[str, ...]
    failed: tuple[str, ...]
    error_blocks: tuple[int, ...]
    counts: dict[str, int]
    findings: tuple[str, ...]
    error: str = ""
    loads: LoadTimes = NO_LOADS


pack = msgspec.msgpack.Encoder().encode
_TO_ENGINE = msgspec.msgpack.Decoder(Serve)
_TO_DRIVER = msgspec.msgpack.Decoder(Answered | Served | Failed)
_STEP = msgspec.msgpack.Decoder(Step)
_REPORT = msgspec.msgpack.Decoder(Report)


def read_serve(payload: bytes) -> Serve:
    return _TO_ENGINE.decode(payload)


def read_answer(payload: bytes) -> Answered | Served | Failed:
    found: Any = _TO_DRIVER.decode(payload)
    assert isinstance(found, Answered | Served | Failed)
    return found


def read_step(payload: bytes) -> Step:
    return _STEP.decode(payload)


def read_report(payload: bytes) -> Report:
    return _REPORT.decode(payload)
