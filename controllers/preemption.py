"""Evicts pods of lower priority for a waiting pod that lacks nothing but GPUs joined as its claim wants.

An annotation on the waiting pod keeps the GPUs for it; then victims are evicted through the eviction API, which
disruption budgets may refuse. The annotation is the plan: the next leader continues where the last one stopped, and the
extender keeps pods of no higher priority off those GPUs. It is removed with the pod, or after the attempt has timed
out; then the pod is left alone for growing pauses, and after a few attempts for good. All waiting pods are weighed
together under one key, highest priority first.

Of a gang only members are evicted that it does not need. Where that is not enough, the gang is evicted whole.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.gangs.gang_budgets import gang_budgets, needs
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import gang_key
from atoll.cluster.island_hosts import decode_demands, refusal, unjudged
from atoll.cluster.island_preemption import IslandPlan, PreemptionInput, may_preempt, plan_island
from atoll.cluster.objects import Pod, decode_pod
from atoll.cluster.preemption_notices import is_stale
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.cluster.soft_reservations import SoftReservation, soft_reservation_of
from atoll.kube import paths
from atoll.kube.budget_list import BudgetList
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import ApiError, Conflict, Forbidden, Invalid, KubeError, NotFound
from atoll.kube.limits import TokenBucket
from atoll.kube.mirror import WatchedKind
from controllers.context import Context, pod_reference
from controllers.eviction_progress import EvictionAttempt, EvictionStatus, EvictionStep, next_step
from controllers.gangs.cache import GangCache
from controllers.gangs.preemption import evict_gang
from controllers.pod_calls import EvictionRefused, evict, evict_with_notice, withdraw_notice, write_kept
from controllers.settings import ControllersSettings

log = structlog.get_logger(__name__)

ALL = "pods that wait for islands"
BLIND_SECONDS = 5.0
LOOK_SECONDS = 1.0
"""While GPUs are being freed, how often is looked whether they are."""
IN_FLIGHT_MAX = 8
"""Waiting pods for which GPUs are being freed at a time."""
ATTEMPTS_MAX = 3
PLANNED_MAX = 8
"""Pods that are planned for in one pass; each may look at every node."""
TRIES_PER_SECOND = 1.0
"""Plans that are asked about, of which most may be refused; each lists the pods of a few nodes."""
RETRY_SECONDS = 15.0
"""After this a plan that was refused, by a budget or for want of cpu, is made again."""
PAUSE_SECONDS = 60.0
"""After a failed attempt; four times as long after each further one."""


@dataclass(slots=True)
class FailedPreemptions:
    """What was tried for a pod in vain."""

    count: int = 0
    until_seconds: float = 0.0
    nodes: set[str] = field(default_factory=set)


class PreemptionReconciler:
    """Makes plans, begins them, and sees them to their end."""

    name = "preemption"

    def __init__(self, context: Context, settings: ControllersSettings, cache: GangCache | None = None) -> None:
        clock = context.clock
        self._context = context
        self._cache = cache
        self._settings = settings
        self._budgets = BudgetList(context.api, clock)
        per_second = settings.preemptions_per_minute / 60
        self._bucket = TokenBucket(rate=per_second, burst=IN_FLIGHT_MAX, now=clock.monotonic_seconds)
        self._tries = TokenBucket(rate=TRIES_PER_SECOND, burst=IN_FLIGHT_MAX, now=clock.monotonic_seconds)
        self._refused_at: dict[str, float] = {}
        self.attempts: dict[str, EvictionAttempt] = {}
        self._failures: dict[str, FailedPreemptions] = {}
        self._looked_at: set[str] = set()
        """Pods that were planned for in vain since a pass last came to its end: the next pass begins behind them."""
        for pod in context.mirror.ledger.pods.values():
            self._note(pod)

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the one key when a pod that wants an island was refused, or when GPUs that are kept may be free."""
        if kind is WatchedKind.LEASE:
            return (ALL,) if self.attempts and change.kind is ChangeKind.DELETED else ()
        if kind is not WatchedKind.POD:
            return ()
        uid = change.object.metadata.uid
        if change.kind is ChangeKind.DELETED or uid not in self._context.mirror.ledger.pods:
            self._forget(uid)
            return ()
        return (ALL,) if self._note(change.object) else ()

    def all_keys(self) -> Iterable[str]:
        """Return the one key."""
        return (ALL,)

    async def reconcile(self, key: str) -> float | None:  # noqa: ARG002 - there is only one
        """Go on with what was begun, then begin what may begin; return when to look again. Raises KubeError."""
        if self._context.mirror.unready_reason():
            return BLIND_SECONDS
        waits: list[float | None] = []
        now = self._context.clock.now().timestamp()
        for uid, pod in sorted(self._context.mirror.ledger.pods.items()):
            if is_stale(pod, now):
                await withdraw_notice(self._context, pod)
            if soft_reservation_of(pod) is not None and names.GANG not in pod.metadata.annotations:
                waits.append(await self._reconcile_evictions(uid, pod))
        waits += await self._begin_some(self._candidates(waits))
        return min((wait for wait in waits if wait is not None), default=None)

    # Beginning

    def _note(self, pod: Pod) -> bool:
        """Keep in mind since when a pod is refused; tell whether there may be something to do for it."""
        uid = pod.metadata.uid
        if not pods.is_waiting(pod):
            if pod.spec.node_name and uid in self.attempts:
                self._context.metrics.preemptions.labels("placed").inc()
            self._forget(uid)
            return False
        if soft_reservation_of(pod) is not None:
            return True
        request = self._request(pod)
        if not may_preempt(pod, request):
            self._refused_at.pop(uid, None)
            return False
        self._refused_at.setdefault(uid, self._now())
        return True

    def _forget(self, uid: str) -> None:
        self._looked_at.discard(uid)
        for memory in (self._refused_at, self.attempts, self._failures):
            memory.pop(uid, None)

    def _candidates(self, waits: list[float | None]) -> list[Pod]:
        """Return the pods for which GPUs may be freed now, the most important first; note when the next may be."""
        if not self._settings.preemption:
            return []
        found = []
        for uid, since in self._refused_at.items():
            pod = self._context.mirror.ledger.pods.get(uid)
            failures = self._failures.get(uid, FailedPreemptions())
            if pod is None or uid in self.attempts or failures.count >= ATTEMPTS_MAX:
                continue
            rest = max(since + self._settings.preemption_delay_seconds, failures.until_seconds) - self._now()
            if rest > 0:
                waits.append(rest)
            elif not self._context.mirror.ledger.leases_of(uid):
                found.append(pod)
        return sorted(
            found, key=lambda pod: (-pod.spec.priority, pod.metadata.creation_timestamp or "", pod.metadata.uid)
        )

    async def _begin_some(self, candidates: list[Pod]) -> list[float | None]:
        """Plan for some of the candidates; of pods that ask for the same, the next ones get what the first did."""
        waits: list[float | None] = []
        hopeless: set[tuple[object, ...]] = set()
        planned = 0
        admitted = tuple(self._cache.admitted().values()) if candidates and self._cache is not None else ()
        for pod in candidates:
            request = self._request(pod)
            kind = (request, pod.spec.priority, tuple(sorted(pod.spec.node_selector.items())), pod.spec.tolerations)
            if isinstance(request, Rejection) or not may_preempt(pod, request) or pod.metadata.uid in self._looked_at:
                continue
            if kind not in hopeless:
                if planned >= PLANNED_MAX:
                    return [*waits, LOOK_SECONDS]
                planned += 1
                plans = await self._plans(pod, request, admitted)
                waits.append(await self._try_to_begin(pod, plans))
                if waits[-1] == LOOK_SECONDS and pod.metadata.uid not in self.attempts:
                    return waits  # as many have begun as may: the most important one that waits is the next
                if not plans:
                    hopeless.add(kind)
                await asyncio.sleep(0)
            self._looked_at.add(pod.metadata.uid)
        self._looked_at.clear()
        return waits

    async def _try_to_begin(self, pod: Pod, plans: tuple[IslandPlan, ...]) -> float | None:
        """Begin one plan if there is any. A pod that takes no write must not keep others waiting."""
        try:
            return await self.begin(pod, plans) if plans else None
        except ApiError as error:
            log.warning("Could not free GPUs", pod=_name(pod), uid=pod.metadata.uid, err=str(error))
            return RETRY_SECONDS

    async def begin(self, pod: Pod, plans: tuple[IslandPlan, ...]) -> float | None:
        if len(self.attempts) >= IN_FLIGHT_MAX or not self._tries.try_take() or not self._bucket.try_take():
            return LOOK_SECONDS
        has_begun = False
        try:
            demands = decode_demands(await self._context.api.get(paths.pods(pod.metadata.namespace, pod.metadata.name)))
            reason = unjudged(demands)
            if reason:
                self._give_up(pod, "", f"no pod is evicted for one with {reason}: only kube-scheduler can judge that")
                return None
            for plan in plans:
                has_begun = await self.can_begin(pod, plan) and await self.start(pod, plan)
                if has_begun:
                    return LOOK_SECONDS
        finally:
            if not has_begun:
                self._bucket.give_back()
        self._failures.setdefault(pod.metadata.uid, FailedPreemptions()).until_seconds = self._now() + RETRY_SECONDS
        return RETRY_SECONDS

    async def _plans(self, pod: Pod, request: Request, admitted: Sequence[GangView]) -> tuple[IslandPlan, ...]:
        """Plan with members that their gangs do not need; only where that leads nowhere, with gangs that end whole."""
        situation = await self._situation(pod)
        plans: tuple[IslandPlan, ...] = ()
        for whole_below in (None, pod.spec.priority) if admitted else (None,):
            gangs = gang_budgets(admitted, whole_below=whole_below)
            plans = plan_island(pod, request, replace(situation, budgets=replace(situation.budgets, gangs=gangs)))
            if plans:
                break
        return plans

    async def _situation(self, pod: Pod) -> PreemptionInput:
        mirror = self._context.mirror
        nodes = {name: node for (_, name), node in mirror.nodes.store.items()}
        failures = self._failures.get(pod.metadata.uid, FailedPreemptions())
        return PreemptionInput(mirror.ledger, nodes, await self._budgets.read(), self._now(), failures.nodes)

    async def can_begin(self, pod: Pod, plan: IslandPlan) -> bool:
        """Tell whether the node would take the pod without the victims, and every victim may be evicted: asked live."""
        selector = {"fieldSelector": f"spec.nodeName={plan.node}"}
        listing = await self._context.api.list(paths.pods(), decode_pod, params=selector)
        present = {
            each.metadata.uid: each
            for each in listing.items
            if each.spec.node_name == plan.node and each.metadata.deletion_timestamp is None
        }
        gone = {victim.metadata.uid for victim in plan.victims}
        if not gone <= present.keys():
            return False
        others = [each for uid, each in present.items() if uid not in gone]
        node = self._context.mirror.nodes.store.get(("", plan.node))
        reason = refusal(pod, node, others) if node is not None else "no Node"
        if reason:
            log.info("No victims on a node", pod=_name(pod), uid=pod.metadata.uid, node=plan.node, reason=reason)
            return False
        return await self._may_evict_all(plan)

    async def _may_evict_all(self, plan: IslandPlan) -> bool:
        """Tell whether every victim could be evicted now; a second budget and webhooks forbid it in their own ways."""
        try:
            await asyncio.gather(*(evict(self._context.api, victim, dry_run=True) for victim in plan.victims))
        except (EvictionRefused, ApiError) as error:
            log.info("A budget forbids an eviction", node=plan.node, err=str(error))
            return False
        return True

    async def start(self, pod: Pod, plan: IslandPlan) -> bool:
        """Keep the GPUs for the pod as it was judged; False when it has changed since."""
        uid = pod.metadata.uid
        try:
            await write_kept(self._context, pod, plan.kept)
        except (NotFound, Conflict):
            return False
        except (Forbidden, Invalid) as error:
            self._give_up(pod, plan.node, f"the pod takes no annotation: {error}")
            return False
        self.attempts[uid] = attempt = EvictionAttempt(self._now())
        self._context.metrics.preemptions.labels("begun").inc()
        self._context.events.record(
            pod_reference(pod),
            reason=names.REASON_GPUS_FREEING,
            note=f"{len(plan.kept.device_ids)} joined GPUs on node {plan.node} are freed for it; evicted: "
            + ", ".join(map(_name, plan.victims)),
            action="Preempt",
        )
        log.info(
            "Frees GPUs",
            pod=_name(pod),
            uid=uid,
            kept=str(plan.kept),
            victims=[_name(each) for each in plan.victims],
        )
        for victim in plan.victims:
            await self._evict(pod, plan.kept, victim, attempt)
        return True

    # Seeing it through

    async def _reconcile_evictions(self, uid: str, pod: Pod) -> float | None:
        kept, request = soft_reservation_of(pod), self._request(pod)
        if kept is None:
            return None
        if isinstance(request, Rejection):
            return await self._end(pod, kept.node, f"the pod's request cannot be served: {request.reason}")
        attempt = self.attempts.setdefault(uid, EvictionAttempt(self._now()))
        outlook = EvictionStatus.of(self._context.mirror.ledger, pod, kept, self._now())
        step = next_step(attempt, outlook, self._now(), timeout_seconds=self._settings.preemption_timeout_seconds)
        if isinstance(step, str):
            told = next((c.message for c in pod.status.conditions if c.type == "PodScheduled" and c.message), "")
            return await self._end(pod, kept.node, step + (f"; kube-scheduler says: {told}" if told else ""))
        for victim in step.evict:
            await self._evict(pod, kept, victim, attempt)
        return _rest(step)

    async def _evict(self, pod: Pod, kept: SoftReservation, victim: Pod, attempt: EvictionAttempt) -> None:
        try:
            if await self._end_gang(pod, victim):
                attempt.refuse(victim.metadata.uid, self._now(), LOOK_SECONDS)
                return
            await evict_with_notice(self._context, victim)
        except EvictionRefused as error:
            attempt.refuse(victim.metadata.uid, self._now(), error.retry_after_seconds)
            log.info("May not evict yet", pod=_name(victim), uid=victim.metadata.uid, err=str(error))
            return
        except KubeError as error:
            attempt.refuse(victim.metadata.uid, self._now(), LOOK_SECONDS)
            log.warning("Could not evict", pod=_name(victim), uid=victim.metadata.uid, err=str(error))
            return
        attempt.evicted.add(victim.metadata.uid)
        self._context.metrics.preemption_victims.inc()
        self._context.events.record(
            pod_reference(victim),
            reason=names.REASON_PREEMPTED,
            note=f"evicted for {_name(pod)} (priority {pod.spec.priority} over {victim.spec.priority}), "
            f"which wants GPUs {kept} joined",
            action="Evict",
            type="Warning",
        )

    async def _end_gang(self, pod: Pod, victim: Pod) -> bool:
        """Tell the victim's gang to give way whole if it needs the victim; False where the victim goes alone."""
        if self._cache is None or (key := gang_key(victim)) is None or (gang := self._cache.gang(key)) is None:
            return False
        view = self._cache.view(gang)
        gone = [member for member in view.members if member.uid == victim.metadata.uid]
        if not view.is_admitted or not needs(view, gone):
            return False
        await evict_gang(self._context, self._cache, key, f"gives way to pod {_name(pod)}, which has a higher priority")
        return True

    async def _end(self, pod: Pod, node: str, reason: str) -> float | None:
        """Keep nothing any more for a pod that did not get its GPUs."""
        uid = pod.metadata.uid
        try:
            await write_kept(self._context, pod, None)
        except NotFound:
            return None
        except Conflict:
            return LOOK_SECONDS
        except ApiError as error:
            self.attempts.pop(uid, None)
            log.warning("Could not end what is kept", pod=_name(pod), uid=uid, err=str(error))
            return RETRY_SECONDS
        self._give_up(pod, node, reason)
        return None

    def _give_up(self, pod: Pod, node: str, reason: str) -> None:
        """Leave the pod alone for a while, and this node for good."""
        uid = pod.metadata.uid
        self.attempts.pop(uid, None)
        failures = self._failures.setdefault(uid, FailedPreemptions())
        failures.until_seconds = self._now() + PAUSE_SECONDS * 4**failures.count
        failures.count = failures.count + 1 if node else ATTEMPTS_MAX
        failures.nodes.add(node)
        self._context.metrics.preemptions.labels("failed").inc()
        log.warning("Freed no GPUs", pod=_name(pod), uid=pod.metadata.uid, node=node, reason=reason)
        self._context.events.record(
            pod_reference(pod), reason=names.REASON_PREEMPTION_ENDED, note=reason, action="Preempt", type="Warning"
        )

    def _request(self, pod: Pod) -> Request | Rejection:
        return request_of(pod, self._context.mirror.claim(pod.metadata.namespace, pods.claim_name(pod)))

    def _now(self) -> float:
        return self._context.clock.monotonic_seconds()


def _rest(step: EvictionStep) -> float:
    return min(step.again_seconds, LOOK_SECONDS) if step.evict else step.again_seconds


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
