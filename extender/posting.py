"""Posts the Binding of a pod whose Leases are held, exactly once, whatever the network does.

`post_binding` returns the allocation that stands. It raises BindRefused when none of our requests can land any more,
and BindInDoubt when nobody can know. The Binding carries uid and resourceVersion, so a delayed copy cannot land on a
pod that changed since; as long as the pod did *not* change, it still can. A newer version is used only after the Leases
were seen to be held *after* that version was read: whoever takes a Lease back marks it first and moves the pod's
version second.

A restore of the API server takes Leases back too, and may leave the pod as it was. From then on a Binding is repeated
only while its Leases are there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from atoll.api import names
from atoll.cluster.allocations import Allocation
from atoll.cluster.objects import Pod, decode_pod
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.errors import ApiError, KubeError, ServerError, TooManyRequests, Unanswered
from extender.bind_plan import binding_body, fits_annotations
from extender.errors import BindInDoubt, BindRefused
from extender.reading import describe, read_live, standing_allocation
from extender.reservations import BindAttempt, ReservedGpus, still_held, withdrawn_text

BINDING_SECONDS = 4.0
VERSIONS_MAX = 8
PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 5.0
DOUBT_SECONDS_MAX = 600.0


@dataclass(frozen=True, slots=True)
class PostResult:
    """Why a Binding did not land, None when it did; whether an unanswered copy of it may have landed, or may yet."""

    refusal: ApiError | BindRefused | None
    may_have_landed: bool


async def post_binding(
    client: ApiClient, clock: Clock, held: ReservedGpus, is_restored: Callable[[], bool]
) -> Allocation:
    """Bind the pod as planned; return what it holds now, which an earlier bind may have chosen. `is_restored`: whether
    the API server was restored from a backup since the Leases were written.

    Raises BindRefused, BindInDoubt.
    """
    pod, plan = held.pod, held.plan
    version = pod.metadata.resource_version
    for _ in range(VERSIONS_MAX):
        sent = await _send_until_answered(client, clock, held, version, is_restored)
        if sent.refusal is None:
            return plan.allocation
        live = await _read_again(client, clock, pod, sent)
        if live is None:
            raise _gone(pod, sent)
        if live.spec.node_name:
            return standing_allocation(live, plan.allocation.node)
        if live.metadata.resource_version == version:
            raise _refused_as_it_is(pod, sent, sent.refusal)
        if live.metadata.deletion_timestamp is not None:
            raise BindRefused(f"{describe(pod)} is being deleted")
        if not fits_annotations(live, plan.annotations):
            raise BindRefused(f"{describe(pod)}: {names.REJECT_ANNOTATIONS}")
        await _check_still_held(client, pod, held.attempt, sent.refusal)
        if withdrawn := held.withdrawn():
            raise BindRefused(f"{describe(pod)} cannot be bound: {withdrawn_text(withdrawn)}")
        version = live.metadata.resource_version
    raise BindRefused(f"{describe(pod)} changed faster than it could be bound; kube-scheduler tries again")


async def _send_until_answered(
    client: ApiClient, clock: Clock, held: ReservedGpus, version: str, is_restored: Callable[[], bool]
) -> PostResult:
    """Repeat one Binding unchanged until the API server says yes or no, or has lost its Leases. Raises BindInDoubt."""
    pod, plan = held.pod, held.plan
    body = binding_body(pod, plan.allocation.node, plan.annotations, version)
    path = paths.binding(pod.metadata.namespace, pod.metadata.name)
    give_up_at = clock.monotonic_seconds() + DOUBT_SECONDS_MAX
    pause_seconds = PAUSE_SECONDS_MIN
    may_have_landed = False
    while True:
        try:
            if is_restored() and not await still_held(client, held.attempt):
                return PostResult(BindRefused("its Leases are gone since etcd was restored"), may_have_landed)
            await client.request("POST", path, body=body, timeout_seconds=BINDING_SECONDS, retry=False)
            return PostResult(None, may_have_landed)
        except KubeError as error:
            if _is_refusal(error):
                return PostResult(error, may_have_landed)
            may_have_landed |= _may_have_acted(error)
            if clock.monotonic_seconds() > give_up_at:
                raise BindInDoubt(f"nobody answered whether {describe(pod)} is bound: {error}") from error
        await clock.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * 2, PAUSE_SECONDS_MAX)


def _is_refusal(error: KubeError) -> TypeGuard[ApiError]:
    """Tell whether the API server decided; what it could not decide is asked again."""
    return isinstance(error, ApiError) and not isinstance(error, ServerError | TooManyRequests)


def _may_have_acted(error: KubeError) -> bool:
    return error.sent if isinstance(error, Unanswered) else not isinstance(error, TooManyRequests)


async def _read_again(client: ApiClient, clock: Clock, pod: Pod, sent: PostResult) -> Pod | None:
    """Read the pod after a refusal, as often as it takes while a copy may have landed; None when this pod is gone."""
    path = paths.pods(pod.metadata.namespace, pod.metadata.name)
    give_up_at = clock.monotonic_seconds() + DOUBT_SECONDS_MAX
    while True:
        try:
            live = await read_live(client, path, decode_pod)
            return live if live is not None and live.metadata.uid == pod.metadata.uid else None
        except KubeError as error:
            if not sent.may_have_landed:
                raise BindRefused(f"{describe(pod)} cannot be bound ({sent.refusal}) nor read ({error})") from error
            if clock.monotonic_seconds() > give_up_at:
                raise BindInDoubt(f"{describe(pod)} cannot be read to see whether it is bound: {error}") from error
        await clock.sleep(PAUSE_SECONDS_MAX)


def _gone(pod: Pod, sent: PostResult) -> BindRefused | BindInDoubt:
    if sent.may_have_landed:
        return BindInDoubt(f"{describe(pod)} is gone, and its Binding may have landed before")
    return BindRefused(f"{describe(pod)} no longer exists")


def _refused_as_it_is(pod: Pod, sent: PostResult, refusal: ApiError | BindRefused) -> BindRefused | BindInDoubt:
    """The pod is as it was read. An unanswered copy of the Binding could still land on it, else nothing can."""
    if sent.may_have_landed:
        return BindInDoubt(f"{describe(pod)} is not bound now, but an earlier request may yet land: {refusal}")
    return BindRefused(f"{describe(pod)} is not bound as it is: {refusal}")


async def _check_still_held(client: ApiClient, pod: Pod, attempt: BindAttempt, refusal: ApiError | BindRefused) -> None:
    """Raise BindRefused unless every Lease is still held; the pod has moved on, so no older Binding can land."""
    try:
        is_held = await still_held(client, attempt)
    except KubeError as error:
        raise BindRefused(f"{describe(pod)} changed, and its Leases cannot be read again: {error}") from error
    if not is_held:
        raise BindRefused(f"the GPUs of {describe(pod)} were taken back; kube-scheduler tries again: {refusal}")
