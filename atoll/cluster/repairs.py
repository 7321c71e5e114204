"""Where Leases and pods disagree, and what follows from it.

It tells what a Lease means for its holder, which Leases a bound pod lacks, and whose an unreadable Lease is. Nothing
here is proof enough to act: the controllers ask the API server again before they write.
A bound pod's annotation outranks its Lease.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from atoll.cluster import pods
from atoll.cluster.allocations import Allocation, bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import Holder, LeaseRecord, lease_name
from atoll.cluster.machines import NodeDevices
from atoll.cluster.objects import Pod
from atoll.cluster.reservation_use import reservation_name


class LeaseState(StrEnum):
    """What a Lease is to the pod that its holder identity names."""

    HELD = "the bound pod's annotation names the device"
    RESERVED = "the reservation of a bind that may still succeed"
    OVERDUE = "the pod is not bound, and the reservation's deadline has passed"
    STRAY = "the pod is bound to other devices"
    DEPARTED = "the pod is terminal, or nobody knows it"
    UNCLEAR = "the pod is bound, and its annotation cannot be read"
    KEPT = "a GpuReservation holds the device for pods to come"


@dataclass(frozen=True, slots=True)
class MissingLease:
    """A device that a bound pod's annotation names, and the Lease that should say so."""

    name: str
    holder: Holder
    claim: str
    node: str
    device_id: int
    device_uuid: str


def lease_state(record: LeaseRecord, pod: Pod | None, now: str) -> LeaseState:
    """Say what a Lease is to its holder; `pod` is the pod with the holder's uid, None if there is none.

    A pod is bound once, with all of its devices: from then on it can use no other, however long that is reserved.
    `now` and the deadline are UTC times of one length, so their texts compare like the times. A deadline that is
    missing or malformed has passed: what follows is fenced, so a wrong clock costs a retry, never a GPU.
    """
    if record.holder.is_reservation:
        return LeaseState.KEPT
    if pod is None or pods.is_terminal(pod):
        return LeaseState.DEPARTED
    try:
        allocation = bound_allocation(pod)
    except MalformedValue:
        return LeaseState.UNCLEAR
    if allocation is not None and names_device(allocation, record):
        return LeaseState.HELD
    if pod.spec.node_name:
        return LeaseState.STRAY
    is_over = len(record.deadline) != len(now) or record.deadline <= now
    return LeaseState.OVERDUE if is_over else LeaseState.RESERVED


def names_device(allocation: Allocation, record: LeaseRecord) -> bool:
    """Tell whether an allocation covers the device of a Lease, by id or, after a renumbering, by uuid."""
    if allocation.node != record.node:
        return False
    return record.device_id in allocation.device_ids or record.device_uuid in allocation.uuids


def required_leases(pod: Pod) -> tuple[MissingLease, ...]:
    """Return every Lease that a bound pod must have; none for one that is unbound, terminal or cannot be read."""
    if pods.is_terminal(pod):
        return ()
    try:
        allocation = bound_allocation(pod)
    except MalformedValue:
        return ()
    if allocation is None:
        return ()
    return tuple(
        MissingLease(
            name=lease_name(allocation.node, device_id),
            holder=pods.holder_of(pod),
            claim=pods.claim_name(pod),
            node=allocation.node,
            device_id=device_id,
            device_uuid=uuid,
        )
        for device_id, uuid in zip(allocation.device_ids, allocation.uuids, strict=True)
    )


def lacking_records(pod: Pod, present: Collection[str]) -> tuple[LeaseRecord, ...]:
    """Return what the Leases of a bound pod would say, as far as the pod tells, without those named in `present`."""
    return tuple(
        LeaseRecord(
            lease_name=lease.name,
            lease_uid="",
            resource_version="",
            node=lease.node,
            node_uid="",
            device_id=lease.device_id,
            device_uuid=lease.device_uuid,
            holder=lease.holder,
            attempt="",
            deadline="",
            claim=lease.claim,
            reservation=reservation_name(pod),
        )
        for lease in required_leases(pod)
        if lease.name not in present
    )


def owner_of_unreadable(name: str, bound: Mapping[str, Pod]) -> MissingLease | None:
    """Return what an unreadable Lease should say: the bound pod whose annotation names its device, found by its *name*.

    None when no pod does, or when several do: then nobody can tell, and the device stays blocked.
    """
    found = [lease for pod in bound.values() for lease in required_leases(pod) if lease.name == name]
    return found[0] if len(found) == 1 else None


def device_of_lease_name(name: str, nodes: Mapping[str, NodeDevices]) -> tuple[str, int, str] | None:
    """Return (node, id, uuid) of the reported device whose Lease has this name; None when no report has it."""
    for node, devices in nodes.items():
        for device in devices.devices:
            if lease_name(node, device.id) == name:
                return node, device.id, device.uuid
    return None
