"""Mutants of what happens when a load fails or is refused: what is taken back, stored, asked again (groups E, F)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug, hard, safe

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
        "refused_prefix_stays_under_lease",
        "F",
        "what the admission does not promise can be neither loaded nor evicted until the request ends (R24, R33)",
        "leases",
        Edit(f"{_SCHEDULER}._choose", "    else:\n        self._release(tracker)\n", ""),
        Edit(
            f"{_SCHEDULER}.after_alloc",
            "        self._release(tracker)\n        tracker.decline()",
            "        if tracker.chosen is None:\n            self._release(tracker)\n        tracker.decline()",
        ),
    ),
    safe(
        "refused_prefix_is_released_at_the_admission",
        "F",
        "what the admission does not promise is held until the request gets its blocks (R24)",
        "the engine's allocation, at which a request that loads nothing gives everything back",
        Edit(f"{_SCHEDULER}._choose", "    else:\n        self._release(tracker)\n", ""),
    ),
    bug(
        "refused_prefix_is_promised_all_the_same",
        "C",
        "the promise is made from what was found and not from what was decided, whose leases are gone (R07, R24)",
        "prefix crash bytes",
        Edit(f"{_TRACKER}.length", " if self.chosen is None else self.chosen", ""),
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
