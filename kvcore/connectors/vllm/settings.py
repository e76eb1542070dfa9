"""`kv_connector_extra_config`, checked before anything is opened.

    servers        address of a running `kvcore serve`, or a list of them; without it the cache lives in the engine
    placement      how several servers share the work: "chunk" (default) or "rank"
    l1_bytes       host memory of a cache inside the engine (default 1 GiB)
    l2             URL of a store behind it, or a list of them
    policy         its eviction: "lru" (default) or "s3fifo"
    chunk_tokens   the wish (default 256); the nearest size that fits the engine's blocks is taken
    load_async     default true
    transfer       "worker" (default and only): servers copy by themselves only from and to shared memory on the host
    admission      "always" (default), or "if-it-pays": what is found is loaded where measured rates say that computing
                   it would cost more (`kvcore.connectors.admission`)
    admission_floor_tokens     shorter prefixes are never loaded
    admission_ceiling_tokens   prefixes of so many tokens are always loaded
    admission_objective        "ttft:2000 tpot:50" in milliseconds (`kvcore.objective`); answers are kept within it
    host           a `SharedHost` of the caller's own, which may outlive the engine

With servers, memory, stores and eviction are the servers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from kvcore.admission import Limits
from kvcore.connectors.admission import MODES
from kvcore.connectors.vllm.host import POLICIES
from kvcore.errors import ConfigError
from kvcore.objective import Objective
from kvcore.placement import PlacementMode
from kvcore.service.protocol import Transfer

L1_BYTES = 1 << 30
_LIMITS: tuple[tuple[str, type, str], ...] = (
    ("admission_floor_tokens", int, "a whole number"),
    ("admission_ceiling_tokens", int, "a whole number"),
    ("admission_objective", str, "a text like 'ttft:2000 tpot:50'"),
)
_OF_THE_ENGINE: dict[str, Any] = {"l1_bytes": L1_BYTES, "l2": (), "policy": "lru", "host": None}


@dataclass(frozen=True, slots=True)
class Settings:
    """See the module text. Made by `Settings.read`."""

    servers: tuple[str, ...] = ()
    placement: PlacementMode = "chunk"
    l1_bytes: int = L1_BYTES
    l2: tuple[str, ...] = field(default=(), repr=False)  # URLs may hold passwords
    policy: str = "lru"
    chunk_tokens: int | None = None
    load_async: bool = True
    transfer: Transfer = "worker"
    admission: str = "always"
    admission_floor_tokens: int = 0
    admission_ceiling_tokens: int | None = None
    admission_objective: str | None = None
    host: Any = None

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises ConfigError, naming the setting."""
        known = tuple(cls.__dataclass_fields__)
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ConfigError(f"unknown settings {unknown} in kv_connector_extra_config; known are {list(known)}")
        values = {name: value for name, value in extra.items() if value is not None}
        for name in {"servers", "l2"} & set(values):
            values[name] = _texts(name, values[name])
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("l1_bytes", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} = {value!r} must be a whole number from 1 on")
        if type(self.load_async) is not bool:
            raise ConfigError(f"load_async = {self.load_async!r} must be true or false")
        _one_of("placement", self.placement, get_args(PlacementMode))
        _one_of("policy", self.policy, tuple(POLICIES))
        _one_of("transfer", self.transfer, get_args(Transfer))
        if self.transfer == "server":
            raise ConfigError(
                "transfer = server: servers can copy only from and to pages in shared memory on the host, and vLLM "
                "allocates its pages itself; leave it at worker"
            )
        _one_of("admission", self.admission, MODES)
        self._check_limits()
        self._check_whose()

    def _check_limits(self) -> None:
        for name, kind, what in _LIMITS:
            value = getattr(self, name)
            if value is not None and type(value) is not kind:
                raise ConfigError(f"{name} = {value!r} must be {what}")
            if value and self.admission != "if-it-pays":
                raise ConfigError(f'{name} is for admission = "if-it-pays"; {self.admission} loads whatever is found')
        _ = self.limits

    @property
    def limits(self) -> Limits | None:
        """Of an admission that measures; None: everything is loaded."""
        if self.admission == "always":
            return None
        told = self.admission_objective
        objective = None if told is None else Objective.read(told)
        return Limits(self.admission_floor_tokens, self.admission_ceiling_tokens, objective)

    def _check_whose(self) -> None:
        """What nobody would look at is refused: it was meant to do something."""
        if self.servers:
            given = [name for name, default in _OF_THE_ENGINE.items() if getattr(self, name) != default]
            if given:
                raise ConfigError(f"{given}: a cache in servers has its own; give them to `kvcore serve`")
        elif self.placement != "chunk":
            raise ConfigError("placement is for several servers, and no servers are named")


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{name} takes a text, or a list of texts")
    return texts


def _one_of(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ConfigError(f"{name} = {given!r}; known are {', '.join(known)}")
