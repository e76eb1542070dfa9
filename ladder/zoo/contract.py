"""Mutants of what happens when a load fails: what is taken back, what is stored, what is asked again (group E)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug, hard

_TRACKER = "kvcore.connectors.tracker:RequestTracker"
_SCHEDULER = "kvcore.connectors.scheduler:SchedulerConnector"

MUTANTS = (
    bug(
        "stores_before_the_load_is_confirmed",
        "E",
        "what this step computes is stored though its load may have failed (R16)",
        "bytes crash",
        Edit(f"{_TRACKER}.chunks_due", " if self.confirmed else 0", ""),
    ),
    hard(
        "sharer_of_a_loading_block_is_trusted",
        "E",
        "a second request found the block in the engine's own cache while it was still being filled (R16)",
        "bytes",
        Edit(f"{_SCHEDULER}._take_step", "if loading and request_id in self._admitted:", "if False:"),
        note="no seed meets a failed load of blocks that two requests of one step share: "
        "tests/sim/connector/test_connector_stores.py does",
    ),
    hard(
        "loads_are_tried_for_ever",
        "E",
        "a request whose loads fail asks again each time, and is never computed without the cache (R17)",
        "liveness",
        Edit(f"{_SCHEDULER}._worth_asking", "tracker.load_failures >= self._config.load_failures_max or ", ""),
    ),
    bug(
        "promise_counted_at_every_question",
        "L",
        "hits are counted when they are announced, also for admissions that fail (R60)",
        "counters",
        Edit(
            f"{_SCHEDULER}.matched_tokens",
            "    tokens = tracker.promise(local_tokens)\n",
            '    tokens = tracker.promise(local_tokens)\n    self._counts["tokens_hit"] += tokens\n',
        ),
    ),
)
