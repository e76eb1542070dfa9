"""What the pure core hands out are values: nobody can change one after it was made, nor hang anything on it.

A plan, a verdict or a message that two parts of the program share must mean the same to both. What may change is named
here, and is the running state of one owner.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

RUNNING_STATE = {
    "kvcore.meters.ShareMeter",
    "kvcore.connectors.measured._Step",
    "kvcore.connectors.tracker.RequestTracker",
    "kvcore.l2.activity.Activity",
    "kvcore.l2.index.Entry",
    "kvcore.l2.ledger.Record",
    "kvcore.l2.nixl_pool.PoolRecord",
    "kvcore.l2.nixl_pool._Holds",
    "kvcore.l2.statistics.L2Counts",
    "kvcore.l2.tasks.BitTask",
    "kvcore.l2.tasks.StoreTask",
    "kvcore.service.page_desk._Cell",
    "kvcore.service.page_desk._Transfer",
    "kvcore.service.workers._OpenRead",
}


def pure_modules() -> list[str]:
    config = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    (pure,) = (contract for contract in contracts if contract["name"].startswith("the pure"))
    return list(pure["source_modules"])


def classes() -> Iterator[type]:
    """Every dataclass and message that a pure module defines."""
    for name in pure_modules():
        for _, found in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            if found.__module__ == name and (dataclasses.is_dataclass(found) or issubclass(found, msgspec.Struct)):
                yield found


def name_of(found: type) -> str:
    return f"{found.__module__}.{found.__qualname__}"


CLASSES = sorted(set(classes()), key=name_of)
MESSAGES = [found for found in CLASSES if found.__module__ == "kvcore.service.protocol"]


@pytest.mark.parametrize("found", CLASSES, ids=name_of)
def test_a_value_cannot_be_changed_and_running_state_can(found: Any) -> None:
    is_struct = issubclass(found, msgspec.Struct)
    frozen = found.__struct_config__.frozen if is_struct else found.__dataclass_params__.frozen
    assert frozen is (name_of(found) not in RUNNING_STATE)


@pytest.mark.parametrize("found", CLASSES, ids=name_of)
def test_nothing_can_be_hung_on_an_object(found: type) -> None:
    assert found.__dictoffset__ == 0, "a mistyped field name would make a new field"


@pytest.mark.parametrize("found", MESSAGES, ids=name_of)
def test_a_message_refuses_fields_it_does_not_have(found: Any) -> None:
    """A field that one side believes to matter must not be dropped silently by the other."""
    assert found.__struct_config__.forbid_unknown_fields


def test_every_running_state_exists() -> None:
    assert {name_of(found) for found in CLASSES} > RUNNING_STATE
