"""Makes room for one waiting gang at a time: evicts for it what is less important, or keeps for it what falls free.

In: gangs that found no place although the machines would do. Out: annotations on the gated members that keep their GPUs
from pods of no higher priority, evictions of pods, and gangs told to give way whole. What is kept is held by nobody: it
is a bounded time for one gang, then the others' turn. There is one at a time, the first in order; a more important gang
ends the turn of a less important one.

The annotation stands until the member is bound. A new leader does not know since when it does, and takes it off.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from atoll.api import names
from atoll.cluster.budgets import DisruptionBudgets, violations
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
from atoll.kube.errors import ApiError, Conflict, KubeError, ServerError, TooManyRequests
from controllers.context import Context
from controllers.evictions import EvictionRefused, evict
from controllers.gang_cache import GangCache
from controllers.gang_eviction import evict_gang
from controllers.gang_writes import each
from controllers.gangs import gang_reference
from controllers.soft_reservation_writes import write_kept

log = structlog.get_logger(__name__)

PLAN_SECONDS = 15.0
"""After a plan that came to nothing, how long until the next one for the same gang."""


@dataclass(frozen=True, slots=True)
class ActivePreemption:
    """What is kept for a gang, who goes for it, and until when."""

    key: GangKey
    priority: int
    clearing: PreemptionPlan
    until_seconds: float


class GangPreemption:
    """The turn that some gang has, and what was tried before."""

    def __init__(self, context: Context, book: GangCache) -> None:
        self._context = context
        self._book = book
        self._budgets = BudgetList(context.api, context.clock)
        self._turn: ActivePreemption | None = None
        self._since: dict[GangKey, float] = {}
        self._not_before: dict[GangKey, float] = {}
        self._has_strays = True
        """Whether pods may keep GPUs of which no turn knows: in a new term, and where one could not be written."""

    async def reconcile(self) -> float | None:
        """End a turn that is over; return when the present one is. Raises KubeError."""
        if self._has_strays:
            self._has_strays = not await self._clear(self._strays())
        for memory in (self._since, self._not_before):
            for key in memory.keys() - self._book.candidates - self._book.busy:
                del memory[key]
        turn = self._turn
        if turn is None:
            return None
        gang = self._book.gang(turn.key)
        if gang is not None and self._book.view(gang).is_admitted:
            self._turn = None
            return None
        now = self._now()
        if turn.key not in self._book.candidates | self._book.busy or turn.until_seconds <= now:
            await self._end("it was not admitted in time")
            return None
        return turn.until_seconds - now

    def open(self, key: GangKey, landscape: PlacementSnapshot) -> PlacementSnapshot:
        """Return the landscape as this gang sees it: what is kept for its own members is free for them."""
        if self._turn is None or self._turn.key != key:
            return landscape
        kept = self._turn.clearing.kept.values()
        return with_kept(landscape, self._context.mirror.ledger, kept, now_seconds=self._now())

    async def try_preempt(self, key: GangKey, asking: GangRequest) -> None:
        """Do what may be done now for a gang that found no place. Raises KubeError."""
        now, rules = self._now(), self._book.rules
        waited = now - self._since.setdefault(key, now)
        if self._turn is not None and self._turn.key == key:
            await self._reconcile_evictions(self._turn)
            return
        if self._not_before.get(key, 0.0) > now or not self._is_next(key, asking):
            return
        clearing, seconds = None, rules.preemption_timeout_seconds
        if rules.preemption and asking.may_preempt and waited >= rules.preemption_delay_seconds:
            clearing = await self._plan_evictions(asking)
        if clearing is None and rules.hold_seconds > 0 and waited >= rules.hold_after_seconds:
            clearing, seconds = await self._plan(asking, None), rules.hold_seconds
        if clearing is None:
            if waited >= min(rules.preemption_delay_seconds, rules.hold_after_seconds):
                self._not_before[key] = now + PLAN_SECONDS
            return
        await self._begin(ActivePreemption(key, asking.priority, clearing, now + seconds), asking)

    def _is_next(self, key: GangKey, asking: GangRequest) -> bool:
        """Tell whether it is this gang's turn: nobody has one who is as important, and nobody waits before it who may
        have one."""
        if self._turn is not None and self._turn.priority >= asking.priority:
            return False
        own, now = place_in_queue(asking.view), self._now()
        for other in self._since.keys() - {key}:
            gang = self._book.gang(other)
            if gang is None or self._not_before.get(other, 0.0) > now or other not in self._book.candidates:
                continue
            if place_in_queue(self._book.view(gang)) < own:
                return False
        return True

    # Planning

    async def _plan_evictions(self, asking: GangRequest) -> PreemptionPlan | None:
        budgets = await self._budgets.read()
        clearing = await self._plan(asking, budgets)
        if clearing is None:
            return None
        singles = [pod for unit in clearing.evicted if unit.gang is None for pod in self._pods(unit)]
        answers = await each(singles, lambda pod: evict(self._context.api, pod, dry_run=True))
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        for fault in refused:
            log.info("May not evict for a gang", err=str(fault))
        return None if refused else clearing

    async def _plan(self, asking: GangRequest, budgets: DisruptionBudgets | None) -> PreemptionPlan | None:
        """Plan with evictions that the budgets allow, or without any. A plan takes many searches, so that it is made
        beside the loop; what has changed meanwhile is found out when the turn begins."""
        holdings, admitted = holdings_of(self._book.mirror.ledger), self._book.admitted()
        if budgets is None:
            return await asyncio.to_thread(plan_preemption, asking, holdings, admitted, is_spared=None)
        allowed, protecting = budgets.allowed(), {one.pod.metadata.uid: budgets.of(one.pod) for one in holdings}

        def is_spared(unit: EvictionUnit) -> bool:
            return violations((protecting.get(uid, ()) for uid in sorted(unit.uids)), allowed) > 0

        return await asyncio.to_thread(plan_preemption, asking, holdings, admitted, is_spared=is_spared)

    def _pods(self, unit: EvictionUnit) -> list[Pod]:
        pods = self._context.mirror.ledger.pods
        return [pods[uid] for uid in sorted(unit.uids) if uid in pods]

    # A turn

    async def _begin(self, turn: ActivePreemption, asking: GangRequest) -> None:
        """Keep the GPUs first, then evict: nobody else gets what is being freed."""
        if self._turn is not None:
            await self._end("a more important gang has its turn")
        kept = turn.clearing.kept
        members = {member.uid: member.pod for member in asking.chosen if member.uid in kept}
        answers = await each(members.items(), lambda entry: write_kept(self._context, entry[1], kept[entry[0]]))
        faults = [answer for answer in answers if isinstance(answer, BaseException)]
        self._turn = turn
        if faults:
            log.info("Could not keep GPUs for a gang", gang="/".join(turn.key), err=str(faults[0]))
            changed = all(isinstance(fault, Conflict) for fault in faults)
            await self._end("a member changed meanwhile" if changed else "a member takes no annotation")
            return
        nodes = len({one.node for one in kept.values()})
        gpus = sum(len(one.device_ids) for one in kept.values())
        victims = ", ".join(unit.name for unit in turn.clearing.evicted)[:400]
        note = f"{gpus} GPUs on {nodes} nodes are kept for it; " + (
            f"evicted: {victims}" if victims else f"{turn.clearing.awaited} holders are waited for"
        )
        self._tell(turn.key, names.REASON_GPUS_FREEING, note)
        log.info("Keeps GPUs for a gang", gang="/".join(turn.key), gpus=gpus, victims=victims)
        await self._reconcile_evictions(turn)

    async def _reconcile_evictions(self, turn: ActivePreemption) -> None:
        """Evict who has not gone yet; a disruption budget may put that off until the next look."""
        name = "/".join(turn.key)
        for unit in turn.clearing.evicted:
            if unit.gang is not None:
                message = f"gives way to gang {name}, which has a higher priority"
                await evict_gang(self._context, self._book, unit.gang, message)
                continue
            for pod in self._pods(unit):
                if pod.metadata.deletion_timestamp is None and pod.spec.priority < turn.priority:
                    try:
                        await evict(self._context.api, pod)
                    except (EvictionRefused, KubeError) as error:
                        log.info("May not evict yet", pod=unit.name, uid=pod.metadata.uid, err=str(error))

    async def _end(self, reason: str) -> None:
        """Keep nothing any more; the gang may have another turn when others could have had theirs."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self._not_before[turn.key] = self._now() + max(PLAN_SECONDS, self._book.rules.hold_seconds)
        pods = self._context.mirror.ledger.pods
        if not await self._clear(pods[uid] for uid in turn.clearing.kept if uid in pods):
            self._has_strays = True
        self._book.note_capacity()
        self._tell(turn.key, names.REASON_PREEMPTION_ENDED, f"its GPUs are not kept any more: {reason}")

    def _strays(self) -> list[Pod]:
        ledger = self._context.mirror.ledger
        known = self._turn.clearing.kept if self._turn is not None else {}
        return [
            pod
            for uid, pod in sorted(ledger.pods.items())
            if names.GANG in pod.metadata.annotations
            and ledger.kept(uid) is not None
            and uid not in known
            and not ledger.leases_of(uid)
        ]

    async def _clear(self, pods: Iterable[Pod]) -> bool:
        """Keep nothing for these pods; False where one could not be written now, which must stop nobody else."""
        answers = await each(list(pods), lambda pod: write_kept(self._context, pod, None))
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ApiError):
                raise answer
        return not any(isinstance(answer, (Conflict, ServerError, TooManyRequests)) for answer in answers)

    def _tell(self, key: GangKey, reason: str, note: str) -> None:
        gang = self._book.gang(key)
        if gang is not None:
            self._context.events.record(gang_reference(gang), reason=reason, note=note, action="Preempt")

    def _now(self) -> float:
        return self._context.clock.monotonic_seconds()
