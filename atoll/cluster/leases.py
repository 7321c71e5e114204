"""GPU Leases: their names, their holders, their bodies.

There is one Lease per GPU in names.SYSTEM_NAMESPACE; creating it is the reservation. The rules of who may end a Lease
are in `atoll.cluster.release`.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from atoll.api import names
from atoll.cluster.errors import MalformedValue
from atoll.cluster.objects import Lease

NAME_LENGTH_MAX = 253
_HASH_LENGTH = 12
RESERVATION_NAMESPACE = "@reservation"
"""Takes the place of a pod's namespace if a GpuReservation holds a Lease; no namespace can have such a name."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The pod or GpuReservation that holds a Lease. Only the uid decides; the rest is for people and look-ups."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}/{self.uid}"

    @property
    def is_reservation(self) -> bool:
        """Return whether a GpuReservation itself holds the Lease, not a pod."""
        return self.namespace == RESERVATION_NAMESPACE


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a GPU Lease says. `deadline` is a UTC time text of the reservation; it frees nothing by itself. `created`:
    since when the Lease exists, whoever has written it since. `renewed`: when it was written, by the same clock as the
    deadline."""

    lease_name: str
    lease_uid: str
    resource_version: str
    node: str
    node_uid: str
    device_id: int
    device_uuid: str
    holder: Holder
    attempt: str
    deadline: str
    claim: str
    gang: str = ""
    doubt: str = ""
    created: str = ""
    renewed: str = ""
    reservation: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """One attempt's reservation: everything a Lease body needs except the device. `gang` is NAMESPACE/NAME/UID,
    `reservation` NAME/UID of the GpuReservation that the Lease returns to."""

    node: str
    node_uid: str
    holder: Holder
    claim: str
    attempt: str
    now: str
    deadline: str
    gang: str = ""
    reservation: str = ""


def lease_name(node: str, device_id: int) -> str:
    """Return the Lease name of a device: readable, and cut with a hash where it would exceed 253 characters."""
    name = f"gpu-{node}-{device_id}"
    if len(name) <= NAME_LENGTH_MAX:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:_HASH_LENGTH]
    suffix = f"-{digest}-{device_id}"
    return name[: NAME_LENGTH_MAX - len(suffix)].rstrip("-.") + suffix


def parse_holder(identity: str) -> Holder:
    """Read `namespace/pod/uid`. Raises MalformedValue."""
    parts = identity.split("/")
    if len(parts) != 3 or not all(parts):
        raise MalformedValue("Lease holderIdentity", identity, "NAMESPACE/POD/UID")
    return Holder(*parts)


def parse_lease(lease: Lease) -> LeaseRecord:
    """Read a GPU Lease. Raises MalformedValue when node, device or holder cannot be read or disagree with the name."""
    annotations = lease.metadata.annotations
    node = annotations.get(names.LEASE_NODE, "")
    id_text = annotations.get(names.LEASE_DEVICE_ID, "")
    if not node or not (id_text.isascii() and id_text.isdigit()) or len(id_text) > 5:
        raise MalformedValue(
            f"device of Lease {lease.metadata.name}", f"{node}/{id_text}", "node and device id annotations"
        )
    if lease_name(node, int(id_text)) != lease.metadata.name:
        raise MalformedValue(
            f"device of Lease {lease.metadata.name}", f"{node}/{id_text}", "the device that the name says"
        )
    return LeaseRecord(
        lease_name=lease.metadata.name,
        lease_uid=lease.metadata.uid,
        resource_version=lease.metadata.resource_version,
        node=node,
        node_uid=annotations.get(names.LEASE_NODE_UID, ""),
        device_id=int(id_text),
        device_uuid=annotations.get(names.LEASE_DEVICE_UUID, ""),
        holder=parse_holder(lease.spec.holder_identity),
        attempt=annotations.get(names.LEASE_ATTEMPT, ""),
        deadline=annotations.get(names.LEASE_DEADLINE, ""),
        claim=annotations.get(names.LEASE_CLAIM, ""),
        gang=annotations.get(names.LEASE_GANG, ""),
        doubt=annotations.get(names.LEASE_IN_DOUBT, ""),
        created=lease.metadata.creation_timestamp or "",
        renewed=lease.spec.renew_time or "",
        reservation=annotations.get(names.RESERVATION, ""),
    )


def lease_body(reservation: Reservation, device_id: int, device_uuid: str) -> dict[str, Any]:
    """Return the Lease that reserves one device. No owner reference: the collector of a deleted Node would free it."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": lease_name(reservation.node, device_id),
            "namespace": names.SYSTEM_NAMESPACE,
            "labels": {names.LEASE_KIND_LABEL: names.LEASE_KIND_GPU},
            "annotations": {
                names.LEASE_NODE: reservation.node,
                names.LEASE_NODE_UID: reservation.node_uid,
                names.LEASE_DEVICE_ID: str(device_id),
                names.LEASE_DEVICE_UUID: device_uuid,
                names.LEASE_CLAIM: reservation.claim,
                names.LEASE_ATTEMPT: reservation.attempt,
                names.LEASE_DEADLINE: reservation.deadline,
                **({names.LEASE_GANG: reservation.gang} if reservation.gang else {}),
                **({names.RESERVATION: reservation.reservation} if reservation.reservation else {}),
            },
        },
        "spec": {
            "holderIdentity": str(reservation.holder),
            "acquireTime": reservation.now,
            "renewTime": reservation.now,
            "leaseTransitions": 0,
        },
    }


def reserved_for(mark: str, node: str, node_uid: str, now: str) -> Reservation:
    """Return the Reservation for Leases that a GpuReservation, given as NAME/UID, itself holds on a node."""
    name, _, uid = mark.rpartition("/")
    holder = Holder(RESERVATION_NAMESPACE, name, uid)
    return Reservation(node, node_uid, holder, claim="", attempt="", now=now, deadline="", reservation=mark)


def returned_lease(record: LeaseRecord, now: str) -> dict[str, Any]:
    """Return the body that returns a pod's Lease to its GpuReservation, fenced by this version."""
    reservation = reserved_for(record.reservation, record.node, record.node_uid, now)
    body = lease_body(reservation, record.device_id, record.device_uuid)
    body["metadata"] |= {"uid": record.lease_uid, "resourceVersion": record.resource_version}
    return body


def may_be_gpu_lease(lease: Lease) -> bool:
    """Tell whether a Lease is that of a GPU, by its label or, where somebody took that off, by its name."""
    is_labelled = lease.metadata.labels.get(names.LEASE_KIND_LABEL) == names.LEASE_KIND_GPU
    return is_labelled or lease.metadata.name.startswith("gpu-")
