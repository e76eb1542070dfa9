"""Mutants of the prefix rule and of the hit contract: which lengths are servable, what is promised (groups C, D, I)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug, hard

_RULE = "kvcore.groups:_Rule"
_LAYOUT = "kvcore.groups:CacheLayout"
_TRACKER = "kvcore.connectors.tracker:RequestTracker"
_SCHEDULER = "kvcore.connectors.scheduler:SchedulerConnector"

MUTANTS = (
    bug(
        "hit_counted_as_ones_in_the_matrix",
        "D",
        "presence is counted although a hole makes what follows useless (R13)",
        "prefix crash bytes",
        Edit(f"{_LAYOUT}.fold", "lengths &= served", "lengths &= ones(present.bit_count() + 1)"),
    ),
    bug(
        "full_hit_on_a_recurrent_row_kept",
        "C",
        "the snapshot already holds the token that is to be computed again (R07, R13)",
        "prefix crash bytes",
        Edit(f"{_RULE}.serves_full_hit", "return False", "return bool(present >> (chunks - 1) & 1)"),
        Edit(
            f"{_LAYOUT}.unfold",
            """\
    if full_hit and self._recurrent:
        raise CallerError(
            f"{length} chunks are the whole prompt, and a recurrent state already contains its last token"
        )
""",
            "",
        ),
        Edit(
            f"{_LAYOUT}.unfold",
            "[rule.needed(length, full_hit) & beyond",
            "[rule.needed(length, full_hit and rule.kind is not GroupKind.RECURRENT) & beyond",
        ),
    ),
    bug(
        "full_hit_promises_every_token",
        "C",
        "a full hit leaves nothing to compute, so there are no logits (R07)",
        "prefix crash",
        Edit(f"{_LAYOUT}.usable_tokens", "prompt_tokens - 1 if", "prompt_tokens if"),
    ),
    bug(
        "hit_shorter_than_the_local_prefix_is_negative",
        "C",
        "what the engine has is taken off a hit that is shorter (R09)",
        "prefix crash",
        Edit(f"{_TRACKER}.promise", "max(0, usable - local_tokens)", "usable - local_tokens"),
    ),
    bug(
        "last_sampled_token_stored",
        "C",
        "the request's length is taken for what was computed (R11)",
        "bytes",
        Edit(
            f"{_SCHEDULER}.finished",
            "    if any(blocks):\n",
            "    tracker.tokens, tracker.computed_tokens = request.tokens, len(request.tokens)\n    if any(blocks):\n",
        ),
    ),
    bug(
        "token_of_this_step_counts_as_computed",
        "C",
        "the token that the step samples is counted, though its slot is written by the next step only (R11)",
        "blocks bytes",
        Edit(
            f"{_TRACKER}.schedule",
            "min(computed + scheduled, len(tokens))",
            "min(computed + scheduled + 1, len(tokens) + 1)",
        ),
        Edit(
            f"{_TRACKER}.take_stores",
            "    due = self.chunks_due\n",
            "    due = min(self.chunks_due, len(self.hashes))\n",
        ),
    ),
    bug(
        "window_loads_a_chunk_that_was_not_looked_up",
        "D",
        "the load wants one chunk more of a window group than the lookup has asked for (R14)",
        "crash prefix server bytes",
        Edit(
            f"{_RULE}.needed",
            "return span(max(0, length - self.width), length)",
            "return span(max(0, length - self.width - (self.kind is GroupKind.WINDOW)), length)",
        ),
    ),
    bug(
        "window_loads_a_chunk_less_than_was_looked_up",
        "D",
        "the load leaves out the oldest chunk that the lookup relied on (R14)",
        "bytes output prefix",
        Edit(
            f"{_RULE}.needed",
            "return span(max(0, length - self.width), length)",
            "return span(max(0, length - max(1, self.width - 1)), length)",
        ),
    ),
    bug(
        "recurrent_state_is_not_asked_for",
        "D",
        "a hit is announced where the recurrent part is missing (R13)",
        "prefix crash bytes",
        Edit("kvcore.groups:_rule_of", "_Rule(GroupKind.RECURRENT, 1, 0, 0)", "_Rule(GroupKind.RECURRENT, 0, 0, 0)"),
    ),
    bug(
        "ranks_above_0_are_not_asked",
        "I",
        "the hit is what rank 0 holds; the others may have lost it (R42)",
        "prefix crash bytes",
        Edit(
            f"{_LAYOUT}._cache_rules",
            "members.setdefault(by_group[row.group], []).append(row.index)",
            "members.setdefault(by_group[row.group], []).extend([row.index] if row.rank == 0 else [])",
        ),
    ),
    bug(
        "minimum_over_servers",
        "I",
        "the least of the servers' best lengths, which a window row may not serve (R42)",
        "prefix bytes crash",
        Edit(
            "kvcore.lookup:LookupState._conclude",
            "self._fix(LookupOutcome(lengths))",
            "self._fix(LookupOutcome(lengths | 1 << min(part.lengths.bit_length() - 1 for part in self._parts)))",
        ),
    ),
    hard(
        "hurried_lookup_promises_what_is_still_coming",
        "C",
        "who would not wait is promised also what is still being loaded, and nothing holds it for him (R08, R24)",
        "prefix lost",
        Edit(
            "kvcore.prefetch:PrefetchController.hurry",
            """        self._cut_short(job, "prefetch.hurry")\n""",
            """        coming = union(job.held, job.cells.rows(job.joined))
        self._cut_short(job, "prefetch.hurry")
        job.lengths |= job.demand.fold(coming)
""",
        ),
    ),
)
