"""Carries out what `lifecycle.decide` says about each gang: resume or undo, evict, watch readiness, resume owners.

Gangs that want a place are passed on to the admission loop. Keys are gangs. All state is read from the objects, so that
a new leader continues at whatever step the last one stopped.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from atoll.api import names
from atoll.api.gangs import GpuGang, GpuGangStatus, SuspendedOwner
from atoll.cluster import host_fit
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.lifecycle import (
    GangAction,
    GangView,
    LifecycleDecision,
    cannot_start,
    decide,
    give_up,
    has_begun,
)
from atoll.cluster.gangs.membership import STARTED, GangKey, GangMember, has_gate, key_of, stage_of, without_pod_set
from atoll.cluster.gangs.pod_groups import group_of
from atoll.cluster.gangs.readiness import placeable
from atoll.cluster.gangs.sizes import size_conflict_of
from atoll.kube import paths
from atoll.kube.cache import Change
from atoll.kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound
from atoll.kube.events import EventType
from atoll.kube.mirror import WatchedKind
from controllers.context import Context, pod_reference
from controllers.gangs.answers import NominatedMember
from controllers.gangs.cache import GangCache, gang_reference, jitter_of
from controllers.gangs.creation import NOTE_LENGTH_MAX, TOLD_MAX, GangMaker
from controllers.gangs.owners import resume, root_owners, suspend
from controllers.gangs.pod_groups import PodGroupGangs
from controllers.gangs.writes import (
    each,
    fence,
    is_reserved,
    member_annotations,
    nominate,
    raise_first,
    set_active,
    ungate,
    unreserve,
    write_status,
)
from controllers.pauses import Pauses
from controllers.pod_calls import EvictionRefused, evict, give_notice

log = structlog.get_logger(__name__)

BLIND_SECONDS = 5.0
BUSY_SECONDS = 0.25
BEHIND_SECONDS = 0.1
AGAIN_SECONDS = 1.0
OWNER_STOPS_SECONDS = 60.0
"""After this time the members of an evicted gang are evicted one by one, whatever their owner does."""


class GangReconciler:
    """Carries out the decision about each gang. `place` wakes the admission loop."""

    name = "gangs"

    def __init__(self, context: Context, cache: GangCache, place: Callable[[], None]) -> None:
        self._context = context
        self._cache = cache
        self._place = place
        self._groups = PodGroupGangs(context, cache)
        self._maker = GangMaker(context, cache, self._groups)
        self._pauses: Pauses[GangKey] = Pauses(context.clock)

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[GangKey]:
        """Return the gang that changed, that of a pod that changed, and every gang when a topology did."""
        if kind is WatchedKind.TOPOLOGY:
            self._cache.observe(kind, change)
            return self._cache.keys()
        if kind is WatchedKind.LEASE:
            record = self._context.mirror.ledger.leases.get(change.object.metadata.name)
            namespace, _, rest = record.gang.partition("/") if record is not None else ("", "", "")
            return ((namespace, rest.partition("/")[0]),) if rest else ()
        key = self._cache.observe(kind, change)
        return () if key is None else (key,)

    def all_keys(self) -> Iterable[GangKey]:
        """Return every gang."""
        return self._cache.keys()

    async def reconcile(self, key: GangKey) -> float | None:
        """Settle one gang. Raises KubeError."""
        if self._context.mirror.unready_reason():
            return BLIND_SECONDS
        if key in self._cache.busy:
            return BUSY_SECONDS
        if (pause := self._pauses.left_seconds(key)) > 0:
            self._cache.candidates.discard(key)
            return pause
        try:
            return await self._settle(key)
        except (Forbidden, Invalid) as error:
            return self._pause(key, error)

    def _pause(self, key: GangKey, error: ApiError) -> float:
        """Leave a gang alone of which a write was refused, and say so."""
        log.warning("A write for a gang was refused", gang="/".join(key), err=str(error))
        self._cache.candidates.discard(key)
        gang = self._cache.gang(key)
        if gang is not None:
            self._record_event(gang, names.REASON_WRITE_REFUSED, f"tried again later: {error}", type="Warning")
        return self._pauses.begin(key)

    async def _settle(self, key: GangKey) -> float | None:
        gang = self._cache.gang(key)
        if gang is None or await self._maker.is_outlived(gang):
            self._cache.candidates.discard(key)
            await self._undo_without_gang(key)
            return await self._maker.make(key)
        if not self._cache.is_current(gang):
            return await self._catch_up(gang)
        if await self._groups.follow(gang, self._cache.pods_of(key)):
            return BEHIND_SECONDS
        self._maker.tell_conflict(key, size_conflict_of(gang, self._cache.pods_of(key)))
        token = self._context.new_token()
        view = self._cache.view(gang)
        decision = decide(view, now_seconds=self._cache.now_seconds(), jitter=jitter_of(token))
        self._tell_gated(view)
        if decision.act not in {GangAction.PLACE, GangAction.REPLACE}:  # else none behind it may pass meanwhile
            self._cache.candidates.discard(key)
        self._cache.busy.add(key)
        try:
            return await self._act(key, gang, decision)
        except (Conflict, NotFound) as error:
            log.info("A gang changed meanwhile", gang="/".join(key), err=str(error))
            return BUSY_SECONDS
        finally:
            self._cache.busy.discard(key)

    async def _act(self, key: GangKey, gang: GpuGang, decision: LifecycleDecision) -> float | None:
        match decision.act:
            case GangAction.UNDO:
                await fence(self._context, self._cache, gang)
                await unreserve(self._context, decision.members)
                self._record_event(
                    gang, names.REASON_GANG_UNDONE, "reservations of an admission that did not end were undone"
                )
                return BUSY_SECONDS
            case GangAction.UNGATE:
                return await self._ungate_rest(gang, decision)
            case GangAction.EVICT:
                return await self._evict(gang, decision)
            case GangAction.RESUME:
                return await self._resume(gang, decision)
            case GangAction.DROP:
                await self.write(gang, decision.status)
                await self._drop(decision.members)
            case GangAction.PLACE | GangAction.REPLACE:
                self._cache.candidates.add(key)
                await self.write(gang, decision.status)
                self._place()
            case GangAction.NOTHING:
                await self.write(gang, decision.status)
                if self._cache.rules.policy.block_admission and self._cache.candidates:
                    self._place()
        return decision.again_seconds

    def _tell_gated(self, view: GangView) -> None:
        """Record on gated pods why nobody lets them go."""
        for member, note in self._notes(view):
            reference = pod_reference(member.pod)
            self._context.events.record(reference, reason=names.REASON_GANG_WAITING, note=note, action="Wait")

    def _notes(self, view: GangView) -> list[tuple[GangMember, str]]:
        """Return pods with what keeps their gang from starting for its PodGroup, strangers to the group first; or pods
        that come beyond the counts of a running gang, for none of its pod sets, or are strangers to its PodGroup."""
        spec, name = view.gang.spec, view.gang.metadata.name
        gated = [member for member in view.members if member.is_gated]
        if not view.is_admitted:
            conflict = self._cache.group_conflicts.get(key_of(view.gang), "")
            told = sorted(gated, key=lambda member: group_of(member.pod) == name)[:TOLD_MAX] if conflict else []
            return [(member, f"GpuGang {name!r} does not start: {conflict}"[:NOTE_LENGTH_MAX]) for member in told]
        known = ", ".join(pod_set.name for pod_set in spec.pod_sets[:TOLD_MAX])
        lost = (
            f"the pod names no pod set of GpuGang {name!r}, which has {known}; set {names.POD_SET} on its template to "
            "one of them, and create it again"
        )[:NOTE_LENGTH_MAX]
        excess = (
            f"GpuGang {name!r} has as many members of pod set {{}} as it counts; this pod stays gated until one of "
            "them ends, or the pod set's count is raised"
        )
        strange = (
            f"the pod is not of PodGroup {name!r}, for which GpuGang {name!r} runs, and counts for nothing in it; "
            f"create it again with spec.schedulingGroup, or without the annotation {names.GANG}"
        )[:NOTE_LENGTH_MAX]
        return [
            *((member, strange) for member in view.strangers[:TOLD_MAX]),
            *((member, lost) for member in without_pod_set(gated)[:TOLD_MAX]),
            *((member, excess.format(member.pod_set)) for member in placeable(spec, view.members)[1][:TOLD_MAX]),
        ]

    async def _catch_up(self, gang: GpuGang) -> float:
        """Wait until the mirror shows our own writes; end the wait for one that got no answer. Raises KubeError."""
        if self._cache.is_in_doubt(gang):
            with contextlib.suppress(Conflict, NotFound):
                await fence(self._context, self._cache, gang)
        return BEHIND_SECONDS

    async def write(self, gang: GpuGang, status: GpuGangStatus) -> None:
        """Write a status. Raises KubeError."""
        await write_status(self._context, self._cache, gang, status)

    def _refusing_node(self, members: Sequence[GangMember]) -> str:
        """Return a node that would now refuse the member whose GPUs it has; empty when none would."""
        for member in members:
            home, _ = self._cache.reservation(member)
            node = self._context.mirror.nodes.store.get(("", home))
            if node is None or host_fit.node_reason(member.pod, node):
                return home
        return ""

    async def _ungate_rest(self, gang: GpuGang, decision: LifecycleDecision) -> float | None:
        """Ungate those of the rest that can be bound now, unless a node or the API server refuses a member by now, or
        its Leases are gone."""
        view, now = self._cache.view(gang), self._cache.now_seconds()
        homes = {member.uid: self._cache.reservation(member)[0] for member in decision.members}
        bindable = await self._cache.bindable(view, homes)
        if has_begun(view) and not bindable:
            await self.write(gang, decision.status)
            return decision.again_seconds
        members = [one for one in decision.members if one.uid in bindable or not has_begun(view)]
        refusing = self._refusing_node(members)
        if refusing and not has_begun(view):
            message = f"node {refusing} would refuse a member now"
            await self.write(gang, give_up(decision.status, message, now_seconds=now))
            return BUSY_SECONDS
        try:
            nominated = await self._nominate(members)
            lacking = await self._lacking([member for member, _ in nominated])
            if lacking and not has_begun(view):
                message = f"member {lacking[0].pod.metadata.name} has lost its GPUs"
                await self.write(gang, give_up(decision.status, message, now_seconds=now))
                return BUSY_SECONDS
            await unreserve(self._context, lacking)
            if not has_begun(view) and (len(nominated) < len(members) or not self._is_whole(gang)):
                return BUSY_SECONDS
            whole = [(one, seen) for one, seen in nominated if one not in lacking and one.uid in bindable]
            return await self._ungate(view, whole)
        except (Forbidden, Invalid) as error:
            message = f"a member cannot be pinned to its node: {error}"
        if not view.status.was_ready:
            jitter = jitter_of(self._context.new_token())
            return await self._evict(gang, cannot_start(view, message[:1000], now_seconds=now, jitter=jitter))
        log.warning("Gave up members that cannot be pinned", gang=gang.metadata.name, err=message)
        await unreserve(self._context, members)
        return self._pauses.begin(key_of(gang))

    def _is_whole(self, gang: GpuGang) -> bool:
        """Tell whether no member has left while the others were nominated."""
        decision = decide(self._cache.view(gang), now_seconds=self._cache.now_seconds())
        return decision.act is GangAction.UNGATE

    async def _nominate(self, members: Sequence[GangMember]) -> list[tuple[GangMember, NominatedMember]]:
        """Nominate members to the nodes of their GPUs; return those that are as they were seen."""

        async def nominate_one(member: GangMember) -> NominatedMember | None:
            return await nominate(self._context, member.pod, self._cache.reservation(member)[0])

        answers = await each(members, nominate_one)
        raise_first(answers)
        pairs = zip(members, answers, strict=True)
        return [(member, seen) for member, seen in pairs if isinstance(seen, NominatedMember)]

    async def _lacking(self, members: Sequence[GangMember]) -> list[GangMember]:
        """Return the members whose Leases are not all there, as the API server says."""

        async def is_whole(member: GangMember) -> bool:
            return await is_reserved(self._context, member.uid, self._cache.reservation(member)[1])

        answers = await each(members, is_whole)
        raise_first(answers)
        return [member for member, answer in zip(members, answers, strict=True) if answer is not True]

    async def _ungate(self, view: GangView, nominated: Sequence[tuple[GangMember, NominatedMember]]) -> float:
        annotations = member_annotations(view, view.status.admission, [member for member, _ in nominated])

        async def open_one(entry: tuple[GangMember, NominatedMember]) -> None:
            member, seen = entry
            node = seen.status.nominated_node_name
            await ungate(self._context, member.pod, node, annotations[member.uid], seen)

        raise_first(await each(nominated, open_one))
        return BUSY_SECONDS

    async def _evict(self, gang: GpuGang, decision: LifecycleDecision) -> float:
        """Write that the gang is evicted, then stop it; a half-done eviction is done again."""
        was_evicted = conditions.is_true((gang.status or GpuGangStatus()).conditions, names.CONDITION_EVICTED)
        if decision.deactivate:
            await set_active(self._context, gang, active=False)
            gang = await self._reread(gang)
        owners, bare = await root_owners(self._context, gang.metadata.namespace, decision.members)
        status = decision.status.model_copy(
            update={"suspended_owners": _merged(decision.status.suspended_owners, owners)}
        )
        await self.write(gang, status)
        if not was_evicted:
            self._record_eviction(gang, status, deactivated=decision.deactivate)
        uid = gang.metadata.uid
        running = [member.pod for member in decision.members if member.pod.spec.node_name]
        raise_first(await each(running, lambda pod: give_notice(self._context, pod)))
        has_stopped = not self._lasts_too_long(gang)
        for owner in owners:
            try:
                await suspend(self._context, gang.metadata.namespace, owner, uid)
            except (Forbidden, Invalid) as error:
                log.warning("Could not suspend the owner of a gang", owner=f"{owner.kind} {owner.name}", err=str(error))
                has_stopped = False
        await self._drop([member for member in (bare if has_stopped else decision.members) if member.stage in STARTED])
        return AGAIN_SECONDS

    def _lasts_too_long(self, gang: GpuGang) -> bool:
        """Whether an eviction goes on although the owners were told to stop: they may ignore their switch."""
        found = (gang.status or GpuGangStatus()).conditions
        since = conditions.since_seconds(found, names.CONDITION_EVICTED)
        is_evicted = conditions.is_true(found, names.CONDITION_EVICTED)
        return is_evicted and since is not None and self._cache.now_seconds() - since > OWNER_STOPS_SECONDS

    async def _drop(self, members: Sequence[GangMember]) -> None:
        """Evict pods; a disruption budget may delay that until the next call."""
        answers = await each(members, lambda member: evict(self._context.api, member.pod))
        raise_first(answer for answer in answers if not isinstance(answer, EvictionRefused))

    async def _reread(self, gang: GpuGang) -> GpuGang:
        path = paths.gpugangs(gang.metadata.namespace, gang.metadata.name)
        return GpuGang.model_validate_json(await self._context.api.get(path))

    def _record_eviction(self, gang: GpuGang, status: GpuGangStatus, *, deactivated: bool) -> None:
        evicted = conditions.find(status.conditions, names.CONDITION_EVICTED)
        message = evicted.message if evicted is not None else ""
        self._context.metrics.gang_evictions.labels(evicted.reason if evicted is not None else "").inc()
        self._record_event(gang, names.REASON_GANG_EVICTED, message, type="Warning")
        if deactivated:
            self._record_event(gang, names.REASON_GANG_DEACTIVATED, message, type="Warning")

    async def _resume(self, gang: GpuGang, decision: LifecycleDecision) -> float:
        namespace, uid = gang.metadata.namespace, gang.metadata.uid
        owners = decision.status.suspended_owners
        resumed = [owner.name for owner in owners if await resume(self._context, namespace, owner, uid)]
        await self.write(gang, decision.status.model_copy(update={"suspended_owners": ()}))
        if resumed:
            self._record_event(gang, names.REASON_GANG_RESUMED, f"resumed {', '.join(resumed)[:400]}")
        return AGAIN_SECONDS

    async def _undo_without_gang(self, key: GangKey) -> None:
        """Unreserve gated pods whose gang is deleted: nobody would ungate them."""
        found = self._cache.pods_of(key)
        held = [pod for pod in found if has_gate(pod) and self._cache.holds(pod)]
        if held:
            await unreserve(self._context, [GangMember(pod, "", 0, stage_of(pod), holds=True) for pod in held])

    def _record_event(self, gang: GpuGang, reason: str, note: str, *, type: EventType = "Normal") -> None:  # noqa: A002
        self._context.events.record(gang_reference(gang), reason=reason, note=note, action="Settle", type=type)


def _merged(known: tuple[SuspendedOwner, ...], more: tuple[SuspendedOwner, ...]) -> tuple[SuspendedOwner, ...]:
    return tuple({owner.uid: owner for owner in (*known, *more)}.values())
