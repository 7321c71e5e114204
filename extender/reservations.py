"""Creating the Leases of one bind, and taking back what a failed bind created.

In: a plan and the facts of the attempt. Out: the Leases, or the devices that others took first. The API server lets
exactly one creator of a Lease win; that is the whole lock. Only Leases that this very attempt created are ever deleted.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from atoll.api import names
from atoll.cluster.allocations import Allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import LeaseRecord, Reservation, lease_body, lease_name, parse_lease
from atoll.cluster.objects import Lease, decode_lease
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import AlreadyExists, Conflict, KubeError, NotFound, ServerError, TooManyRequests, Unanswered
from atoll.kube.patches import delete_options

log = structlog.get_logger(__name__)

WRITE_SECONDS = 5.0
CREATE_TRIES_MAX = 3


@dataclass(slots=True)
class Attempt:
    """One bind attempt: what it reserves for, the Leases it holds, and which of them it created itself, by name."""

    reservation: Reservation
    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)

    def surplus(self, allocation: Allocation) -> set[str]:
        """Return the Leases that this attempt created and `allocation` does not need."""
        needed = {lease_name(allocation.node, device_id) for device_id in allocation.device_ids}
        return self.created - needed


async def reserve(client: ApiClient, attempt: Attempt, allocation: Allocation) -> frozenset[int]:
    """Create the missing Leases of `allocation`, concurrently; return the ids that somebody else holds.

    Raises KubeError when the API server cannot say who holds a device.
    """
    devices = tuple(zip(allocation.device_ids, allocation.uuids, strict=True))
    won = await asyncio.gather(*(_create(client, attempt, device_id, uuid) for device_id, uuid in devices))
    return frozenset(device_id for (device_id, _), is_ours in zip(devices, won, strict=True) if not is_ours)


async def _create(client: ApiClient, attempt: Attempt, device_id: int, uuid: str) -> bool:
    """Create one Lease, or find that the same pod holds it already. False when another pod does."""
    name = lease_name(attempt.reservation.node, device_id)
    if name in attempt.leases:
        return True
    body = lease_body(attempt.reservation, device_id, uuid)
    for number in range(1, CREATE_TRIES_MAX + 1):
        try:
            raw = await client.request(
                "POST", paths.leases(names.SYSTEM_NAMESPACE), body=body, timeout_seconds=WRITE_SECONDS
            )
        except AlreadyExists:
            return await _is_own(client, attempt, name, uuid)
        except (Unanswered, ServerError, TooManyRequests):
            if number == CREATE_TRIES_MAX:
                raise
        else:
            attempt.leases[name] = parse_lease(decode_lease(raw))
            attempt.created.add(name)
            return True
    raise AssertionError("the loop above returns or raises")


async def _is_own(client: ApiClient, attempt: Attempt, name: str, uuid: str) -> bool:
    """Tell whether the Lease that exists is this pod's: from a repeated create, or from an earlier attempt."""
    lease = await _read(client, name)
    record = _record(lease) if lease is not None else None
    if lease is None or record is None or record.holder.uid != attempt.reservation.holder.uid:
        return False
    if record.device_uuid != uuid or names.LEASE_FENCED in lease.metadata.annotations:
        return False
    attempt.leases[name] = record
    if record.attempt == attempt.reservation.attempt:
        attempt.created.add(name)
    return True


async def still_held(client: ApiClient, attempt: Attempt) -> bool:
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


async def _read(client: ApiClient, name: str) -> Lease | None:
    path = paths.leases(names.SYSTEM_NAMESPACE, name)
    try:
        return decode_lease(await client.request("GET", path, timeout_seconds=WRITE_SECONDS, retry=True))
    except NotFound:
        return None


def _record(lease: Lease) -> LeaseRecord | None:
    try:
        return parse_lease(lease)
    except MalformedValue:
        return None


async def take_back(client: ApiClient, attempt: Attempt, lease_names: Iterable[str]) -> None:
    """Delete Leases that this attempt created; what cannot be deleted now is left to the controllers' sweep."""
    ours = attempt.created.intersection(lease_names)
    attempt.created -= ours
    records = [attempt.leases.pop(name) for name in sorted(ours)]
    await asyncio.gather(*(_delete(client, record) for record in records))


async def _delete(client: ApiClient, record: LeaseRecord) -> None:
    try:
        await client.request(
            "DELETE",
            paths.leases(names.SYSTEM_NAMESPACE, record.lease_name),
            body=delete_options(uid=record.lease_uid, resource_version=record.resource_version),
            timeout_seconds=WRITE_SECONDS,
            retry=True,
        )
    except (NotFound, Conflict):
        return
    except KubeError as error:
        log.warning("Left a Lease to the sweep", lease=record.lease_name, err=str(error))
