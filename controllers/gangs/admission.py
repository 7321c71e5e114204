"""Places waiting gangs and missing members of running gangs, and admits each gang whole or not at all.

All gangs are weighed together under one key, in the order of `queue.in_order`, those that lack members first. A gang
that finds no place holds nothing; it is tried again after capacity changed, or after a growing back-off. Events on the
gang and on its first gated members say what it waits for, so that nobody takes it for a failed one.

A search may take seconds, so it runs in a thread on a snapshot. What changes meanwhile is found when GPUs are reserved
and when the status is written.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from atoll.api import names
from atoll.api.gangs import GpuGang
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation
from atoll.cluster.errors import IllegalTransition
from atoll.cluster.gangs import lifecycle
from atoll.cluster.gangs.contention import usable_positions
from atoll.cluster.gangs.gang_status import wait_for
from atoll.cluster.gangs.lifecycle import GangAction, GangView, LifecycleDecision, Obstacle, decide
from atoll.cluster.gangs.member_assignments import (
    MemberAssignment,
    member_assignments,
    replaced_assignment,
    status_assignment,
)
from atoll.cluster.gangs.member_requests import shared_reservation
from atoll.cluster.gangs.membership import key_of
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, find_places
from atoll.cluster.gangs.preemption import GangRequest
from atoll.cluster.gangs.queue import NOBODY, Ahead, blocker, in_order
from atoll.cluster.gangs.replacements import place_missing
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.machines import NodeDevices
from atoll.cluster.requests import Request, Verdict
from atoll.cluster.reservation_use import reservation_name
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import Conflict, Forbidden, Invalid, KubeError, NotFound, ServerError, Unanswered
from atoll.kube.mirror import WatchedKind
from controllers.context import Context
from controllers.gangs.answers import NominatedMember
from controllers.gangs.cache import GangCache, gang_reference
from controllers.gangs.preemption import GangPreemption
from controllers.gangs.waiting_events import GangEvents
from controllers.gangs.writes import (
    each,
    fence,
    member_annotations,
    nominate,
    raise_first,
    reserve,
    ungate,
    unreserve,
    write_status,
)

log = structlog.get_logger(__name__)

ALL = "waiting gangs"
BLIND_SECONDS = 5.0
TRIES_MAX = 64
"""Gangs tried in one round; the next round continues with those that waited longest."""
PASSED_OVER_MAX = 8
"""Gangs in a pause that are tried before one behind them is admitted."""
CUT_SECONDS = 0.05
TAKEN = "a GPU was taken by somebody else, or fell ill, meanwhile"
T = TypeVar("T")


class AdmissionReconciler:
    """Tries the candidates, one after the other."""

    name = "gang-admission"

    def __init__(self, context: Context, cache: GangCache) -> None:
        self._context = context
        self._cache = cache
        self._preemption = GangPreemption(context, cache)
        self._events = GangEvents(context, cache)

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the one key for a change that may have made room, or keeps GPUs for nobody."""
        keeps_for_nobody = self._preemption.observe(kind, change)
        if not self._may_make_room(kind, change):
            return (ALL,) if keeps_for_nobody else ()
        if kind in {WatchedKind.NODE, WatchedKind.TOPOLOGY} and self._cache.candidates:
            self._cache.attempts.clear()
        self._cache.note_capacity()
        return self.all_keys()

    def _may_make_room(self, kind: WatchedKind, change: Change[Any]) -> bool:
        match kind:
            case WatchedKind.LEASE:
                return self._is_given_back(change)
            case WatchedKind.POD:
                return _has_left(change)
            case WatchedKind.NODE:
                return _differs(change)
            case WatchedKind.REPORT:
                return _gives_more(change)
        return kind not in {WatchedKind.GANG, WatchedKind.HEARTBEAT}

    def _is_given_back(self, change: Change[Any]) -> bool:
        """Return whether a GPU is free now, for everybody or for the pods of its GpuReservation."""
        record = self._context.mirror.ledger.leases.get(change.object.metadata.name)
        return change.kind is ChangeKind.DELETED or (record is not None and record.holder.is_reservation)

    def all_keys(self) -> Iterable[str]:
        """Return the one key, unless no gang waits and nothing is kept for any."""
        return (ALL,) if self._cache.candidates or self._preemption.is_open else ()

    async def reconcile(self, key: str) -> float | None:  # noqa: ARG002 - there is only one
        """Try the candidates; return when the next may be tried. Raises KubeError."""
        if self._context.mirror.unready_reason():
            return BLIND_SECONDS
        preemption_seconds = await self._preemption.reconcile()
        await self._fence_doubtful()
        gangs = [gang for key in sorted(self._cache.candidates) if (gang := self._cache.gang(key)) is not None]
        rests = {key_of(gang): self._rest(gang) for gang in gangs}
        is_strict = self._cache.rules.strict_order
        views = self._views(gang for gang in gangs if is_strict or rests[key_of(gang)] <= 0)
        lacking = [view for view in views if view.is_admitted]
        waits: list[float | None] = [preemption_seconds, *(rest for rest in rests.values() if rest > 0)]
        waits += [await self._try(view) for view in in_order(lacking)]
        waits += await self._admit_in_order(in_order(view for view in views if not view.is_admitted))
        return min((wait for wait in waits if wait is not None), default=None)

    async def _fence_doubtful(self) -> None:
        """Let no status arrive late whose write got no answer. Raises KubeError."""
        for gang in self._cache.gangs_in_doubt():
            with contextlib.suppress(Conflict, NotFound):
                await fence(self._context, self._cache, gang)

    def _views(self, gangs: Iterable[GpuGang]) -> list[GangView]:
        idle = (gang for gang in gangs if key_of(gang) not in self._cache.busy)
        return [self._cache.view(gang) for gang in idle if self._cache.is_current(gang)]

    async def _admit_in_order(self, waiting: Sequence[GangView]) -> list[float | None]:
        waits: list[float | None] = []
        is_blocking = self._cache.rules.policy.block_admission
        if not self._are_settled(self._ahead_of_others()):
            return [CUT_SECONDS]  # one whose last write is not seen yet keeps others waiting, too
        first = self._blocker() if is_blocking else None
        ahead: dict[str, Ahead] = {}
        for number, view in enumerate(waiting):
            if first is not None:
                await self._hold(waiting[number:], f"gang {_named(first)} must be ready first")
                waits.append(BLIND_SECONDS)
                break
            if number >= TRIES_MAX:
                waits.append(CUT_SECONDS)
                break
            pool = next(filter(None, (reservation_name(member.pod) for member in view.members)), "")
            waits.append(await self._try(view, ahead.get(pool, NOBODY)))
            if is_blocking and (waits[-1] is None or self._blocker() is not None):
                waits.append(CUT_SECONDS)
                break
            if waits[-1] is not None and self._cache.rules.strict_order:
                ahead[pool] = await self._with_contender(ahead.get(pool, NOBODY), view)
            await asyncio.sleep(0)
        return waits

    def _are_settled(self, ahead: Sequence[GpuGang]) -> bool:
        """Tell whether nobody works on these gangs, and their last writes are seen; of all gangs where one blocks."""
        is_blocking = self._cache.rules.policy.block_admission
        is_idle = self._cache.busy.isdisjoint(map(key_of, ahead))
        return is_idle and all(map(self._cache.is_current, self._cache.gangs() if is_blocking else ahead))

    def _ahead_of_others(self) -> list[GpuGang]:
        """Return the gangs that others must not pass: under strict order each that is tried, else those that run and
        lack members."""
        tried = (gang for key in self._cache.candidates if (gang := self._cache.gang(key)) is not None)
        is_strict = self._cache.rules.strict_order
        return [one for one in tried if is_strict or (one.status and one.status.admission)]

    async def _with_contender(self, ahead: Ahead, view: GangView) -> Ahead:
        """Note what a gang that waits could use, so that nobody behind it takes that. One that can use nothing, because
        it never fits or because what it asks for is not known, keeps nobody waiting."""
        if not self._cache.attempts_of(view.gang).contends:
            return ahead
        usable = await self._usable(view)
        return ahead.with_gang(_named(view), usable) if usable else ahead

    async def _usable(self, view: GangView) -> dict[str, int]:
        members = decide(view, now_seconds=self._cache.now_seconds()).members
        requests, domains = self._cache.requests(members), self._cache.node_domains(view.gang)
        if isinstance(requests, Obstacle) or isinstance(domains, Obstacle):
            return {}
        return await asyncio.to_thread(
            usable_positions, view.gang.spec, members, requests, domains, self._cache.snapshot()
        )

    def _blocker(self) -> GangView | None:
        """Return the admitted gang that must become ready before any other is admitted."""
        views = (self._cache.view(gang) for gang in self._cache.gangs())
        return blocker([view for view in views if view.is_admitted])

    async def _hold(self, views: Sequence[GangView], message: str) -> None:
        for view in views:
            await self._wait(view, NoPlacement(Verdict.BUSY, message, "WaitForOtherGangs"))

    async def _try(self, view: GangView, ahead: Ahead = NOBODY, *, passed_over: bool = False) -> float | None:
        """Try one gang; return when to try again, None when it got what it wants or wants nothing any more. `ahead`:
        what gangs before it could use; passed_over: though it pauses, and without evicting anybody."""
        key = key_of(view.gang)
        wait = 0.0 if passed_over else self._rest(view.gang)
        if wait > 0:
            return wait
        now = self._context.clock.monotonic_seconds()
        decision = decide(view, now_seconds=self._cache.now_seconds())
        if decision.act not in {GangAction.PLACE, GangAction.REPLACE} or key in self._cache.busy:
            return None
        self._cache.busy.add(key)
        try:
            answer = await self._place(view, decision, ahead, may_evict=not passed_over)
        except (Conflict, NotFound, Forbidden, Invalid) as error:  # one gang's refused write must stop no other gang
            log.info("A gang could not be placed", gang="/".join(key), err=str(error))
            answer = NoPlacement(Verdict.BUSY, str(error), "AdmissionUndone")
        finally:
            self._cache.busy.discard(key)
        if answer is None:
            self._cache.attempts.pop(key, None)
            self._cache.candidates.discard(key)
            return None
        attempts = self._cache.attempts_of(view.gang)
        self._cache.attempts[key] = attempts.next(now, answer.verdict, contends=answer.contends)
        return self._cache.attempts[key].wait_seconds(now, room_at_seconds=0.0)

    def _rest(self, gang: GpuGang) -> float:
        """Return how long the gang must not be tried yet."""
        now = self._context.clock.monotonic_seconds()
        return self._cache.attempts_of(gang).wait_seconds(now, room_at_seconds=self._cache.room_at_seconds)

    async def _place(
        self, view: GangView, decision: LifecycleDecision, ahead: Ahead, *, may_evict: bool
    ) -> NoPlacement | None:
        """Admit a gang or place its missing members; return why not, None on success."""
        requests = self._cache.requests(decision.members)
        domains = self._cache.node_domains(view.gang)
        if isinstance(requests, Obstacle):
            return await self._wait(view, NoPlacement(Verdict.UNKNOWN, requests.message, "WaitForQuorum"))
        if isinstance(domains, Obstacle):
            return NoPlacement(Verdict.UNKNOWN, domains.message, domains.reason)
        reservation = shared_reservation(requests)
        snapshot = self._cache.snapshot(reservation)
        if decision.act is GangAction.REPLACE:
            return await self._replace(view, decision, requests, domains, snapshot)
        key = key_of(view.gang)
        before = ""
        if ahead.gangs:
            asked = (view.gang.spec, decision.members, requests, domains, snapshot)
            before = ahead.in_the_way(await asyncio.to_thread(usable_positions, *asked))
            snapshot = snapshot.without_positions(ahead.positions)
        own = self._preemption.with_own_gpus(key, snapshot)
        answer = await asyncio.to_thread(find_places, view, decision.members, requests, domains, own)
        if isinstance(answer, FoundPlacement):
            if not self._cache.rules.strict_order and (first := await self._admit_passed_over(view)):
                return NoPlacement(Verdict.BUSY, f"gang {first} came first", "WaitForOtherGangs")
            assignments = member_assignments(answer.placement, answer.question.asked, own.devices)
            return await self._admit(view, decision, answer, assignments, domains, reservation)
        if before:
            return await self._wait(view, NoPlacement(Verdict.BUSY, f"gang {before} comes first", "WaitForOtherGangs"))
        if answer.verdict is Verdict.BUSY and may_evict:
            await self._preemption.try_preempt(key, GangRequest(view, decision.members, requests, domains, snapshot))
        return await self._wait(view, answer)

    async def _admit_passed_over(self, view: GangView) -> str:
        """Try the gangs that come before this one and have not been tried since there is new room; return the name of
        the one that was admitted, empty for none."""
        room = self._cache.room_at_seconds
        resting = [
            gang
            for key in self._cache.candidates - self._cache.busy
            if (gang := self._cache.gang(key)) is not None
            and self._rest(gang) > 0
            and self._cache.attempts_of(gang).at_seconds < room
            and self._cache.attempts_of(gang).contends
        ]
        before = in_order((*(one for one in self._views(resting) if not one.is_admitted), view))
        for one in before[: before.index(view)][:PASSED_OVER_MAX]:
            if await self._try(one, passed_over=True) is None:
                return _named(one)
        return ""

    async def _admit(
        self,
        view: GangView,
        decision: LifecycleDecision,
        found: FoundPlacement,
        assignments: Sequence[MemberAssignment],
        domains: NodeDomains,
        reservation: str,
    ) -> NoPlacement | None:
        """Reserve for all, write it down, let all go. Whatever fails before it is written down is undone at once."""
        if not await self._reserve(view, assignments, reservation):
            self._context.metrics.gang_admissions.labels("undone").inc()
            return await self._wait(view, NoPlacement(Verdict.BUSY, TAKEN, "AdmissionUndone"))
        nodes = len({assignment.allocation.node for assignment in assignments})
        where = "one node" if nodes == 1 else f"{nodes} nodes"
        without = sum(not assignment.allocation.device_ids for assignment in assignments)
        message = f"{len(assignments)} members got their {'places' if without else 'GPUs'} on {where}"
        message += f", {without} of them without GPUs" if without else ""
        status = lifecycle.admit(
            decision.status,
            now_seconds=self._cache.now_seconds(),
            message=message,
            admission=self._context.new_token(),
            members=[assignment.member for assignment in assignments],
        )
        status = status.model_copy(update={"assignment": status_assignment(found.placement, domains)})
        try:
            await write_status(self._context, self._cache, view.gang, status)
        except (Unanswered, ServerError) as error:
            log.warning("An admission got no answer", gang=_named(view), admission=status.admission, err=str(error))
            return NoPlacement(Verdict.BUSY, f"the admission was not confirmed: {error}", "AdmissionUndone")
        self._context.metrics.gang_admissions.labels("admitted").inc()
        self._context.events.record(
            gang_reference(view.gang), reason=names.REASON_GANG_ADMITTED, note=message, action="Admit"
        )
        log.info("Admitted a gang", gang=view.gang.metadata.name, members=len(assignments), nodes=nodes)
        await self._ungate(view, assignments, status.admission, is_first=True)
        return None

    def _is_here(self, assignment: MemberAssignment) -> bool:
        """Whether the member still exists; where one is gone, the gang's own loop decides."""
        pod = self._context.mirror.pods.by_uid.get(assignment.member.uid)
        return pod is not None and pod.metadata.deletion_timestamp is None

    async def _reserve(self, view: GangView, assignments: Sequence[MemberAssignment], reservation: str) -> bool:
        """Create every Lease, or take it over from the GpuReservation with this uid; or leave none behind. Raises
        KubeError, also with none behind."""
        attempt, members = self._context.new_token(), [assignment.member for assignment in assignments]
        if not self._assume(assignments, reservation, attempt):
            return False
        claims = {member.uid: pods.claim_name(member.pod) for member in members}
        try:
            got_all = await reserve(self._context, view.gang, assignments, claims, attempt, reservation)
        except KubeError:
            await unreserve(self._context, members, assignments)
            raise
        if not got_all:
            await unreserve(self._context, members, assignments)
        return got_all

    def _assume(self, assignments: Sequence[MemberAssignment], reservation: str, attempt: str) -> bool:
        """Mark the GPUs as taken; False, with none marked, if one was taken or withdrawn while places were searched."""
        ledger = self._context.mirror.ledger
        if not all(map(self._is_here, assignments)):
            return False
        if not all(_is_given_out(ledger.nodes.get(one.allocation.node), one.allocation) for one in assignments):
            return False
        for number, assignment in enumerate(assignments):
            uid = assignment.member.uid
            if not assignment.allocation.device_ids:
                continue
            try:
                ledger.assume(uid, assignment.allocation, attempt=attempt, reservation=reservation)
            except IllegalTransition as taken:
                log.info("A GPU was taken while a gang was placed", uid=uid, err=str(taken))
                for marked in assignments[:number]:
                    ledger.forget(marked.member.uid, attempt=attempt)
                return False
        return True

    async def _replace(
        self,
        view: GangView,
        decision: LifecycleDecision,
        requests: Mapping[str, Request],
        domains: NodeDomains,
        snapshot: PlacementSnapshot,
    ) -> NoPlacement | None:
        """Place missing members of a running gang near its others; return why some wait, gated."""
        found = await asyncio.to_thread(place_missing, view, decision.members, requests, domains, snapshot)
        assignments, waiting = found.assignments, found.waiting
        if assignments and not await self._reserve(view, assignments, shared_reservation(requests)):
            return await self._wait(view, NoPlacement(Verdict.BUSY, TAKEN, "AdmissionUndone"))
        if waiting is not None:
            await self._wait(view, waiting)
        if not assignments:
            return waiting
        await self._ungate(view, assignments, view.status.admission, is_first=False)
        if decision.status.assignment is not None:
            now = replaced_assignment(decision.status.assignment, view.members, assignments, domains)
            status = decision.status.model_copy(update={"assignment": now})
            await write_status(self._context, self._cache, view.gang, status)
        return waiting

    async def _ungate(
        self, view: GangView, assignments: Sequence[MemberAssignment], admission: str, *, is_first: bool
    ) -> None:
        """Nominate members, then ungate who can be bound now; the gang's own loop, or another leader's, finds the
        rest by Leases. `is_first`: nobody is let go unless all are still here; the gang's own loop decides then."""
        bindable = await self._cache.bindable(view, {one.member.uid: one.allocation.node for one in assignments})
        annotations = member_annotations(view, admission, [one.member for one in assignments])
        whole = [one for one in assignments if one.allocation.device_ids]
        bare = [one for one in assignments if not one.allocation.device_ids]
        opened: set[str] = set()
        for one in bare:
            self._cache.assume_home(one.member.uid, one.allocation.node)

        async def nominate_one(one: MemberAssignment) -> NominatedMember | None:
            return await self._pin(one, nominate(self._context, one.member.pod, one.allocation.node))

        async def ungate_one(one: MemberAssignment) -> None:
            pod, node, uid = one.member.pod, one.allocation.node, one.member.uid
            found = seen[uid]
            if found is not None and await self._pin(one, ungate(self._context, pod, node, annotations[uid], found)):
                opened.add(uid)

        try:
            answers = await each(assignments, nominate_one)
            raise_first(answers)
            seen = {
                one.member.uid: answer if isinstance(answer, NominatedMember) else None
                for one, answer in zip(assignments, answers, strict=True)
            }
            may_begin = all(map(self._is_here, assignments)) and all(seen[one.member.uid] is not None for one in whole)
            if is_first and not may_begin:
                return
            raise_first(await each([one for one in bare if one.member.uid in bindable], ungate_one))
            raise_first(await each([one for one in whole if one.member.uid in bindable], ungate_one))
            raise_first(await each([one for one in bare if one.member.uid not in bindable], ungate_one))
        finally:
            for one in bare:
                if one.member.uid not in opened:
                    self._cache.forget_home(one.member.uid)

    async def _pin(self, one: MemberAssignment, write: Awaitable[T]) -> T | None:
        """Await a write that sends a member to its node; None where one without GPUs does not take it."""
        try:
            return await write
        except (Forbidden, Invalid) as error:
            if one.allocation.device_ids:
                raise
            pod, uid = f"{one.member.pod.metadata.namespace}/{one.member.pod.metadata.name}", one.member.uid
            log.warning("A member cannot be pinned to its node", pod=pod, uid=uid, err=str(error))
            return None

    async def _wait(self, view: GangView, answer: NoPlacement) -> NoPlacement:
        """Write and record why the gang, or what it lacks, waits. Returns the answer."""
        self._events.record_waiting(view, answer.message)
        if view.is_admitted:
            return answer
        decision = decide(view, now_seconds=self._cache.now_seconds())
        now_seconds = self._cache.now_seconds()
        status = wait_for(decision.status, answer.reason, answer.message, now_seconds=now_seconds)
        await write_status(self._context, self._cache, view.gang, status)
        return answer


def _is_given_out(devices: NodeDevices | None, allocation: Allocation) -> bool:
    """Return whether the node's report of now has these GPUs, with these ids, and gives them out."""
    if not allocation.device_ids:
        return True
    if devices is None:
        return False
    mask = devices.mask_of(allocation.device_ids)
    is_same = mask == devices.mask_of((), allocation.uuids) and mask.bit_count() == len(allocation.device_ids)
    return is_same and mask & ~devices.usable == 0


def _named(view: GangView) -> str:
    return f"{view.gang.metadata.namespace}/{view.gang.metadata.name}"


def _has_left(change: Change[Any]) -> bool:
    """Tell whether a pod ended, so that its cpu and memory are free."""
    if change.kind is ChangeKind.DELETED:
        return True
    old = change.old
    return old is not None and pods.is_terminal(change.object) and not pods.is_terminal(old)


def _gives_more(change: Change[Any]) -> bool:
    """Tell whether a report changed in what may be given out; most only tell of pods."""
    old, new = change.old, change.object
    if old is None or old.status is None or new.status is None:
        return True
    return (old.spec, old.status.devices, old.status.fabric) != (new.spec, new.status.devices, new.status.fabric)


def _differs(change: Change[Any]) -> bool:
    """Tell whether a node changed in what decides about places; its heartbeats do not."""
    old, new = change.old, change.object
    if old is None:
        return True
    return (old.metadata.labels, old.spec, old.status.allocatable) != (
        new.metadata.labels,
        new.spec,
        new.status.allocatable,
    )
