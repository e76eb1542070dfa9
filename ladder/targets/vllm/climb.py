"""The rungs on vLLM's real engine.

    0 reference   one request at a time, no connector          3b hot from L2   L1 dropped before
    1 no cache    all at once, no connector: A/A               4 preempted      too few blocks, part of the prompts new
    2 cold        with the connector, roomy                    replay           L1 dropped, roomy: all is read back
    3 hot         the same prompts; what L1 has

Every rung from 2 on is climbed twice, by an engine without a prefix cache of its own and by one with it; its counts are
the sums. The hit share is the first one's: there, nobody but the connector has anything to give. Engine and connector
live as long as a climb of one kind; before each pass the engine's own prefix cache is emptied.

Rung 4 leaves so few blocks that running requests starve each other, in several waves, each with prompts that nobody has
seen: what is hot is loaded, what is new is stored, and victims are in both.

Tokens are compared exactly, KV and log-probabilities with a tolerance (`watch`); rung 1 says how large differences are
where there is no cache, and `CellResult.workload` holds the sentence.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.ladder.admissions import floors_with
from kvcore.ladder.guarded import say
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import CellResult, Floors, RungCounts, RungResult
from kvcore.ladder.targets.vllm.caches import CacheKind, cache_for
from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS, Ask, TinyEngine
from kvcore.ladder.targets.vllm.fingerprint_witness import Witness
from kvcore.ladder.targets.vllm.models import VOCABULARY, TinyModel, tiny_model, write_model
from kvcore.ladder.targets.vllm.watch import TOLERANCE, Admission, Distances, Reference, Watch
from kvcore.ladder.targets.vllm_scheduler.mutants import Spoil
from kvcore.sim.workload import Draws, Workload

PROMPT_TOKENS_MAX = 280
OUTPUT_TOKENS_MIN = 40
POSITIONS = 384
FULL_REQUESTS = 40
"""From this size on a climb must meet 50 preemptions; a smaller one shows that things work at all."""
WAVES_MAX = 5
TIGHTNESS_PERCENT = (115, 105, 130, 110, 160)
STRANGERS_PERCENT = 20
"""New prompts of each wave of rung 4, for a hundred of the workload."""
_SPECIAL_TOKENS = 2

CELLS = tuple(
    MatrixCell(groups, 1, servers, load_async)
    for groups in ("full", "full+window")
    for servers in (0, 1)
    for load_async in (False, True)
)
MODEL_OF = {"full": "llama", "full+window": "gemma3"}


def floors(requests: int, engines: int, *, foreign: bool) -> dict[str, Floors]:
    """What each pass must have done, for all waves and engines together."""
    hot = Floors(engines * requests, loads_verified=requests, hit_share=0.5 if foreign else 0.8)
    cold = Floors(engines * requests, stores_verified=0 if foreign else requests)
    pressed = Floors(
        engines * requests,
        loads_verified=requests // 2,
        preemptions=requests * 5 // 4 if requests >= FULL_REQUESTS else 2,
        resumes_with_load=1,
        hit_share=0.1 if foreign else 0.5,
    )
    return {
        "0": Floors(requests),
        "1": Floors(requests),
        "2": cold,
        "3": hot,
        "3b": hot,
        "4": pressed,
        "replay": hot,
    }


def check(options: LadderOptions) -> None:
    """Raises `ConfigError` for options that this target cannot serve."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("target vllm needs vLLM, which is not installed: pip install vllm, or `make vllm`")
    if options.l1_bytes is not None or options.l2_dir is not None:
        raise ConfigError("--l1 and --l2 are for other targets; target vllm makes directories of its own")
    if options.transfer != "worker":
        raise ConfigError("--transfer server: vLLM's pages are not in shared memory")
    if options.chunk_tokens % BLOCK_TOKENS:
        raise ConfigError(f"--chunk-tokens: vLLM has blocks of {BLOCK_TOKENS} tokens on a CPU")
    if options.connector is not None and options.model is None:
        raise ConfigError("--connector with target vllm needs a model: --model llama")
    if options.connector is None and options.connector_config:
        raise ConfigError("--connector-config is for --connector; the ladder configures kvcore's own connector itself")


def cells(options: LadderOptions) -> tuple[MatrixCell, ...]:
    """Those of the model; a foreign connector has one, whatever it does inside."""
    chosen = [cell for cell in options.cells if cell in CELLS]
    if options.model is not None:
        groups = tiny_model(options.model).groups
        chosen = [cell for cell in chosen if cell.groups == groups]
    if options.connector is not None:
        chosen = [cell for cell in chosen if not cell.servers and cell.load_async]
    return tuple(chosen)


def climb_cell(cell: MatrixCell, options: LadderOptions, workload: Workload, reproduce: str) -> CellResult:
    """Climb in one configuration, with a cache and engines of its own."""
    begin = time.process_time()
    stage = VllmStage(cell, options, workload)
    rungs = stage.climb(options.passes)
    text = f"{workload.describe()}; {stage.said()}"
    return CellResult(str(cell), reproduce, rungs, "", 0, time.process_time() - begin, text)


class VllmStage:
    """One climb. Holds directories, cache and engines from `climb` on until that returns.

    `prefix_caches`: of the engines, one after the other. `spoil` is shown both halves of a new connector (a mutant).
    `reference`: of the same requests and model, if there is one already; rungs 0 and 1 are then left out.
    """

    def __init__(
        self,
        cell: MatrixCell,
        options: LadderOptions,
        workload: Workload,
        *,
        prefix_caches: Sequence[bool] = (False, True),
        spoil: Spoil | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.model: TinyModel = tiny_model(options.model or MODEL_OF[cell.groups], options.window_tokens)
        self._cell, self._options = cell, options
        self._prefix_caches, self._spoil = prefix_caches, spoil
        self._asks = asks_of(workload)
        self._strangers = strangers_of(self._asks, options.seed)
        self._everybody = [*self._asks, *(ask for wave in self._strangers for ask in wave)]
        self._prompts = {ask.request_id: ask.prompt for ask in self._everybody}
        wanted = floors(len(self._asks), len(prefix_caches), foreign=options.connector is not None)
        self._floors = floors_with(options.admission, wanted)
        self.reference = reference or Reference()
        self._stored: set[tuple[int, ...]] = set()  # prefixes that a cache that forgot nothing would have by now
        self._met: list[Ask] = []  # strangers of the waves so far: what was stored under pressure is read by the replay
        self._alone_with_cache = True  # the engine has no prefix cache of its own
        self._aa = Distances()
        self._with_cache = Distances()
        self._slots_checked = 0

    def said(self) -> str:
        """How far apart things were."""
        return (
            f"model {self.model.name}; largest differences from the reference: A/A {self._aa}; with the cache "
            f"{self._with_cache}; tolerance {TOLERANCE:g}"
            + (f"; {self._slots_checked} slots verified" if self._slots_checked else "")
        )

    # ------------------------------------------------------------------ the climb

    def climb(self, passes: Sequence[str]) -> list[RungResult]:
        directory = Path(tempfile.mkdtemp(prefix="kvv-model-"))
        try:
            write_model(self.model, directory / self.model.name, self._options.seed)
            results = self._alone(directory / self.model.name, passes)
            rest = [name for name in passes if name not in ("0", "1")]
            if rest and all(result.verdict == "pass" for result in results):
                results += self._with_connector(directory / self.model.name, rest)
            return results
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _alone(self, model: Path, passes: Sequence[str]) -> list[RungResult]:
        """Rungs 0 and 1, on one engine without a connector."""
        if self.reference.answers:
            return []
        engine = self._engine(model, None, prefix_cache=False)
        try:
            with Witness(engine) as witness:
                self.reference.run(engine, self._everybody)
            counts = RungCounts(requests=len(self._asks), steps=engine.steps)
            counts.tokens_compared = sum(len(self.reference.answers[ask.request_id].tokens) for ask in self._asks)
            results = [self._judged("0", RungResult("0", counts, witness.findings))]
            if "1" in passes:
                result = RungResult("1")
                self._aa = self._pass(engine, result, self._asks).distances
                results.append(self._judged("1", result))
            return results
        finally:
            engine.close()

    def _with_connector(self, model: Path, passes: Sequence[str]) -> list[RungResult]:
        """The other rungs, by two engines after each other; each with a cache of its own."""
        results = {name: RungResult(name) for name in passes}
        for prefix_cache in self._prefix_caches:
            self._climb_engine(model, prefix_cache, results)
            if any(result.problems for result in results.values()):
                break
        climbed = [result for result in results.values() if result.counts.requests or result.problems]
        if any(result.problems for result in climbed):
            return climbed  # what has not been climbed by both engines proves nothing, and hides the reason
        return [self._judged(result.rung, result) for result in climbed]

    def _climb_engine(self, model: Path, prefix_cache: bool, results: dict[str, RungResult]) -> None:
        several = len(set(self.model.windows)) > 1
        floor = floor_tokens(self._asks, self._options.chunk_tokens)
        cache = cache_for(self._options, self._cell.servers, self._cell.load_async, several, floor)
        engine, rung = None, next(iter(results))
        self._stored.clear()
        self._met = []
        self._alone_with_cache = not prefix_cache
        try:
            engine = self._engine(model, cache.transfer(), prefix_cache=prefix_cache)
            if self._spoil is not None:
                self._spoil(engine.connector, engine.worker_connector)
            for rung, result in results.items():
                if rung == "3b" and not cache.has_l2:
                    continue
                self._rung(engine, cache, result)
                if result.problems:
                    return
        except Exception as error:
            results[rung].problems.append(f"[crash] prefix cache {'on' if prefix_cache else 'off'}: {say(error)}")
        finally:
            if engine is not None:
                engine.close()
            results[rung].problems += cache.close()

    def _engine(self, model: Path, transfer: dict[str, Any] | None, *, prefix_cache: bool) -> TinyEngine:
        blocks = (len(self._asks) + 8) * POSITIONS // BLOCK_TOKENS * len({*self.model.windows})
        options = self._options.engine_config if transfer is not None else {}
        return TinyEngine(
            model, num_blocks=blocks, positions=POSITIONS, prefix_cache=prefix_cache, transfer=transfer, **options
        )

    # ------------------------------------------------------------------ one rung on one engine

    def _rung(self, engine: TinyEngine, cache: CacheKind, result: RungResult) -> None:
        before = cache.counters(engine)
        if result.rung == "4":
            self._waves(engine, cache, result)
        else:
            if result.rung in ("3b", "replay") and cache.has_l2:
                cache.drop_l1(engine)
            engine.forget_prefixes()
            met = self._met if result.rung == "replay" else ()
            self._cached(engine, cache, result, [*met, *self._asks])
        for name, value in cache.counters(engine).items():
            setattr(result.counts, name, getattr(result.counts, name) + value - before[name])

    def _waves(self, engine: TinyEngine, cache: CacheKind, result: RungResult) -> None:
        """Rung 4 with another pressure and other new prompts, until this engine's part of the floor is met."""
        wanted = self._floors["4"].preemptions
        begin = result.counts.preemptions
        for wave, strangers in enumerate(self._strangers):
            self._met += strangers
            if cache.has_l2:
                cache.drop_l1(engine)
            engine.forget_prefixes()
            with engine.hold_blocks(self._tight_blocks(engine, wave)):
                self._cached(engine, cache, result, [*strangers, *self._asks])
            if result.problems or (result.counts.preemptions - begin) * len(self._prefix_caches) >= wanted:
                return

    def _tight_blocks(self, engine: TinyEngine, wave: int) -> int:
        longest = max(len(ask.prompt) + ask.output_tokens for ask in self._asks)
        # A window does not help while a prompt is computed in one step: admission counts all its blocks in every group.
        blocks = len(engine.windows) * -(-longest // BLOCK_TOKENS)
        return 2 + blocks * TIGHTNESS_PERCENT[wave % len(TIGHTNESS_PERCENT)] // 100

    def _cached(self, engine: TinyEngine, cache: CacheKind, result: RungResult, asks: Sequence[Ask]) -> None:
        """A pass with the connector, from an empty prefix cache to rest."""
        watch = self._pass(engine, result, asks)
        engine.settle()
        left = cache.settle(engine)
        if left:
            result.problems.append(f"[leases] the cache did not come to rest: {left}")
        if self._alone_with_cache:
            for admission in watch.admissions:
                result.counts.tokens_loaded += admission.external_tokens
                result.counts.tokens_loadable += self._loadable(admission, cache.chunk_tokens)
        self._learn(asks, cache.chunk_tokens)
        self._with_cache = Distances(
            max(self._with_cache.kv, watch.distances.kv), max(self._with_cache.logprob, watch.distances.logprob)
        )

    def _loadable(self, admission: Admission, chunk_tokens: int) -> int:
        """What a cache that forgot nothing could have given: what it had when the pass began, or gave all the same."""
        sequence = self._sequence(admission.request_id)
        usable = (admission.tokens - 1) // chunk_tokens * chunk_tokens
        while usable and sequence[:usable] not in self._stored:
            usable -= chunk_tokens
        return max(usable - admission.local_tokens, admission.external_tokens)

    def _learn(self, asks: Sequence[Ask], chunk_tokens: int) -> None:
        for ask in asks:
            sequence = self._sequence(ask.request_id)
            computed = len(sequence) - 1  # the last token was only sampled
            self._stored.update(sequence[:end] for end in range(chunk_tokens, computed + 1, chunk_tokens))

    def _sequence(self, request_id: str) -> tuple[int, ...]:
        return self._prompts[request_id] + self.reference.answers[request_id].tokens

    def _judged(self, rung: str, result: RungResult) -> RungResult:
        result.problems = result.problems or self._floors[rung].unmet(result.counts)
        return result

    def _pass(self, engine: TinyEngine, result: RungResult, asks: Sequence[Ask]) -> Watch:
        """Serve everything at once, compare, count."""
        begin = engine.steps
        with Watch(engine, self.reference) as watch, Witness(engine) as witness:
            answers = engine.serve(asks, watch.look)
        counts = RungCounts(steps=engine.steps - begin)
        for ask in asks:
            counts.mismatches += watch.compare(ask, answers.get(ask.request_id))
            counts.tokens_compared += ask.output_tokens
        counts.requests = len(asks)
        counts.preemptions = watch.preemptions
        counts.loads_verified = watch.loads_verified
        counts.cells_byte_checked = watch.blocks_checked
        counts.resumes_with_load = sum(each.resumed and each.external_tokens > 0 for each in watch.admissions)
        result.counts.add(counts)
        result.problems += witness.findings + watch.findings
        self._slots_checked += witness.slots_checked
        return watch


def asks_of(workload: Workload) -> list[Ask]:
    """The workload's requests as a tiny model can take them: its vocabulary, prompts that are not too long."""
    return [
        Ask(
            spec.request_id,
            tuple(_token(token) for token in spec.prompt[:PROMPT_TOKENS_MAX]),
            OUTPUT_TOKENS_MIN + spec.output_tokens % OUTPUT_TOKENS_MIN,
        )
        for spec in workload.requests
    ]


def floor_tokens(asks: Sequence[Ask], chunk_tokens: int) -> int:
    """Of an admission: prompts have few chunks here, and those with the fewest are below it, all others not."""
    lengths = sorted({(len(ask.prompt) - 1) // chunk_tokens * chunk_tokens for ask in asks} - {0})
    return lengths[1] if len(lengths) > 1 else 0


def strangers_of(asks: Sequence[Ask], seed: int) -> list[list[Ask]]:
    """For each wave of rung 4, prompts that begin like one of the workload and go on in a way of their own."""
    draws = Draws(seed, "strangers")
    waves = []
    for wave in range(WAVES_MAX):
        chosen = [asks[draws.below(len(asks))] for _ in range(-(-len(asks) * STRANGERS_PERCENT // 100))]
        waves.append([_stranger(f"new{wave}.{index}", ask, draws) for index, ask in enumerate(chosen)])
    return waves


def _stranger(request_id: str, ask: Ask, draws: Draws) -> Ask:
    shared = draws.below(len(ask.prompt))
    own = tuple(_token(draws.below(VOCABULARY)) for _ in range(len(ask.prompt) - shared))
    return Ask(request_id, ask.prompt[:shared] + own, ask.output_tokens)


def _token(token: int) -> int:
    return _SPECIAL_TOKENS + token % (VOCABULARY - _SPECIAL_TOKENS)
