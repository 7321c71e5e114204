"""etcd is restored from a backup: every memory that is ordered by versions begins anew, and none is forgotten here.

Whatever a leader remembers belongs to its term and is built anew as a whole. What lives as long as the process is
listed, attribute by attribute; a new one must be put into the right row.
"""

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import Gauge

from atoll.cluster.foreign import ForeignUseCache
from atoll.cluster.holds import DeviceHolds
from atoll.cluster.ledger import Ledger
from atoll.cluster.reports import NodeReports
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind
from atoll.service.clock import SystemClock
from atoll.service.metrics import Metrics
from controllers import runner
from controllers.leases.terminations import PodTerminations
from controllers.metrics import controller_metrics
from controllers.runner import ControllerManager, build_manager
from controllers.settings import ControllersSettings
from tests.builders import make_pod
from tests.fakes.clock import ManualClock
from tests.service.test_metrics import samples

BEGINS_ANEW = {
    PodTerminations: {"_gone", "_last", "_seen_live", "_open", "_nodes"},
    DeviceHolds: {"lost", "_lost_devices"},
    ForeignUseCache: {"_former"},
    ClusterMirror: {"_audit"},
    ControllerManager: {"loops", "restored"},
}
"""Ordered by versions, or by the numbers of reports."""
LISTED_AGAIN = {
    DeviceHolds: {
        "leases", "unreadable_leases", "pods", "malformed_pods", "_allocations", "_lease_names", "_left", "_by_id",
        "_by_uuid", "_foreign",
    },
    ForeignUseCache: {"_uses", "_unread"},
    NodeReports: {"nodes", "uncounted", "_heard", "next_silent_seconds"},
    Ledger: {"_holds", "_reports", "leases", "unreadable_leases", "pods", "malformed_pods", "nodes", "uncounted"},
    ClusterMirror: {
        "ledger", "reports", "pods", "nodes", "leases", "heartbeats", "claims", "node_statuses", "reservations",
        "gangs", "topologies", "volumes", "volume_claims", "storage_classes", "csi_nodes", "csi_drivers",
        "capacities", "namespaces",
    },
    ControllerManager: {"mirror", "terminations"},
}  # fmt: skip
"""Copies of objects: the new list changes them, and what the ledger holds for them."""
KNOWS_NO_VERSION = {
    PodTerminations: {"_mirror"},
    DeviceHolds: {"_assumed", "_history", "_changed"},
    Ledger: {"_index", "fleet", "sizes", "_derived"},
    ClusterMirror: {"_client", "_clock", "_listeners", "_rewind_listeners", "restores_count"},
    ControllerManager: {"settings", "clock", "client", "metrics", "identity", "elector"},
}
"""An elector that meets another version of its Lease reads it again."""


def long_lived() -> list[object]:
    """Return the objects of a process that remember something, as they are at its start."""
    mirror = ClusterMirror(cast("Any", None), ManualClock(), with_gangs=True)
    holds = mirror.ledger._holds
    return [mirror, mirror.ledger, holds, holds._foreign, mirror.ledger._reports, PodTerminations(mirror)]


async def test_every_memory_says_what_a_restore_means_for_it() -> None:
    """Each attribute stands in one row; a row names none that is not there."""
    found = {type(one): set(vars(one)) for one in long_lived()}
    found[ControllerManager] = set(ControllerManager.__dataclass_fields__)

    for owner, attributes in found.items():
        rows = [table.get(owner, set()) for table in (BEGINS_ANEW, LISTED_AGAIN, KNOWS_NO_VERSION)]
        assert sorted(attribute for row in rows for attribute in row) == sorted(attributes), owner.__name__


async def test_what_begins_anew_is_as_at_the_start() -> None:
    """The mirror tells everybody in one call."""
    used, fresh = long_lived(), long_lived()
    for one in used:
        for attribute in BEGINS_ANEW.get(type(one), set()) - {"_audit", "lost"}:
            getattr(one, attribute)["key"] = {}
    mirror = cast("ClusterMirror", used[0])
    lost = mirror.ledger.lost

    mirror._rewind()

    assert mirror.ledger.lost is not lost
    for one, other in zip(used, fresh, strict=True):
        for attribute in BEGINS_ANEW.get(type(one), set()) - {"_audit", "lost"}:
            assert getattr(one, attribute) == getattr(other, attribute), attribute


async def test_the_process_hears_of_every_change_and_of_a_restore() -> None:
    """What a pod's deletion showed is remembered until a restore, of which the leader is told."""
    client = cast("Any", SimpleNamespace())
    process = build_manager(ControllersSettings(), SystemClock(), client, Metrics("controllers"))
    pod = make_pod("p", node="n1")
    for listener in process.mirror._listeners:
        listener(WatchedKind.POD, Change(ChangeKind.DELETED, pod, pod))
    assert process.terminations.gone("uid-of-p") is not None
    assert not process.restored.is_set()

    process.mirror._rewind()

    assert process.restored.is_set()
    assert process.terminations.gone("uid-of-p") is None


async def test_a_leader_builds_everything_of_its_term_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on leading, with reconcilers that remember nothing; their loops have ended before. No gauge that
    reconcilers set keeps its value, neither for the next term nor in a process that leads no more."""
    running, terms = set[int](), list[int]()
    page, found = Metrics("controllers"), list[dict[tuple[str, ...], float]]()
    metrics = controller_metrics(page)
    gauges = {name: one for name in metrics.__slots__ if isinstance(one := getattr(metrics, name), Gauge)}

    async def supervise(**work: Any) -> None:
        for coroutine in work.values():
            coroutine.close()
        number = len(terms)
        running.add(number)
        terms.append(len(running))
        found.append(gauges_of(page, gauges))
        for name, gauge in gauges.items():
            (gauge.labels("a loop") if name == "queue_keys" else gauge).set(7)
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(number)

    async def synced() -> None:
        return None

    monkeypatch.setattr(runner, "supervise", supervise)
    monkeypatch.setattr(runner, "build_loops", lambda *_: ())
    monkeypatch.setattr(runner, "freeze_garbage", lambda: None)
    restored = asyncio.Event()
    process = SimpleNamespace(
        settings=ControllersSettings(keep_certificates=False),
        clock=ManualClock(),
        client=None,
        identity="a",
        mirror=SimpleNamespace(synced=synced),
        terminations=None,
        restored=restored,
        context=lambda _events: None,
        metrics=metrics,
    )
    leading = asyncio.create_task(runner._lead(cast("Any", process)))
    async with asyncio.timeout(20):
        while len(terms) < 3:
            await asyncio.sleep(0)
            if running:
                restored.set()
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)

    assert terms == [1, 1, 1]
    nothing = {("atoll_controllers_" + name,): 0.0 for name in ("departures_in_doubt", "foreign_gpus", "stranded_pods")}
    assert [*found, gauges_of(page, gauges)] == [nothing] * 4


def gauges_of(page: Metrics, wanted: Collection[str]) -> dict[tuple[str, ...], float]:
    """Return the samples of these gauges by name and labels."""
    return {key: value for key, value in samples(page).items() if key[0].removeprefix("atoll_controllers_") in wanted}
