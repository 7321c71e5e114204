"""Mirror of the cluster for Atoll's decisions: watched collections folded into one ledger.

Extender and controllers both use it, so their state is the same. Listeners are called once per change, after the
ledger.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import structlog

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.node_status import GpuNodeStatus
from atoll.api.reservations import GpuReservation
from atoll.api.topologies import Topology
from atoll.cluster import pods
from atoll.cluster.csi import (
    CsiDriver,
    CsiNode,
    StorageCapacity,
    decode_csi_driver,
    decode_csi_node,
    decode_storage_capacity,
    decode_storage_class,
)
from atoll.cluster.leases import may_be_gpu_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.node_audit import NodeAudit
from atoll.cluster.objects import (
    Lease,
    Namespace,
    Node,
    Pod,
    decode_heartbeat,
    decode_lease,
    decode_namespace,
    decode_node,
    decode_pod,
)
from atoll.cluster.release import version_number
from atoll.cluster.reports import age_at_first_sight, reason_of_the_past, silence_seconds_max
from atoll.cluster.reservation_use import reservation_name
from atoll.cluster.storage import (
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
    decode_volume,
    decode_volume_claim,
)
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind, is_older
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.reflector import Reflector

log = structlog.get_logger(__name__)

BLIND_SECONDS_MAX = 120.0
"""A collection silent for this long is too old for decisions; bookmarks come about once a minute."""

AUDIT_REFUSALS = frozenset({names.REJECT_RESTORED, names.REJECT_UNKNOWN_POD})


class WatchedKind(StrEnum):
    """Collection of a change."""

    POD = "pod"
    NODE = "node"
    LEASE = "lease"
    HEARTBEAT = "heartbeat"
    CLAIM = "claim"
    REPORT = "report"
    GANG = "gang"
    TOPOLOGY = "topology"
    RESERVATION = "reservation"
    VOLUME = "volume"
    VOLUME_CLAIM = "volume claim"
    STORAGE_CLASS = "storage class"
    CSI_NODE = "CSI node"
    CSI_DRIVER = "CSI driver"
    STORAGE_CAPACITY = "storage capacity"
    NAMESPACE = "namespace"


Listener = Callable[[WatchedKind, Change[Any]], None]


class ClusterMirror:
    """Watches pods, nodes, GPU Leases, heartbeats, GpuClaims, GpuNodeStatuses and GpuReservations; owns the ledger.

    `with_gangs`: GpuGangs and Topologies too, which only the controllers use, the volumes that bind members to nodes,
    and the namespaces whose labels pod affinity chooses by.
    """

    def __init__(self, client: ApiClient, clock: Clock, *, with_gangs: bool = False) -> None:
        self._client = client
        self._clock = clock
        self._listeners: list[Listener] = []
        self._rewind_listeners: list[Callable[[], None]] = []
        self.ledger = Ledger()
        self.reports: dict[str, GpuNodeStatus] = {}

        def watch(
            path: str, decode: Callable[[bytes], Any], take: Callable[[Change[Any]], None], kind: WatchedKind
        ) -> Reflector[Any]:
            def on_event(change: Change[Any]) -> None:
                take(change)
                for listener in self._listeners:
                    listener(kind, change)

            return Reflector(client, path, decode, on_event=on_event, clock=clock, on_rewind=self._rewind)

        self.pods: Reflector[Pod] = watch(paths.pods(), decode_pod, self._take_pod, WatchedKind.POD)
        self.nodes: Reflector[Node] = watch(paths.nodes(), decode_node, self._take_node, WatchedKind.NODE)
        self.leases: Reflector[Lease] = watch(
            paths.leases(names.SYSTEM_NAMESPACE), decode_lease, self._take_lease, WatchedKind.LEASE
        )
        self.heartbeats: Reflector[Lease] = watch(
            paths.leases(names.HEARTBEAT_NAMESPACE), decode_heartbeat, self._take_heartbeat, WatchedKind.HEARTBEAT
        )
        self.claims: Reflector[GpuClaim] = watch(
            paths.gpuclaims(), GpuClaim.model_validate_json, _ignore, WatchedKind.CLAIM
        )
        self.node_statuses: Reflector[GpuNodeStatus] = watch(
            paths.gpunodestatuses(), GpuNodeStatus.model_validate_json, self._take_report, WatchedKind.REPORT
        )
        self.reservations: Reflector[GpuReservation] = watch(
            paths.gpureservations(), GpuReservation.model_validate_json, _ignore, WatchedKind.RESERVATION
        )
        self._audit = NodeAudit(self.pods.by_uid, self.ledger)
        self.restores_count = 0
        """How often a restore of the API server was noticed; several watches may notice the same one."""
        self.gangs: Reflector[GpuGang] | None = None
        self.topologies: Reflector[Topology] | None = None
        self.volumes: Reflector[PersistentVolume] | None = None
        self.volume_claims: Reflector[PersistentVolumeClaim] | None = None
        self.storage_classes: Reflector[StorageClass] | None = None
        self.csi_nodes: Reflector[CsiNode] | None = None
        self.csi_drivers: Reflector[CsiDriver] | None = None
        self.capacities: Reflector[StorageCapacity] | None = None
        self.namespaces: Reflector[Namespace] | None = None
        if with_gangs:
            self._watch_for_gangs(watch)

    def _watch_for_gangs(self, watch: Callable[..., Reflector[Any]]) -> None:
        """Watch what only gangs need, too."""
        self.volumes = watch(paths.persistentvolumes(), decode_volume, _ignore, WatchedKind.VOLUME)
        self.volume_claims = watch(
            paths.persistentvolumeclaims(), decode_volume_claim, _ignore, WatchedKind.VOLUME_CLAIM
        )
        self.storage_classes = watch(paths.storageclasses(), decode_storage_class, _ignore, WatchedKind.STORAGE_CLASS)
        self.csi_nodes = watch(paths.csinodes(), decode_csi_node, _ignore, WatchedKind.CSI_NODE)
        self.csi_drivers = watch(paths.csidrivers(), decode_csi_driver, _ignore, WatchedKind.CSI_DRIVER)
        self.capacities = watch(
            paths.csistoragecapacities(), decode_storage_capacity, _ignore, WatchedKind.STORAGE_CAPACITY
        )
        self.namespaces = watch(paths.namespaces(), decode_namespace, _ignore, WatchedKind.NAMESPACE)
        self.gangs = watch(paths.gpugangs(), GpuGang.model_validate_json, _ignore, WatchedKind.GANG)
        self.topologies = watch(paths.topologies(), Topology.model_validate_json, _ignore, WatchedKind.TOPOLOGY)

    @property
    def reflectors(self) -> dict[WatchedKind, Reflector[Any]]:
        """Every watched collection by its kind."""
        found: dict[WatchedKind, Reflector[Any] | None] = {
            WatchedKind.POD: self.pods,
            WatchedKind.NODE: self.nodes,
            WatchedKind.LEASE: self.leases,
            WatchedKind.HEARTBEAT: self.heartbeats,
            WatchedKind.CLAIM: self.claims,
            WatchedKind.REPORT: self.node_statuses,
            WatchedKind.RESERVATION: self.reservations,
            WatchedKind.GANG: self.gangs,
            WatchedKind.TOPOLOGY: self.topologies,
            WatchedKind.VOLUME: self.volumes,
            WatchedKind.VOLUME_CLAIM: self.volume_claims,
            WatchedKind.STORAGE_CLASS: self.storage_classes,
            WatchedKind.CSI_NODE: self.csi_nodes,
            WatchedKind.CSI_DRIVER: self.csi_drivers,
            WatchedKind.STORAGE_CAPACITY: self.capacities,
            WatchedKind.NAMESPACE: self.namespaces,
        }
        return {kind: one for kind, one in found.items() if one is not None}

    def on_change(self, listener: Listener) -> None:
        """Call `listener` after every change has reached the ledger; it must not block."""
        self._listeners.append(listener)

    def on_rewind(self, listener: Callable[[], None]) -> None:
        """Call `listener` after the API server was restored: remembered deletions and versions are void."""
        self._rewind_listeners.append(listener)

    def claim(self, namespace: str, name: str) -> GpuClaim | None:
        """Return the GpuClaim of that name as last seen."""
        return self.claims.store.get((namespace, name))

    def reservation_of(self, pod: Pod) -> GpuReservation | None:
        """Return the GpuReservation that a pod names, as last seen; None for a pod that names none."""
        name = reservation_name(pod)
        return self.reservations.store.get(("", name)) if name else None

    def unready_reason(self) -> str:
        """Return why no decision may use this mirror now; empty if it is ready."""
        for kind, reflector in self.reflectors.items():
            if not reflector.synced.is_set():
                return f"list of {kind} objects is not complete yet: {reflector.last_error or 'listing'}"
            if reflector.seconds_since_heard() > BLIND_SECONDS_MAX:
                return f"watch of {kind} objects has been silent for {reflector.seconds_since_heard():.0f} s"
        return ""

    def is_ready(self) -> bool:
        """True if every collection is complete and fresh."""
        return not self.unready_reason()

    def relist(self) -> None:
        """Become unready until every collection was listed by a list that begins after this call; drop expectations."""
        self.ledger.drop_all_tentative()
        for reflector in self.reflectors.values():
            reflector.relist()

    def _rewind(self) -> None:
        """The API server was restored from a backup: list everything again, and let no node offer anything until its
        agent has reported again. Pods that were bound after the backup may still run there, unknown to the server."""
        self.restores_count += 1
        self._audit.begin(self.reports)
        for name in self.reports:
            self.ledger.drop_report(name, why=names.REJECT_RESTORED)
        for listener in self._rewind_listeners:
            listener()
        self.ledger.drop_all_tentative()
        self.ledger.forget_versions()
        for reflector in self.reflectors.values():
            reflector.begin_anew()

    async def synced(self) -> None:
        """Wait until every collection was listed once."""
        for reflector in self.reflectors.values():
            await reflector.synced.wait()

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self.reflectors.values():
                group.create_task(reflector.run())

    def _take_pod(self, change: Change[Pod]) -> None:
        pod = change.object
        if change.kind is ChangeKind.DELETED:
            self._audit.note_missing(pod)
            if not change.synthetic:
                self._audit.note_deleted(pod.metadata.uid)
            self.ledger.drop_pod(pod.metadata.uid, final=pod)
            if change.synthetic and pod.spec.node_name in self.ledger.nodes:
                self._take_again(pod.spec.node_name)
        elif pods.is_gpu_pod(pod) or pod.metadata.uid in self.ledger.pods:
            self.ledger.put_pod(pod)
        if change.kind is not ChangeKind.DELETED:
            self._audit.note_pod(pod)
        self._judge_again(pod.metadata.uid)

    def _take_lease(self, change: Change[Lease]) -> None:
        lease = change.object
        if not may_be_gpu_lease(lease) or _has_successor(self.leases, change):
            return
        if change.kind is ChangeKind.DELETED:
            version = 0 if change.synthetic else version_number(lease.metadata.resource_version)
            self.ledger.drop_lease(lease.metadata.name, version=version)
        else:
            self.ledger.put_lease(lease)
            record = self.ledger.leases.get(lease.metadata.name)
            self._judge_again(record.holder.uid if record is not None else "")

    def _take_heartbeat(self, change: Change[Lease]) -> None:
        if change.kind is ChangeKind.DELETED:
            if not _has_successor(self.heartbeats, change):
                self.ledger.drop_heartbeat(change.object.metadata.name)
            return
        if change.old is not None and not _is_renewal(change.old, change.object):
            return
        is_seen = change.kind is ChangeKind.MODIFIED
        age = 0.0 if is_seen else age_at_first_sight(change.object, self._client.server_seconds())
        heard_seconds = self._clock.monotonic_seconds() - age
        name = change.object.metadata.name
        self.ledger.put_heartbeat(name, heard_seconds, silence_seconds_max(change.object))
        if is_seen:
            self._audit.note_renewal(name)
        if self.ledger.uncounted.get(name) in AUDIT_REFUSALS:
            self._take_again(name)
        if name in self.ledger.nodes and self._is_unreadable(name):
            self.ledger.drop_report(name, why=names.REJECT_BAD_REPORT)

    def _is_unreadable(self, name: str) -> bool:
        """True if a node's report was changed to something unreadable, which calls no listener."""
        return ("", name) in self.node_statuses.untrusted

    def _take_node(self, change: Change[Node]) -> None:
        """Update the ledger for a Node: its report may become valid or invalid."""
        name = change.object.metadata.name
        report = self.reports.get(name)
        if change.kind is ChangeKind.DELETED or report is None:
            return
        why = reason_of_the_past(report, change.object)
        if why:
            self.ledger.drop_report(name, why=why)
        elif (change.kind is ChangeKind.ADDED or name not in self.ledger.nodes) and not self._is_unreadable(name):
            self._take_again(name)

    def _take_report(self, change: Change[GpuNodeStatus]) -> None:
        name = change.object.metadata.name
        if _has_successor(self.node_statuses, change):
            return
        if change.kind is ChangeKind.DELETED:
            self.reports.pop(name, None)
            self._audit.forget(name)
            self.ledger.drop_report(name)
            return
        self.reports[name] = change.object
        self._take_again(name)

    def _judge_again(self, uid: str) -> None:
        """Judge the reports again that did not count because they show a pod of which nothing was known."""
        for node in self._audit.waits_for(uid):
            self._take_again(node)

    def _take_again(self, name: str) -> None:
        """Let a node's report count, or say why it does not."""
        report = self.reports.get(name)
        if report is None:
            return
        is_known = self.pods.synced.is_set()
        why = self._audit.refusal(report, pods_version=self.pods.resource_version if is_known else "")
        if why:
            self.ledger.drop_report(name, why=why)
        else:
            self.ledger.take_report(report, self.nodes.store.get(("", name)))


def _has_successor(reflector: Reflector[Any], change: Change[Any]) -> bool:
    """True if a deletion concerns a predecessor: another object has the name by now."""
    metadata = change.object.metadata
    present = reflector.store.get((metadata.namespace, metadata.name))
    return change.kind is ChangeKind.DELETED and present is not None and present.metadata.uid != metadata.uid


def _ignore(_change: Change[Any]) -> None:
    """The reflector's own store is all that is needed."""


def _is_renewal(old: Lease, new: Lease) -> bool:
    """Tell whether a heartbeat was renewed; one of an older version is a backup's, which a list shows after a restore.
    Times are not compared: the agent's clock may be set back."""
    is_backup = is_older(new.metadata.resource_version, old.metadata.resource_version)
    return old.spec.renew_time != new.spec.renew_time and not is_backup
