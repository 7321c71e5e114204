"""Fenced writes of GPU Leases: each names the object and the version that the decision was made on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.api import names
from atoll.cluster.leases import LeaseRecord, returned_lease
from atoll.cluster.objects import Lease, decode_lease
from atoll.kube import paths
from atoll.kube.api import Api
from atoll.kube.errors import Conflict, NotFound
from atoll.kube.patches import delete_options, merge_patch


async def delete_lease(api: Api, record: LeaseRecord) -> bool:
    """Delete this very version of the Lease; False when it was gone already, or has a successor.

    Raises Conflict when it is still the same Lease and has changed.
    """
    options = delete_options(uid=record.lease_uid, resource_version=record.resource_version)
    try:
        await api.delete(_path(record.lease_name), options)
    except NotFound:
        return False
    except Conflict:
        live = await read_lease(api, record.lease_name)
        if live is not None and live.metadata.uid == record.lease_uid:
            raise
        return False
    return True


async def end_lease(api: Api, record: LeaseRecord, now: str, *, heir: str = "") -> bool:
    """End a pod's hold on exactly this version of a Lease: return it to its GpuReservation, give it to `heir`, which is
    the NAME/UID of one, or delete it. False if it is already gone. Raises Conflict if it has changed."""
    mark = record.reservation or heir
    if not mark or record.holder.is_reservation:
        return await delete_lease(api, record)
    return await rewrite_lease(api, record, returned_lease(replace(record, reservation=mark), now))


async def rewrite_lease(api: Api, record: LeaseRecord, body: Mapping[str, Any]) -> bool:
    """Give exactly this version of a Lease to the holder that `body` names, without any mark of the one before. False
    if it is gone. Raises Conflict if it has changed."""
    gone = dict.fromkeys((names.LEASE_IN_DOUBT, names.LEASE_FENCED, names.LEASE_GANG, names.RESERVATION))
    patch = merge_patch(
        uid=record.lease_uid,
        resource_version=record.resource_version,
        annotations={**gone, **body["metadata"]["annotations"]},
        spec=body["spec"],
    )
    try:
        await api.patch(_path(record.lease_name), patch)
    except NotFound:
        return False
    return True


async def annotate_lease(api: Api, record: LeaseRecord, annotations: Mapping[str, str | None]) -> LeaseRecord | None:
    """Change annotations of this very version; return the record with its new version, None when the Lease is gone.

    Raises Conflict when it changed meanwhile.
    """
    body = merge_patch(uid=record.lease_uid, resource_version=record.resource_version, annotations=annotations)
    try:
        answer = decode_lease(await api.patch(_path(record.lease_name), body))
    except NotFound:
        return None
    return replace(record, resource_version=answer.metadata.resource_version)


async def read_lease(api: Api, name: str) -> Lease | None:
    """Read a Lease live; None when there is none."""
    try:
        return decode_lease(await api.get(_path(name)))
    except NotFound:
        return None


def _path(name: str) -> str:
    return paths.leases(names.SYSTEM_NAMESPACE, name)
