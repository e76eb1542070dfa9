"""Faults: what goes wrong in a simulated run, as a plain list of events that says all of it.

`kind` says what a fault is, `catalogue` which ones there are, `scene` what they act on, and `injector` begins and ends
the events of one run. One module per plane holds its kinds: `schedule`, `clock`, `transport`, `device`, `l1`, `l2`,
`engine` and `process`. Whatever is random about a fault comes from a stream of its own (`Scene.stream`), so that
taking one event away changes no draw of another.
"""
