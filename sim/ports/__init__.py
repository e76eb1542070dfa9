"""The simulated ports: what the core needs from the outside, in virtual time and out of seeded streams.

Each passes the same conformance suite as its real counterpart. Every port belongs to the process (incarnation) that
made it or uses it; when that process has died its ports do nothing more: no callback, no work, no copy.
"""
