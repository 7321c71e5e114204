"""Bind: reserve the GPUs, then post one fenced Binding, and leave nothing behind where that fails.

`Binder.bind` takes kube-scheduler's bind call and returns an empty text for success, else the reason. It reads the pod,
enters the scope of `extender.reservations`, and posts the Binding with the uid and resourceVersion that were read.
If no answer comes, it asks again, unchanged, in the background, until the API server says yes or no; the Leases stay
meanwhile. One bind per pod uid runs at a time, and a repeat of a bind that succeeded succeeds.

Few binds write Leases at a time. kube-scheduler sends all it has at once, and an API server that is asked for more than
it can do answers none of it in time: every bind would be rolled back and tried again, for ever. A bind that finds no
turn is refused before anything is written, and kube-scheduler tries again after a pause.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from atoll.api.claims import VisibleDevices
from atoll.api.times import parse_microtime
from atoll.cluster.errors import IllegalTransition
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.errors import KubeError
from atoll.kube.mirror import ClusterMirror
from extender.errors import BindInDoubt, BindRefused, BindsBusy
from extender.posting import post_binding
from extender.reading import describe, read_pod, resolve_request, standing_allocation
from extender.reservations import Reserver
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
        self._reserver = Reserver(
            client,
            mirror.ledger,
            clock,
            reservation_seconds=settings.reservation_seconds,
            expectation_seconds=settings.answer_seconds,
            default_mode=settings.default_mode,
        )
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
        """Reserve and post; a bind that was carried out before is left as it stands."""
        restores_count = self._mirror.restores_count
        async with AsyncExitStack() as scope:
            async with self._turn():
                pod = self._mirror.ledger.pods.get(call.pod_uid) or await read_pod(self._client, call)
                if pod.spec.node_name:
                    standing_allocation(pod, call.node)
                    return
                request = resolve_request(self._mirror, pod)
                if isinstance(request, Rejection):
                    raise BindRefused(f"{describe(pod)}: {request.reason}")
                held = await scope.enter_async_context(self._reserver.reserved(pod, call.node, request, token))
            held.standing = await post_binding(
                self._client, self._clock, held, lambda: self._mirror.restores_count != restores_count
            )
        facts.info("Bound a pod", gpus=held.plan.allocation.device_ids, quality=round(held.plan.relative_quality, 3))
        self.observer(CompletedBind(str(request.ask.policy), held.plan.relative_quality, self._age_seconds(pod)))

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

    def _age_seconds(self, pod: Pod) -> float | None:
        """Return how long ago the pod was created, by two clocks."""
        try:
            created = parse_microtime(pod.metadata.creation_timestamp or "")
        except (ValueError, OverflowError):
            return None
        return max(0.0, (self._clock.now() - created).total_seconds())
