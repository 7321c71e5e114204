"""Bind: reserve the GPUs, then post one fenced Binding, and leave nothing behind where that fails.

In: kube-scheduler's bind call. Out: an empty text for success, else the reason. The steps: read the pod, choose
devices, assume them before the first await, create their Leases, post the Binding with the uid and resourceVersion that
were read. An answer that never came is asked for again, unchanged, in the background, until the API server says yes or
no; the Leases stay meanwhile. One bind per pod uid runs at a time, and a repeat of a bind that succeeded succeeds.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import structlog

from atoll.api.claims import VisibleDevices
from atoll.cluster import pods
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.leases import Reservation
from atoll.cluster.machines import NodeDevices
from atoll.cluster.objects import Pod, decode_pod
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import KubeError, NotFound
from atoll.kube.microtime import format_microtime
from atoll.kube.mirror import ClusterMirror
from atoll.service.clock import Clock
from extender.bind_plan import Plan, plan_bind
from extender.errors import BindInDoubt, BindRefused
from extender.posting import post_binding
from extender.reservations import Attempt, reserve, take_back
from extender.wire import BindCall

log = structlog.get_logger(__name__)

READ_SECONDS = 3.0
FAILED_NODE_SECONDS = 30.0
FAILURES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class BinderSettings:
    """`answer_seconds` is below kube-scheduler's httpTimeout; after `reservation_seconds` a bind may be taken back."""

    answer_seconds: float
    reservation_seconds: float
    default_mode: VisibleDevices


class Binder:
    """Carries out bind calls; owns the binds under way and the memory of those that failed."""

    def __init__(
        self,
        client: ApiClient,
        mirror: ClusterMirror,
        clock: Clock,
        settings: BinderSettings,
        new_token: Callable[[], str],
    ) -> None:
        self._client = client
        self._mirror = mirror
        self._clock = clock
        self._settings = settings
        self._new_token = new_token
        self._under_way: dict[str, tuple[str, asyncio.Task[str]]] = {}
        self._failed: dict[tuple[str, str], float] = {}

    async def bind(self, call: BindCall) -> str:
        """Bind, or say why not. A bind that is not answered in time goes on in the background."""
        node, task = self._under_way.get(call.pod_uid, ("", None))
        if task is None:
            task = asyncio.create_task(self._settle(call))
            self._under_way[call.pod_uid] = (call.node, task)
            task.add_done_callback(lambda _: self._under_way.pop(call.pod_uid, None))
        elif node != call.node:
            return f"a bind of this pod to node {node} is still under way; it cannot be bound to {call.node} meanwhile"
        try:
            return await asyncio.wait_for(asyncio.shield(task), self._settings.answer_seconds)
        except TimeoutError:
            return f"the API server has not answered within {self._settings.answer_seconds:g} s; the GPUs stay reserved"

    def failed_nodes(self, uid: str) -> frozenset[str]:
        """Return the nodes on which a bind of the pod failed in the last half minute."""
        now = self._clock.monotonic_seconds()
        return frozenset(
            node for (pod, node), at in self._failed.items() if pod == uid and now - at < FAILED_NODE_SECONDS
        )

    async def drain(self) -> None:
        """Wait until every bind under way has ended."""
        while self._under_way:
            await asyncio.wait([task for _, task in self._under_way.values()])

    async def _settle(self, call: BindCall) -> str:
        try:
            await self._bind(call)
        except BindRefused as refusal:
            self._note_failure(call)
            return str(refusal)
        except BindInDoubt as doubt:
            return str(doubt)
        except KubeError as error:
            self._note_failure(call)
            return f"the API server failed: {error}"
        return ""

    def _note_failure(self, call: BindCall) -> None:
        now = self._clock.monotonic_seconds()
        if len(self._failed) >= FAILURES_MAX:
            self._failed = {key: at for key, at in self._failed.items() if now - at < FAILED_NODE_SECONDS}
        self._failed[call.pod_uid, call.node] = now

    async def _bind(self, call: BindCall) -> None:
        pod = self._mirror.ledger.pods.get(call.pod_uid)
        if pod is None or pod.spec.node_name:
            pod = await self._read_pod(call)
        if pod.spec.node_name:
            _check_bound(pod, call)
            return
        request = request_of(pod, self._mirror.claim(call.pod_namespace, pods.claim_name(pod)))
        if isinstance(request, Rejection):
            raise BindRefused(f"pod {call.pod_namespace}/{call.pod_name}: {request.reason}")
        devices = self._mirror.ledger.nodes.get(call.node)
        if devices is None:
            raise BindRefused(f"node {call.node} has no GPU report any more")
        attempt = self._new_attempt(pod, devices, request)
        try:
            plan = await self._reserve(pod, devices, request, attempt)
            await post_binding(self._client, self._clock, pod, plan, attempt)
        except (BindRefused, KubeError):
            await take_back(self._client, attempt, set(attempt.created))
            self._mirror.ledger.forget(call.pod_uid)
            raise
        except BindInDoubt:
            self._mirror.ledger.forget(call.pod_uid)
            raise

    async def _read_pod(self, call: BindCall) -> Pod:
        """Read the live pod; refuse when it is gone or another one of the same name."""
        try:
            raw = await self._client.request(
                "GET", paths.pods(call.pod_namespace, call.pod_name), timeout_seconds=READ_SECONDS, retry=True
            )
        except NotFound:
            raise BindRefused(f"pod {call.pod_namespace}/{call.pod_name} no longer exists") from None
        pod = decode_pod(raw)
        if pod.metadata.uid != call.pod_uid:
            raise BindRefused(f"pod {call.pod_namespace}/{call.pod_name} was replaced by another one of the same name")
        return pod

    def _new_attempt(self, pod: Pod, devices: NodeDevices, request: Request) -> Attempt:
        now = self._clock.now()
        reservation = Reservation(
            node=devices.node,
            node_uid=devices.node_uid,
            holder=pods.holder_of(pod),
            claim=request.claim,
            attempt=self._new_token(),
            now=format_microtime(now),
            deadline=format_microtime(now + timedelta(seconds=self._settings.reservation_seconds)),
        )
        return Attempt(reservation)

    async def _reserve(self, pod: Pod, devices: NodeDevices, request: Request, attempt: Attempt) -> Plan:
        """Hold a full set of Leases. A device that turns out taken is replaced by the next best set of this node."""
        ledger = self._mirror.ledger
        uid = pod.metadata.uid
        taken: frozenset[int] = frozenset()
        for _ in range(len(devices.devices) + 1):
            free = ledger.free(devices.node, now_seconds=self._clock.monotonic_seconds(), asking_uid=uid)
            plan = plan_bind(pod, devices, free & ~devices.mask_of(taken), request, self._settings.default_mode)
            if isinstance(plan, Rejection):
                raise BindRefused(f"node {devices.node}: {plan.reason}")
            ledger.assume(uid, plan.allocation)
            lost = await reserve(self._client, attempt, plan.allocation)
            if not lost:
                await take_back(self._client, attempt, attempt.surplus(plan.allocation))
                return plan
            taken |= lost
        raise BindRefused(f"node {devices.node}: every matching GPU was taken by other pods meanwhile")


def _check_bound(pod: Pod, call: BindCall) -> None:
    """Answer a repeated bind: it succeeded before when the pod is bound to that node with an allocation."""
    if pod.spec.node_name != call.node:
        raise BindRefused(f"pod {call.pod_namespace}/{call.pod_name} is already bound to node {pod.spec.node_name}")
    if bound_allocation(pod) is None:
        raise BindRefused(
            f"pod {call.pod_namespace}/{call.pod_name} was bound to {call.node} without GPUs by somebody else"
        )
