"""Repairs Leases: writes missing ones of bound pods again, and makes unreadable ones readable.

A missing Lease is also written again for a deleted pod that had lost it, whose release then needs proof like any other.
One that a GpuReservation holds by itself becomes the pod's: the pod uses the GPU, the reservation only keeps it. A GPU
that another pod has is reported as double use; nothing is released. An unreadable Lease (somebody edited its
annotations) gets them from its *name*, and its holder from the one bound pod that names the GPU; until it can be read,
nobody gets that GPU.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.holds import HoldSource
from atoll.cluster.leases import LeaseRecord, Reservation, lease_body, lease_name, parse_lease
from atoll.cluster.objects import Lease, Pod
from atoll.cluster.repairs import MissingLease, device_of_lease_name, owner_of_unreadable, required_leases
from atoll.cluster.reservation_use import reservation_name
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import AlreadyExists, NotFound
from atoll.kube.events import ObjectReference
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.context import Context, holder_reference, pod_reference
from controllers.leases.writes import read_lease, rewrite_lease
from controllers.pod_calls import look_up

log = structlog.get_logger(__name__)

ATTEMPT = "repair"


class MissingLeaseRepair:
    """Every device of a bound pod has its Lease."""

    name = "repair"

    def __init__(self, context: Context) -> None:
        self._context = context

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the pod that changed, and the pods that name the device of a Lease that went."""
        ledger = self._context.mirror.ledger
        if kind is WatchedKind.POD:
            uid = change.object.metadata.uid
            return (uid,) if ledger.allocation_of(uid) is not None or ledger.lost.records(uid) else ()
        if kind is WatchedKind.LEASE:
            record = _record(change)
            if record is None or change.kind is ChangeKind.ADDED:
                return ()
            holds = ledger.holds(record.node, record.device_id, record.device_uuid)
            return tuple(hold.key for hold in holds if hold.key in ledger.pods or hold.source is HoldSource.LOST)
        return ()

    def all_keys(self) -> Iterable[str]:
        """Return every bound pod that lacks a Lease of its own for one of its devices."""
        ledger = self._context.mirror.ledger
        allocations = ((uid, ledger.allocation_of(uid)) for uid in ledger.pods)
        lacking = (uid for uid, held in allocations if held is not None and not self._holds_all(uid, held))
        return (*lacking, *ledger.lost.departed())

    async def reconcile(self, uid: str) -> float | None:
        """Write what is missing. Raises KubeError."""
        pod = self._context.mirror.ledger.pods.get(uid)
        if left_behind := self._context.mirror.ledger.lost.records(uid):
            await asyncio.gather(*(self._restore(_lacking(record), record.reservation) for record in left_behind))
            return None
        if pod is None:
            return None
        lacking = self._lacking_by(pod)
        if not lacking:
            return None
        lookup = await look_up(self._context.api, pods.holder_of(pod))
        live = set(required_leases(lookup.pod)) if lookup.pod is not None else set()
        wanted = [lease for lease in lacking if lease in live]
        own = await asyncio.gather(*(self._restore(lease, reservation_name(pod)) for lease in wanted))
        for lease, is_own in zip(wanted, own, strict=True):
            if not is_own:
                await self._record_double_use(pod, lease)
        return None

    def _holds_all(self, uid: str, allocation: Allocation) -> bool:
        leases = self._context.mirror.ledger.leases
        records = (leases.get(lease_name(allocation.node, device_id)) for device_id in allocation.device_ids)
        return all(record is not None and record.holder.uid == uid for record in records)

    def _lacking_by(self, pod: Pod) -> list[MissingLease]:
        """Return the Leases that the pod must have, and that are missing or another holder's."""
        ledger = self._context.mirror.ledger
        required = [lease for lease in required_leases(pod) if lease.name not in ledger.unreadable_leases]
        held = {record.lease_name for record in ledger.leases_of(pod.metadata.uid)}
        return [lease for lease in required if lease.name not in held]

    async def _restore(self, lease: MissingLease, uses: str) -> bool:
        """Write one Lease; False when another pod has it. The bind's own Lease may only not have been seen yet. `uses`:
        the GpuReservation of the pod, by name or as NAME/UID."""
        now = self._context.now_text()
        reservation = Reservation(lease.node, self._node_uid(lease.node), lease.holder, lease.claim, ATTEMPT, now, now)
        body = lease_body(reservation, lease.device_id, lease.device_uuid)
        try:
            await self._context.api.create(paths.leases(names.SYSTEM_NAMESPACE), body)
        except AlreadyExists:
            found = await self._live(lease)
            if found is None or found.holder.uid == lease.holder.uid:
                return True
            if not found.holder.is_reservation or found.device_uuid != lease.device_uuid:
                return False
            if found.reservation.partition("/")[0] == uses.partition("/")[0]:
                body["metadata"]["annotations"][names.RESERVATION] = found.reservation
            await rewrite_lease(self._context.api, found, body)
        self._context.metrics.leases_recreated.inc()
        log.warning("Wrote a missing Lease again", lease=lease.name, pod=str(lease.holder), uid=lease.holder.uid)
        self._context.events.record(
            holder_reference(lease.holder),
            reason=names.REASON_LEASE_RECREATED,
            note=f"the Lease {lease.name} of a GPU that this pod uses was missing; it was written again",
            action="Repair",
            type="Warning",
        )
        return True

    def _node_uid(self, node: str) -> str:
        """Return the uid of the machine: of its report, counted or not, as binds take it, else of the Node."""
        mirror = self._context.mirror
        status, registered = mirror.reports.get(node), mirror.nodes.store.get(("", node))
        reported = status.status.node_uid if status is not None and status.status is not None else ""
        return reported or (registered.metadata.uid if registered is not None else "")

    async def _live(self, lease: MissingLease) -> LeaseRecord | None:
        found = await read_lease(self._context.api, lease.name)
        try:
            return parse_lease(found) if found is not None else None
        except MalformedValue:
            return None

    async def _record_double_use(self, pod: Pod, lease: MissingLease) -> None:
        """Record it if the live Lease confirms it: Leases and pods come by two watches, one may be behind."""
        found = await self._live(lease)
        if found is None or found.holder.uid == lease.holder.uid:
            return
        other = found.holder
        self._context.metrics.double_uses.inc()
        log.error(
            "Two holders name one GPU", lease=lease.name, pod=str(lease.holder), uid=lease.holder.uid, other=str(other)
        )
        self._context.events.record(
            pod_reference(pod),
            reason=names.REASON_DOUBLE_USE,
            note=f"GPU {lease.device_id} ({lease.device_uuid}) of node {lease.node} is also held by "
            f"{other.namespace}/{other.name}; nothing was released",
            action="Repair",
            type="Warning",
        )


class UnreadableLeaseRepair:
    """Every GPU Lease can be read."""

    name = "relabel"

    def __init__(self, context: Context) -> None:
        self._context = context

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the Lease that changed, if it cannot be read."""
        if kind is not WatchedKind.LEASE or change.kind is ChangeKind.DELETED:
            return ()
        name = change.object.metadata.name
        return (name,) if name in self._context.mirror.ledger.unreadable_leases else ()

    def all_keys(self) -> Iterable[str]:
        """Return every unreadable Lease."""
        return tuple(self._context.mirror.ledger.unreadable_leases)

    async def reconcile(self, name: str) -> float | None:
        """Write the Lease anew as far as it can be known. Raises KubeError."""
        ledger = self._context.mirror.ledger
        lease = self._context.mirror.leases.store.get((names.SYSTEM_NAMESPACE, name))
        reason = ledger.unreadable_leases.get(name)
        if lease is None or reason is None:
            return None
        self._context.events.record(
            ObjectReference("coordination.k8s.io/v1", "Lease", name, names.SYSTEM_NAMESPACE, lease.metadata.uid),
            reason=names.REASON_UNREADABLE_LEASE,
            note=f"nobody gets the GPU of this Lease until it can be read: {reason}",
            action="Repair",
            type="Warning",
        )
        owner = owner_of_unreadable(name, ledger.pods)
        if owner is not None and await self._is_confirmed(owner):
            annotations = _device_annotations(owner.node, owner.device_id, owner.device_uuid)
            await self._write(lease, annotations, {"holderIdentity": str(owner.holder)})
            return None
        device = device_of_lease_name(name, ledger.nodes)
        annotations = _device_annotations(*device) if device is not None else {}
        if any(lease.metadata.annotations.get(key) != value for key, value in annotations.items()):
            await self._write(lease, annotations, None)
        return None

    async def _is_confirmed(self, owner: MissingLease) -> bool:
        lookup = await look_up(self._context.api, owner.holder)
        return lookup.pod is not None and owner in required_leases(lookup.pod)

    async def _write(self, lease: Lease, annotations: dict[str, str], spec: dict[str, str] | None) -> None:
        metadata = lease.metadata
        sections = {"spec": spec} if spec is not None else {}
        body = merge_patch(
            uid=metadata.uid, resource_version=metadata.resource_version, annotations=annotations, **sections
        )
        try:
            await self._context.api.patch(paths.leases(names.SYSTEM_NAMESPACE, metadata.name), body)
        except NotFound:
            return
        self._context.metrics.leases_rewritten.inc()
        log.warning("Wrote an unreadable Lease anew", lease=metadata.name, holder=spec)


def _device_annotations(node: str, device_id: int, device_uuid: str) -> dict[str, str]:
    return {
        names.LEASE_NODE: node,
        names.LEASE_DEVICE_ID: str(device_id),
        names.LEASE_DEVICE_UUID: device_uuid,
    }


def _lacking(record: LeaseRecord) -> MissingLease:
    return MissingLease(
        record.lease_name, record.holder, record.claim, record.node, record.device_id, record.device_uuid
    )


def _record(change: Change[Any]) -> LeaseRecord | None:
    try:
        return parse_lease(change.old or change.object)
    except MalformedValue:
        return None
