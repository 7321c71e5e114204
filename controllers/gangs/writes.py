"""Fenced, idempotent writes of gang admission.

The callers keep the order of an admission: all Leases, then the gang's status, then for each member the nomination
while it is gated (kube-scheduler sets cpu and memory aside for it), then node and gate in one patch.

Unreserving begins with a write on the pod. Its answer shows whether the gate is still there, and no patch that was
prepared before can remove the gate any more. A gated pod is bound by nobody, so its Leases may go.

A status whose write got no answer may arrive late. So the gang's version is moved before anything else is decided, and
before the reservations of a gang that is not admitted are taken back: whatever was prepared before fails then.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import structlog

from atoll.api import names
from atoll.api.gangs import GpuGang, GpuGangStatus
from atoll.api.times import format_microtime
from atoll.cluster import pods
from atoll.cluster.errors import MalformedValue
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.member_assignments import MemberAssignment, open_gate
from atoll.cluster.gangs.membership import GangMember, has_gate
from atoll.cluster.gangs.rendezvous import rendezvous_annotations
from atoll.cluster.leases import LeaseRecord, Reservation, lease_body, lease_name, parse_lease
from atoll.cluster.objects import Lease, Pod
from atoll.cluster.release import version_number
from atoll.kube import paths
from atoll.kube.errors import AlreadyExists, Conflict, KubeError, NotFound, ServerError, Unanswered
from atoll.kube.patches import merge_patch
from controllers.context import Context
from controllers.gangs.answers import NominatedMember, Written, decode
from controllers.gangs.cache import GangCache
from controllers.leases.writes import annotate_lease, end_lease, read_lease, rewrite_lease
from controllers.pod_calls import move

log = structlog.get_logger(__name__)

RESERVATION_SECONDS = 600.0
"""A leader that dies in the middle is succeeded in seconds; this long, its reservations mean something."""
AT_ONCE = 32
T = TypeVar("T")
U = TypeVar("U")


async def each(items: Iterable[T], work: Callable[[T], Awaitable[U]]) -> list[U | BaseException]:
    """Do the work for every item, some at once; every one has ended when this returns, faults among the answers."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> U:
        async with limit:
            return await work(item)

    return await asyncio.gather(*(one(item) for item in items), return_exceptions=True)


def raise_first(answers: Iterable[object]) -> None:
    """Raise the first fault among answers, one that is no KubeError before any that is."""
    faults = [answer for answer in answers if isinstance(answer, BaseException)]
    for fault in sorted(faults, key=lambda fault: isinstance(fault, KubeError)):
        raise fault


async def reserve(
    context: Context,
    gang: GpuGang,
    assignments: Sequence[MemberAssignment],
    claims: dict[str, str],
    attempt: str,
    reserved_by: str = "",
) -> bool:
    """Create the Leases of all assignments; or, for a gang that uses the GpuReservation `reserved_by`, a uid, take over
    the Leases that it holds. False when somebody else holds a GPU; KubeError when that is unknown.

    Every write has ended by then; what was written stays, and the caller takes it back. Until then the assumptions
    stay, which have the token `attempt`, also for a member that goes: its requests may still be carried out.
    """
    identity = f"{gang.metadata.namespace}/{gang.metadata.name}/{gang.metadata.uid}"

    async def create(entry: tuple[MemberAssignment, int, str]) -> bool:
        assignment, device_id, uuid = entry
        now, idle = context.clock.now(), None
        if reserved_by:
            idle = context.mirror.ledger.leases.get(lease_name(assignment.allocation.node, device_id))
            if idle is None or idle.holder.uid != reserved_by or idle.device_uuid != uuid:
                return False
        reservation = Reservation(
            node=assignment.allocation.node,
            node_uid=assignment.node_uid,
            holder=pods.holder_of(assignment.member.pod),
            claim=claims.get(assignment.member.uid, ""),
            attempt=attempt,
            now=format_microtime(now),
            deadline=format_microtime(now + timedelta(seconds=RESERVATION_SECONDS)),
            gang=identity,
            reservation=idle.reservation if idle is not None else "",
        )
        body = lease_body(reservation, device_id, uuid)
        try:
            if idle is not None:
                return await rewrite_lease(context.api, idle, body)
            await context.api.create(paths.leases(names.SYSTEM_NAMESPACE), body)
        except (AlreadyExists, Conflict):
            return False
        return True

    entries = [
        (assignment, device_id, uuid)
        for assignment in assignments
        for device_id, uuid in zip(assignment.allocation.device_ids, assignment.allocation.uuids, strict=True)
    ]
    try:
        answers = await each(entries, create)
    finally:
        for one in assignments:
            context.mirror.ledger.end_attempt(one.member.uid, attempt=attempt)
    raise_first(answers)
    return all(answer is True for answer in answers)


async def nominate(context: Context, pod: Pod, node: str) -> NominatedMember | None:
    """Nominate a gated pod; return it as that write left it, None if it has changed in the meantime, or is gone."""
    metadata = pod.metadata
    body = merge_patch(uid=metadata.uid, resource_version=metadata.resource_version, status={"nominatedNodeName": node})
    try:
        path = paths.pods(metadata.namespace, metadata.name, "status")
        return decode(await context.api.patch(path, body), NominatedMember, path)
    except (NotFound, Conflict) as error:
        _log_gated(pod, error)
        return None


async def ungate(context: Context, pod: Pod, node: str, annotations: Mapping[str, str], seen: NominatedMember) -> bool:
    """Pin a nominated pod, open its gate and annotate it, in one patch. `seen`: as the nomination left it. False, and
    nothing happens, if the pod has changed in the meantime, or is gone."""
    metadata = pod.metadata
    body = merge_patch(
        uid=metadata.uid,
        resource_version=seen.metadata.resource_version,
        annotations=dict(annotations) or None,
        spec=open_gate(seen.spec.affinity, seen.spec.scheduling_gates or (), node),
    )
    try:
        await context.api.patch(paths.pods(metadata.namespace, metadata.name), body)
    except (NotFound, Conflict) as error:
        _log_gated(pod, error)
        return False
    return True


def member_annotations(view: GangView, admission: str, coming: Iterable[GangMember]) -> dict[str, dict[str, str]]:
    """Return the annotations that members get with their open gates, by uid: the id of the admission, and for those
    that ask what they need to find each other."""
    uids = {member.uid for member in coming}
    found = rendezvous_annotations(view.gang.spec, view.members, uids)
    shared = {names.ADMISSION: admission} if admission else {}
    return {uid: {**shared, **found.get(uid, {})} for uid in uids}


def _log_gated(pod: Pod, error: KubeError) -> None:
    name = f"{pod.metadata.namespace}/{pod.metadata.name}"
    log.info("Could not let a member go yet", pod=name, uid=pod.metadata.uid, err=str(error))


async def is_reserved(context: Context, uid: str, names_of_leases: Sequence[str]) -> bool:
    """Renew the Leases of a gated member; False when one is gone, or another's. A deletion that was decided on before
    fails then, however late it arrives. Raises Conflict when a Lease has changed."""
    answers = await each(names_of_leases, lambda name: _renew(context, name, uid))
    raise_first(answers)
    return bool(answers) and all(answer is True for answer in answers)


async def _renew(context: Context, name: str, uid: str) -> bool:
    record = context.mirror.ledger.leases.get(name)
    if record is None or record.holder.uid != uid:
        lease = await read_lease(context.api, name)
        record = _record(lease) if lease is not None else None
    if record is None or record.holder.uid != uid:
        return False
    deadline = format_microtime(context.clock.now() + timedelta(seconds=RESERVATION_SECONDS))
    return await annotate_lease(context.api, record, {names.LEASE_DEADLINE: deadline}) is not None


async def unreserve(
    context: Context, members: Sequence[GangMember], assignments: Sequence[MemberAssignment] = ()
) -> None:
    """Delete the Leases of gated members, also those just made for `assignments` that the mirror does not show yet."""
    made = {assignment.member.uid: assignment for assignment in assignments}
    raise_first(await each(members, lambda member: _unreserve(context, member.pod, made.get(member.uid))))


async def _unreserve(context: Context, pod: Pod, assignment: MemberAssignment | None) -> None:
    ledger, uid = context.mirror.ledger, pod.metadata.uid
    seen = await _move(context, pod)
    if seen is not None and has_gate(seen) and seen.status.nominated_node_name:
        await _clear_nomination(context, seen)
    if seen is None or has_gate(seen):
        known = {record.lease_name for record in ledger.leases_of(uid)}
        made = assignment.allocation if assignment is not None else ledger.assumed(uid)
        if made is not None:
            known |= {lease_name(made.node, device_id) for device_id in made.device_ids}
        if seen is not None:
            raise_first(await each(sorted(known), lambda name: _delete_own(context, name, uid)))
        ledger.forget(uid)


async def _move(context: Context, pod: Pod) -> Pod | None:
    """Write a value that the pod never had; return the pod as that write left it, None when it is gone."""
    metadata = pod.metadata
    generation = max(
        (version_number(record.resource_version) for record in context.mirror.ledger.leases_of(metadata.uid)),
        default=version_number(metadata.resource_version),
    )
    return await move(context, pods.holder_of(pod), generation=generation)


async def _clear_nomination(context: Context, pod: Pod) -> None:
    """Give back the cpu and memory that kube-scheduler set aside for a gated pod."""
    metadata = pod.metadata
    body = merge_patch(uid=metadata.uid, status={"nominatedNodeName": None})
    with contextlib.suppress(NotFound, Conflict):
        await context.api.patch(paths.pods(metadata.namespace, metadata.name, "status"), body)


async def _delete_own(context: Context, name: str, uid: str) -> None:
    """Delete the Lease of that name if the pod with that uid holds it, as a live look shows; one of a GpuReservation
    returns to it."""
    lease = await read_lease(context.api, name)
    record = _record(lease) if lease is not None else None
    if record is not None and record.holder.uid == uid:
        await end_lease(context.api, record, context.now_text())


def _record(lease: Lease) -> LeaseRecord | None:
    try:
        return parse_lease(lease)
    except MalformedValue:
        return None


async def write_status(context: Context, cache: GangCache, gang: GpuGang, status: GpuGangStatus) -> None:
    """Write the status if it differs from what the gang shows, and note the version that it leaves, or that it may
    still arrive. Raises Conflict when the gang has changed meanwhile, and other KubeErrors."""
    before = (gang.status or GpuGangStatus()).to_json()
    after = status.to_json()
    if before == after:
        return
    gone = dict.fromkeys(key for key in before if key not in after)
    metadata = gang.metadata
    body = merge_patch(
        uid=metadata.uid, resource_version=metadata.resource_version, status={**gone, **_whole(before, after)}
    )
    path = paths.gpugangs(metadata.namespace, metadata.name, "status")
    try:
        answer = await context.api.patch(path, body)
    except (Unanswered, ServerError):
        cache.note_unanswered(gang)
        raise
    cache.note_written(metadata.uid, decode(answer, Written, path).metadata.resource_version)


async def fence(context: Context, cache: GangCache, gang: GpuGang) -> None:
    """Move the gang's version, so that no status that was prepared before can arrive any more. Raises Conflict when the
    gang has changed since it was seen, and other KubeErrors."""
    metadata = gang.metadata
    body = merge_patch(
        uid=metadata.uid,
        resource_version=metadata.resource_version,
        annotations={names.GANG_FENCED: context.new_token()},
    )
    path = paths.gpugangs(metadata.namespace, metadata.name)
    answer = await context.api.patch(path, body)
    cache.note_written(metadata.uid, decode(answer, Written, path).metadata.resource_version)


def _whole(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what to merge: a merge patch keeps keys of an object that it does not name, so those are set to null."""
    merged: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = {**dict.fromkeys(name for name in old if name not in value), **_whole(old, value)}
        else:
            merged[key] = value
    return merged


async def set_active(context: Context, gang: GpuGang, *, active: bool) -> None:
    """Write spec.active. Raises Conflict when the gang has changed since it was seen, and other KubeErrors."""
    metadata = gang.metadata
    body = merge_patch(uid=metadata.uid, resource_version=metadata.resource_version, spec={"active": active})
    await context.api.patch(paths.gpugangs(metadata.namespace, metadata.name), body)
