"""Other connectors of vLLM 0.32.0 on the real engine, as described in docs/findings/vllm-foreign-connectors.md.

A test that fails here means: mended upstream, adapt the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.ladder.targets.vllm.engine import Ask, TinyEngine
from kvcore.ladder.targets.vllm.models import tiny_model, write_model

pytestmark = [pytest.mark.ladder, pytest.mark.vllm]
TOKENS = tuple(2 + 7 * position % 250 for position in range(300))


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Any]:
    engines: list[TinyEngine] = []

    def build(step_tokens: int) -> TinyEngine:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
        }
        model = write_model(tiny_model("llama"), tmp_path / "model")
        engine = TinyEngine(model, num_blocks=64, positions=384, transfer=transfer, max_num_batched_tokens=step_tokens)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def test_the_example_connector_promises_one_prefix_and_loads_another(example: Any) -> None:
    engine = example(4096)
    engine.serve([Ask("short", TOKENS[:40], 2)])
    with pytest.raises(FileNotFoundError):
        engine.serve([Ask("long", TOKENS[:65], 2)])


def test_the_example_connector_fails_after_a_chunked_prefill(example: Any) -> None:
    engine = example(64)
    engine.serve([Ask("first", TOKENS[:200], 2)])
    with pytest.raises(RuntimeError, match="shape mismatch"):
        engine.serve([Ask("again", TOKENS[:200], 2)])
