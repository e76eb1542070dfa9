"""The parts of `scripts/bench_peers.py`."""
