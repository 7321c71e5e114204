"""Lifecycle of a gang: decision and status at each step."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.gangs import GangAssignment, SuspendedOwner
from atoll.api.times import seconds_of, text_of
from atoll.cluster.gangs import lifecycle
from atoll.cluster.gangs.lifecycle import GangAction, GangView, Obstacle
from atoll.cluster.gangs.membership import GangMember, MemberStage
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy, Requeuing
from atoll.cluster.gangs.refusals import REFUSED_SECONDS, STUCK_SECONDS
from atoll.cluster.objects import OwnerReference, PodCondition
from tests.cluster.gangs.builders import NOW, WAITING, Life, make_gang, member, members

GATED, STARTING, READY = MemberStage.GATED, MemberStage.STARTING, MemberStage.READY
FAILED, SUCCEEDED, ENDING = MemberStage.FAILED, MemberStage.SUCCEEDED, MemberStage.ENDING
ADMITTED = names.CONDITION_ADMITTED
PODS_READY = names.CONDITION_PODS_READY
EVICTED = names.CONDITION_EVICTED
SUSPENDED = SuspendedOwner(api_version="batch/v1", kind="Job", name="j", uid="job-1")


def admitted(count: int = 4, policy: ReadinessPolicy = WAITING, **spec: Any) -> Life:
    """Return a gang whose GPUs were all reserved a moment ago."""
    life = Life(make_gang(count, **spec), policy)
    decision = life.look(*members(*[GATED] * count))
    assert decision.act is GangAction.PLACE
    status = lifecycle.admit(decision.status, now_seconds=life.now, message="")
    life.write(status.model_copy(update={"assignment": GangAssignment()}))
    return life


def running(count: int = 4, policy: ReadinessPolicy = WAITING, **spec: Any) -> Life:
    """Return a gang that was ready once."""
    life = admitted(count, policy, **spec)
    life.look(*members(*[READY] * count))
    assert life.condition(PODS_READY) == ("True", "Started")
    return life


def test_a_gang_without_quorum_waits_and_holds_nothing() -> None:
    """Three of four members: nothing is placed, and the condition counts them."""
    life = Life(make_gang(4))

    decision = life.look(*members(GATED, GATED, GATED))

    assert decision.act is GangAction.NOTHING
    assert life.condition(ADMITTED) == ("False", "WaitForQuorum")
    assert life.condition(names.CONDITION_QUORUM) == ("False", "WaitForMembers")


@pytest.mark.parametrize(("kind", "told"), [("StatefulSet", True), ("Job", False)])
def test_a_gang_of_a_stateful_set_says_that_its_pods_come_one_by_one(kind: str, told: bool) -> None:
    """Its second pod is never created while the first is gated: the condition names the setting."""
    life = Life(make_gang(4))
    owner = OwnerReference(kind=kind, name="s", uid="s-1", controller=True)
    (first,) = members(GATED)
    metadata = msgspec.structs.replace(first.pod.metadata, owner_references=(owner,))

    life.look(replace(first, pod=msgspec.structs.replace(first.pod, metadata=metadata)))

    (found,) = [one for one in life.gang.status.conditions if one.type == names.CONDITION_QUORUM]
    assert ("podManagementPolicy" in found.message) == told


def test_members_behind_gates_of_others_do_not_make_a_quorum() -> None:
    """A member that somebody else holds back too cannot start, so that it does not count, and the reason says so."""
    life = Life(make_gang(2))

    decision = life.look(*members(GATED, MemberStage.HELD_BACK))

    assert decision.act is GangAction.NOTHING
    assert life.condition(names.CONDITION_QUORUM) == ("False", "ForeignGates")


def test_a_quorum_is_placed_with_all_that_are_there() -> None:
    """minMember of four: five of six are there, and all five are placed."""
    life = Life(make_gang(6, minMember=4))

    decision = life.look(*members(*[GATED] * 5))

    assert decision.act is GangAction.PLACE
    assert len(decision.members) == 5


def test_pods_beyond_the_count_stay_outside() -> None:
    """A fifth pod of a gang of four is not placed."""
    decision = Life(make_gang(4)).look(*members(*[GATED] * 5))

    assert [one.rank for one in decision.members] == [0, 1, 2, 3]


def test_a_pod_of_no_pod_set_stays_gated_and_is_counted() -> None:
    """It takes nobody's place, and the condition says how many such pods there are."""
    life = Life(make_gang(2))
    stray = member(9, GATED, pod_set="")
    decision = life.look(*members(GATED), stray)

    assert decision.act is GangAction.NOTHING
    message = next(one.message for one in decision.status.conditions if one.type == names.CONDITION_QUORUM)
    assert "1 name no pod set of this gang" in message
    placed = life.look(*members(GATED, GATED), stray)
    assert placed.act is GangAction.PLACE
    assert stray not in placed.members


def test_each_pod_set_needs_its_own_members() -> None:
    """Eight workers do not stand in for a missing leader."""
    sets = [{"name": "leader", "count": 1}, {"name": "workers", "count": 8}]
    life = Life(make_gang(podSets=[{**sets[0], "minCount": 1}, {**sets[1], "minCount": 4}], minMember=5))

    assert life.look(*members(*[GATED] * 8)).act is GangAction.NOTHING
    assert life.condition(ADMITTED) == ("False", "WaitForQuorum")

    leader = member(9, GATED, pod_set="leader")
    assert life.look(leader, *members(*[GATED] * 4)).act is GangAction.PLACE


def test_reservations_without_an_admission_are_undone() -> None:
    """Leases written, leader killed before the status: the next leader gives everything back before anything else."""
    life = Life(make_gang(2))

    decision = life.look(member(0, GATED, holds=True), member(1, GATED))

    assert decision.act is GangAction.UNDO
    assert [one.rank for one in decision.members] == [0]


def test_an_admission_that_was_written_down_is_finished() -> None:
    """Leader killed between two members: whoever is still gated and holds GPUs is let go."""
    life = admitted(2)

    decision = life.look(member(0, STARTING, holds=True), member(1, GATED, holds=True))

    assert decision.act is GangAction.UNGATE
    assert [one.rank for one in decision.members] == [1]


def test_the_clock_starts_when_the_last_member_was_let_go() -> None:
    """An admission whose members were let go late is given its whole time."""
    life = admitted(2)
    life.look(member(0, STARTING), member(1, GATED, holds=True), after=200)

    life.look(*members(STARTING, STARTING), after=50)

    assert life.gang.status.assignment.time == text_of(NOW + 250)
    assert life.look(*members(STARTING, STARTING), after=WAITING.timeout_seconds - 1).act is GangAction.NOTHING
    assert life.look(*members(STARTING, STARTING), after=2).act is GangAction.EVICT


def test_members_that_wait_for_others_are_let_go_as_soon_as_they_can() -> None:
    """They have to be near those, who are not bound yet; it may become too late for the gang."""
    life = admitted(2)
    early = life.look(member(0, STARTING), member(1, GATED, holds=True), after=WAITING.timeout_seconds - 1)
    assert early.act is GangAction.UNGATE
    assert early.again_seconds == 1
    assert life.gang.status.phase == "Starting"

    late = life.look(member(0, STARTING), member(1, GATED, holds=True), after=2)

    assert late.act is GangAction.EVICT
    assert [one.rank for one in late.members] == [0, 1]
    assert life.condition(EVICTED) == ("True", "PodsReadyTimeout")


def test_ready_and_succeeded_members_count_and_failed_ones_never() -> None:
    """Two ready, one succeeded, one failed of four: not ready. With the last one ready: ready."""
    life = admitted(4)

    life.look(*members(READY, READY, SUCCEEDED, FAILED))
    assert life.condition(PODS_READY) == ("False", "WaitForStart")

    life.look(*members(READY, READY, SUCCEEDED, READY))
    assert life.condition(PODS_READY) == ("True", "Started")


def test_nothing_flickers_between_a_members_success_and_its_successor() -> None:
    """A Job with more completions than parallelism: successors of successful pods start, the gang stays ready."""
    life = running(2)
    since = life.gang.status.conditions

    life.look(*members(READY, SUCCEEDED), after=5)
    replacing = life.look(*members(READY, SUCCEEDED), member(2, GATED), after=5)
    life.look(*members(READY, SUCCEEDED), member(2, STARTING), after=5)

    assert replacing.act is GangAction.REPLACE
    assert [one.rank for one in replacing.members] == [2]
    assert life.condition(PODS_READY) == ("True", "Started")
    times = {one.type: one.last_transition_time for one in life.gang.status.conditions}
    assert times[PODS_READY] == {one.type: one.last_transition_time for one in since}[PODS_READY]


def test_a_failed_member_is_waited_for_and_then_recovered() -> None:
    """Ready, one fails, its successor starts: WaitForRecovery, then Recovered; times are those of transitions."""
    life = running(2)
    life.look(*members(READY, FAILED), after=10)
    assert life.condition(PODS_READY) == ("False", "WaitForRecovery")
    lost_at = next(one for one in life.gang.status.conditions if one.type == PODS_READY).last_transition_time

    life.look(*members(READY, FAILED), member(2, STARTING), after=10)
    assert next(one for one in life.gang.status.conditions if one.type == PODS_READY).last_transition_time == lost_at
    life.look(*members(READY, FAILED), member(2, READY), after=10)

    assert life.condition(PODS_READY) == ("True", "Recovered")


def test_recovery_has_its_own_time_and_only_after_the_gang_was_ready() -> None:
    """A start that takes longer than recoveryTimeout is no recovery; a lost member is given just that time."""
    life = admitted(2)
    assert life.look(*members(STARTING, STARTING), after=WAITING.recovery_timeout_seconds + 5).act is GangAction.NOTHING
    life.look(*members(READY, READY), after=1)
    life.look(*members(READY, FAILED), after=1)

    assert life.look(*members(READY, FAILED), after=WAITING.recovery_timeout_seconds - 2).act is GangAction.NOTHING
    decision = life.look(*members(READY, FAILED), after=3)

    assert decision.act is GangAction.EVICT
    assert life.condition(EVICTED) == ("True", "PodsReadyTimeout")


def test_recovery_lasts_no_longer_where_the_last_leaders_clock_was_ahead() -> None:
    """A time that lies in the future becomes the time at which the next leader first sees it, and stays that."""
    life = running(2)
    life.look(*members(READY, FAILED), after=1)
    life.now -= 500.0

    assert life.look(*members(READY, FAILED)).act is GangAction.NOTHING
    assert life.look(*members(READY, FAILED), after=WAITING.recovery_timeout_seconds - 2).act is GangAction.NOTHING
    assert life.look(*members(READY, FAILED), after=3).act is GangAction.EVICT


def test_without_recovery_timeout_a_running_gang_may_lack_members_for_ever() -> None:
    """recoveryTimeout none means none."""
    life = running(2, ReadinessPolicy(enable=True, timeout_seconds=10))

    assert life.look(*members(READY, FAILED), after=1e6).act is GangAction.NOTHING


def test_off_means_off() -> None:
    """Without waitForPodsReady nobody is evicted for not being ready, and the condition tells all the same."""
    life = admitted(2, ReadinessPolicy())

    assert life.look(*members(STARTING, STARTING), after=1e6).act is GangAction.NOTHING
    assert life.condition(PODS_READY) == ("False", "WaitForStart")


def test_an_evicted_gang_waits_out_its_pause_and_is_placed_again() -> None:
    """Timeout, eviction, pause of the base, owner resumed, quorum, placed again; one eviction is counted."""
    life = admitted(2)
    life.look(*members(STARTING, STARTING))
    decision = life.look(*members(STARTING, STARTING), after=WAITING.timeout_seconds)
    assert decision.act is GangAction.EVICT
    assert life.condition(ADMITTED) == ("False", "WaitForRelease")
    assert life.gang.status.requeue_state.count == 1
    assert life.look(*members(STARTING, ENDING)).act is GangAction.EVICT
    assert life.gang.status.requeue_state.count == 1

    waiting = life.look(*members(ENDING, ENDING), after=1)
    assert (waiting.act, life.condition(ADMITTED)[1]) == (GangAction.NOTHING, "WaitForRequeue")
    assert waiting.again_seconds == pytest.approx(60, abs=2)
    life.write(life.gang.status.model_copy(update={"suspended_owners": (SUSPENDED,)}))
    assert life.look(after=62).act is GangAction.RESUME
    life.write(life.gang.status.model_copy(update={"suspended_owners": ()}))
    assert life.look().act is GangAction.NOTHING
    assert life.look(*members(GATED, GATED)).act is GangAction.PLACE
    assert life.gang.status.requeue_state.count == 1


def test_pauses_double_and_the_gang_is_deactivated_when_the_limit_is_surpassed() -> None:
    """Limit 2: the first and the second eviction come back, the third does not; set active again, the count is gone."""
    policy = ReadinessPolicy(enable=True, timeout_seconds=10, requeuing=Requeuing(limit_count=2))
    life = admitted(1, policy)
    pauses = []
    for _ in range(3):
        life.write(lifecycle.admit(life.gang.status, now_seconds=life.now, message=""))
        life.write(life.gang.status.model_copy(update={"assignment": GangAssignment(time=text_of(life.now))}))
        decision = life.look(*members(STARTING), after=11)
        assert decision.act is GangAction.EVICT
        state = decision.status.requeue_state
        pauses.append(None if state.requeue_at is None else round(seconds_of(state.requeue_at) - life.now))
        life.now += 1000

    assert pauses == [60, 120, None]
    assert decision.deactivate
    life.set_active(active=False)
    assert life.look(*members(GATED)).act is GangAction.NOTHING
    assert life.condition(names.CONDITION_ACTIVE) == ("False", "RequeuingLimitExceeded")
    life.set_active(active=True)
    assert life.look(*members(GATED)).act is GangAction.PLACE
    assert life.gang.status.requeue_state is None
    assert life.condition(names.CONDITION_ACTIVE) == ("True", "Active")


def test_a_gang_that_fails_and_recovers_without_end_comes_to_its_limit() -> None:
    """To become ready does not wipe out earlier evictions: the one beyond the limit deactivates the gang."""
    policy = ReadinessPolicy(
        enable=True, timeout_seconds=10, recovery_timeout_seconds=5, requeuing=Requeuing(limit_count=2)
    )
    life = admitted(2, policy)
    ends = []
    for _ in range(3):
        life.write(lifecycle.admit(life.gang.status, now_seconds=life.now, message=""))
        assert life.look(*members(READY, READY), after=1).act is GangAction.NOTHING
        life.look(*members(READY, FAILED), after=1)
        decision = life.look(*members(READY, FAILED), after=6)
        assert decision.act is GangAction.EVICT
        ends.append(decision.deactivate)
        life.now += 1000

    assert ends == [False, False, True]
    assert life.condition(names.CONDITION_ACTIVE) == ("False", "RequeuingLimitExceeded")


@pytest.mark.parametrize("enable", [True, False], ids=["it waits for ready pods", "it does not"])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_gang_that_is_lost_and_found_too_often_is_evicted_and_counted(limit: int, enable: bool) -> None:
    """Each loss is made good in time. The one beyond the limit evicts, counts like any, and the next admission starts
    with a clean record; the limit of evictions then ends it for good."""
    policy = ReadinessPolicy(enable=enable, recovery_limit_count=limit, requeuing=Requeuing(limit_count=1))
    life = admitted(2, policy)
    ends = []
    for _ in range(2):
        life.write(lifecycle.admit(life.gang.status, now_seconds=life.now, message=""))
        life.look(*members(READY, READY), after=1)
        for _ in range(limit):
            assert life.look(*members(READY, FAILED), after=1).act is not GangAction.EVICT
            assert life.look(*members(READY, FAILED), after=1).act is not GangAction.EVICT
            assert life.look(*members(READY, READY), after=1).act is GangAction.NOTHING
        decision = life.look(*members(READY, FAILED), after=1)
        assert decision.act is GangAction.EVICT
        assert life.condition(names.CONDITION_EVICTED) == ("True", "RecoveryLimitExceeded")
        ends.append(decision.deactivate)
        life.now += 1000

    assert ends == [False, True]
    assert life.gang.status.losses == 0


def test_without_a_limit_a_gang_may_be_lost_and_found_for_ever() -> None:
    """Training over weeks outlives many cards; what never became ready has lost nothing."""
    life = admitted(2, ReadinessPolicy(enable=True, recovery_timeout_seconds=60))
    for _ in range(50):
        life.look(*members(READY, READY), after=1)
        assert life.look(*members(READY, FAILED), after=1).act is not GangAction.EVICT
    assert life.gang.status.losses == 50

    fresh = admitted(2, ReadinessPolicy(recovery_limit_count=0))
    assert fresh.look(*members(READY, STARTING), after=1).act is not GangAction.EVICT


def test_deactivation_gives_everything_back_and_counts_nothing() -> None:
    """active: false evicts a running gang without a pause; active: true places it again at once."""
    life = running(2)
    life.set_active(active=False)

    assert life.look(*members(READY, READY)).act is GangAction.EVICT
    assert life.gang.status.requeue_state is None
    assert life.look(*members(ENDING, ENDING)).act is GangAction.NOTHING
    assert life.condition(ADMITTED) == ("False", "Inactive")
    life.set_active(active=True)
    assert life.look(*members(GATED, GATED)).act is GangAction.PLACE


def refused(number: int, since: float, *, reason: str = "Unschedulable", **options: Any) -> GangMember:
    """Return a member that kube-scheduler will not take."""
    one = replace(member(number, STARTING, holds=True), **options)
    condition = PodCondition("PodScheduled", "False", reason, "Insufficient cpu", text_of(since))
    status = msgspec.structs.replace(one.pod.status, conditions=(condition,))
    return replace(one, pod=msgspec.structs.replace(one.pod, status=status))


def test_a_pinned_member_that_is_refused_ends_the_admission() -> None:
    """kube-scheduler refuses one member for good: nothing half-placed stays, and the gang is tried again later."""
    life = admitted(2, ReadinessPolicy())
    life.look(*members(STARTING, STARTING))

    early = life.look(refused(0, life.now), member(1, STARTING), after=1)
    assert early.act is GangAction.NOTHING
    assert early.again_seconds is not None
    late = life.look(refused(0, NOW), member(1, STARTING), after=REFUSED_SECONDS)

    assert late.act is GangAction.EVICT
    assert life.condition(EVICTED) == ("True", "SchedulerRefused")
    assert life.gang.status.requeue_state.count == 1


def test_nobody_waits_gated_for_a_member_that_is_refused() -> None:
    """Those who have to be near it hold GPUs as long as it may come, and give them back with their gang; beside a gang
    that runs, it alone is given up."""
    life = admitted(2, ReadinessPolicy())
    waits = member(1, GATED, holds=True)
    assert life.look(refused(0, life.now), waits, after=REFUSED_SECONDS - 1).act is GangAction.UNGATE
    late = life.look(refused(0, NOW), waits, after=1)
    assert (late.act, [one.rank for one in late.members]) == (GangAction.EVICT, [0, 1])

    ready = running(3, ReadinessPolicy())
    stuck, waits = refused(1, ready.now), member(2, GATED, holds=True)
    decision = ready.look(*members(READY), stuck, waits, after=STUCK_SECONDS)
    assert (decision.act, decision.members) == (GangAction.DROP, (stuck,))


@pytest.mark.parametrize(
    ("reason", "patience"),
    [
        pytest.param("Unschedulable", REFUSED_SECONDS, id="refused"),
        pytest.param("SchedulerError", STUCK_SECONDS, id="a bind that nobody has answered"),
    ],
)
def test_the_time_that_a_member_was_gated_is_no_refusal(reason: str, patience: float) -> None:
    """PodScheduled is False since the pod was created, gated: its transition is as old as the pod, which may have
    waited for an hour. The patience with kube-scheduler begins when the gang is let go."""
    life = admitted(2, ReadinessPolicy())
    life.look(*members(STARTING, STARTING), after=3600)
    old = refused(0, NOW, reason=reason)

    assert life.look(old, member(1, STARTING), after=1).act is GangAction.NOTHING
    assert life.look(old, member(1, STARTING), after=patience - 3).act is GangAction.NOTHING
    assert life.look(old, member(1, STARTING), after=3).act is GangAction.EVICT


def test_the_time_that_a_replacement_was_gated_is_no_refusal() -> None:
    """It waited for room for an hour; its time to start begins when it got its GPUs."""
    life = running(2, ReadinessPolicy())
    life.now += 3600
    stuck = refused(1, NOW, held_since=life.now)

    assert life.look(*members(READY), stuck, after=STUCK_SECONDS - 1).act is GangAction.NOTHING
    assert life.look(*members(READY), stuck, after=2).act is GangAction.DROP


def taken(number: int, stage: MemberStage = ENDING, *, reason: str = "PreemptionByScheduler") -> GangMember:
    """Return a member that ends because somebody has chosen it."""
    one = member(number, stage)
    status = msgspec.structs.replace(one.pod.status, conditions=(PodCondition("DisruptionTarget", "True", reason),))
    return replace(one, pod=msgspec.structs.replace(one.pod, status=status))


@pytest.mark.parametrize("stage", [ENDING, FAILED])
def test_a_gang_of_which_kube_scheduler_takes_a_needed_member_gives_way_whole(stage: MemberStage) -> None:
    """Below its minimum the rest would run in vain: evicted whole, without a pause and without counting."""
    life = running(3)

    decision = life.look(*members(READY, READY), taken(2, stage))

    assert decision.act is GangAction.EVICT
    assert {one.rank for one in decision.members} == {0, 1}
    assert life.condition(EVICTED) == ("True", "Preempted")
    assert life.gang.status.requeue_state is None


def test_a_gang_of_which_others_take_a_member_waits_for_its_successor() -> None:
    """A drain is no preemption, and a member beyond the minimum may go: the others run on."""
    drained = running(3)
    assert drained.look(*members(READY, READY), taken(2, reason="EvictionByEvictionAPI")).act is not GangAction.EVICT
    elastic = running(3, minMember=2)
    assert elastic.look(*members(READY, READY), taken(2)).act is not GangAction.EVICT


def test_a_replacement_that_cannot_start_is_given_up_alone() -> None:
    """A gang runs, its new member is refused where it was put: after a minute that pod alone goes, the others stay."""
    life = running(2, ReadinessPolicy())
    stuck = refused(1, life.now)
    assert life.look(*members(READY), stuck, after=STUCK_SECONDS - 1).act is GangAction.NOTHING

    decision = life.look(*members(READY), stuck, after=2)

    assert decision.act is GangAction.DROP
    assert decision.members == (stuck,)
    assert life.condition(EVICTED)[0] != "True"


def test_an_admission_of_which_nobody_is_left_is_forgotten() -> None:
    """The owner was suspended by its user: pods gone, GPUs free; unsuspended, the gang is placed anew (no eviction)."""
    life = running(2)

    life.look()
    assert life.condition(ADMITTED) == ("False", "WaitForQuorum")
    assert life.condition(PODS_READY) == ("", "")
    assert life.look(*members(GATED, GATED)).act is GangAction.PLACE
    assert life.gang.status.requeue_state is None


def test_a_finished_gang_stays_as_it_is() -> None:
    """All members succeeded: nothing is placed again, and nothing is evicted."""
    life = running(2)

    decision = life.look(*members(SUCCEEDED, SUCCEEDED), after=1e6)

    assert decision.act is GangAction.NOTHING
    assert life.condition(PODS_READY)[0] == "True"


def test_running_members_of_a_gang_created_anew_are_taken_over() -> None:
    """A GpuGang deleted and created again under running members stops nobody and places nobody twice."""
    life = Life(make_gang(2))

    life.look(*members(READY, READY))
    assert life.condition(ADMITTED) == ("True", "Admitted")
    assert life.look(*members(READY, READY)).act is GangAction.NOTHING


def test_a_successor_of_the_same_name_inherits_nothing() -> None:
    """All old pods are terminating, new ones are there under the same gang name: only the new ones count."""
    life = Life(make_gang(2))
    old = members(ENDING, ENDING)
    new = (member(8, GATED), member(9, GATED))

    decision = life.look(*old, *new)

    assert decision.act is GangAction.PLACE
    assert decision.members == new


def test_a_job_that_was_stopped_half_way_needs_only_the_rest() -> None:
    """Two of four completions are done; the Job comes back with two pods: a quorum, and only they are placed."""
    life = Life(make_gang(4))
    done = tuple(owned(number, SUCCEEDED, "job-1") for number in range(2))
    left = tuple(owned(number, GATED, "job-1") for number in range(2, 4))

    decision = life.look(*done, *left)

    assert decision.act is GangAction.PLACE
    assert decision.members == left


def test_successes_of_an_earlier_job_do_not_count() -> None:
    """A Job restarted under another uid needs all its members again."""
    life = Life(make_gang(4))
    old = tuple(owned(number, SUCCEEDED, "job-1") for number in range(2))
    left = tuple(owned(number, GATED, "job-2") for number in range(2, 4))

    assert life.look(*old, *left).act is GangAction.NOTHING
    assert life.condition(ADMITTED) == ("False", "WaitForQuorum")


def owned(number: int, stage: MemberStage, uid: str) -> GangMember:
    """Return a member of the Job with that uid."""
    one = member(number, stage)
    owners = (OwnerReference("Job", "j", uid, controller=True),)
    metadata = msgspec.structs.replace(one.pod.metadata, owner_references=owners)
    return replace(one, pod=msgspec.structs.replace(one.pod, metadata=metadata))


def test_extra_members_are_placed_as_soon_as_the_base_is_admitted() -> None:
    """minMember 2 of 4, the third comes while two start: it does not wait until they are ready."""
    life = Life(make_gang(4, minMember=2))
    life.write(lifecycle.admit(life.look(*members(GATED, GATED)).status, now_seconds=NOW, message=""))

    decision = life.look(*members(STARTING, STARTING), member(2, GATED))

    assert decision.act is GangAction.REPLACE
    assert [one.rank for one in decision.members] == [2]


def test_running_members_of_a_gang_that_is_created_anew_with_a_mistake_run_on() -> None:
    """What is wrong with a gang bars its next admission and ends none: its members are taken over, as with any other
    successor, and only what is not there yet stays out."""
    life = Life(make_gang(2))
    wrong = Obstacle("LevelMissing", "no such level")
    assert life.look(*members(READY, READY, holds=True), obstacle=wrong).act is GangAction.NOTHING
    assert life.condition(ADMITTED) == ("True", "Admitted")
    assert life.look(*members(READY, READY, holds=True), obstacle=wrong).act is GangAction.NOTHING
    life.look(obstacle=wrong)
    assert life.look(*members(GATED, GATED), obstacle=wrong).act is GangAction.NOTHING
    assert life.condition(names.CONDITION_ACTIVE) == ("False", "LevelMissing")


def test_an_eviction_goes_on_for_its_own_reason_when_the_topology_goes_meanwhile() -> None:
    """The reason that people read is that of the eviction, not of what went wrong afterwards."""
    life = running(2)
    life.write(lifecycle.preempt(GangView(life.gang, (), life.policy), "gives way", now_seconds=life.now))
    decision = life.look(*members(READY, ENDING, holds=True), obstacle=Obstacle("NoTopology", "gone"))

    assert decision.act is GangAction.EVICT
    assert life.condition(EVICTED) == ("True", "Preempted")
