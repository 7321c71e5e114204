"""What the conditions of ungated members say: that kube-scheduler refuses one and since when, or preempts it.

How long is too long is a constant here; `lifecycle` decides what follows.
"""

from typing import Final

from atoll.api.gangs import GpuGangStatus
from atoll.cluster.gangs.membership import GangMember, MemberStage
from atoll.cluster.gangs.times import seconds_of
from atoll.cluster.objects import Pod, PodCondition

REFUSED_SECONDS: Final = 40.0
"""kube-scheduler may refuse a member because its own view, or the extender's, lags behind. It tries again within 30 s
(--pod-max-in-unschedulable-pods-duration as shipped): after this long it has been asked twice, and means it."""
STUCK_SECONDS: Final = 60.0
"""A member that joins a gang that runs already is given up after this long: what it holds would be lost to others. So
long, too, a bind may fail for want of an answer: that is no refusal, and kube-scheduler tries again by itself."""
VICTIM = "PreemptionByScheduler"


def refused_since(member: GangMember, status: GpuGangStatus) -> float | None:
    """Return from when on kube-scheduler has refused a member; None while it does not.

    The condition is False from the pod's creation on, first because of the gates, and that is its transition. So the
    time cannot be read off it: it begins at the earliest when the member got its GPUs, or its gang was let go.
    """
    condition = _refusal(member)
    if condition is None:
        return None
    start = seconds_of(status.assignment.time) if status.assignment is not None and not status.was_ready else None
    times = (seconds_of(condition.last_transition_time or ""), member.held_since, start)
    return max((time for time in times if time is not None), default=None)


def patience_seconds(member: GangMember) -> float:
    """Return how long a member of a gang that has not run yet may be refused."""
    condition = _refusal(member)
    return REFUSED_SECONDS if condition is not None and condition.reason == "Unschedulable" else STUCK_SECONDS


def why_refused(member: GangMember) -> str:
    """Return what kube-scheduler says, cut; empty for a member that it does not refuse."""
    condition = _refusal(member)
    return condition.message[:300] if condition is not None else ""


def is_victim(pod: Pod) -> bool:
    """Tell whether kube-scheduler takes the pod's place for one of a higher priority."""
    return any(
        condition.type == "DisruptionTarget" and condition.status == "True" and condition.reason == VICTIM
        for condition in pod.status.conditions
    )


def _refusal(member: GangMember) -> PodCondition | None:
    if member.stage is not MemberStage.STARTING or member.pod.spec.node_name:
        return None
    for condition in member.pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False" and condition.reason != "SchedulingGated":
            return condition
    return None
