"""Frees GPUs for one waiting gang at a time: evicts pods and gangs of lower priority, or keeps GPUs that become free.

Annotations on the gang's gated members keep the GPUs from pods of no higher priority until each member is bound. Nobody
holds what is kept, and the time is bounded; then the next gang may have one. A gang of higher priority ends the
preemption of one of lower priority. A gang gives way whole, because less than it needs would run in vain.

A new leader does not know how long an annotation has been there, and removes it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster.budgets import DisruptionBudgets, violations
from atoll.cluster.gangs import lifecycle
from atoll.cluster.gangs.member_requests import shared_reservation
from atoll.cluster.gangs.membership import GangKey
from atoll.cluster.gangs.preemption import (
    EvictionUnit,
    GangRequest,
    PreemptionPlan,
    holdings_of,
    plan_preemption,
    with_kept,
)
from atoll.cluster.gangs.queue import place_in_queue
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.objects import Pod
from atoll.kube.budget_list import BudgetList
from atoll.kube.cache import Change
from atoll.kube.errors import ApiError, Conflict, KubeError, NotFound, ServerError, TooManyRequests
from atoll.kube.mirror import WatchedKind
from controllers.context import Context
from controllers.gangs.cache import GangCache, gang_reference
from controllers.gangs.writes import each, write_status
from controllers.pod_calls import EvictionRefused, evict, evict_with_notice, write_kept

log = structlog.get_logger(__name__)

PLAN_SECONDS = 15.0
"""Pause between two plans for the same gang."""
RETRY_SECONDS = 1.0
GangIdentity = tuple[GangKey, str]
"""A gang's key and its uid: a new gang of the same name starts from nothing."""


@dataclass(frozen=True, slots=True)
class ActivePreemption:
    """The plan in progress for a gang, and its end. `uid`: distinguishes it from a later gang of the same name."""

    key: GangKey
    uid: str
    priority: int
    plan: PreemptionPlan
    until_seconds: float


class GangPreemption:
    """The one active preemption, and when gangs may have their next."""

    def __init__(self, context: Context, cache: GangCache) -> None:
        self._context = context
        self._cache = cache
        self._budgets = BudgetList(context.api, context.clock)
        self._active: ActivePreemption | None = None
        self._since: dict[GangIdentity, float] = {}
        self._not_before: dict[GangIdentity, float] = {}
        self._has_stray_reservations = True
        """Whether pods may carry annotations of no active preemption: in a new term, and after a failed removal."""

    def observe(self, kind: WatchedKind, change: Change[Any]) -> bool:
        """Notice an annotation of no active preemption: one that was given up without an answer, and arrived late."""
        if kind is not WatchedKind.POD or names.KEPT not in change.object.metadata.annotations:
            return False
        uid = change.object.metadata.uid
        is_known = self._active is not None and uid in self._active.plan.kept
        is_stray = not is_known and self._context.mirror.ledger.kept(uid) is not None
        self._has_stray_reservations |= is_stray
        return is_stray

    @property
    def is_open(self) -> bool:
        """Whether something is, or may be, kept: also for a gang that is deleted, so that nobody waits any more."""
        return self._active is not None or self._has_stray_reservations

    async def reconcile(self) -> float | None:
        """End a preemption that is over; return when to call again. Raises KubeError."""
        if self._has_stray_reservations:
            self._has_stray_reservations = False
            await self._clear(self._stray_reservations())
        for memory in (self._since, self._not_before):
            for identity in [one for one in memory if not self._is_tried(*one)]:
                del memory[identity]
        active, now = self._active, self._now()
        if active is not None:
            gang = self._cache.gang(active.key)
            if gang is not None and gang.metadata.uid == active.uid and self._cache.view(gang).is_admitted:
                self._active = None
            elif not self._is_tried(active.key, active.uid) or active.until_seconds <= now:
                await self._end("it was not admitted in time")
        if self._has_stray_reservations:
            return RETRY_SECONDS
        return self._active.until_seconds - now if self._active is not None else None

    def _is_tried(self, key: GangKey, uid: str) -> bool:
        """Return whether this gang, with this uid, still waits for a place."""
        gang = self._cache.gang(key)
        return gang is not None and gang.metadata.uid == uid and key in self._cache.candidates | self._cache.busy

    def with_own_gpus(self, key: GangKey, snapshot: PlacementSnapshot) -> PlacementSnapshot:
        """Return the snapshot as this gang sees it: GPUs kept for its members are free for them."""
        if self._active is None or self._active.key != key:
            return snapshot
        kept = self._active.plan.kept.values()
        return with_kept(snapshot, self._context.mirror.ledger, kept, now_seconds=self._now())

    async def try_preempt(self, key: GangKey, request: GangRequest) -> None:
        """Continue or begin the preemption for a gang that found no place. Raises KubeError."""
        now, rules, identity = self._now(), self._cache.rules, (key, request.view.gang.metadata.uid)
        waited = now - self._since.setdefault(identity, now)
        if self._active is not None and (self._active.key, self._active.uid) == identity:
            await self._reconcile_evictions(self._active)
            return
        if self._not_before.get(identity, 0.0) > now or not self._is_next(identity, request):
            return
        plan, seconds = None, rules.preemption_timeout_seconds
        if rules.preemption and request.may_preempt and waited >= rules.preemption_delay_seconds:
            plan = await self._plan_evictions(request)
        if plan is None and rules.hold_seconds > 0 and waited >= rules.hold_after_seconds:
            plan, seconds = await self._plan(request, None), rules.hold_seconds
        if plan is None:
            if waited >= min(rules.preemption_delay_seconds, rules.hold_after_seconds):
                self._not_before[identity] = now + PLAN_SECONDS
            return
        await self._begin(ActivePreemption(*identity, request.priority, plan, now + seconds), request)

    def _is_next(self, identity: GangIdentity, request: GangRequest) -> bool:
        """Whether this gang may begin: no other of its priority is active, none before it may begin."""
        if self._active is not None and self._active.priority >= request.priority:
            return False
        own, now = place_in_queue(request.view), self._now()
        for other in self._since.keys() - {identity}:
            gang = self._cache.gang(other[0])
            if gang is None or self._not_before.get(other, 0.0) > now or not self._is_tried(*other):
                continue
            if place_in_queue(self._cache.view(gang)) < own:
                return False
        return True

    async def _plan_evictions(self, request: GangRequest) -> PreemptionPlan | None:
        budgets = await self._budgets.read()
        plan = await self._plan(request, budgets)
        if plan is None:
            return None
        singles = [pod for unit in plan.evicted if unit.gang is None for pod in self._pods(unit)]
        answers = await each(singles, lambda pod: evict(self._context.api, pod, dry_run=True))
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        for fault in refused:
            log.info("May not evict for a gang", err=str(fault))
        return None if refused else plan

    async def _plan(self, request: GangRequest, budgets: DisruptionBudgets | None) -> PreemptionPlan | None:
        """Plan with evictions that the budgets allow, or without any. A plan takes many searches, so it is computed
        in a thread; what changes meanwhile is found when the preemption begins."""
        reservation = shared_reservation(request.requests)
        holdings, admitted = holdings_of(self._cache.mirror.ledger, reservation), self._cache.admitted()
        if budgets is None:
            return await asyncio.to_thread(plan_preemption, request, holdings, admitted, is_spared=None)
        allowed, protecting = budgets.allowed(), {one.pod.metadata.uid: budgets.of(one.pod) for one in holdings}

        def is_spared(unit: EvictionUnit) -> bool:
            return violations((protecting.get(uid, ()) for uid in sorted(unit.uids)), allowed) > 0

        return await asyncio.to_thread(plan_preemption, request, holdings, admitted, is_spared=is_spared)

    def _pods(self, unit: EvictionUnit) -> list[Pod]:
        pods = self._context.mirror.ledger.pods
        return [pods[uid] for uid in sorted(unit.uids) if uid in pods]

    async def _begin(self, active: ActivePreemption, request: GangRequest) -> None:
        """Keep the GPUs, then evict, so that nobody else gets what is freed."""
        if self._active is not None:
            await self._end("a gang of higher priority preempts now")
        kept = active.plan.kept
        members = {member.uid: member.pod for member in request.chosen if member.uid in kept}
        answers = await each(members.items(), lambda entry: write_kept(self._context, entry[1], kept[entry[0]]))
        faults = [answer for answer in answers if isinstance(answer, BaseException)]
        self._active = active
        if faults:
            log.info("Could not keep GPUs for a gang", gang="/".join(active.key), err=str(faults[0]))
            has_changed = any(isinstance(fault, Conflict) for fault in faults)
            await self._end("a member changed meanwhile" if has_changed else "a member takes no annotation")
            if has_changed:
                self._not_before[active.key, active.uid] = self._now() + PLAN_SECONDS
            return
        nodes = len({one.node for one in kept.values()})
        gpus = sum(len(one.device_ids) for one in kept.values())
        victims = ", ".join(unit.name for unit in active.plan.evicted)[:400]
        note = f"{gpus} GPUs on {nodes} nodes are kept for it; " + (
            f"evicted: {victims}" if victims else f"{active.plan.awaited} holders are waited for"
        )
        self._record_event(active.key, names.REASON_GPUS_FREEING, note)
        log.info("Keeps GPUs for a gang", gang="/".join(active.key), gpus=gpus, victims=victims)
        await self._reconcile_evictions(active)

    async def _reconcile_evictions(self, active: ActivePreemption) -> None:
        """Evict remaining victims; a disruption budget may delay that until the next call."""
        name = "/".join(active.key)
        for unit in active.plan.evicted:
            if unit.gang is not None:
                message = f"gives way to gang {name}, which has a higher priority"
                await evict_gang(self._context, self._cache, unit.gang, message)
                continue
            for pod in self._pods(unit):
                if pod.metadata.deletion_timestamp is None and pod.spec.priority < active.priority:
                    try:
                        await evict_with_notice(self._context, pod)
                    except (EvictionRefused, KubeError) as error:
                        log.info("May not evict yet", pod=unit.name, uid=pod.metadata.uid, err=str(error))

    async def _end(self, reason: str) -> None:
        """Remove the annotations; other gangs may have a preemption before this one has its next."""
        active, self._active = self._active, None
        if active is None:
            return
        self._not_before[active.key, active.uid] = self._now() + max(PLAN_SECONDS, self._cache.rules.hold_seconds)
        pods = self._context.mirror.ledger.pods
        await self._clear(pods[uid] for uid in active.plan.kept if uid in pods)
        self._cache.note_capacity()
        self._record_event(active.key, names.REASON_PREEMPTION_ENDED, f"its GPUs are not kept any more: {reason}")

    def _stray_reservations(self) -> list[Pod]:
        ledger = self._context.mirror.ledger
        known = self._active.plan.kept if self._active is not None else {}
        return [
            pod
            for uid, pod in sorted(ledger.pods.items())
            if names.GANG in pod.metadata.annotations
            and ledger.kept(uid) is not None
            and uid not in known
            and not ledger.leases_of(uid)
        ]

    async def _clear(self, pods: Iterable[Pod]) -> None:
        """Remove the annotations of these pods; one that cannot be written now is stray, and stops no other.

        Raises KubeError when the API server cannot be reached.
        """
        answers = await each(list(pods), lambda pod: write_kept(self._context, pod, None))
        unanswered = [one for one in answers if isinstance(one, BaseException) and not isinstance(one, ApiError)]
        if unanswered or any(isinstance(one, (Conflict, ServerError, TooManyRequests)) for one in answers):
            self._has_stray_reservations = True
        if unanswered:
            raise unanswered[0]

    def _record_event(self, key: GangKey, reason: str, note: str) -> None:
        gang = self._cache.gang(key)
        if gang is not None:
            self._context.events.record(gang_reference(gang), reason=reason, note=note, action="Preempt")

    def _now(self) -> float:
        return self._context.clock.monotonic_seconds()


async def evict_gang(context: Context, cache: GangCache, key: GangKey, message: str) -> None:
    """Evict an admitted gang whole, unless another reconciler works on it. Raises KubeError."""
    gang = cache.gang(key)
    if gang is None or key in cache.busy or not cache.is_current(gang):
        return
    view = cache.view(gang)
    if not view.is_admitted:
        return
    status = lifecycle.preempt(view, message, now_seconds=cache.now_seconds())
    try:
        await write_status(context, cache, gang, status)
    except (Conflict, NotFound):
        return
    context.metrics.gang_evictions.labels("Preempted").inc()
    context.events.record(
        gang_reference(gang), reason=names.REASON_GANG_EVICTED, note=message, action="Preempt", type="Warning"
    )
