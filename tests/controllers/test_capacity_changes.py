"""Changes that trigger a new check of waiting pods and of topologies."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from atoll.api.reservations import GpuReservation
from atoll.api.topologies import Topology
from atoll.cluster.gangs.membership import GangKey
from atoll.cluster.gangs.queue import PAUSE_SECONDS, AdmissionAttempts
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node, PodCondition, PodStatus
from atoll.cluster.requests import Verdict
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind
from controllers.capacity_changes import CapacityChanges
from controllers.context import Context
from controllers.foreign import ForeignReconciler
from controllers.gangs.admission import AdmissionReconciler
from controllers.gangs.cache import GangCache, GangRules
from controllers.leases.repair import MissingLeaseRepair
from controllers.loops import Reconciler
from controllers.requeue import SETTLE_SECONDS, RequeueReconciler
from controllers.topologies import TopologyReconciler
from tests.builders import make_allocation, make_lease, make_pod, make_report
from tests.cluster.gangs.builders import make_gang
from tests.controllers.gang_harness import TOPOLOGIES, cluster, settled, term
from tests.fakes.clock import ManualClock


def node(*, ready: str = "True", reason: str = "", labels: dict[str, str] | None = None, **spec: Any) -> Node:
    """Return a Node of this readiness."""
    status = {"conditions": [{"type": "Ready", "status": ready, "reason": reason}]}
    metadata = {"name": "n1", "resourceVersion": "7", "labels": labels or {}}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, Node)


def empty_mirror() -> ClusterMirror:
    """Return a mirror of nothing."""
    reflectors = {"any": SimpleNamespace(resource_version="1")}
    return cast("ClusterMirror", SimpleNamespace(ledger=Ledger(), reflectors=reflectors))


RACK = {"rack": "r1"}
TOPOLOGY = Topology.model_validate({"metadata": {"name": "a"}, "spec": {"levels": [{"nodeLabel": "rack"}]}})


@pytest.mark.parametrize(
    ("before", "after", "is_room"),
    [
        pytest.param(node(ready="False"), node(), True, id="it became ready"),
        pytest.param(node(unschedulable=True), node(), True, id="it was uncordoned"),
        pytest.param(node(), node(labels={"zone": "a"}), True, id="a label that an affinity may want"),
        pytest.param(node(), node(reason="KubeletReady"), False, id="kubelet says the same in other words"),
        pytest.param(node(ready="False"), None, False, id="it was deleted"),
    ],
)
def test_a_node_that_opens_makes_room(before: Node, after: Node | None, *, is_room: bool) -> None:
    """Whatever `node_reason` reads counts; the many status writes of kubelet do not."""
    changes = CapacityChanges(empty_mirror(), ManualClock())

    change = Change(ChangeKind.MODIFIED, after, before) if after else Change(ChangeKind.DELETED, before, before)
    assert changes.observe(WatchedKind.NODE, change) is is_room


def reservation(count: int = 1, *, phase: str = "Filling") -> GpuReservation:
    """Return a GpuReservation of so many GPUs."""
    spec = {"shape": {"count": count}, "namespaces": ["team"]}
    return GpuReservation.model_validate({"metadata": {"name": "r"}, "spec": spec, "status": {"phase": phase}})


@pytest.mark.parametrize(
    ("after", "is_room"),
    [
        pytest.param(reservation(2), True, id="another size"),
        pytest.param(reservation(phase="Active"), True, id="it opened"),
        pytest.param(reservation(), False, id="nothing that pods could use"),
    ],
)
def test_a_reservation_that_changes_makes_room(after: GpuReservation, *, is_room: bool) -> None:
    """Its pods wait for its size and its times; what its status counts wakes nobody."""
    changes = CapacityChanges(empty_mirror(), ManualClock())

    change = Change(ChangeKind.MODIFIED, after, reservation())
    assert changes.observe(WatchedKind.RESERVATION, change) is is_room


@pytest.mark.parametrize(
    ("kind", "change", "affected"),
    [
        pytest.param(WatchedKind.NODE, Change(ChangeKind.ADDED, node()), ["a"], id="a node came"),
        pytest.param(WatchedKind.NODE, Change(ChangeKind.DELETED, node(), node()), ["a"], id="a node went"),
        pytest.param(WatchedKind.NODE, Change(ChangeKind.MODIFIED, node(labels=RACK), node()), ["a"], id="labels"),
        pytest.param(WatchedKind.NODE, Change(ChangeKind.MODIFIED, node(ready="False"), node()), [], id="readiness"),
        pytest.param(WatchedKind.POD, Change(ChangeKind.ADDED, make_pod()), [], id="a pod came"),
        pytest.param(WatchedKind.TOPOLOGY, Change(ChangeKind.MODIFIED, TOPOLOGY), ["a"], id="the topology itself"),
        pytest.param(WatchedKind.TOPOLOGY, Change(ChangeKind.DELETED, TOPOLOGY), [], id="a topology that is gone"),
    ],
)
def test_topologies_are_counted_again_when_labels_may_differ(
    kind: WatchedKind, change: Change[Any], affected: list[str]
) -> None:
    """Kubelets write each Node's status all the time, and thousands of pods come and go."""
    mirror = SimpleNamespace(topologies=SimpleNamespace(store={("", "a"): TOPOLOGY}))
    reconciler = TopologyReconciler(cast("Context", SimpleNamespace(mirror=mirror)))
    assert list(reconciler.affected(kind, change)) == affected


@pytest.mark.parametrize(
    ("reconciler", "kind", "change", "affected"),
    [
        pytest.param(ForeignReconciler, WatchedKind.REPORT, Change(ChangeKind.MODIFIED, make_report("n1")), ["n1"],
                     id="foreign use is looked for at each report"),
        pytest.param(MissingLeaseRepair, WatchedKind.LEASE, Change(ChangeKind.DELETED, make_lease("n1", 0)),
                     ["uid-of-p"], id="the Lease of a bound pod went"),
        pytest.param(MissingLeaseRepair, WatchedKind.LEASE, Change(ChangeKind.DELETED, make_lease("n1", 1)), [],
                     id="the Lease of no bound pod went"),
    ],
)  # fmt: skip
def test_reconcilers_look_at_once_at_what_a_change_concerns(
    reconciler: Callable[[Context], Reconciler[str]], kind: WatchedKind, change: Change[Any], affected: list[str]
) -> None:
    """Nobody waits for the next resync."""
    ledger = Ledger()
    ledger.put_report(make_report("n1"))
    ledger.put_pod(make_pod("p", node="n1", phase="Running", allocation=make_allocation("n1", 0)))
    context = cast("Context", SimpleNamespace(mirror=SimpleNamespace(ledger=ledger)))

    assert list(reconciler(context).affected(kind, change)) == affected


@pytest.mark.parametrize(
    ("kind", "change", "is_room"),
    [
        pytest.param(WatchedKind.NODE, Change(ChangeKind.MODIFIED, node(labels=RACK), node()), True, id="labels"),
        pytest.param(WatchedKind.NODE, Change(ChangeKind.MODIFIED, node(), node()), False, id="a node's heartbeat"),
        pytest.param(WatchedKind.POD, Change(ChangeKind.DELETED, make_pod()), True, id="a pod went"),
        pytest.param(
            WatchedKind.POD, Change(ChangeKind.MODIFIED, make_pod(phase="Failed"), make_pod()), True, id="a pod ended"
        ),
        pytest.param(WatchedKind.POD, Change(ChangeKind.ADDED, make_pod()), False, id="a pod came"),
        pytest.param(WatchedKind.POD, Change(ChangeKind.MODIFIED, make_pod(), make_pod()), False, id="a pod changed"),
        pytest.param(WatchedKind.TOPOLOGY, Change(ChangeKind.DELETED, TOPOLOGY), True, id="a topology went"),
        pytest.param(WatchedKind.HEARTBEAT, Change(ChangeKind.DELETED, TOPOLOGY), False, id="a heartbeat"),
    ],
)
def test_waiting_gangs_are_tried_again_when_there_may_be_room(
    kind: WatchedKind, change: Change[Any], is_room: bool
) -> None:
    """Most changes are none of that: they cut no gang's pause short."""
    rooms: list[None] = []
    cache = SimpleNamespace(candidates={("team", "g")}, attempts={}, note_capacity=lambda: rooms.append(None))
    context = SimpleNamespace(api=None, clock=ManualClock(), mirror=SimpleNamespace(ledger=Ledger()))
    reconciler = AdmissionReconciler(cast("Context", context), cast("GangCache", cache))

    assert (bool(list(reconciler.affected(kind, change))), len(rooms)) == (is_room, int(is_room))


@pytest.mark.parametrize(
    ("waiting", "is_kept", "is_looked_at"),
    [
        pytest.param({("team", "g")}, False, True, id="a gang waits"),
        pytest.param(set(), True, True, id="GPUs are kept for a gang that waits no more"),
        pytest.param(set(), False, False, id="neither"),
    ],
)
def test_gangs_are_looked_at_while_there_is_something_to_do(
    waiting: set[GangKey], *, is_kept: bool, is_looked_at: bool
) -> None:
    """Where no gang waits a resync costs nothing."""
    reconciler = AdmissionReconciler(
        cast("Context", SimpleNamespace(api=None, clock=ManualClock())),
        cast("GangCache", SimpleNamespace(candidates=waiting)),
    )
    reconciler._preemption._has_stray_reservations = is_kept

    assert bool(list(reconciler.all_keys())) is is_looked_at


async def test_a_gang_in_its_pause_is_tried_when_that_is_over() -> None:
    """Also where something else was the reason to look at the gangs meanwhile."""
    clock, gang, key = ManualClock(), make_gang(2), ("team", "g")
    attempt = AdmissionAttempts(("", 0)).next(clock.monotonic_seconds(), Verdict.BUSY, contends=True)
    cache = SimpleNamespace(
        rules=GangRules(),
        candidates={key},
        busy=set(),
        room_at_seconds=0.0,
        gang={key: gang}.get,
        gangs_in_doubt=tuple,
        attempts_of=lambda _: attempt,
        is_current=lambda _: True,
    )
    context = SimpleNamespace(api=None, clock=clock, mirror=SimpleNamespace(ledger=Ledger(), unready_reason=str))
    reconciler = AdmissionReconciler(cast("Context", context), cast("GangCache", cache))

    await clock.advance(PAUSE_SECONDS / 2)

    assert await reconciler.reconcile("") == PAUSE_SECONDS / 2


@pytest.mark.parametrize("is_room_made", [False, True], ids=["a moment later", "at once when room is made"])
async def test_a_pod_that_was_just_set_aside_is_woken_when_its_refusal_is_settled(*, is_room_made: bool) -> None:
    """Nobody waits for the next resync. It may have been refused for a bind whose Leases are not seen yet."""
    clock, api, ledger = ManualClock(), AsyncMock(), Ledger()
    ledger.put_report(make_report("n1"))
    ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    mirror = SimpleNamespace(
        ledger=ledger,
        reflectors={"any": SimpleNamespace(resource_version="1")},
        nodes=SimpleNamespace(store={("", "n1"): node()}),
        unready_reason=str,
        claim=lambda *_: None,
        reservation_of=lambda _: "",
    )
    context = Context(api, cast("ClusterMirror", mirror), clock, Mock(), Mock(), str)
    requeue = RequeueReconciler(context, wakes_per_second=1.0, burst=9)
    refused = PodCondition("PodScheduled", "False", "Unschedulable")
    pod = msgspec.structs.replace(make_pod("p"), status=PodStatus(conditions=(refused,)))
    ledger.put_pod(pod)

    assert list(requeue.affected(WatchedKind.POD, Change(ChangeKind.MODIFIED, pod, make_pod("p"))))
    assert await requeue.reconcile("") == SETTLE_SECONDS
    assert api.patch.await_count == 0

    if is_room_made:
        gone = make_lease("n1", 0, version="2")
        assert list(requeue.affected(WatchedKind.LEASE, Change(ChangeKind.DELETED, gone, gone)))
    else:
        await clock.advance(SETTLE_SECONDS)
    await requeue.reconcile("")
    assert api.patch.await_count == 1


async def test_the_status_of_a_topology_is_written_when_it_changes_and_not_again(tmp_path: Path) -> None:
    """It counts the nodes that it covers; the next look at the same nodes writes nothing."""
    async with cluster("n1", labels=RACK) as made, term(made, tmp_path) as running:
        made.server.put(f"{TOPOLOGIES}/a", {"metadata": {"name": "a"}, "spec": {"levels": [{"nodeLabel": "rack"}]}})

        def counted() -> Any:
            return made.server.objects[f"{TOPOLOGIES}/a"].get("status", {}).get("nodes")

        await settled(running, lambda: counted() == 1)
        loop = next(one for one in running.loops if isinstance(one._reconciler, TopologyReconciler))
        await settled(running, lambda: running.mirror.topologies.store[("", "a")].status is not None)
        before = len(running.api.writes)
        await loop._reconciler.reconcile("a")
        assert [path for _, path in running.api.writes[before:] if path.startswith(TOPOLOGIES)] == []
        made.add_node("n2", labels=RACK)
        await settled(running, lambda: counted() == 2)
