"""Mutants of waiting: deadlines, retries, budgets, and messages that come late, twice or never (group H)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug, hard, safe

_PREFETCH = "kvcore.prefetch:PrefetchController"
_LOADS = "kvcore.loads:LoadTable"
_CONNECTION = "kvcore.service.connection:Connection"
_CLIENT = "kvcore.service.scheduler_client:SchedulerClient"
_LOOKUP = "kvcore.lookup:LookupState"

MUTANTS = (
    hard(
        "lookup_without_a_deadline",
        "H",
        "a lookup waits for every server, however long one of them is silent (R35)",
        "liveness",
        Edit(f"{_LOOKUP}.tick", "if now_ns >= self._deadline_ns:", "if False:"),
        Edit(
            f"{_LOOKUP}.next_due_ns",
            "return min(self._deadline_ns, *dues) if dues else self._deadline_ns",
            "return min(dues, default=None)",
        ),
        planes=("transport",),
    ),
    safe(
        "server_without_a_lookup_deadline",
        "H",
        "the server lets a lookup wait for a hung store (R35)",
        "the client's own deadline: it gives the lookup up and releases it",
        Edit(
            f"{_PREFETCH}._begin",
            "    job.timer = DeadlineTimer(self._loop, self._clock, job.deadline_ns, lambda: self._deadline(job))\n",
            "",
        ),
    ),
    bug(
        "budget_keeps_the_worst_case",
        "H",
        "a lookup never gives back what its plan does not need; later ones wait for bytes that nobody uses (R36)",
        "liveness hits crash plan",
        Edit(f"{_PREFETCH}._plan", "        self._line.shrink(grant, made.load_bytes)\n", ""),
    ),
    bug(
        "failed_loads_keep_their_budget",
        "H",
        "bytes of loads that failed are never given back, until a limit blocks all (R24, R36)",
        "liveness hits plan",
        Edit(
            f"{_LOADS}._fail",
            "        self._give_back(load.grant, load.size)\n",
            "",
        ),
    ),
    bug(
        "lost_release_is_not_sent_again",
        "H",
        "a release that gets lost is not repeated, and the leases stay until the session dies (R24, R33)",
        "leases liveness memory",
        Edit(
            "kvcore.service.debts:Debts._paid",
            "if code not in _LOST | UNREAD:",
            "if True:",
        ),
        planes=("transport",),
    ),
    safe(
        "requests_are_executed_twice",
        "H",
        "a message that the network delivers twice is carried out twice (R39)",
        "the names: tags, tickets and epochs are used once, so a second execution finds nothing to do",
        Edit("kvcore.service.peers:ConnectionTable.admit", "return request_id > last_id", "return True"),
    ),
    safe(
        "debts_are_void_after_a_restart",
        "G",
        "what is sent again to a restarted server is owed nothing there, and is never released (R31, R33)",
        "the session, which dies of idleness in the new life as well",
        Edit("kvcore.service.debts:Debts.keep", "if subject_of(debt.message) not in subjects:", "if True:"),
    ),
    safe(
        "old_life_of_the_server_is_not_told_apart",
        "G",
        "a request that was meant for the life before is looked at by the next one (R32)",
        "the table of connections: the new life knows none that has not shaken hands with it",
        Edit(
            "kvcore.service.server:CacheServer._execute",
            "if header.incarnation != self._incarnation:",
            "if False:",
        ),
    ),
    bug(
        "worker_does_not_register_again",
        "G",
        "after a restart the server does not know the worker, and is never told (R31, R33)",
        "liveness hits lost",
        Edit(
            f"{_CONNECTION}._greeted",
            "    if met:\n        for callback",
            '    if met and self._counts["incarnations"] == 1:\n        for callback',
        ),
        Edit(
            "kvcore.service.worker_client:WorkerClient._lost",
            "if is_unknown_worker(reply):",
            "if False:",
        ),
        Edit(
            "kvcore.service.introduction:ask_as_known",
            "        register(connection)\n",
            "",
        ),
        planes=("process",),
    ),
    bug(
        "second_reader_of_a_load_gets_no_lease",
        "L",
        "of those who wait for one load only the first is protected; the others are told that it is theirs (R58, R65)",
        "prefix leases",
        Edit(f"{_LOADS}._publish_and_lease", "    for reader in others:\n", "    for reader in others[:0]:\n"),
    ),
    bug(
        "deadline_does_not_leave_the_loads",
        "H",
        "a lookup that was answered at its deadline stays a reader of its loads, and is leased them (R37)",
        "crash server leases",
        Edit(f"{_PREFETCH}._detach", "    for key in list(job.joined):\n        self._leave(job, key)\n", ""),
    ),
    bug(
        "store_that_timed_out_is_not_aborted",
        "H",
        "no answer in time is taken for no; what the server has reserved meanwhile is never given up (R24, R33)",
        "leases memory liveness",
        Edit("kvcore.service.worker_client:_may_have_been_granted", "(ErrorCode.TIMEOUT, ", "("),
    ),
    bug(
        "one_load_per_reader",
        "L",
        "every lookup loads for itself what another one is loading already (R58, R63)",
        "plan crash server",
        Edit(f"{_PREFETCH}._observe", "    if self.loads.in_flight:\n", "    if False:\n"),
    ),
    hard(
        "close_waits_for_a_hung_store",
        "H",
        "closing waits until the store has answered, which a hung one never does (R41)",
        "liveness crash",
        Edit("kvcore.storage:Storage.close", "await self.drain(self.config.close_deadline_ns)", "await self.drain()"),
    ),
)
