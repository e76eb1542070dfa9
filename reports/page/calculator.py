"""What the calculator in the page starts from: models, hosts and tiers with their numbers, and the first question.

The page computes with assets/cost.js, which has the closed forms of `kvcore.reports.cost` and `kvcore.reports.stream`;
the tests hold the two against each other. `link_share` marks host memory: its bandwidth is a share of the chosen GPU's
own link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvcore.reports.host import Host
from kvcore.reports.model import Model
from kvcore.reports.page.document import Widget
from kvcore.reports.parameters import Parameters
from kvcore.reports.stream import Requests
from kvcore.reports.tier import Tier, host_memory

BLOCKS = (16, 32, 64, 128, 256, 512)
GPUS = (1, 2, 4, 8, 16)
NOTE = (
    "The closed forms of the cost model, in your browser: nothing is sent anywhere. Idle: one request alone. Under "
    "load: requests arrive at random, GPU and link are queues whose waits grow as 1/(1 - busy). The serving simulation "
    "(kvcore report trace) replays real arrivals instead."
)
_NOT_SHOWN = ("source", "unsure")


def calculator(
    known: Parameters,
    model: Model,
    host: Host,
    tier: Tier,
    *,
    block_tokens: int,
    requests: Requests,
) -> Widget:
    """The widget; the named three are chosen at first. `host` has its number of GPUs."""
    first = {
        "model": model.name,
        "host": host.gpu,
        "gpus": host.gpus,
        "tier": tier.name,
        "block": block_tokens,
        "prefix": requests.prefix,
        "rest": requests.rest,
        "bandwidth": tier.bytes_per_s,
        "hits": requests.hits,
        "load": requests.load,
        "lookup": requests.lookup_s,
        "sharers": requests.sharers,
    }
    data: dict[str, Any] = {
        "models": [plain(each) for each in _with(known.models, model.name, model)],
        "hosts": [plain(each) for each in _with(known.hosts, host.gpu, host)],
        "tiers": [*host_tiers(host), *(plain(each) for each in _with(known.tiers, tier.name, tier))],
        "gpus": sorted({*GPUS, host.gpus}),
        "blocks": sorted({*BLOCKS, block_tokens}),
        "start": first,
    }
    names = [entry["name"] for entry in data["tiers"]]
    data["tiers"] = [entry for number, entry in enumerate(data["tiers"]) if entry["name"] not in names[:number]]
    return Widget("calculator", "The calculator", data, NOTE)


def _with(known: Mapping[str, Any], name: str, chosen: Any) -> Sequence[Any]:
    return list(known.values()) if name in known else [*known.values(), chosen]


def host_tiers(host: Host) -> list[dict[str, Any]]:
    """Host memory by DMA and by a copy kernel, each a share of whatever link the GPU has."""
    tiers = [host_memory(host), host_memory(host, kernel=True)]
    return [{**plain(tier), "link_share": tier.bytes_per_s / host.link_Bps} for tier in tiers]


def plain(value: Model | Host | Tier) -> dict[str, Any]:
    """Its fields, without what nobody computes with."""
    return {name: field for name, field in asdict(value).items() if name not in _NOT_SHOWN}
