"""The life of a gang: what is to be done about it now, and what its status says afterwards.

All state is in the objects (conditions of the gang, gates and Leases of its pods), so that the next leader decides the
same:

    inactive <--active: false--  WAITING  --quorum, room--> Leases of all --> ADMITTED --> members ungated, one by one
                                  ^    ^                        |                 |
                                  |    +-- UNDO: not admitted --+                 | not ready in time, refused, inactive
                                  +---- pause, owners resumed <-- EVICTED <-------+

Admitted is written when all GPUs are reserved and before the first member may start. So a gated member that holds GPUs
is ungated where the gang is admitted, and gives them back where it is not: there is no third case.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.api import names
from atoll.api.gangs import GangAssignment, GpuGang, GpuGangStatus, RequeueState
from atoll.api.times import seconds_of, text_of
from atoll.cluster.gangs import conditions
from atoll.cluster.gangs.gang_status import (
    close_admission,
    fail,
    in_phase,
    meet,
    open_admission,
    wait_for,
    with_quorum,
    with_readiness,
)
from atoll.cluster.gangs.membership import (
    STARTED,
    GangMember,
    MemberStage,
    admission_of,
    of_admission,
    owner_uid,
)
from atoll.cluster.gangs.pod_groups import strangers
from atoll.cluster.gangs.readiness import QuorumCount, have_all_succeeded, placeable, placed, quorum, readiness
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy, exceeds_limit, loses_too_often, pause_seconds
from atoll.cluster.gangs.refusals import STUCK_SECONDS, is_victim, patience_seconds, refused_since, why_refused
from atoll.cluster.gangs.succeeded import known_uids, of_owners, remember


class GangAction(StrEnum):
    """What is to be done."""

    NOTHING = "nothing"
    UNDO = "delete the reservations of gated members"
    UNGATE = "ungate the members that hold GPUs"
    EVICT = "give everything back"
    RESUME = "resume the owners that were suspended"
    PLACE = "find a place for all"
    REPLACE = "find places for members that are missing"
    DROP = "evict members that cannot start where they were put, so that their owner makes others"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a gang cannot be admitted whatever is free: a reason of the condition Active, and a message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class GangView:
    """Input of a decision. `members`: without those that ended in an earlier admission, and without `strangers` to the
    PodGroup of a running gang; `obstacle`: the problem with the gang or its topology."""

    gang: GpuGang
    members: tuple[GangMember, ...]
    policy: ReadinessPolicy
    obstacle: Obstacle | None = None
    strangers: tuple[GangMember, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if self.is_admitted:
            found = strangers(self.gang, self.members)
            object.__setattr__(self, "strangers", found)
            object.__setattr__(self, "members", tuple(one for one in self.of_last_admission if one not in found))

    @property
    def status(self) -> GpuGangStatus:
        """The status as last written."""
        return self.gang.status or GpuGangStatus()

    @property
    def is_admitted(self) -> bool:
        """Whether the gang is admitted."""
        return conditions.is_true(self.status.conditions, names.CONDITION_ADMITTED)

    @property
    def of_last_admission(self) -> tuple[GangMember, ...]:
        """The members without those that ended before the last admission, which may be over by now."""
        return of_admission(self.members, self.status.admission, known_uids(self.status.succeeded))


@dataclass(frozen=True, slots=True)
class LifecycleDecision:
    """`act` on `members`; `status` is what the gang's status says then. `deactivate`: spec.active is set to false."""

    act: GangAction
    status: GpuGangStatus
    members: tuple[GangMember, ...] = ()
    again_seconds: float | None = None
    deactivate: bool = False


def decide(view: GangView, *, now_seconds: float, jitter: float = 0.0) -> LifecycleDecision:
    """Decide about one gang. `jitter` from 0 to 1 moves the end of a pause."""
    spec = view.gang.spec
    succeeded = remember(view.status.succeeded, view.of_last_admission, is_admitted=view.is_admitted)
    tallied = readiness(spec, view.members, succeeded)
    status = view.status.model_copy(
        update={
            "members": sum(
                m.stage in STARTED or m.stage in {MemberStage.GATED, MemberStage.HELD_BACK} for m in view.members
            ),
            "ready": tallied.count,
            "succeeded": succeeded,
            "needed": spec.quorum,
            "observed_generation": view.gang.metadata.generation or None,
        }
    )
    is_barred = view.obstacle is not None and not view.is_admitted and not _remains(view.members)
    if not spec.active or is_barred:
        return _decide_inactive(view, status, now_seconds)
    status = _activate(status, now_seconds)
    if view.is_admitted:
        return _decide_admitted(view, status, tallied, now_seconds=now_seconds, jitter=jitter)
    return _decide_waiting(view, status, now_seconds)


def _decide_inactive(view: GangView, status: GpuGangStatus, now_seconds: float) -> LifecycleDecision:
    active = conditions.find(status.conditions, names.CONDITION_ACTIVE)
    obstacle = view.obstacle or Obstacle("Deactivated", "spec.active is false; set it to true to try the gang again")
    if not view.gang.spec.active and active is not None and active.reason == "RequeuingLimitExceeded":
        obstacle = Obstacle(active.reason, active.message)
    status = fail(status, names.CONDITION_ACTIVE, obstacle.reason, obstacle.message, now_seconds)
    if view.is_admitted or _remains(view.members):
        return _evict(view, status, Obstacle("Deactivated", obstacle.message), now_seconds=now_seconds, pause=None)
    status = fail(status, names.CONDITION_ADMITTED, "Inactive", obstacle.message, now_seconds)
    return _undo_or(view, LifecycleDecision(GangAction.NOTHING, in_phase(status, "Inactive")))


def _activate(status: GpuGangStatus, now_seconds: float) -> GpuGangStatus:
    """Note that the gang is active; what was put out of action and comes back starts with a clean record."""
    active = conditions.find(status.conditions, names.CONDITION_ACTIVE)
    if active is not None and active.reason in {"Deactivated", "RequeuingLimitExceeded"}:
        status = status.model_copy(update={"requeue_state": None})
    return meet(status, names.CONDITION_ACTIVE, "Active", "", now_seconds)


def _decide_waiting(view: GangView, status: GpuGangStatus, now_seconds: float) -> LifecycleDecision:
    is_evicted = conditions.is_true(status.conditions, names.CONDITION_EVICTED)
    remains = _remains(view.members)
    if remains and is_evicted:
        message = f"{len(remains)} members of the evicted admission have not ended yet"
        return LifecycleDecision(GangAction.EVICT, wait_for(status, "WaitForRelease", message, now_seconds), remains)
    has_finished = _has_finished(view, status, is_evicted=is_evicted)
    if remains or (has_finished and not status.suspended_owners):
        return LifecycleDecision(GangAction.NOTHING, _adopt(view, status, now_seconds), again_seconds=0.0)
    status, requeue_at = _with_pause(view, status, now_seconds)
    if requeue_at > now_seconds and not has_finished:
        count = status.requeue_state.count if status.requeue_state is not None else 0
        message = f"evicted {count} times; retried at {text_of(requeue_at)}"
        waiting = wait_for(status, "WaitForRequeue", message, now_seconds)
        return _undo_or(view, LifecycleDecision(GangAction.NOTHING, waiting, again_seconds=requeue_at - now_seconds))
    if status.suspended_owners:
        return _undo_or(
            view,
            LifecycleDecision(GangAction.RESUME, wait_for(status, "WaitForQuorum", "resuming owners", now_seconds)),
        )
    present = quorum(view.gang.spec, view.members, status.succeeded)
    status = with_quorum(status, view.members, present, now_seconds)
    if not present.is_enough:
        return _undo_or(
            view,
            LifecycleDecision(GangAction.NOTHING, wait_for(status, "WaitForQuorum", str(present), now_seconds)),
        )
    chosen, excess = placeable(view.gang.spec, view.members)
    if excess:
        message = f"{present}; {len(excess)} pods are beyond the counts of their pod sets and stay gated"
        status = meet(status, names.CONDITION_QUORUM, "QuorumReached", message, now_seconds)
    return _undo_or(view, LifecycleDecision(GangAction.PLACE, in_phase(status, "Waiting"), chosen))


def _has_finished(view: GangView, status: GpuGangStatus, *, is_evicted: bool) -> bool:
    """Return whether all work is done and no member waits to do more. Of an evicted gang every member must have ended
    well before it was stopped: their owner creates all others again, whatever the gang needs at least."""
    if status.members:
        return False
    if is_evicted:
        return have_all_succeeded(view.gang.spec, view.of_last_admission, status.succeeded)
    return readiness(view.gang.spec, view.members, status.succeeded).is_enough


def _with_pause(view: GangView, status: GpuGangStatus, now_seconds: float) -> tuple[GpuGangStatus, float]:
    """Return the status and the end of the pause. An earlier leader's clock may have been ahead, so the pause is never
    longer than the maximum, counted from now."""
    state = status.requeue_state
    end = seconds_of(state.requeue_at or "") if state is not None else None
    latest = now_seconds + view.policy.requeuing.max_seconds + 1.0
    if state is None or end is None or end <= latest:
        return status, end or 0.0
    return status.model_copy(update={"requeue_state": state.model_copy(update={"requeue_at": text_of(latest)})}), latest


def _undo_or(view: GangView, decision: LifecycleDecision) -> LifecycleDecision:
    """A gang that is not admitted holds nothing: whatever else is to be done comes after that."""
    held = _held(view)
    return LifecycleDecision(GangAction.UNDO, decision.status, held) if held else decision


def _held(view: GangView) -> tuple[GangMember, ...]:
    """Return the gated members that hold GPUs."""
    return tuple(member for member in view.members if member.holds and member.is_gated)


def _decide_admitted(
    view: GangView, status: GpuGangStatus, tallied: QuorumCount, *, now_seconds: float, jitter: float
) -> LifecycleDecision:
    held = _held(view)
    served = tuple(member for member in view.members if member.holds or not member.is_gated)
    if held and not has_begun(view) and not quorum(view.gang.spec, served, status.succeeded).is_enough:
        gone = give_up(status, "members that hold its GPUs left before any was ungated", now_seconds=now_seconds)
        return LifecycleDecision(GangAction.NOTHING, gone, again_seconds=0.0)
    if held and not has_begun(view):
        return LifecycleDecision(GangAction.UNGATE, in_phase(status, "Starting"), held)
    if not has_begun(view) and (not tallied.is_enough or _begins_anew(view, status)):
        return LifecycleDecision(GangAction.NOTHING, _without_admission(status, now_seconds), again_seconds=0.0)
    status = status if held else _with_start(status, now_seconds)
    status = with_readiness(status, tallied, now_seconds)
    preempted = _preempted(view, status)
    if preempted is not None:
        return _evict(view, status, preempted, now_seconds=now_seconds, pause=None)
    failing = _failing(view, status, tallied, now_seconds)
    if failing is not None:
        return _evict(view, status, failing, now_seconds=now_seconds, pause=_next_pause(view, status, jitter))
    again = _next_look(view, status, now_seconds)
    stuck = tuple(m for m in view.members if (refused_since(m, status) or now_seconds) + STUCK_SECONDS <= now_seconds)
    if stuck:
        return LifecycleDecision(GangAction.DROP, in_phase(status, "Recovering"), stuck, again_seconds=1.0)
    status = in_phase(status, _phase_of(status, tallied))
    if held:  # some wait until those whom they have to be near are bound
        return LifecycleDecision(GangAction.UNGATE, status, held, again)
    chosen, _ = placeable(view.gang.spec, view.members)
    return LifecycleDecision(GangAction.REPLACE if chosen else GangAction.NOTHING, status, chosen, again)


def _phase_of(status: GpuGangStatus, tallied: QuorumCount) -> str:
    """Return the phase of an admitted gang that has begun."""
    if tallied.is_enough:
        return "Running" if status.members else "Finished"
    return "Recovering" if status.was_ready else "Starting"


def _begins_anew(view: GangView, status: GpuGangStatus) -> bool:
    """Return whether the gang has done its work and its waiting members are not those that its owners still had to
    create: then they start together as a new gang, not one by one as successors."""
    gated = {owner_uid(member) for member in view.members if member.is_gated and not member.holds}
    return bool(gated) and not gated & {entry.owner for entry in status.succeeded if entry.owner}


def has_begun(view: GangView) -> bool:
    """Tell whether any member of the admission was let go: from then on it is no longer undone, but evicted."""
    return any(member.stage in STARTED for member in view.members)


def cannot_start(view: GangView, message: str, *, now_seconds: float, jitter: float = 0.0) -> LifecycleDecision:
    """Decide about a gang of which a member takes no pin: this admission ends, and is tried again after a pause."""
    pause = _next_pause(view, view.status, jitter)
    return _evict(view, view.status, Obstacle("MemberRefused", message), now_seconds=now_seconds, pause=pause)


def _next_pause(view: GangView, status: GpuGangStatus, jitter: float) -> tuple[int, float]:
    """Return the number of the next eviction, and how long the gang pauses after it."""
    count = (status.requeue_state.count if status.requeue_state else 0) + 1
    return count, pause_seconds(view.policy.requeuing, count, jitter=jitter)


def _with_start(status: GpuGangStatus, now_seconds: float) -> GpuGangStatus:
    """Start the clock: every placed member has been ungated. If the time is unknown (the gang was taken over) or in
    the future (another clock wrote it), it is now."""
    assignment = status.assignment or GangAssignment()
    start = seconds_of(assignment.time)
    if start is not None and start <= now_seconds:
        return status
    return status.model_copy(update={"assignment": assignment.model_copy(update={"time": text_of(now_seconds)})})


def _deadline(view: GangView, status: GpuGangStatus) -> float | None:
    """Return when the gang must be ready; None while it is, or where nobody waits for it."""
    policy = view.policy
    if not policy.enable or conditions.is_true(status.conditions, names.CONDITION_PODS_READY):
        return None
    if status.was_ready:
        since = conditions.since_seconds(status.conditions, names.CONDITION_PODS_READY)
        patience = policy.recovery_timeout_seconds
        return None if since is None or patience is None else since + patience
    start = seconds_of(status.assignment.time) if status.assignment is not None else None
    if start is None and _held(view):
        start = conditions.since_seconds(status.conditions, names.CONDITION_ADMITTED)
    return None if start is None else start + policy.timeout_seconds


def _failing(view: GangView, status: GpuGangStatus, tallied: QuorumCount, now_seconds: float) -> Obstacle | None:
    """Return why this admission must end."""
    deadline = _deadline(view, status)
    if deadline is not None and deadline <= now_seconds:
        what = "recovered" if status.was_ready else "ready"
        return Obstacle("PodsReadyTimeout", f"not {what} in time: {tallied}")
    if loses_too_often(view.policy, status.losses):
        limit = view.policy.recovery_limit_count
        message = (
            f"lost ready members {status.losses} times, more often than recoveryLimitCount {limit} allows: {tallied}"
        )
        return Obstacle("RecoveryLimitExceeded", message)
    if status.was_ready:
        return None
    for member in view.members:
        refused = refused_since(member, status)
        if refused is not None and refused + patience_seconds(member) <= now_seconds:
            return Obstacle(
                "SchedulerRefused", f"kube-scheduler refuses pod {member.pod.metadata.name}: {why_refused(member)}"
            )
    return None


def _preempted(view: GangView, status: GpuGangStatus) -> Obstacle | None:
    """Return why the gang gives way: kube-scheduler takes members that it needs, and the rest would run in vain."""
    if placed(view.gang.spec, view.members, status.succeeded).is_enough:
        return None
    for member in view.members:
        if member.stage in {MemberStage.ENDING, MemberStage.FAILED} and is_victim(member.pod):
            return Obstacle("Preempted", f"kube-scheduler preempts member {member.pod.metadata.name}, which is needed")
    return None


def _next_look(view: GangView, status: GpuGangStatus, now_seconds: float) -> float | None:
    times = [_deadline(view, status)]
    for member in view.members:
        refused = refused_since(member, status)
        if refused is not None:
            times.append(refused + (STUCK_SECONDS if status.was_ready else patience_seconds(member)))
    left = [time - now_seconds for time in times if time is not None]
    return max(0.05, min(left)) if left else None


def _evict(
    view: GangView, status: GpuGangStatus, why: Obstacle, *, now_seconds: float, pause: tuple[int, float] | None
) -> LifecycleDecision:
    """End the admission. `pause`: the number of the eviction that counts, and the seconds until the next try."""
    deactivate, message = False, why.message
    if any(m.stage in STARTED and not owner_uid(m) for m in view.members):
        message += "; pods without an owner do not come back: create them again"
    if pause is not None:
        count, seconds = pause
        deactivate = exceeds_limit(view.policy.requeuing, count)
        requeue_at = None if deactivate else text_of(now_seconds + seconds + 0.999)
        status = status.model_copy(update={"requeue_state": RequeueState(count=count, requeue_at=requeue_at)})
        if deactivate:
            message = f"{message}; eviction {count} surpasses the limit of {view.policy.requeuing.limit_count}"
            status = fail(status, names.CONDITION_ACTIVE, "RequeuingLimitExceeded", message, now_seconds)
    status = meet(status, names.CONDITION_EVICTED, why.reason, message, now_seconds)
    closed = close_admission(wait_for(status, "WaitForRelease", message, now_seconds))
    status = closed.model_copy(update={"admission": status.admission})  # its members still end, well or not
    concerned = tuple(m for m in view.members if m.stage in STARTED or m.holds)
    return LifecycleDecision(GangAction.EVICT, in_phase(status, "Evicted"), concerned, deactivate=deactivate)


def _without_admission(status: GpuGangStatus, now_seconds: float) -> GpuGangStatus:
    """Nobody of the admission is left: its owner was suspended, or all members were deleted or failed."""
    return close_admission(wait_for(status, "WaitForQuorum", "no member of the last admission is left", now_seconds))


def _adopt(view: GangView, status: GpuGangStatus, now_seconds: float) -> GpuGangStatus:
    """Take over members that run or have done all work while this GpuGang has no admission: it was created again, or
    lost its status. It continues the admission of most members, with the same id; timeouts start now."""
    running = _remains(view.members) or view.of_last_admission
    known = Counter(admission_of(member) for member in running).items()
    admission = min(((-count, one) for one, count in known), default=(0, ""))[1]
    message = "members that already run were taken over"
    return open_admission(status, admission, message, now_seconds)


def admit(
    status: GpuGangStatus,
    *,
    now_seconds: float,
    message: str,
    admission: str = "",
    members: Sequence[GangMember] = (),
) -> GpuGangStatus:
    """Return the status of a gang whose GPUs are all reserved, under the id `admission`. Earlier members still count as
    succeeded if their owners created some of these `members`."""
    owners = {owner_uid(member) for member in members}
    status = status.model_copy(
        update={"admissions": status.admissions + 1, "succeeded": of_owners(status.succeeded, owners)}
    )
    return open_admission(status, admission, message, now_seconds)


def give_up(status: GpuGangStatus, message: str, *, now_seconds: float) -> GpuGangStatus:
    """Return the status of a gang whose admission ends before any member was let go: it is undone, and not counted."""
    return close_admission(wait_for(status, "AdmissionUndone", message, now_seconds))


def preempt(view: GangView, message: str, *, now_seconds: float) -> GpuGangStatus:
    """Return the status of an admitted gang that gives way to another: it is evicted whole, and waits again at once."""
    why = Obstacle("Preempted", message)
    return _evict(view, view.status, why, now_seconds=now_seconds, pause=None).status


def _remains(members: Sequence[GangMember]) -> tuple[GangMember, ...]:
    """Return the members that were let go and have not ended."""
    return tuple(member for member in members if member.stage in STARTED)
