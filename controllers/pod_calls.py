"""Fenced API calls on a pod: live look-up, a fence, eviction with its notice, and the annotation that keeps GPUs.

A cache is not proof enough for a release, so that a look-up asks the API server. Atoll ends pods of others through the
eviction API alone, so that their disruption budgets hold. A pod that is gone, or replaced by a namesake, is no error.
"""

import contextlib
from dataclasses import dataclass

import structlog

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.leases import Holder
from atoll.cluster.objects import Pod, decode_pod
from atoll.cluster.pods import holder_of
from atoll.cluster.preemption_notices import notice_of
from atoll.cluster.release import version_number
from atoll.cluster.soft_reservations import SoftReservation
from atoll.kube import paths
from atoll.kube.api import Api
from atoll.kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, TooManyRequests
from atoll.kube.patches import STRATEGIC_MERGE_PATCH, eviction, merge_patch
from controllers.context import Context

log = structlog.get_logger(__name__)

BUDGET_SECONDS = 10.0
"""When to ask again where a disruption budget, or a busy API server, does not say."""


class EvictionRefused(Exception):
    """A disruption budget allows no eviction now; ask again after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


async def evict(api: Api, pod: Pod, *, dry_run: bool = False) -> bool:
    """Evict the pod with this uid, False when it is gone. `dry_run` only asks. Raises EvictionRefused, KubeError."""
    metadata = pod.metadata
    body = eviction(metadata.namespace, metadata.name, uid=metadata.uid, dry_run=dry_run)
    try:
        await api.create(paths.eviction(metadata.namespace, metadata.name), body)
    except TooManyRequests as error:
        raise EvictionRefused(str(error), retry_after_seconds=error.retry_after_seconds or BUDGET_SECONDS) from error
    except (NotFound, Conflict):
        return False
    return True


async def try_evict(context: Context, pod: Pod, why: str, **facts: object) -> float | None:
    """Evict the pod, and log why with these facts. Return when to ask again where a disruption budget refuses it,
    None where nothing is left to do. Raises KubeError."""
    holder, uid = str(holder_of(pod)), pod.metadata.uid
    try:
        is_evicted = await evict(context.api, pod)
    except EvictionRefused as error:
        log.info("Cannot evict a pod yet", pod=holder, uid=uid, err=str(error))
        return error.retry_after_seconds
    if is_evicted:
        context.metrics.pods_evicted.inc()
        log.warning("Evicted a pod", pod=holder, uid=uid, why=why, **facts)
    return None


async def read_report(api: Api, node: str) -> GpuNodeStatus | None:
    """Read a node's report, None without one. Read it after the pod: a bind may have used a newer one than the mirror
    has."""
    try:
        return GpuNodeStatus.model_validate_json(await api.get(paths.gpunodestatuses(node)))
    except NotFound:
        return None


@dataclass(frozen=True, slots=True)
class PodLookup:
    """The pod with the uid that was asked for, None when it does not exist; true as of `version`."""

    pod: Pod | None
    version: int


async def look_up(api: Api, holder: Holder) -> PodLookup:
    """Look for a pod by name and compare the uid. Raises KubeError.

    A list of one name instead of a get: where the pod is missing, only a list says as of which version.
    """
    selector = {"fieldSelector": f"metadata.name={_escape(holder.name)}"}
    listing = await api.list(paths.pods(holder.namespace), decode_pod, params=selector)
    pod = next((pod for pod in listing.items if pod.metadata.uid == holder.uid), None)
    return PodLookup(pod, version_number(listing.resource_version))


def _escape(name: str) -> str:
    """Escape what has a meaning in a field selector: the name stands on a Lease, which anybody may have written."""
    return name.replace("\\", "\\\\").replace(",", "\\,").replace("=", "\\=")


async def move(context: Context, holder: Holder, *, generation: int) -> Pod | None:
    """Write a value that the pod never had, so that no write that was prepared before lands; return the pod as that
    left it, None when it is gone. A pod that takes no annotation gets a condition. Raises KubeError.

    `generation`: the version of a Lease or pod that is newer than every earlier fence of this pod.
    """
    path = paths.pods(holder.namespace, holder.name)
    try:
        try:
            body = merge_patch(uid=holder.uid, annotations={names.WOKEN: str(generation)})
            return decode_pod(await context.api.patch(path, body))
        except (Forbidden, Invalid) as error:
            body = merge_patch(uid=holder.uid, status={"conditions": [_refusal(context, generation, error)]})
            path = paths.pods(holder.namespace, holder.name, "status")
            return decode_pod(await context.api.patch(path, body, content_type=STRATEGIC_MERGE_PATCH))
    except (NotFound, Conflict):
        return None


def _refusal(context: Context, generation: int, error: ApiError) -> dict[str, str]:
    return {
        "type": names.POD_TAKES_WRITES,
        "status": "False",
        "reason": names.REASON_WRITE_REFUSED,
        "message": f"reserved GPUs were given back ({generation}); annotation {names.WOKEN} refused: {error.message}",
        "lastTransitionTime": context.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


async def evict_with_notice(context: Context, pod: Pod) -> bool:
    """Annotate the pod with the time of its end, then evict it as `evict` does. Checks the disruption budgets first, so
    that a refused eviction gives no notice if possible. Raises EvictionRefused, KubeError."""
    if not await evict(context.api, pod, dry_run=True):
        return False
    await give_notice(context, pod)
    try:
        return await evict(context.api, pod)
    except EvictionRefused:
        await withdraw_notice(context, pod)
        raise


async def give_notice(context: Context, pod: Pod) -> None:
    """Annotate a pod that is about to be ended with the time of its end, once. Raises KubeError.

    A pod that is gone needs no notice, and one that cannot be annotated only gets SIGTERM.
    """
    if names.PREEMPTION_NOTICE in pod.metadata.annotations:
        return
    try:
        text = notice_of(pod, context.clock.now().timestamp())
        await _annotate_notice(context, pod, text, resource_version=pod.metadata.resource_version)
    except NotFound:
        return
    except (Forbidden, Invalid) as error:
        log.info("Could not annotate the notice", pod=str(holder_of(pod)), uid=pod.metadata.uid, err=str(error))


async def withdraw_notice(context: Context, pod: Pod) -> None:
    """Remove a notice that no eviction followed, whatever else changed on the pod. Raises KubeError."""
    with contextlib.suppress(ApiError):
        await _annotate_notice(context, pod, None)


async def _annotate_notice(context: Context, pod: Pod, text: str | None, *, resource_version: str = "") -> None:
    metadata, annotations = pod.metadata, {names.PREEMPTION_NOTICE: text}
    body = merge_patch(uid=metadata.uid, resource_version=resource_version, annotations=annotations)
    await context.api.patch(paths.pods(metadata.namespace, metadata.name), body)


async def write_kept(context: Context, pod: Pod, kept: SoftReservation | None) -> None:
    """Write on the pod which GPUs are kept for it, None for none, and tell the ledger at once.

    Raises Conflict when the pod is no longer as it was judged, and KubeError.
    """
    metadata = pod.metadata
    annotations = {names.KEPT: str(kept) if kept is not None else None}
    body = merge_patch(uid=metadata.uid, resource_version=metadata.resource_version, annotations=annotations)
    await context.api.patch(paths.pods(metadata.namespace, metadata.name), body)
    context.mirror.ledger.keep(metadata.uid, kept)
