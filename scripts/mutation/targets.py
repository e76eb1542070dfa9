"""Which tests judge which pure module, quickest first: a mutant is killed by the first test that fails.

The list of modules is the import contract of the pure modules in pyproject.toml, so a new one cannot be forgotten: it
has no row here and `tests_of` says so. Only tests that run in a few seconds stand in a row. The slower ones at the end
of a row are paid for by survivors alone.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

CONTRACT = "the pure modules "

EVERYWHERE = ("unit/test_values.py",)
_L1 = ("unit/test_l1.py", "unit/test_eviction.py", "machines/test_l1_machine.py::TestL1Machine")
_TRACKER = ("unit/test_tracker.py", "machines/test_tracker_machine.py::TestTracker", "sim/connector")
_SERVICE = ("unit/test_limits.py", "unit/test_protocol.py", "sim/test_service.py", "sim/test_reaping.py")
_STORE = ("unit/test_file_backend.py", "unit/test_l2_open.py", "sim/test_storage.py")
_SHARED = (
    "stores/shared/test_ledger.py",
    "stores/shared/test_shared_adapter.py",
    "stores/shared/test_shared_machine.py",
)
_SLAB = (
    "stores/disk/test_slab_space.py",
    "stores/disk/test_slab_entry.py",
    "stores/disk/test_slab_jobs.py",
    "stores/disk/test_slab.py",
)
_GUARDS = ("unit/test_l2_guards.py", "unit/test_l2_codecs.py", "sim/reports/test_k_breaker.py")
_PAGES = ("unit/test_page_map.py", "unit/test_page_desk.py", "unit/test_worker_pages.py", "sim/test_page_copies.py")

TESTS: dict[str, tuple[str, ...]] = {
    "kvcore.admission": ("unit/test_admission.py", "reports/test_serving.py"),
    "kvcore.meters": ("unit/test_meters.py", "reports/test_serving.py"),
    "kvcore.objective": ("unit/test_objective.py", "reports/test_slo.py"),
    "kvcore.device.fingerprint": ("device/test_fingerprint.py",),
    "kvcore.device.formats": ("device/test_discover.py", "device/test_fingerprint.py"),
    "kvcore.device.planes": ("device/test_planes.py", "device/test_reference.py"),
    "kvcore.l2.activity": _SHARED,
    "kvcore.l2.breaker": _GUARDS,
    "kvcore.l2.indexed_tasks": _STORE,
    "kvcore.l2.ledger": _SHARED,
    "kvcore.l2.nixl_pool": ("unit/test_nixl_pool.py",),
    "kvcore.l2.objectstore_names": ("stores/objectstore/test_objectstore.py",),
    "kvcore.l2.shared_backend": _SHARED,
    "kvcore.l2.shared_tasks": _SHARED,
    "kvcore.l2.slab_entry": _SLAB,
    "kvcore.l2.slab_jobs": _SLAB,
    "kvcore.l2.slab_space": _SLAB,
    "kvcore.l2.tasks": (*_STORE, *_SHARED),
    "kvcore.l2.wrapped": _GUARDS,
    "kvcore.l2.wrapped_backend": _GUARDS,
    "kvcore.service.page_desk": _PAGES,
    "kvcore.service.page_map": _PAGES,
    "kvcore.service.page_shares": _PAGES,
    "kvcore.service.shapes": _SERVICE,
    "kvcore.service.worker_cells": _PAGES,
    "kvcore.allocator": ("unit/test_allocator.py", "unit/test_memory.py", "unit/test_l1.py"),
    "kvcore.answers": ("unit/test_leases.py", *_L1),
    "kvcore.bitmap": ("unit/test_bitmap.py", "unit/test_groups.py"),
    "kvcore.budget": ("unit/test_budget.py", "sim/test_storage.py"),
    "kvcore.config.values": ("unit/test_config.py", "unit/test_l2_open.py"),
    "kvcore.connectors.admission": ("sim/connector",),
    "kvcore.connectors.cells": _TRACKER,
    "kvcore.connectors.measured": ("unit/test_measured.py", "sim/connector/test_load_if_it_pays.py"),
    "kvcore.connectors.plan": _TRACKER,
    "kvcore.connectors.tracker": _TRACKER,
    "kvcore.connectors.views": _TRACKER,
    "kvcore.errors": ("unit/test_l1.py", "unit/test_groups.py"),
    "kvcore.eviction": ("unit/test_eviction.py", *_L1),
    "kvcore.groups": ("unit/test_groups.py", "machines/test_fold_brute_force.py", "unit/test_planner.py"),
    "kvcore.keys": ("unit/test_keys.py",),
    "kvcore.l1": _L1,
    "kvcore.l1_arguments": _L1,
    "kvcore.l1_audit": ("unit/test_l1_audit.py", *_L1),
    "kvcore.l1_room": _L1,
    "kvcore.l1_staging": _L1,
    "kvcore.l1_states": _L1,
    "kvcore.l1_statistics": ("unit/test_l1_audit.py", *_L1, "sim/test_storage.py"),
    "kvcore.l2.adapter": _STORE,
    "kvcore.l2.backend": _STORE,
    "kvcore.l2.envelope": ("unit/test_envelope.py", "unit/test_file_backend.py"),
    "kvcore.l2.index": ("unit/test_l2_index.py", *_STORE),
    "kvcore.l2.statistics": ("unit/test_l2_statistics.py", *_STORE),
    "kvcore.leases": ("unit/test_leases.py", "machines/test_leases_machine.py::TestLeases", "unit/test_l1.py"),
    "kvcore.lookup": ("unit/test_lookup.py", "machines/test_lookup_machine.py::TestLookup"),
    "kvcore.memory": ("unit/test_memory.py", "unit/test_l1.py"),
    "kvcore.placement": ("unit/test_placement.py",),
    "kvcore.planner": ("unit/test_planner.py", "sim/test_storage.py"),
    "kvcore.ports": (*_STORE, "sim/test_simulated_ports.py"),
    "kvcore.quota": ("unit/test_eviction.py", "unit/test_l1.py"),
    "kvcore.service.checks": _SERVICE,
    "kvcore.service.identity": _SERVICE,
    "kvcore.service.limits": _SERVICE,
    "kvcore.service.peers": _SERVICE,
    "kvcore.service.protocol": _SERVICE,
    "kvcore.service.region": _SERVICE,
    "kvcore.service.server_ports": _SERVICE,
    "kvcore.service.workers": ("unit/test_workers.py", "sim/test_reaping.py", "unit/test_protocol.py"),
    "kvcore.session": ("unit/test_session.py", "unit/test_protocol.py", "sim/test_service.py"),
}


def pure_modules(root: Path) -> list[str]:
    """The modules that the import contract calls pure."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["name"].startswith(CONTRACT))
    return list(contract["source_modules"])


def tests_of(module: str) -> tuple[str, ...]:
    """What pytest is asked to run for a mutant of `module`."""
    if module not in TESTS:
        raise SystemExit(f"{module} is pure and has no row in scripts/mutation/targets.py: say which tests judge it")
    return tuple(f"tests/{test}" for test in (*TESTS[module], *EVERYWHERE))


def named(wanted: tuple[str, ...], modules: list[str]) -> list[str]:
    """Those of `modules` that are wanted by name or lie in a wanted package; all of them when nothing is wanted."""
    for name in wanted:
        if not any(f"{module}.".startswith(f"{name}.") for module in modules):
            raise SystemExit(f"no pure module is called {name}, and none lies in it")
    return [module for module in modules if not wanted or f"{module}.".startswith(tuple(f"{name}." for name in wanted))]
