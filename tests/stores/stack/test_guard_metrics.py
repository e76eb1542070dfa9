"""What a server's scrape and status say of the guards around a store that was lost. Real server, real store."""

from __future__ import annotations

import asyncio
import dataclasses
import json

from kvcore.keys import ObjectKey
from kvcore.operations import metrics
from kvcore.service.host import ServerHost
from kvcore.service.serve_config import L1Config, ServeConfig

HANG_S = 60.0
FAILURES = 3
PATIENT = "timeout_s=20&connect_timeout_s=20&deadline_ms=60000"  # nothing here is to be late
KEYS = [ObjectKey(b"k" * 32, "m", 0)]


async def looked_up(adapter):
    """One lookup, taken when its notice has come. None: it was refused at once."""
    rings = asyncio.Event()
    adapter.lookup_notice.subscribe(rings.set)
    try:
        task = adapter.submit_lookup_and_lock(KEYS)
    except Exception:
        return None
    async with asyncio.timeout(HANG_S):
        while (bits := adapter.take_lookup(task)) is None:
            await rings.wait()
            rings.clear()
    return bits


def test_a_lost_store_shows_in_the_metrics_and_in_the_status(valkey, tmp_path):
    server = valkey()
    config = ServeConfig(
        listen=f"ipc://{tmp_path}/s.sock",
        l2=(
            f"redis://127.0.0.1:{server.port}/0?name=tier&breaker_failures={FAILURES}&breaker_open_s=3600&retries=1&{PATIENT}",
        ),
        l1=L1Config(capacity_bytes=1 << 20),
    )

    async def life():
        host = ServerHost(config)
        await host.start()
        [adapter] = host._adapters
        async with asyncio.timeout(HANG_S):
            while not adapter.there or adapter.work_inflight:  # a failed first scan would count for the breaker
                await asyncio.sleep(0)
        before = metrics.exposition(host.statistics()).decode()
        server.kill()
        bits = [await looked_up(adapter) for _ in range(FAILURES + 2)]
        state = host.statistics()
        await host.close()
        return before, bits, state

    before, bits, state = asyncio.run(life())
    assert 'kvcore_l2_breaker_state{state="closed",store="tier"} 1.0' in before
    assert bits == [0] * FAILURES + [None] * 2
    after = metrics.exposition(state).decode()
    for line in (
        'kvcore_l2_breaker_state{state="open",store="tier"} 1.0',
        'kvcore_l2_breaker_state{state="closed",store="tier"} 0.0',
        'kvcore_l2_breaker_opened_total{store="tier"} 1.0',
        'kvcore_l2_breaker_refused_total{store="tier"} 2.0',
        'kvcore_l2_breaker_probes_total{store="tier"} 0.0',
        f'kvcore_l2_retried_total{{store="tier"}} {FAILURES}.0',
        'kvcore_l2_deadlines_work_total{store="tier"} 0.0',
    ):
        assert line in after
    assert json.loads(json.dumps(dataclasses.asdict(state)))["guards"]["tier"]["breaker_state"] == "open"
