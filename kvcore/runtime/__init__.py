"""The real ports: threads, event descriptors, clocks and copies of the machine we run on.

Everything that may read a clock, start a thread or draw randomness lives below this package (and in the transports of
`kvcore.service`). The core gets these objects through its constructors and never imports them, except for the guard
that keeps it on its loop's thread (`confined`).
"""
