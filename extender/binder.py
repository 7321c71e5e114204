"""Bind: reserve the GPUs, then post one fenced Binding, and leave nothing behind where that fails.

In: kube-scheduler's bind call. Out: an empty text for success, else the reason. The steps: read the pod, choose
devices, assume them before the first await, create their Leases, post the Binding with the uid and resourceVersion that
were read. An answer that never came is asked for again, unchanged, in the background, until the API server says yes or
no; the Leases stay meanwhile. One bind per pod uid runs at a time, and a repeat of a bind that succeeded succeeds.

Few binds write Leases at a time. kube-scheduler sends all it has at once, and an API server that is asked for more than
it can do answers none of it in time: everything would be taken back and begun anew, for ever. Whoever finds no turn is
refused before anything is written, and kube-scheduler tries again after a pause.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import structlog

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.cluster import pods
from atoll.cluster.allocations import DEVICES_MAX
from atoll.cluster.errors import IllegalTransition
from atoll.cluster.leases import Reservation
from atoll.cluster.ledger import TentativePlacement
from atoll.cluster.machines import NodeDevices
from atoll.cluster.objects import Pod, decode_pod
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.cluster.verdicts import why_unseen
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.errors import KubeError
from atoll.kube.microtime import format_microtime, parse_microtime
from atoll.kube.mirror import ClusterMirror
from atoll.service.clock import Clock
from extender.bind_plan import BindPlan, plan_bind
from extender.errors import BindInDoubt, BindRefused, BindsBusy
from extender.posting import describe, post_binding, standing_allocation
from extender.reading import read_live
from extender.reservations import BindAttempt, reserve, unreserve
from extender.wire import BindCall

log = structlog.get_logger(__name__)

FAILED_NODE_SECONDS = 30.0
FAILED_PODS_MAX = 10_000
TURN_SHARE = 0.5
"""Of `answer_seconds`: how long a bind waits for its turn; the rest is left to carry it out."""


@dataclass(frozen=True, slots=True)
class BinderSettings:
    """`answer_seconds` is below kube-scheduler's httpTimeout; after `reservation_seconds` a bind may be taken back.
    `binds_at_once` binds write Leases at a time."""

    answer_seconds: float
    reservation_seconds: float
    default_mode: VisibleDevices
    binds_at_once: int = 16


@dataclass(frozen=True, slots=True)
class CompletedBind:
    """A bind that has landed. waited_seconds: the pod's age; None where the API server did not tell."""

    policy: str
    relative_quality: float
    waited_seconds: float | None


def _ignore(_bound: CompletedBind) -> None:
    """Observe nothing."""


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
        self._failed: dict[str, dict[str, float]] = {}
        self._turns = asyncio.Semaphore(settings.binds_at_once)
        self.observer: Callable[[CompletedBind], None] = _ignore
        """Told of every bind that has landed."""

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
        return frozenset(node for node, at in self._failed.get(uid, {}).items() if now - at < FAILED_NODE_SECONDS)

    async def drain(self) -> None:
        """Wait until every bind under way has ended."""
        while self._under_way:
            await asyncio.wait([task for _, task in self._under_way.values()])

    async def _settle(self, call: BindCall) -> str:
        """Bind, and say in one line of the log how that ended."""
        token = self._new_token()
        facts = log.bind(pod=f"{call.pod_namespace}/{call.pod_name}", uid=call.pod_uid, node=call.node, attempt=token)
        try:
            await self._bind(call, token, facts)
        except BindInDoubt as doubt:
            facts.warning("Left a bind in doubt", err=str(doubt))
            return str(doubt)
        except IllegalTransition as fault:
            facts.critical("Refused to promise a GPU twice", err=str(fault))
            self._note_failure(call)
            return f"a fault of Atoll's, please report it: {fault}"
        except BindsBusy as busy:
            facts.info("Put off a bind", err=str(busy))
            self._mirror.ledger.drop_tentative(call.pod_uid)
            return str(busy)
        except (BindRefused, KubeError) as refusal:
            facts.info("Did not bind a pod", err=str(refusal))
            self._note_failure(call)
            return str(refusal) if isinstance(refusal, BindRefused) else f"the API server failed: {refusal}"
        return ""

    def _note_failure(self, call: BindCall) -> None:
        self._mirror.ledger.drop_tentative(call.pod_uid)
        self._failed.setdefault(call.pod_uid, {})[call.node] = self._clock.monotonic_seconds()
        while len(self._failed) > FAILED_PODS_MAX:
            del self._failed[next(iter(self._failed))]

    async def _bind(self, call: BindCall, token: str, facts: structlog.typing.FilteringBoundLogger) -> None:
        async with self._turn():
            held = await self._hold(call, token)
        if held is None:
            return
        pod, request, plan, attempt = held
        await self._post(pod, plan, attempt)
        facts.info("Bound a pod", gpus=plan.allocation.device_ids, quality=round(plan.relative_quality, 3))
        self.observer(CompletedBind(str(request.ask.policy), plan.relative_quality, self._age_seconds(pod)))

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until few enough others write Leases. Raises BindsBusy."""
        seconds = self._settings.answer_seconds * TURN_SHARE
        try:
            async with asyncio.timeout(seconds):
                await self._turns.acquire()
        except TimeoutError as late:
            raise BindsBusy(
                f"{self._settings.binds_at_once} other binds wait for the API server already; tried again after a pause"
            ) from late
        try:
            yield
        finally:
            self._turns.release()

    async def _hold(self, call: BindCall, token: str) -> tuple[Pod, Request, BindPlan, BindAttempt] | None:
        """Read the pod and hold its Leases; None where it is bound as asked already."""
        pod = self._mirror.ledger.pods.get(call.pod_uid) or await self._read_pod(call)
        if pod.spec.node_name:
            standing_allocation(pod, call.node)
            return None
        claim = self._mirror.claim(call.pod_namespace, pods.claim_name(pod))
        request = request_of(pod, claim, is_admitted=bool(self._mirror.ledger.leases_of(call.pod_uid)))
        if isinstance(request, Rejection):
            raise BindRefused(f"{describe(pod)}: {request.reason}")
        attempt = self._new_attempt(pod, self._devices(call.node), request, token)
        try:
            plan = await self._reserve(pod, request, attempt)
        except BaseException:
            await unreserve(self._client, self._clock, attempt)
            self._mirror.ledger.forget(call.pod_uid, attempt=attempt.reservation.attempt)
            raise
        return pod, request, plan, attempt

    def _age_seconds(self, pod: Pod) -> float | None:
        """Return how long ago the pod was created, by two clocks."""
        try:
            created = parse_microtime(pod.metadata.creation_timestamp or "")
        except (ValueError, OverflowError):
            return None
        return max(0.0, (self._clock.now() - created).total_seconds())

    async def _post(self, pod: Pod, plan: BindPlan, attempt: BindAttempt) -> None:
        """Post the Binding. Leases go back only where it certainly did not land; anything else keeps them."""
        ledger = self._mirror.ledger
        try:
            standing = await post_binding(self._client, self._clock, pod, plan, attempt)
        except BindRefused:
            await unreserve(self._client, self._clock, attempt)
            raise
        else:
            until = self._clock.monotonic_seconds() + self._settings.answer_seconds
            if ledger.allocation_of(pod.metadata.uid) is None:
                ledger.put_tentative(pod.metadata.uid, TentativePlacement(standing.node, standing.device_ids, until))
            await unreserve(self._client, self._clock, attempt, keep=standing)
        finally:
            ledger.forget(pod.metadata.uid, attempt=attempt.reservation.attempt)

    def _devices(self, node: str) -> NodeDevices:
        devices = self._mirror.ledger.nodes.get(node)
        if devices is None:
            raise BindRefused(f"node {node}: {why_unseen(node, self._mirror.ledger)}")
        return devices

    async def _read_pod(self, call: BindCall) -> Pod:
        """Read the live pod; refuse when it is gone or another one of the same name."""
        pod = await read_live(self._client, paths.pods(call.pod_namespace, call.pod_name), decode_pod)
        if pod is None:
            raise BindRefused(f"pod {call.pod_namespace}/{call.pod_name} no longer exists")
        if pod.metadata.uid != call.pod_uid:
            raise BindRefused(f"pod {call.pod_namespace}/{call.pod_name} was replaced by another one of the same name")
        return pod

    def _new_attempt(self, pod: Pod, devices: NodeDevices, request: Request, token: str) -> BindAttempt:
        now = self._clock.now()
        seen = self._mirror.ledger.leases_of(pod.metadata.uid)
        reservation = Reservation(
            node=devices.node,
            node_uid=devices.node_uid,
            holder=pods.holder_of(pod),
            claim=request.claim,
            attempt=token,
            now=format_microtime(now),
            deadline=format_microtime(now + timedelta(seconds=self._settings.reservation_seconds)),
            gang=next((record.gang for record in seen), ""),
        )
        return BindAttempt(reservation, frozenset(record.lease_name for record in seen))

    def _admitted_mask(self, pod: Pod, devices: NodeDevices) -> int:
        """Return the mask of what the pod may take: all, or for a member of a gang what its admission reserved."""
        if names.GANG not in pod.metadata.annotations:
            return devices.all
        held = self._mirror.ledger.leases_of(pod.metadata.uid)
        return devices.mask_of((), frozenset(record.device_uuid for record in held if record.node == devices.node))

    async def _reserve(self, pod: Pod, request: Request, attempt: BindAttempt) -> BindPlan:
        """Hold a full set of Leases. A device that turns out taken is replaced by the next best set of this node.

        Every round looks at the node as it is now: its report may have changed while the Leases were written.
        """
        ledger, uid, node = self._mirror.ledger, pod.metadata.uid, attempt.reservation.node
        lost: frozenset[str] = frozenset()
        for _ in range(DEVICES_MAX):
            devices = self._devices(node)
            now = self._clock.monotonic_seconds()
            free = ledger.free(node, now_seconds=now, asking_uid=uid, asking_priority=pod.spec.priority)
            left = free & ~devices.mask_of((), lost) & self._admitted_mask(pod, devices)
            plan = plan_bind(pod, devices, left, request, self._settings.default_mode, ledger.demand)
            if isinstance(plan, Rejection):
                raise BindRefused(f"node {node}: {plan.reason}")
            ledger.assume(uid, plan.allocation, attempt=attempt.reservation.attempt)
            newly_lost = await reserve(self._client, attempt, plan.allocation)
            if not newly_lost:
                await unreserve(self._client, self._clock, attempt, keep=plan.allocation)
                return plan
            lost |= newly_lost
        raise BindRefused(f"node {node}: every matching GPU was taken by other pods meanwhile")
