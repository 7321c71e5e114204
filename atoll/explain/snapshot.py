"""The cluster at one moment, as frozen values: all input of a decision about a pod.

It also gives the Ledger that extender and controllers would have after reading the same lists. A live cluster and a
saved file give the same kind of value.

`past_asks`: an extender's history of requests, if one was asked. Not included, because it lives in one process: sets
that filter expects moments before their bind, and nodes on which a bind has just failed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.node_status import GpuNodeStatus
from atoll.api.reservations import GpuReservation
from atoll.api.times import seconds_of
from atoll.api.topologies import Topology
from atoll.cluster import pods
from atoll.cluster.budgets import DisruptionBudget
from atoll.cluster.csi import CsiDriver, CsiNode, StorageCapacity
from atoll.cluster.leases import may_be_gpu_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Lease, Namespace, Node, Pod, PriorityClass
from atoll.cluster.reports import silence_seconds_max
from atoll.cluster.request_history import RequestHistory, recall
from atoll.cluster.reservation_use import reservation_name
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim, StorageClass
from atoll.cluster.volume_fit import Volumes

NOW_SECONDS = 0.0
"""Time of a snapshot on its ledger's clock."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Everything at `taken_at`, a UTC time. `leases`: those of GPUs; `heartbeats`: those of agents; `storage_classes`:
    None if nobody has listed them; `unread`: resources that the user may not list, which are empty then; `refused`: why
    reports do not count, by node, as only a watch can tell: lists do not say whether a pod that a report still shows
    was unknown or has just ended."""

    taken_at: str
    nodes: tuple[Node, ...] = ()
    pods: tuple[Pod, ...] = ()
    claims: tuple[GpuClaim, ...] = ()
    reports: tuple[GpuNodeStatus, ...] = ()
    leases: tuple[Lease, ...] = ()
    heartbeats: tuple[Lease, ...] = ()
    gangs: tuple[GpuGang, ...] = ()
    topologies: tuple[Topology, ...] = ()
    budgets: tuple[DisruptionBudget, ...] = ()
    priority_classes: tuple[PriorityClass, ...] = ()
    reservations: tuple[GpuReservation, ...] = ()
    volumes: tuple[PersistentVolume, ...] = ()
    volume_claims: tuple[PersistentVolumeClaim, ...] = ()
    storage_classes: tuple[StorageClass, ...] | None = None
    csi_nodes: tuple[CsiNode, ...] = ()
    csi_drivers: tuple[CsiDriver, ...] = ()
    storage_capacities: tuple[StorageCapacity, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    unread: tuple[str, ...] = ()
    past_asks: RequestHistory | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def pod(self, namespace: str, name: str) -> Pod | None:
        """Return the pod of that name."""
        return next((p for p in self.pods if (p.metadata.namespace, p.metadata.name) == (namespace, name)), None)

    def claim(self, namespace: str, name: str) -> GpuClaim | None:
        """Return the GpuClaim of that name."""
        return next((c for c in self.claims if (c.metadata.namespace, c.metadata.name) == (namespace, name)), None)

    def gang(self, namespace: str, name: str) -> GpuGang | None:
        """Return the GpuGang of that name."""
        return next((g for g in self.gangs if (g.metadata.namespace, g.metadata.name) == (namespace, name)), None)

    def reservation_of(self, pod: Pod) -> GpuReservation | None:
        """Return the GpuReservation that the pod names."""
        name = reservation_name(pod)
        return next((one for one in self.reservations if one.metadata.name == name), None) if name else None

    def claim_of(self, pod: Pod) -> GpuClaim | None:
        """Return the GpuClaim that the pod names."""
        return self.claim(pod.metadata.namespace, pods.claim_name(pod))

    def age_seconds(self, time: str | None) -> float:
        """Return the seconds between a time and the snapshot, at least zero; infinity for an invalid text."""
        then, now = seconds_of(time or ""), seconds_of(self.taken_at)
        return max(0.0, now - then) if then is not None and now is not None else math.inf


def volumes_of(snapshot: ClusterSnapshot) -> Volumes:
    """Return the volumes that bind pods to nodes, as the controllers see them. What may not be read binds nobody: a
    claim may be bound, and storage may have room."""
    if {"persistentvolumes", "persistentvolumeclaims"} & set(snapshot.unread):
        return Volumes()
    classes = snapshot.storage_classes
    drivers = () if "csistoragecapacities" in snapshot.unread else snapshot.csi_drivers
    return Volumes(
        {(one.metadata.namespace, one.metadata.name): one for one in snapshot.volume_claims},
        {one.metadata.name: one for one in snapshot.volumes},
        {one.metadata.name: one for one in classes} if classes is not None else None,
        {one.metadata.name: one for one in snapshot.csi_nodes},
        {one.metadata.name: one for one in drivers},
        {(one.metadata.namespace, one.metadata.name): one for one in snapshot.storage_capacities},
    )


def ledger_of(snapshot: ClusterSnapshot) -> Ledger:
    """Return the ledger of a process that has read these lists, at time NOW_SECONDS."""
    ledger = Ledger()
    nodes = {node.metadata.name: node for node in snapshot.nodes}
    for heartbeat in snapshot.heartbeats:
        age = snapshot.age_seconds(heartbeat.spec.renew_time)
        ledger.put_heartbeat(heartbeat.metadata.name, NOW_SECONDS - age, silence_seconds_max(heartbeat))
    for lease in snapshot.leases:
        if may_be_gpu_lease(lease):
            ledger.put_lease(lease)
    for report in snapshot.reports:
        ledger.take_report(report, nodes.get(report.metadata.name))
        if why := snapshot.refused.get(report.metadata.name):
            ledger.drop_report(report.metadata.name, why=why)
    for pod in snapshot.pods:
        if pods.is_gpu_pod(pod):
            ledger.put_pod(pod)
    if snapshot.past_asks is not None:
        recall(ledger, snapshot.past_asks)
    return ledger


def pods_by_node(found: Iterable[Pod]) -> dict[str, list[Pod]]:
    """Return the bound pods by node, including ended ones."""
    by_node: dict[str, list[Pod]] = {}
    for pod in found:
        if pod.spec.node_name:
            by_node.setdefault(pod.spec.node_name, []).append(pod)
    return by_node
