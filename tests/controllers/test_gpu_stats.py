"""The controllers' gauges: no values until the mirror is complete, then the ledger's numbers."""

from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import msgspec

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.ledger import Ledger
from atoll.cluster.machine_life import MachinePhase
from atoll.cluster.objects import Node
from atoll.kube.mirror import ClusterMirror
from atoll.service.metrics import Metrics
from controllers.gpu_stats import FRESH_SECONDS, GpuStatsPublisher
from tests.builders import make_allocation, make_lease, make_pod, make_report
from tests.fakes.clock import ManualClock
from tests.service.test_metrics import samples


@dataclass
class LateMirror:
    """A ledger that becomes complete when the test says so."""

    ledger: Ledger = field(default_factory=Ledger)
    complete: bool = False
    nodes: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(store={}))
    heartbeats: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(store={}))
    reports: dict[str, GpuNodeStatus] = field(default_factory=dict)

    def is_ready(self) -> bool:
        return self.complete


async def test_gauges_follow_the_ledger() -> None:
    """Absent while lists are incomplete; then GPUs by state; a state that is over disappears."""
    clock, mirror, metrics = ManualClock(), LateMirror(), Metrics("controllers")
    GpuStatsPublisher(metrics, cast("ClusterMirror", mirror), clock)
    mirror.ledger.put_report(make_report("n1", "t4-4"))
    mirror.ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    mirror.ledger.put_pod(make_pod("a", uid="a", node="n1", allocation=make_allocation("n1", 0)))
    metrics.refresh()
    assert gpus(metrics) == {}

    mirror.complete = True
    metrics.refresh()
    assert gpus(metrics) == {"bound": 1.0, "free": 3.0}
    mirror.ledger.drop_pod("a")
    metrics.refresh()
    assert gpus(metrics) == {"bound": 1.0, "free": 3.0}, "asked again at once: the figures of a moment ago"
    await clock.advance(FRESH_SECONDS)
    metrics.refresh()
    assert gpus(metrics) == {"free": 4.0}


def test_leases_are_counted() -> None:
    """All that can be read, those of them that are in doubt, and those that cannot be read."""
    mirror, metrics = LateMirror(complete=True), Metrics("controllers")
    GpuStatsPublisher(metrics, cast("ClusterMirror", mirror), ManualClock())
    for number, notes in enumerate(({}, {names.LEASE_IN_DOUBT: "why"}, {names.LEASE_DEVICE_ID: "odd"})):
        mirror.ledger.put_lease(make_lease("n1", number, annotations=notes))

    metrics.refresh()

    told = samples(metrics)

    counts = [told[f"atoll_controllers_leases{which}",] for which in ("", "_in_doubt", "_unreadable")]
    assert counts == [2.0, 1.0, 1.0]


def test_what_fits_and_how_long_somebody_waits_is_told() -> None:
    """The largest request that a free node takes, by model and policy; the age of the pod that has waited longest."""
    clock, mirror, metrics = ManualClock(), LateMirror(complete=True), Metrics("controllers")
    GpuStatsPublisher(metrics, cast("ClusterMirror", mirror), clock)
    mirror.ledger.put_report(make_report("n1", "t4-4"))
    mirror.ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    mirror.ledger.put_pod(make_pod("a", uid="a", node="n1", allocation=make_allocation("n1", 0)))
    created = (clock.now() - timedelta(seconds=90)).strftime("%Y-%m-%dT%H:%M:%SZ")
    waits = make_pod("waits", uid="waits", gpus=8)
    metadata = msgspec.structs.replace(waits.metadata, creation_timestamp=created)
    mirror.ledger.put_pod(msgspec.structs.replace(waits, metadata=metadata))

    metrics.refresh()

    told = samples(metrics)
    asks = {value for (name, *_), value in told.items() if name == "atoll_controllers_largest_ask_gpus"}
    assert asks == {3.0}
    assert 90 <= told["atoll_controllers_oldest_waiting_pod_seconds",] < 92


def test_machines_are_counted_by_phase() -> None:
    """By name of everything that is kept about a machine; a phase without machines shows 0."""
    mirror, metrics = LateMirror(complete=True), Metrics("controllers")
    GpuStatsPublisher(metrics, cast("ClusterMirror", mirror), ManualClock())
    mirror.reports["gone"] = make_report("gone", "t4-4")
    mirror.reports["refused"] = make_report("refused", "t4-4")
    mirror.nodes.store["", "refused"] = msgspec.convert(
        {"metadata": {"name": "refused", "uid": "uid-of-refused"}}, Node
    )
    mirror.ledger.drop_report("refused", why=names.REJECT_UNKNOWN_POD)
    mirror.nodes.store["", "new"] = msgspec.convert({"metadata": {"name": "new", "uid": "u"}}, Node)
    mirror.heartbeats.store[names.HEARTBEAT_NAMESPACE, "new"] = None
    mirror.ledger.put_lease(make_lease("lease-only", 0))

    metrics.refresh()

    told = {key[-1]: value for key, value in samples(metrics).items() if key[0] == "atoll_controllers_machines"}
    counts = {phase: count for phase, count in told.items() if count}
    assert counts == {"deleted": 1, "joining": 1, "refused": 1, "unknown": 1}
    assert told.keys() == set(MachinePhase)


def gpus(metrics: Metrics) -> dict[str, float]:
    """Return the told GPUs by state."""
    return {key[-1]: value for key, value in samples(metrics).items() if key[0] == "atoll_controllers_gpus"}
