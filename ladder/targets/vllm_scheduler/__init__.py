"""Target `vllm-scheduler`: vLLM's real `Scheduler` and `AsyncScheduler` with kvcore's connector, without a model.

    .venv-vllm/bin/python -m kvcore.ladder.targets.vllm_scheduler --seeds 500

Theory of operation
-------------------
One seed decides everything: a `Case` (engine settings, requests, aborts, load errors), and the order of every event,
since the cache runs on a simulated loop that is stepped from the engine's calls.

1. `engine` builds the real scheduler around a hand-made cache configuration; no weights, no tokenizer.
2. `fake_runner` stands for the model runner. It reads only what a runner gets, the scheduler's output in the shape of
   the V1 or of the V2 runner, calls the connector's worker half in the runner's order, and writes into each slot the
   rolling hash of the token prefix that ends there.
3. Before it writes, it checks *every* slot that the model would read, of every scheduled request, at every step. A
   block that was reused while a store still read it, a load into the wrong place, a stale table: wrong hashes all.
4. `drive` runs a case in two passes on one cache: cold, then hot with a new engine. At the end no block is held, no
   lease, no hold, no session is left, and all tokens are those of the plain recurrence.
5. `shrink` takes a failing case to fewer requests and fewer steps that fail in the same way.
6. `differential` steps our simulated scheduler beside the real one.

vLLM's blocks that a failed *synchronous* load left behind stay in its prefix cache (docs/findings); cases with such
errors run without prefix cache.
"""
