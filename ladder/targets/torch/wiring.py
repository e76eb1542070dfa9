"""From an engine's setup to its namespace and its servers: what scheduler and workers must do in the same way."""

from __future__ import annotations

from kvcore.connectors.registration import layout_name
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout
from kvcore.keys import Namespace
from kvcore.ladder.targets.torch.messages import EngineSetup
from kvcore.ladder.targets.torch.model import TorchModel
from kvcore.ladder.targets.torch.pages import promised_fingerprints
from kvcore.placement import PlacementMode
from kvcore.service.remote import RemoteConfig


def namespace_of(setup: EngineSetup, layout: CacheLayout, model: TorchModel) -> Namespace:
    return Namespace(
        f"torch-{setup.model}",
        model_revision=str(setup.seed),
        kv_dtype="float32",
        layout=layout_name(layout, promised_fingerprints(layout, model)),
        chunk_tokens=setup.chunk_tokens,
    )


def remote_config(setup: EngineSetup) -> RemoteConfig:
    return RemoteConfig(setup.servers, placement_mode(setup.placement), transfer=setup.transfer)


def placement_mode(text: str) -> PlacementMode:
    if text == "rank":
        return "rank"
    if text == "chunk":
        return "chunk"
    raise ConfigError(f"{text!r} is no placement")
