"""Finds places for waiting gangs and for members that running gangs lack, and admits whole gangs.

In: the candidates of the gang loop, changes that make room. Out: Leases for all members of a gang or for none, its
status, its members let go. There is one key: all gangs are weighed against each other, in the order of
`queue.in_order`, those that lack members first. A gang that finds no place holds nothing and is tried again, ever more
rarely while nothing makes room.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.feasibility import Verdict
from atoll.cluster.gangs import lifecycle
from atoll.cluster.gangs.lifecycle import GangAction, GangView, LifecycleDecision, Obstacle, decide
from atoll.cluster.gangs.member_assignments import MemberAssignment, member_assignments, status_assignment
from atoll.cluster.gangs.membership import GangKey, key_of
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, find_places
from atoll.cluster.gangs.preemption import GangRequest
from atoll.cluster.gangs.queue import NOBODY, Ahead, blocker, in_order
from atoll.cluster.gangs.replacements import place_missing
from atoll.cluster.gangs.search_input import PlacementSnapshot, usable_positions
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import Conflict, KubeError, NotFound
from atoll.kube.mirror import WatchedKind
from controllers.context import Context
from controllers.gang_cache import GangCache
from controllers.gang_events import GangEvents
from controllers.gang_preemption import GangPreemption
from controllers.gang_writes import each, raise_first, reserve, ungate, unreserve, write_status
from controllers.gangs import gang_reference

log = structlog.get_logger(__name__)

ALL = "waiting gangs"
BLIND_SECONDS = 5.0
TRIES_MAX = 64
"""Gangs that one round tries; the next one goes on with those that waited longest for it."""
CUT_SECONDS = 0.05


class AdmissionReconciler:
    """Weighs the candidates, one after the other."""

    name = "gang-admission"

    def __init__(self, context: Context, book: GangCache) -> None:
        self._context = context
        self._book = book
        self._room = GangPreemption(context, book)
        self._news = GangEvents(context, book)

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the one key for a change that may have made room."""
        if kind is WatchedKind.LEASE and change.kind is not ChangeKind.DELETED:
            return ()
        if kind is WatchedKind.POD and not _has_left(change):
            return ()
        if kind is WatchedKind.NODE and not _differs(change):
            return ()
        if kind in {WatchedKind.GANG, WatchedKind.HEARTBEAT} or (
            kind is WatchedKind.REPORT and not _gives_more(change)
        ):
            return ()
        if kind in {WatchedKind.NODE, WatchedKind.TOPOLOGY} and self._book.candidates:
            self._book.attempts.clear()
        self._book.note_capacity()
        return (ALL,) if self._book.candidates else ()

    def all_keys(self) -> Iterable[str]:
        """Return the one key."""
        return (ALL,) if self._book.candidates else ()

    async def reconcile(self, key: str) -> float | None:  # noqa: ARG002 - there is only one
        """Try the candidates; return when the next may be tried. Raises KubeError."""
        if self._context.mirror.unready_reason():
            return BLIND_SECONDS
        turn_seconds = await self._room.reconcile()
        views = self._views(self._book.candidates)
        rests = {key_of(view.gang): self._rest(view) for view in views}
        if not self._book.rules.strict_order:
            views = [view for view in views if rests[key_of(view.gang)] <= 0]
        lacking = [view for view in views if view.is_admitted]
        waits: list[float | None] = [turn_seconds, *(rest for rest in rests.values() if rest > 0)]
        waits += [await self._try(view) for view in in_order(lacking)]
        waits += await self._admit_in_order(in_order(view for view in views if not view.is_admitted))
        return min((wait for wait in waits if wait is not None), default=None)

    def _views(self, keys: Iterable[GangKey]) -> list[GangView]:
        gangs = [self._book.gang(key) for key in sorted(keys) if key not in self._book.busy]
        return [self._book.view(gang) for gang in gangs if gang is not None and self._book.is_current(gang)]

    async def _admit_in_order(self, waiting: Sequence[GangView]) -> list[float | None]:
        waits: list[float | None] = []
        is_blocking = self._book.rules.policy.block_admission
        if is_blocking and not all(self._book.is_current(gang) for gang in self._book.gangs()):
            return [CUT_SECONDS]
        first = self._blocker() if is_blocking else None
        ahead = Ahead()
        for number, view in enumerate(waiting):
            if first is not None:
                await self._hold(waiting[number:], f"gang {_named(first)} must be ready first")
                waits.append(BLIND_SECONDS)
                break
            if number >= TRIES_MAX:
                waits.append(CUT_SECONDS)
                break
            waits.append(await self._try(view, ahead))
            if waits[-1] is None and is_blocking:
                waits.append(CUT_SECONDS)
                break
            if waits[-1] is not None and self._book.rules.strict_order:
                ahead = self._with_contender(ahead, view)
            await asyncio.sleep(0)
        return waits

    def _with_contender(self, ahead: Ahead, view: GangView) -> Ahead:
        """Note what a gang that waits could use, so that nobody behind it takes that. One that can use nothing, because
        it never fits or because what it asks for is not known, keeps nobody waiting."""
        if not self._book.attempts_of(view.gang).contends:
            return ahead
        usable = self._usable(view)
        return ahead.with_gang(_named(view), usable) if usable else ahead

    def _usable(self, view: GangView) -> dict[str, int]:
        members = decide(view, now_seconds=self._book.now_seconds()).members
        requests = self._book.requests(members)
        return {} if isinstance(requests, Obstacle) else usable_positions(members, requests, self._book.landscape())

    def _blocker(self) -> GangView | None:
        """Return the admitted gang that must become ready before any other is admitted."""
        views = (self._book.view(gang) for gang in self._book.gangs())
        return blocker([view for view in views if view.is_admitted])

    async def _hold(self, views: Sequence[GangView], message: str) -> None:
        for view in views:
            await self._wait(view, NoPlacement(Verdict.BUSY, message, "WaitForOtherGangs"))

    async def _try(self, view: GangView, ahead: Ahead = NOBODY) -> float | None:
        """Try one gang; return when to try again, None when it got what it wants or wants nothing any more. `ahead`:
        what gangs before it could use."""
        key = key_of(view.gang)
        wait = self._rest(view)
        if wait > 0:
            return wait
        now = self._context.clock.monotonic_seconds()
        decision = decide(view, now_seconds=self._book.now_seconds())
        if decision.act not in {GangAction.PLACE, GangAction.REPLACE} or key in self._book.busy:
            return None
        self._book.busy.add(key)
        try:
            answer = await self._place(view, decision, ahead)
        except (Conflict, NotFound) as error:
            log.info("A gang changed while it was placed", gang="/".join(key), err=str(error))
            answer = NoPlacement(Verdict.BUSY, str(error), "AdmissionUndone")
        finally:
            self._book.busy.discard(key)
        if answer is None:
            self._book.attempts.pop(key, None)
            self._book.candidates.discard(key)
            return None
        contends = answer.verdict is Verdict.BUSY or answer.reason == "WaitForNodes"
        self._book.attempts[key] = self._book.attempts_of(view.gang).next(now, answer.verdict, contends=contends)
        return self._book.attempts[key].wait_seconds(now, room_at_seconds=0.0)

    def _rest(self, view: GangView) -> float:
        """Return how long the gang must not be tried yet."""
        now = self._context.clock.monotonic_seconds()
        return self._book.attempts_of(view.gang).wait_seconds(now, room_at_seconds=self._book.room_at_seconds)

    async def _place(self, view: GangView, decision: LifecycleDecision, ahead: Ahead) -> NoPlacement | None:
        """Give a gang what it wants; return why not, None where it has it now."""
        requests = self._book.requests(decision.members)
        site = self._book.site(view.gang)
        if isinstance(requests, Obstacle):
            return await self._wait(view, NoPlacement(Verdict.UNKNOWN, requests.message, "WaitForQuorum"))
        if isinstance(site, Obstacle):
            return NoPlacement(Verdict.UNKNOWN, site.message, site.reason)
        landscape = self._book.landscape()
        if decision.act is GangAction.REPLACE:
            is_whole = await self._replace(view, decision, site, landscape)
            return None if is_whole else NoPlacement(Verdict.BUSY, "members that it lacks find no place", "WaitForRoom")
        key = key_of(view.gang)
        if ahead.gangs:
            before = ahead.in_the_way(usable_positions(decision.members, requests, landscape))
            landscape = landscape.without_positions(ahead.positions)
        else:
            before = ""
        answer = find_places(view, decision.members, requests, site, self._room.open(key, landscape))
        if isinstance(answer, FoundPlacement):
            return await self._admit(view, decision, answer, site)
        if before:
            return await self._wait(view, NoPlacement(Verdict.BUSY, f"gang {before} comes first", "WaitForOtherGangs"))
        if answer.verdict is Verdict.BUSY:
            await self._room.try_preempt(key, GangRequest(view, decision.members, requests, site, landscape))
        return await self._wait(view, answer)

    async def _admit(
        self, view: GangView, decision: LifecycleDecision, found: FoundPlacement, site: NodeDomains
    ) -> NoPlacement | None:
        """Reserve for all, write it down, let all go. Whatever fails before it is written down is undone at once."""
        seats = member_assignments(found.placement, found.question.asked, self._context.mirror.ledger.nodes)
        if not await self._reserve(view, seats):
            self._context.metrics.gang_admissions.labels("undone").inc()
            message = "a GPU was taken by somebody else meanwhile"
            return await self._wait(view, NoPlacement(Verdict.BUSY, message, "AdmissionUndone"))
        nodes = len({seat.allocation.node for seat in seats})
        where = "one node" if nodes == 1 else f"{nodes} nodes"
        message = f"{len(seats)} members got their GPUs on {where}"
        status = lifecycle.admit(decision.status, now_seconds=self._book.now_seconds(), message=message)
        status = status.model_copy(update={"assignment": status_assignment(found.placement, site)})
        await self._write(view, status)
        self._context.metrics.gang_admissions.labels("admitted").inc()
        self._context.events.record(
            gang_reference(view.gang), reason=names.REASON_GANG_ADMITTED, note=message, action="Admit"
        )
        log.info("Admitted a gang", gang=view.gang.metadata.name, members=len(seats), nodes=nodes)
        if all(self._is_here(seat) for seat in seats):
            await self._ungate(seats)
        return None

    def _is_here(self, seat: MemberAssignment) -> bool:
        """Tell whether the member is still there; where one went meanwhile, the loop of gangs looks at the whole."""
        pod = self._context.mirror.pods.by_uid.get(seat.member.uid)
        return pod is not None and pod.metadata.deletion_timestamp is None

    async def _reserve(self, view: GangView, seats: Sequence[MemberAssignment]) -> bool:
        """Create every Lease, or leave none behind. Raises KubeError, also with none behind."""
        ledger = self._context.mirror.ledger
        for seat in seats:
            ledger.assume(seat.member.uid, seat.allocation)
        claims = {seat.member.uid: pods.claim_name(seat.member.pod) for seat in seats}
        members = [seat.member for seat in seats]
        try:
            got_all = await reserve(self._context, view.gang, seats, claims)
        except KubeError:
            await unreserve(self._context, members, seats)
            raise
        if not got_all:
            await unreserve(self._context, members, seats)
        return got_all

    async def _replace(
        self, view: GangView, decision: LifecycleDecision, site: NodeDomains, landscape: PlacementSnapshot
    ) -> bool:
        """Place members that a running gang lacks, where its others are. Those that find no place wait, gated."""
        requests = self._book.requests(decision.members)
        if isinstance(requests, Obstacle):
            return False
        seats = place_missing(view, decision.members, requests, site, landscape)
        if not seats or not await self._reserve(view, seats):
            return False
        await self._ungate(seats)
        return len(seats) == len(decision.members)

    async def _ungate(self, seats: Sequence[MemberAssignment]) -> None:
        raise_first(
            await each(seats, lambda seat: ungate(self._context, seat.member.pod, seat.allocation.node))
        )  # fmt: skip

    async def _wait(self, view: GangView, answer: NoPlacement) -> NoPlacement:
        """Note on the gang why it waits, and tell its members. Returns the answer."""
        if view.is_admitted:
            return answer
        self._news.tell(view, answer.message)
        decision = decide(view, now_seconds=self._book.now_seconds())
        now_seconds = self._book.now_seconds()
        status = lifecycle.wait_for(decision.status, answer.reason, answer.message, now_seconds=now_seconds)
        await self._write(view, status)
        return answer

    async def _write(self, view: GangView, status: Any) -> None:  # noqa: ANN401 - a GpuGangStatus
        version = await write_status(self._context, view.gang, status)
        if version:
            self._book.note_written(view.gang.metadata.uid, version)


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
