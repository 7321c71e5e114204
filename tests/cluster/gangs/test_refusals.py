"""Time since kube-scheduler refused a member, and the missing members of its gang."""

from dataclasses import replace

import msgspec
import pytest

from atoll.api.gangs import GangAssignment, GpuGangStatus
from atoll.api.times import text_of
from atoll.cluster.gangs.membership import GangMember, MemberStage
from atoll.cluster.gangs.readiness import quorum
from atoll.cluster.gangs.refusals import REFUSED_SECONDS, STUCK_SECONDS, patience_seconds, refused_since
from atoll.cluster.objects import PodCondition
from tests.cluster.gangs.builders import NOW, make_gang, member, members


def refused(*, at: float = NOW, reason: str = "Unschedulable", held_since: float | None = None) -> GangMember:
    """Return a member that was let go, with a condition PodScheduled of False."""
    one = member(0, MemberStage.STARTING)
    condition = PodCondition("PodScheduled", "False", reason, last_transition_time=text_of(at))
    status = msgspec.structs.replace(one.pod.status, conditions=(condition,))
    return replace(one, pod=msgspec.structs.replace(one.pod, status=status), held_since=held_since)


def admitted(at: float, *, was_ready: bool = False) -> GpuGangStatus:
    """Return the status of a gang that was admitted then."""
    return GpuGangStatus(assignment=GangAssignment(time=text_of(at)), was_ready=was_ready)


@pytest.mark.parametrize(
    ("one", "status", "since"),
    [
        pytest.param(member(0, MemberStage.STARTING), GpuGangStatus(), None, id="not refused"),
        pytest.param(refused(reason="SchedulingGated"), GpuGangStatus(), None, id="gated"),
        pytest.param(refused(), GpuGangStatus(), NOW, id="refused before any admission is known"),
        pytest.param(refused(), admitted(NOW - 5), NOW, id="refused after the gang was let go"),
        pytest.param(refused(), admitted(NOW + 5), NOW + 5, id="the condition is older than the admission"),
        pytest.param(refused(), admitted(NOW + 5, was_ready=True), NOW, id="it has run already"),
        pytest.param(refused(held_since=NOW + 9), admitted(NOW + 5), NOW + 9, id="it got its GPUs last"),
    ],
)
def test_a_refusal_begins_when_the_member_could_first_be_bound(
    one: GangMember, status: GpuGangStatus, since: float | None
) -> None:
    """The gates are the first reason of the same condition, so its own time may lie long before."""
    assert refused_since(one, status) == since


def test_only_what_kube_scheduler_means_ends_a_gang_soon() -> None:
    """A bind that fails for want of an answer is no refusal."""
    assert patience_seconds(refused()) == REFUSED_SECONDS
    assert patience_seconds(refused(reason="SchedulerError")) == STUCK_SECONDS


def test_what_a_pod_set_lacks_is_told_by_number() -> None:
    """Two of three workers wait, of which all are needed."""
    gang = make_gang(podSets=[{"name": "workers", "count": 3}, {"name": "leader", "count": 1}])
    assert str(quorum(gang.spec, members(MemberStage.GATED, MemberStage.GATED))) == (
        "2 of 4 members; 1 more in pod set workers; 1 more in pod set leader"
    )
