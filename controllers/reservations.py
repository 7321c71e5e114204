"""Holds GPUs for GpuReservations, frees those they no longer need, and writes their status.

`atoll.cluster.reservations` decides; this module creates and deletes Leases. Whoever creates a Lease first has its GPU:
if a pod is faster, the reservation takes another GPU. A Lease that a pod lets go changes hands and is never free in
between. Only Leases that a reservation itself holds are deleted here; those of its pods return on proof like any other.
Keys are uids of reservations; the Leases of a deleted one are freed.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import structlog

from atoll.api import names
from atoll.api.reservations import GpuReservation, GpuReservationStatus, ReservationPhase
from atoll.cluster.allocations import Allocation
from atoll.cluster.gangs.node_domains import level_values
from atoll.cluster.leases import LeaseRecord, lease_body, reserved_for
from atoll.cluster.reservation_use import mark_of
from atoll.cluster.reservations import NodeOffer, ReservedDevice, decide, inherited
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import AlreadyExists, Conflict, NotFound
from atoll.kube.events import ObjectReference
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.context import Context
from controllers.gangs.writes import each, raise_first
from controllers.leases.writes import delete_lease

log = structlog.get_logger(__name__)

BLIND_SECONDS = 5.0
FILLING_SECONDS = 15.0
"""Seconds between searches while GPUs are missing, even without a change."""
SOONEST_SECONDS = 1.0
_TOLD = {
    ReservationPhase.ACTIVE: names.REASON_RESERVATION_ACTIVE,
    ReservationPhase.FILLING: names.REASON_RESERVATION_FILLING,
    ReservationPhase.ENDED: names.REASON_RESERVATION_OVER,
    ReservationPhase.RELEASED: names.REASON_RESERVATION_OVER,
}


class ReservationReconciler:
    """Makes each reservation hold what it should."""

    name = "reservations"

    def __init__(self, context: Context) -> None:
        self._context = context

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the reservation that changed or whose Lease changed, and those that lack GPUs if a GPU may be free."""
        if kind is WatchedKind.RESERVATION:
            return (change.object.metadata.uid,)
        if kind is WatchedKind.NODE and change.kind is ChangeKind.DELETED:
            return {_uid(record) for record in self._leases() if record.node == change.object.metadata.name}
        if kind not in (WatchedKind.LEASE, WatchedKind.REPORT):
            return ()
        found = {one.metadata.uid for one in self._reservations() if _phase(one) is ReservationPhase.FILLING}
        if kind is WatchedKind.REPORT:
            node = change.object.metadata.name
            return found | {_uid(record) for record in self._leases() if record.node == node}
        marks = (change.object.metadata.annotations, change.old.metadata.annotations if change.old else {})
        return found | {mark[names.RESERVATION].rpartition("/")[2] for mark in marks if mark.get(names.RESERVATION)}

    def all_keys(self) -> Iterable[str]:
        """Return every reservation, including deleted ones that still hold Leases."""
        return {one.metadata.uid for one in self._reservations()} | {_uid(record) for record in self._leases()}

    async def reconcile(self, uid: str) -> float | None:
        """Create and delete Leases of one reservation, and write its status. Raises KubeError."""
        if self._context.mirror.unready_reason():
            return BLIND_SECONDS
        leases = [record for record in self._leases() if _uid(record) == uid]
        reservation = next((one for one in self._reservations() if one.metadata.uid == uid), None)
        if reservation is None or reservation.metadata.deletion_timestamp is not None:
            await self._free([record for record in leases if record.holder.is_reservation])
            return None
        now_seconds, nodes = self._context.clock.now().timestamp(), self._context.mirror.nodes.store
        gone = {record.node for record in leases if ("", record.node) not in nodes}
        pods = self._context.mirror.pods.by_uid
        users = [pods[record.holder.uid] for record in leases if record.holder.uid in pods]
        decision = decide(reservation, leases, self._offers(reservation), now_seconds, gone=gone, users=users)
        with self._assumed(uid, decision.taken):
            await self._free(decision.released)
            won = await each(decision.taken, lambda device: self._hold(reservation, device))
        raise_first(won)
        if not all(won):
            return SOONEST_SECONDS
        await self._write(reservation, decision.status)
        waits = [decision.again_seconds] if decision.again_seconds is not None else []
        waits += [FILLING_SECONDS] if decision.status.phase is ReservationPhase.FILLING else []
        return max(SOONEST_SECONDS, min(waits)) if waits else None

    def heirs(self, records: Sequence[LeaseRecord]) -> dict[str, str]:
        """Return the NAME/UID of reservations that take over Leases of a pod that has ended, by the Leases' names; the
        oldest reservation comes first. If it would take other GPUs of the node too, it does that by itself."""
        now_seconds, found = self._context.clock.now().timestamp(), dict[str, str]()
        filling = [one for one in self._reservations() if _phase(one) is ReservationPhase.FILLING]
        for reservation in sorted(filling, key=lambda one: (one.metadata.creation_timestamp or "", one.metadata.name)):
            left = [one for one in records if not one.reservation and one.lease_name not in found]
            if not left:
                break
            held = [one for one in self._leases() if _uid(one) == reservation.metadata.uid]
            decision = decide(reservation, held, self._offers(reservation, left), now_seconds)
            found |= dict.fromkeys(inherited(decision, left), mark_of(reservation))
        return found

    def _reservations(self) -> list[GpuReservation]:
        return list(self._context.mirror.reservations.store.values())

    def _leases(self) -> list[LeaseRecord]:
        return [record for record in self._context.mirror.ledger.leases.values() if record.reservation]

    def _offers(self, reservation: GpuReservation, ending: Sequence[LeaseRecord] = ()) -> dict[str, NodeOffer]:
        """Return the nodes with a fresh report, and the GPUs there that no pod holds or waits for. The Leases `ending`
        of one pod count as free."""
        mirror, now = self._context.mirror, self._context.clock.monotonic_seconds()
        level, ended = reservation.spec.shape.level, next((one.holder.uid for one in ending), "")
        found = {}
        for name, devices in mirror.ledger.nodes.items():
            node = mirror.nodes.store.get(("", name))
            if node is None or mirror.ledger.is_stale(name, now):
                continue
            domain = level_values(node, mirror.reports.get(name), (level,))[0] if level is not None else ""
            free = 0 if node.spec.unschedulable else mirror.ledger.free(name, now_seconds=now, asking_uid=ended)
            found[name] = NodeOffer(devices, free, domain)
        return found

    @contextmanager
    def _assumed(self, uid: str, taken: Sequence[ReservedDevice]) -> Iterator[None]:
        """Count GPUs as taken while their Leases are created, so that this process promises them to nobody else."""
        ledger, by_node = self._context.mirror.ledger, groupby(sorted(taken), key=lambda device: device.node)
        keys = []
        for node, group in by_node:
            devices = tuple(group)
            keys.append(f"{uid}/{node}")
            ids, uuids = (device.device_id for device in devices), (device.uuid for device in devices)
            ledger.assume(keys[-1], Allocation(node, tuple(ids), tuple(uuids)))
        try:
            yield
        finally:
            for key in keys:
                ledger.forget(key)

    async def _hold(self, reservation: GpuReservation, device: ReservedDevice) -> bool:
        """Create one Lease; False if somebody else was faster."""
        devices = self._context.mirror.ledger.nodes.get(device.node)
        node_uid = devices.node_uid if devices is not None else ""
        reserved = reserved_for(mark_of(reservation), device.node, node_uid, self._context.now_text())
        body = lease_body(reserved, device.device_id, device.uuid)
        try:
            await self._context.api.create(paths.leases(names.SYSTEM_NAMESPACE), body)
        except AlreadyExists:
            return False
        self._context.metrics.reserved_gpus.labels("taken").inc()
        return True

    async def _free(self, records: Iterable[LeaseRecord]) -> None:
        """Delete Leases that a reservation itself holds; one that a pod has just taken over stays."""

        async def free_one(record: LeaseRecord) -> None:
            try:
                freed = await delete_lease(self._context.api, record)
            except Conflict:
                return
            self._context.metrics.reserved_gpus.labels("freed").inc(freed)

        await asyncio.gather(*(free_one(record) for record in records))

    async def _write(self, reservation: GpuReservation, status: GpuReservationStatus) -> None:
        """Write the status if it changed, and record an event if the phase changed."""
        metadata, before = reservation.metadata, reservation.status
        if before is not None and before.to_json() == status.to_json():
            return
        body = merge_patch(
            uid=metadata.uid,
            resource_version=metadata.resource_version,
            status={"unusedSince": None, "askedTimeoutSeconds": None, **status.to_json()},
        )
        try:
            await self._context.api.patch(paths.gpureservations(metadata.name, "status"), body)
        except (NotFound, Conflict):
            return
        if status.phase in _TOLD and (before is None or before.phase is not status.phase):
            note = status.message or f"holds all of its {reservation.spec.shape.count} GPUs"
            log.info("Reservation changed", reservation=metadata.name, phase=status.phase.value, note=note)
            self._context.events.record(
                ObjectReference(names.API_VERSION, "GpuReservation", metadata.name, "", metadata.uid),
                reason=_TOLD[status.phase],
                note=note,
                action="Reserve",
            )


def _uid(record: LeaseRecord) -> str:
    return record.reservation.rpartition("/")[2]


def _phase(reservation: GpuReservation) -> ReservationPhase | None:
    return reservation.status.phase if reservation.status is not None else None
