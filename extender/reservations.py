"""The GPUs of one bind: reserved when a scope is entered, given back when it ends, as in Reserve and Unreserve.

`Reserver.reserved` is that scope. It chooses devices, assumes them in the ledger before the first await, and creates
their Leases; the body posts the Binding. On exit it deletes the Leases that are not needed and forgets the assumption.
This is the only place that rolls a bind back.

The API server lets exactly one creator of a Lease win; that is the whole lock. Only Leases that this very attempt
created are ever deleted, also those whose creation was never answered: the attempt's token on the Lease tells.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import structlog

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.api.times import format_microtime
from atoll.cluster import pods
from atoll.cluster.allocations import DEVICES_MAX, Allocation
from atoll.cluster.cells import TentativePlacement
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import LeaseRecord, Reservation, lease_body, lease_name, parse_lease, returned_lease
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Lease, Pod, decode_lease
from atoll.cluster.requests import Rejection, Request
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.errors import AlreadyExists, Conflict, KubeError, MalformedAnswer, NotFound
from atoll.kube.patches import delete_options
from extender.bind_plan import BindPlan, plan_on_node
from extender.errors import BindRefused
from extender.reading import decode_answer, read_live
from topology.model import positions_of

log = structlog.get_logger(__name__)

WRITE_SECONDS = 5.0
CREATE_TRIES_MAX = 4
DELETE_PAUSES_SECONDS = (0.2, 0.5, 1.0)


@dataclass(slots=True)
class BindAttempt:
    """One bind attempt, and by Lease name what it holds, created, took over, may have created without an answer.
    `seen`: Leases that the pod had before, such as those that the admission of its gang reserved for it."""

    reservation: Reservation
    seen: frozenset[str] = frozenset()
    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)
    adopted: set[str] = field(default_factory=set)
    unanswered: set[str] = field(default_factory=set)

    @property
    def uses_reservation(self) -> bool:
        """Return whether Leases are taken over from a GpuReservation instead of created."""
        return bool(self.reservation.reservation)


@dataclass(slots=True)
class ReservedGpus:
    """Passed to the body of a scope. The body sets `standing` to what the pod holds once the Binding is written.
    `withdrawn`: returns which of the GPUs may no longer be given out."""

    pod: Pod
    plan: BindPlan
    attempt: BindAttempt
    withdrawn: Callable[[], frozenset[str]]
    standing: Allocation | None = None


def withdrawn_text(uuids: frozenset[str]) -> str:
    """Return the message for GPUs that were healthy when they were chosen."""
    return f"{', '.join(sorted(uuids))} became unhealthy or was withdrawn during the reservation"


@dataclass(frozen=True, slots=True)
class Reserver:
    """Reserves GPUs for binds. After `reservation_seconds` the controllers may take a reservation back;
    `expectation_seconds` after a bind the watch has shown it."""

    client: ApiClient
    ledger: Ledger
    clock: Clock
    reservation_seconds: float
    expectation_seconds: float
    default_mode: VisibleDevices

    @asynccontextmanager
    async def reserved(self, pod: Pod, node: str, request: Request, token: str) -> AsyncIterator[ReservedGpus]:
        """Hold GPUs of `node` while the body posts the Binding.

        On exit all Leases go back if nothing was posted or the body raises BindRefused. If the Binding landed, those
        that `standing` does not name go back. Any other end keeps them all: the Binding may still land.
        """
        attempt = self._new_attempt(pod, node, request, token)
        keep: frozenset[str] = frozenset()
        try:
            plan = await self._reserve(pod, request, attempt)
            keep = frozenset(attempt.leases)
            held = ReservedGpus(pod, plan, attempt, partial(self.withdrawn, plan.allocation))
            yield held
            if held.standing is not None:
                keep = _lease_names(held.standing)
                self._expect(pod.metadata.uid, held.standing)
        except BindRefused:
            keep = frozenset()
            raise
        finally:
            try:
                await unreserve(self.client, self.clock, attempt, keep=keep)
            finally:
                self.ledger.forget(pod.metadata.uid, attempt=token)

    def _new_attempt(self, pod: Pod, node: str, request: Request, token: str) -> BindAttempt:
        now = self.clock.now()
        seen = self.ledger.leases_of(pod.metadata.uid)
        reservation = Reservation(
            node=node,
            node_uid=self.ledger.nodes[node].node_uid if node in self.ledger.nodes else "",
            holder=pods.holder_of(pod),
            claim=request.claim,
            attempt=token,
            now=format_microtime(now),
            deadline=format_microtime(now + timedelta(seconds=self.reservation_seconds)),
            gang=next((record.gang for record in seen), ""),
            reservation=self._mark(request, seen),
        )
        return BindAttempt(reservation, frozenset(record.lease_name for record in seen))

    def _mark(self, request: Request, seen: Sequence[LeaseRecord]) -> str:
        """Return the mark on Leases of the GpuReservation that the pod uses."""
        records = (*self.ledger.leases_of(request.reservation), *seen) if request.reservation else ()
        return next((record.reservation for record in records if record.reservation), "")

    async def _reserve(self, pod: Pod, request: Request, attempt: BindAttempt) -> BindPlan:
        """Hold exactly the Leases of one set. A device that another pod took is replaced by the next best set.

        Every round looks at the node as it is now: its report may have changed while the Leases were written.
        """
        node, lost = attempt.reservation.node, frozenset[str]()
        why = ""
        for _ in range(DEVICES_MAX):
            now = self.clock.monotonic_seconds()
            plan = plan_on_node(pod, node, request, self.ledger, self.default_mode, lost=lost, now_seconds=now)
            if isinstance(plan, Rejection):
                raise BindRefused(f"node {node}: {plan.reason}{why}")
            token, reservation = attempt.reservation.attempt, request.reservation
            self.ledger.assume(pod.metadata.uid, plan.allocation, attempt=token, reservation=reservation)
            newly_lost = await create_leases(self.client, attempt, plan.allocation)
            if withdrawn := self.withdrawn(plan.allocation):
                why = f"; {withdrawn_text(withdrawn)}"
                newly_lost |= withdrawn
            if not newly_lost:
                await unreserve(self.client, self.clock, attempt, keep=_lease_names(plan.allocation))
                return plan
            lost |= newly_lost
        raise BindRefused(f"node {node}: every matching GPU was taken by other pods meanwhile")

    def withdrawn(self, allocation: Allocation) -> frozenset[str]:
        """Return the devices that may no longer be given out, by the node's current report: unhealthy, cordoned,
        gone, or on a silent node. A report may arrive while Leases are written."""
        devices = self.ledger.nodes.get(allocation.node)
        if devices is None or self.ledger.is_stale(allocation.node, self.clock.monotonic_seconds()):
            return frozenset(allocation.uuids)
        usable = {devices.devices[position].uuid for position in positions_of(devices.usable)}
        return frozenset(allocation.uuids) - usable

    def _expect(self, uid: str, standing: Allocation) -> None:
        """Count what stands as taken until the watch shows the bound pod."""
        if self.ledger.allocation_of(uid) is None:
            until = self.clock.monotonic_seconds() + self.expectation_seconds
            self.ledger.put_tentative(uid, TentativePlacement(standing.node, standing.device_ids, until))


def _lease_names(allocation: Allocation) -> frozenset[str]:
    return frozenset(lease_name(allocation.node, device_id) for device_id in allocation.device_ids)


async def create_leases(client: ApiClient, attempt: BindAttempt, allocation: Allocation) -> frozenset[str]:
    """Create the missing Leases of `allocation`, concurrently; return the uuids that somebody else holds.

    Every creation has ended when this returns or raises. Raises KubeError when the API server cannot say who holds a
    device.
    """
    devices = tuple(zip(allocation.device_ids, allocation.uuids, strict=True))
    answers = await asyncio.gather(
        *(_create(client, attempt, device_id, uuid) for device_id, uuid in devices), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return frozenset(uuid for (_, uuid), is_ours in zip(devices, answers, strict=True) if not is_ours)


async def _create(client: ApiClient, attempt: BindAttempt, device_id: int, uuid: str) -> bool:
    """Create one Lease, or take over the one that an earlier attempt for the same pod left. False when another pod has
    it."""
    name = lease_name(attempt.reservation.node, device_id)
    if name in attempt.leases:
        return attempt.leases[name].device_uuid == uuid
    body = lease_body(attempt.reservation, device_id, uuid)
    for number in range(CREATE_TRIES_MAX):
        is_there = attempt.uses_reservation or (number == 0 and name in attempt.seen)
        lease = await _read(client, name) if is_there else await _created_or_found(client, attempt, name, body)
        if lease is None and attempt.uses_reservation:
            return False  # no longer held by the reservation
        if lease is None:
            continue
        record = _record(lease)
        if record is None or not _is_own(attempt, lease, record, uuid):
            return False
        if record.attempt != attempt.reservation.attempt:
            lease = await _adopt(client, attempt, record, body)
            record = _record(lease) if lease is not None else None
        if record is not None and record.attempt == attempt.reservation.attempt:
            attempt.leases[name] = record
            attempt.created |= {name} - attempt.adopted
            return True
    raise MalformedAnswer(f"Lease {name} changes whenever it is looked at; try again")


async def _created_or_found(client: ApiClient, attempt: BindAttempt, name: str, body: dict[str, Any]) -> Lease | None:
    """Create a Lease, else read the one that is there; None for one that went meanwhile."""
    attempt.unanswered.add(name)
    try:
        lease: Lease | None = await _write(client, "POST", paths.leases(names.SYSTEM_NAMESPACE), body)
    except AlreadyExists:
        lease = await _read(client, name)
    if lease is not None:
        attempt.unanswered.discard(name)
    return lease


def _is_own(attempt: BindAttempt, lease: Lease, record: LeaseRecord, uuid: str) -> bool:
    is_kept = record.holder.is_reservation and record.reservation == attempt.reservation.reservation
    return (
        (record.holder.uid == attempt.reservation.holder.uid or is_kept)
        and record.device_uuid == uuid
        and names.LEASE_FENCED not in lease.metadata.annotations
    )


async def _adopt(client: ApiClient, attempt: BindAttempt, record: LeaseRecord, body: dict[str, Any]) -> Lease | None:
    """Put this attempt's token on a Lease of an earlier attempt, which then can no longer delete it, or on a Lease of
    the GpuReservation that the pod uses. None if the Lease changed or was deleted in the meantime.

    The earlier attempt may still be under way elsewhere. Its Binding, too, may be; so this attempt never deletes it.
    Nobody else has started to use a Lease from a reservation, so this attempt gives it back. A deadline that is later,
    such as that of a gang's admission, stays: the other members rely on it.
    """
    (attempt.unanswered if record.holder.is_reservation else attempt.adopted).add(record.lease_name)
    annotations = body["metadata"]["annotations"]
    if len(record.deadline) == len(annotations[names.LEASE_DEADLINE]):
        annotations = {**annotations, names.LEASE_DEADLINE: max(record.deadline, annotations[names.LEASE_DEADLINE])}
    identity = {"uid": record.lease_uid, "resourceVersion": record.resource_version}
    metadata = {**body["metadata"], **identity, "annotations": annotations}
    path = paths.leases(names.SYSTEM_NAMESPACE, record.lease_name)
    try:
        lease = await _write(client, "PUT", path, {**body, "metadata": metadata})
    except (NotFound, Conflict):
        lease = None
    attempt.unanswered.discard(record.lease_name)
    return lease


async def _write(client: ApiClient, method: str, path: str, body: dict[str, Any]) -> Lease:
    raw = await client.request(method, path, body=body, timeout_seconds=WRITE_SECONDS, retry=True)
    return decode_answer(raw, path, decode_lease)


async def still_held(client: ApiClient, attempt: BindAttempt) -> bool:
    """Tell whether every Lease of the attempt is still the same object, unfenced: asked live, before a newer Binding.

    Raises KubeError.
    """
    found = await asyncio.gather(*(_read(client, name) for name in attempt.leases))
    return all(
        lease is not None
        and lease.metadata.uid == record.lease_uid
        and lease.spec.holder_identity == str(record.holder)
        and names.LEASE_FENCED not in lease.metadata.annotations
        for lease, record in zip(found, attempt.leases.values(), strict=True)
    )


async def unreserve(client: ApiClient, clock: Clock, attempt: BindAttempt, *, keep: frozenset[str]) -> None:
    """Delete the Leases that this attempt created, except those named in `keep`. The controllers' sweep takes what
    cannot be deleted now.

    A Lease that it adopted bears its token too, but stays: the Binding of the attempt that created it may have landed.
    """
    surplus, unsure = attempt.created - keep, attempt.unanswered - keep - attempt.adopted
    attempt.created -= surplus
    records = [attempt.leases.pop(name) for name in sorted(surplus)]
    await asyncio.gather(
        *(_persist(clock, attempt, record.lease_name, partial(_delete, client, record)) for record in records),
        *(
            _persist(clock, attempt, name, partial(_delete_if_own, client, name, attempt.reservation.attempt))
            for name in sorted(unsure)
        ),
    )


async def _persist(clock: Clock, attempt: BindAttempt, name: str, delete: Callable[[], Awaitable[None]]) -> None:
    """Try a deletion a few times; it is fenced by uid and version, so that repeating one is harmless."""
    reservation = attempt.reservation
    facts = log.bind(lease=name, pod=str(reservation.holder), uid=reservation.holder.uid, attempt=reservation.attempt)
    for pause_seconds in DELETE_PAUSES_SECONDS:
        try:
            await delete()
        except KubeError as error:
            facts.info("Could not take back a Lease yet", err=str(error))
            await clock.sleep(pause_seconds)
        else:
            return
    facts.warning("Left a Lease to the sweep")


async def _delete_if_own(client: ApiClient, name: str, token: str) -> None:
    """Delete a Lease whose creation was never answered, if it was this attempt that created it."""
    lease = await _read(client, name)
    record = _record(lease) if lease is not None else None
    if record is not None and record.attempt == token:
        await _delete(client, record)


async def _delete(client: ApiClient, record: LeaseRecord) -> None:
    """Delete the Leases of the attempt; a Lease of a GpuReservation returns to it."""
    path = paths.leases(names.SYSTEM_NAMESPACE, record.lease_name)
    with contextlib.suppress(NotFound, Conflict):
        if record.reservation:
            await _write(client, "PUT", path, returned_lease(record, record.renewed))
            return
        await client.request(
            "DELETE",
            path,
            body=delete_options(uid=record.lease_uid, resource_version=record.resource_version),
            timeout_seconds=WRITE_SECONDS,
            retry=True,
        )


async def _read(client: ApiClient, name: str) -> Lease | None:
    return await read_live(client, paths.leases(names.SYSTEM_NAMESPACE, name), decode_lease)


def _record(lease: Lease) -> LeaseRecord | None:
    try:
        return parse_lease(lease)
    except MalformedValue:
        return None
