"""Posting the Binding of a pod whose Leases are held, exactly once, whatever the network does.

In: the pod as read, the plan, the attempt with its Leases. Out: nothing when the Binding stands, BindRefused when it
certainly does not, BindInDoubt when nobody can know. The Binding carries uid and resourceVersion, so one that was
delayed cannot land on a pod that changed since. A newer version is used only after the Leases were seen to be held
*after* that version was read: whoever takes a Lease back marks it first and moves the pod's version second.
"""

from dataclasses import dataclass
from enum import Enum, auto

from atoll.cluster.objects import Pod, decode_pod
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import ApiError, Conflict, NotFound, ServerError, TooManyRequests, Unanswered
from atoll.service.clock import Clock
from extender.bind_plan import Plan, binding_body, is_bound_as_planned
from extender.errors import BindInDoubt, BindRefused
from extender.reservations import Attempt, still_held

BINDING_SECONDS = 4.0
VERSIONS_MAX = 8
PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 5.0
DOUBT_SECONDS_MAX = 600.0


class Answer(Enum):
    """What the API server said to a Binding."""

    LANDED = auto()
    CONFLICT = auto()
    NOT_FOUND = auto()


@dataclass(frozen=True, slots=True)
class Sent:
    """An answer, and whether an earlier, unanswered copy of the same Binding may have landed."""

    answer: Answer
    may_have_landed: bool


async def post_binding(client: ApiClient, clock: Clock, pod: Pod, plan: Plan, attempt: Attempt) -> None:
    """Bind `pod` as planned. Raises BindRefused, BindInDoubt."""
    version = pod.metadata.resource_version
    for _ in range(VERSIONS_MAX):
        sent = await _send_until_answered(client, clock, pod, plan, version)
        if sent.answer is Answer.LANDED:
            return
        live = await _read_live(client, clock, pod) if sent.answer is Answer.CONFLICT else None
        if live is None:
            if sent.may_have_landed:
                raise BindInDoubt(f"{_name(pod)} is gone, and its Binding may have landed before")
            raise BindRefused(f"{_name(pod)} no longer exists")
        if is_bound_as_planned(live, plan.allocation.node, plan):
            return
        version = _next_version(live, version)
        if not await still_held(client, attempt):
            raise BindRefused(f"the GPUs of {_name(pod)} were taken back meanwhile; kube-scheduler tries again")
    raise BindRefused(f"{_name(pod)} changed faster than it could be bound; kube-scheduler tries again")


def _next_version(live: Pod, version: str) -> str:
    """Return the version for the next Binding of an unbound pod that has moved on; no older Binding can land on it."""
    if live.spec.node_name:
        raise BindRefused(f"{_name(live)} was bound to node {live.spec.node_name} by somebody else")
    if live.metadata.deletion_timestamp is not None:
        raise BindRefused(f"{_name(live)} is being deleted")
    if live.spec.scheduling_gates or live.metadata.resource_version == version:
        raise BindRefused(f"the API server will not bind {_name(live)} as it is")
    return live.metadata.resource_version


async def _send_until_answered(client: ApiClient, clock: Clock, pod: Pod, plan: Plan, version: str) -> Sent:
    body = binding_body(pod, plan.allocation.node, plan.annotations, version)
    path = paths.binding(pod.metadata.namespace, pod.metadata.name)
    give_up_at = clock.monotonic_seconds() + DOUBT_SECONDS_MAX
    pause_seconds = PAUSE_SECONDS_MIN
    may_have_landed = False
    while True:
        try:
            await client.request("POST", path, body=body, timeout_seconds=BINDING_SECONDS, retry=False)
            return Sent(Answer.LANDED, may_have_landed)
        except Conflict:
            return Sent(Answer.CONFLICT, may_have_landed)
        except NotFound:
            return Sent(Answer.NOT_FOUND, may_have_landed)
        except (Unanswered, ServerError, TooManyRequests) as error:
            may_have_landed |= not isinstance(error, TooManyRequests) and getattr(error, "sent", True)
            if clock.monotonic_seconds() > give_up_at:
                raise BindInDoubt(f"nobody answered whether the Binding of {_name(pod)} landed: {error}") from error
        except ApiError as error:
            raise BindRefused(f"the API server refused the Binding of {_name(pod)}: {error}") from error
        await clock.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * 2, PAUSE_SECONDS_MAX)


async def _read_live(client: ApiClient, clock: Clock, pod: Pod) -> Pod | None:
    """Read the pod again, as often as it takes; None when it is gone or another one has its name."""
    path = paths.pods(pod.metadata.namespace, pod.metadata.name)
    give_up_at = clock.monotonic_seconds() + DOUBT_SECONDS_MAX
    while True:
        try:
            live = decode_pod(await client.request("GET", path, retry=True))
        except NotFound:
            return None
        except (Unanswered, ServerError, TooManyRequests) as error:
            if clock.monotonic_seconds() > give_up_at:
                raise BindInDoubt(f"{_name(pod)} cannot be read to see whether it is bound: {error}") from error
            await clock.sleep(PAUSE_SECONDS_MAX)
        else:
            return live if live.metadata.uid == pod.metadata.uid else None


def _name(pod: Pod) -> str:
    return f"pod {pod.metadata.namespace}/{pod.metadata.name}"
