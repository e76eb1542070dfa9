"""The swarm: seeds become cases, cases become outcomes, and a swarm is many of them.

    seed --draw_case--> Case --run_case--> Outcome

A `Case` says everything in plain values; nothing is decided by chance while it runs, except what the streams of its
own seed decide (delays, ties). So a case can be written down, cut down and run again on another day.
"""
