"""One request at a time through the torch engine of the ladder, with its KV computed or loaded from a real cache.

Theory of operation
-------------------
The model, the pages and the forward pass are those of the ladder's torch target (kvcore.ladder.targets.torch), in this
process: prefill is a real transformer's. The cache is `kvcore.Cache`: a real server, its L1, and a file store as L2.
One prompt is used throughout; its KV is computed once and stored, so that any whole-chunk prefix of it can be loaded.

    recompute   prefill(prefix + rest)                                 everything at once, into the pages
    load        retrieve(prefix), copy into the pages, prefill(rest)   from L1, or from L2 after L1 was emptied

Both begin with pages that nobody has written (NaN, which no later result survives) and end with the first token. The
model's arithmetic is exact, so the pages must then hold the same bytes both ways, which is looked at after every run:
`MeasuringBug` otherwise, because then nothing that was measured is worth anything.

Three things would be measured instead of the engine, and are taken care of. The C library gives the memory of large
activations back after every operation, and fetching it again costs more than computing: a GPU's engine keeps it, so the
process is told to keep it too (where it is glibc's). Neighbours take the core: times are those of the `stopwatch`. Of
several tries the first is left out, because after other work it finds cold caches; then `TRIES_LEAST` of them, and up
to `TRIES_MAX` while they take less than `TRIES_S` together, so that a load and a request with that load have as many.
Their mean counts, because means add up: that of load and prefill is that of both. The fastest of them does not. A
neighbour who is rarely silent leaves a load alone in one try and the prefill in another, but hardly both in one, and
every request with a load from L2 was predicted a tenth too fast. What came before counts too: right behind a load,
another finds its code in the processor's caches; in an engine it comes behind a prefill, and so it does here. And a
load is not over with its answer: the cache ends the session on its own thread while the engine computes, and in one
process both share the interpreter. `time_call` shows how long that takes, and whoever predicts adds it.

Who holds: `CalibrationEngine` holds pages and caches; who frees: `close`, or `with`.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from kvcore.errors import ConfigError, KvcoreError
from kvcore.inprocess import Cache
from kvcore.keys import Namespace
from kvcore.reports.calibration.rates import check_kept
from kvcore.reports.calibration.stopwatch import Timed, timed
from kvcore.sim.streams import RandomStream

if TYPE_CHECKING:
    import torch

    from kvcore.ladder.targets.torch.pages import TorchForward

CHUNK_TOKENS = 16
L1_BYTES = 256 << 20
TRIES_LEAST, TRIES_MAX = 3, 8
TRIES_S = 0.03
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt(3)
_KEPT_BYTES = 1 << 30
_MMAP_BYTES_MAX = 32 << 20
KIND = "full"

Way = Literal["recompute", "L1", "L2"]


class MeasuringBug(KvcoreError):
    """What was measured is not what it is called: other bytes, other tokens, chunks that are gone. A bug of ours."""


def check_torch() -> None:
    """ConfigError unless torch is installed."""
    if find_spec("torch") is None:
        raise ConfigError("calibrate runs a real transformer and needs torch: pip install kvcore[torch]")


def tokens_max() -> int:
    """The longest prompt of the engine."""
    from kvcore.ladder.targets.torch.model import POSITIONS_MAX

    return POSITIONS_MAX


class CalibrationEngine:
    """See the module text. `store`: where the L2's folder is made, which is removed at the end; None: anywhere."""

    def __init__(self, seed: int, store: Path | None = None) -> None:
        import torch

        from kvcore.ladder.targets.torch.model import build_torch_model
        from kvcore.ladder.targets.torch.pages import TorchPages

        _keep_memory()
        self._seconds = self._clock_s = 0.0
        self._dropped = False
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # one stream of work, as a GPU has; and less at the mercy of the neighbours
        self._stack = contextlib.ExitStack()
        self._stack.callback(torch.set_num_threads, self._threads)
        self.layout, self._model = build_torch_model(KIND, 1, chunk_tokens=CHUNK_TOKENS, seed=seed)
        self._block_tokens = self.layout.groups[0].block_tokens
        blocks = tokens_max() // self._block_tokens
        self._table = tuple(range(1, blocks + 1))
        self._pages = TorchPages(self.layout, self._model, blocks + 1)
        stream = RandomStream(seed, "reports.calibration")
        self.prompt = tuple(stream.sample_index(512) for _ in range(tokens_max()))
        try:
            self._cache = self._open(store, seed)
            self._fill()
        except BaseException:
            self._stack.close()
            raise

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.cell_bytes(0) // CHUNK_TOKENS

    @property
    def layers(self) -> int:
        return len(self._model.layers)

    def _open(self, store: Path | None, seed: int) -> Cache:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(dir=store, prefix="kvcore-calibrate-"))
        namespace = Namespace(f"calibrate-{KIND}", model_revision=str(seed), kv_dtype="float32")
        return self._stack.enter_context(
            Cache.open(
                namespace=namespace,
                chunk_tokens=CHUNK_TOKENS,
                chunk_bytes=self.layout.cell_bytes(0),
                l1_bytes=L1_BYTES,
                l2=Path(folder).as_uri(),
            )
        )

    def _fill(self) -> None:
        """Compute the whole prompt's KV once and store it, in L1 and L2."""
        self._pages.poison(self._table)
        self._prefill(0, len(self.prompt))
        self._right = self._pages.groups[0].clone()
        blocks = CHUNK_TOKENS // self._block_tokens
        pages = self._pages.groups[0]
        chunks = [
            pages[list(self._table[first : first + blocks])].numpy().tobytes()
            for first in range(0, len(self._table), blocks)
        ]
        self._cache.store(self.prompt, chunks)
        check_kept(self._cache, self.prompt, len(chunks))

    # ---- what is timed

    @property
    def core_share(self) -> float:
        """Seconds without neighbours / seconds by the clock, of all that was timed: 1 on a machine of our own."""
        return self._seconds / self._clock_s if self._clock_s else 1.0

    def time_prefill(self, new_tokens: int, prefix_tokens: int) -> Timed:
        """A prefill whose prefix is in the pages already."""

        def ready() -> None:
            self._pages.poison(self._table)
            self._load(prefix_tokens)

        return self._mean(lambda: self._prefill(prefix_tokens, prefix_tokens + new_tokens), ready)

    def time_load(self, way: Way, tokens: int) -> Timed:
        """Bringing a prefix into the pages, until the cache has answered and the copy is done."""

        def ready() -> None:
            self._prefill(0, CHUNK_TOKENS)
            self._ready(way)

        return self._mean(lambda: self._load(tokens), ready)

    def time_call(self, way: Way, tokens: int, rested: bool) -> Timed:
        """A call of the cache after a load: right after it, or when the cache rests again. The first waits for what the
        load has left to do."""

        def call() -> None:
            self._cache.statistics()

        def loaded() -> None:
            self._ready(way)
            call()
            self._load(tokens)
            if rested:
                call()

        return self._mean(call, loaded)

    def time_first_token(self, way: Way, prefix_tokens: int, rest_tokens: int) -> tuple[Timed, int]:
        """(TTFT, the token) of a prompt whose prefix is computed or loaded."""
        tokens = set()

        def request() -> None:
            loaded = 0 if way == "recompute" else self._load(prefix_tokens)
            tokens.add(self._prefill(loaded, prefix_tokens + rest_tokens))

        time = self._mean(request, lambda: self._ready(way))
        self._check(prefix_tokens + rest_tokens)
        if len(tokens) != 1:
            raise MeasuringBug(f"one prompt was answered in several ways: {sorted(tokens)}")
        return time, tokens.pop()

    def _mean(self, work: Callable[[], object], before: Callable[[], None]) -> Timed:
        """Of the tries (module text)."""
        before()
        work()
        tries: list[Timed] = []
        while len(tries) < TRIES_LEAST or (len(tries) < TRIES_MAX and sum(one.seconds for one in tries) < TRIES_S):
            before()
            tries.append(timed(work))
        seconds, clock_s = sum(one.seconds for one in tries), sum(one.clock_s for one in tries)
        self._seconds += seconds
        self._clock_s += clock_s
        return Timed(seconds / len(tries), clock_s / len(tries))

    def _check(self, tokens: int) -> None:
        """The pages of these tokens, whole ones, must hold what was computed at first."""
        import torch

        blocks = list(self._table[: tokens // self._block_tokens])
        if not torch.equal(self._pages.groups[0][blocks], self._right[blocks]):
            raise MeasuringBug(f"the KV of {tokens} tokens differs from what was computed")

    def _ready(self, way: Way) -> None:
        self._pages.poison(self._table)
        self._place(way)

    def _place(self, way: Way) -> None:
        """Put the cache's content where it is to be loaded from."""
        if way == "L2":
            self._cache.drop_l1()
            self._dropped = True
        elif way == "L1" and self._dropped:
            self._cache.retrieve(self.prompt)  # what L1 has dropped comes back from L2
            self._dropped = False

    def _load(self, tokens: int) -> int:
        """Retrieve the chunks of the first tokens and copy them into the pages; how many tokens came."""
        import torch

        if tokens < CHUNK_TOKENS:
            return 0
        chunks = self._cache.retrieve(self.prompt[:tokens])
        if len(chunks) != tokens // CHUNK_TOKENS:
            raise MeasuringBug(f"{tokens // CHUNK_TOKENS} chunks were stored, {len(chunks)} came back")
        pages = self._pages.groups[0]
        blocks = len(chunks) * CHUNK_TOKENS // self._block_tokens
        flat = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.float32)
        pages[list(self._table[:blocks])] = flat.view(blocks, *pages.shape[1:])
        return len(chunks) * CHUNK_TOKENS

    def _prefill(self, computed: int, end: int) -> int:
        """Compute tokens [computed, end) and sample the next one."""
        forward = self._forward(computed, end)
        for index in range(self.layers):
            forward.layer(index)
        return forward.sample()["request"]

    def _forward(self, computed: int, end: int) -> TorchForward:
        from kvcore.ladder.targets.torch.pages import Entry, TorchForward

        entry = Entry("request", computed, self.prompt[computed:end], (self._table,), True)
        return TorchForward([entry], self.layout, self._model, self._pages, 0, _alone)

    # ---- end

    def close(self) -> None:
        self._stack.close()
        self._pages.close()

    def __enter__(self) -> CalibrationEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _alone(output: torch.Tensor) -> None:
    """One rank has nobody to add its output to."""


def _keep_memory() -> None:
    """Ask glibc to keep freed memory; elsewhere nothing happens (module text)."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_BYTES_MAX)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
