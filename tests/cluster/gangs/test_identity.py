"""Memory of a gang when objects are deleted or recreated: its age, successes and members."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.api import names
from atoll.api.gangs import PRESENT_MAX, SUCCEEDED_MAX, GangAssignment, GpuGangStatus, SuspendedOwner
from atoll.api.times import text_of
from atoll.cluster.gangs import lifecycle
from atoll.cluster.gangs.gang_budgets import gang_budgets
from atoll.cluster.gangs.lifecycle import GangAction, GangView
from atoll.cluster.gangs.membership import GangMember, MemberStage
from atoll.cluster.gangs.queue import blocker
from atoll.cluster.gangs.readiness_policy import ReadinessPolicy
from atoll.cluster.gangs.succeeded import remember
from atoll.cluster.objects import OwnerReference, PodCondition
from tests.cluster.gangs.builders import NOW, WAITING, Life, make_gang, member, members

GATED, STARTING, READY = MemberStage.GATED, MemberStage.STARTING, MemberStage.READY
FAILED, SUCCEEDED, ENDING = MemberStage.FAILED, MemberStage.SUCCEEDED, MemberStage.ENDING
PODS_READY, ADMITTED, EVICTED = names.CONDITION_PODS_READY, names.CONDITION_ADMITTED, names.CONDITION_EVICTED
FIRST, SECOND = "admission-1", "admission-2"
SUSPENDED = SuspendedOwner(api_version="batch/v1", kind="Job", name="j", uid="job-2")


def changed(one: GangMember, *, admission: str = "", owner: str = "", is_victim: bool = False) -> GangMember:
    """Return a member of an admission, of the Job with that uid, that kube-scheduler takes or not."""
    metadata, status = one.pod.metadata, one.pod.status
    annotations = {**metadata.annotations, **({names.ADMISSION: admission} if admission else {})}
    owners = (OwnerReference("Job", "j", owner, controller=True),) if owner else ()
    metadata = msgspec.structs.replace(metadata, annotations=annotations, owner_references=owners)
    if is_victim:
        taken = PodCondition("DisruptionTarget", "True", "PreemptionByScheduler")
        status = msgspec.structs.replace(status, conditions=(taken,))
    return replace(one, pod=msgspec.structs.replace(one.pod, metadata=metadata, status=status))


def begun(
    count: int, policy: ReadinessPolicy = WAITING, *, admission: str = FIRST, owner: str = "", **spec: Any
) -> Life:
    """Return a gang of which every member was let go and is ready."""
    life = Life(make_gang(count, **spec), policy)
    gated = tuple(changed(member(number, GATED), owner=owner) for number in range(count))
    let_go(life, gated, admission)
    life.look(*(changed(member(number, READY), admission=admission, owner=owner) for number in range(count)))
    assert life.condition(PODS_READY)[0] == "True"
    return life


def let_go(life: Life, gated: tuple[GangMember, ...], admission: str) -> None:
    """Admit the gang with the members that wait."""
    decision = life.look(*gated)
    assert decision.act is GangAction.PLACE
    status = lifecycle.admit(
        decision.status, now_seconds=life.now, message="", admission=admission, members=decision.members
    )
    life.write(status.model_copy(update={"assignment": GangAssignment()}))


# Taken over

LOST: dict[str, Callable[[GpuGangStatus], GpuGangStatus | None]] = {
    "made anew": lambda _: None,
    "lost its status": lambda _: GpuGangStatus(),
    "lost its conditions": lambda status: status.model_copy(update={"conditions": ()}),
    "lost its assignment": lambda status: status.model_copy(update={"assignment": None}),
    "its time cannot be read": lambda status: status.model_copy(update={"assignment": GangAssignment(time="soon")}),
    "its time is that of a clock an hour ahead": lambda status: status.model_copy(
        update={"assignment": GangAssignment(time=text_of(NOW + 7200))}
    ),
}


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_a_gang_that_is_taken_over_has_its_time_from_then_on(
    lose: Callable[[GpuGangStatus], GpuGangStatus | None],
) -> None:
    """Its members run and are not ready: nobody is stopped at once, nobody holds a place for ever, and none of the
    gangs behind it waits longer than that for it."""
    policy = replace(WAITING, block_admission=True)
    life = Life(make_gang(2), policy)
    let_go(life, members(GATED, GATED), "")
    life.look(*members(READY, STARTING))
    life.write(lose(life.gang.status))
    life.now += 3600

    life.look(*members(READY, STARTING))
    assert life.look(*members(READY, STARTING)).act is GangAction.NOTHING
    assert blocker([GangView(life.gang, members(READY, STARTING), policy)]) is not None
    assert life.look(*members(READY, STARTING), after=policy.timeout_seconds - 2).act is GangAction.NOTHING
    decision = life.look(*members(READY, STARTING), after=3)

    assert decision.act is GangAction.EVICT
    assert life.condition(EVICTED) == ("True", "PodsReadyTimeout")
    assert not GangView(life.gang, (), policy).is_admitted


def test_a_gang_that_is_taken_over_goes_on_in_the_admission_of_its_members() -> None:
    """One that terminates since an earlier admission says nothing, although nothing is known of that admission."""
    life = Life(make_gang(2))
    running = tuple(changed(member(number, READY), admission=SECOND) for number in range(2))
    past = changed(member(2, ENDING), admission=FIRST, is_victim=True)

    life.look(*running, past)
    assert life.gang.status.admission == SECOND
    decision = life.look(running[0], changed(member(1, FAILED), admission=SECOND), past)

    assert decision.act is GangAction.NOTHING
    assert life.condition(PODS_READY) == ("False", "WaitForStart")


def test_a_gang_that_is_made_anew_when_its_work_is_done_is_finished() -> None:
    """Its members have succeeded and are still there; whoever comes then starts together."""
    life = Life(make_gang(2))
    done = tuple(changed(member(number, SUCCEEDED), admission=FIRST) for number in range(2))

    life.look(*done)
    life.look(*done)
    assert (life.gang.status.phase, life.gang.status.admission) == ("Finished", FIRST)
    life.look(*done, member(5, GATED))
    assert life.look(*done, member(5, GATED)).act is GangAction.NOTHING
    assert life.condition(ADMITTED) == ("False", "WaitForQuorum")


WORK = {
    "they end well while they are stopped": ((SUCCEEDED, SUCCEEDED), "Finished"),
    "one is stopped before it is done": ((SUCCEEDED, ENDING), "Waiting"),
    "one fails": ((SUCCEEDED, FAILED), "Waiting"),
}


@pytest.mark.parametrize(("stages", "phase"), WORK.values(), ids=WORK)
@pytest.mark.parametrize("owner", ["job-2", ""])
def test_an_evicted_gang_whose_members_all_end_well_is_finished(
    owner: str, stages: tuple[MemberStage, ...], phase: str
) -> None:
    """It waits for no pause, resumes whom it suspended, and says that it is done; only one of two is not enough, also
    where the gang needs no more, and pods that an earlier Job left behind are nobody's work of now."""
    left = tuple(changed(member(number, SUCCEEDED), admission=FIRST, owner="job-1") for number in (7, 8))
    life = Life(make_gang(2, minMember=1))
    let_go(life, (*left, *(changed(member(number, GATED), owner=owner) for number in range(2))), SECOND)
    started = [changed(member(number, STARTING), admission=SECOND, owner=owner) for number in range(2)]
    life.look(*left, *started)
    assert life.look(*left, *started, after=1e5).act is GangAction.EVICT
    life.write(life.gang.status.model_copy(update={"suspended_owners": (SUSPENDED,)}))

    ended = [changed(member(n, one), admission=SECOND, owner=owner) for n, one in enumerate(stages)]
    acts = [life.look(*left, *ended).act]
    life.write(life.gang.status.model_copy(update={"suspended_owners": ()}))
    life.look(*left, *ended)
    life.look(*left, *ended)

    assert acts == [GangAction.RESUME if phase == "Finished" else GangAction.NOTHING]
    assert life.gang.status.phase == phase
    assert life.look(*left, *ended).act is GangAction.NOTHING


def test_a_gang_whose_work_is_done_is_finished_also_after_it_was_inactive() -> None:
    """Somebody turns spec.active off and on again, when the objects of its members are gone."""
    life = begun(2, owner="job-1")
    life.look(*(changed(member(number, SUCCEEDED), admission=FIRST, owner="job-1") for number in range(2)))
    life.look()
    assert life.gang.status.phase == "Finished"

    life.set_active(active=False)
    life.look()
    life.look()
    assert life.gang.status.phase == "Inactive"
    life.set_active(active=True)
    life.look()
    life.look()

    assert life.gang.status.phase == "Finished"


def test_a_pause_that_the_clock_of_another_leader_set_too_far_ends_all_the_same() -> None:
    """requeueAt lies a day ahead: no pause is longer than the longest."""
    life = begun(1)
    life.look(changed(member(0, FAILED), admission=FIRST))
    far = {"count": 1, "requeue_at": text_of(NOW + 86_400)}
    life.write(life.gang.status.model_copy(update={"requeue_state": lifecycle.RequeueState(**far)}))
    wait = life.look(member(1, GATED)).again_seconds

    assert wait is not None
    assert wait <= WAITING.requeuing.max_seconds + 1
    assert life.look(member(1, GATED), after=wait).act is GangAction.PLACE


# Done, and deleted


def test_a_member_whose_object_is_collected_after_its_success_counts_on() -> None:
    """minMember 4 with a recovery timeout: p0 is done and gone, p1 to p3 run on for days; nobody is evicted."""
    life = begun(4, minMember=4)
    rest = tuple(changed(member(number, READY), admission=FIRST) for number in range(1, 4))
    life.look(changed(member(0, SUCCEEDED), admission=FIRST), *rest, after=10)

    life.look(*rest, after=10)
    decision = life.look(*rest, after=86_400)

    assert decision.act is GangAction.NOTHING
    assert life.condition(PODS_READY) == ("True", "Started")
    assert (life.gang.status.ready, life.gang.status.members, life.gang.status.phase) == (4, 3, "Running")


def test_a_gang_whose_members_went_one_by_one_ends_as_finished() -> None:
    """Each is collected as soon as it is done; with the last the work is done, and nothing is tried again."""
    life = begun(3)
    for done in range(3):
        rest = tuple(changed(member(number, READY), admission=FIRST) for number in range(done + 1, 3))
        life.look(changed(member(done, SUCCEEDED), admission=FIRST), *rest, after=10)
        decision = life.look(*rest, after=10)
        assert decision.act is GangAction.NOTHING

    assert life.look(after=86_400).act is GangAction.NOTHING
    assert life.condition(ADMITTED) == ("True", "Admitted")
    assert (life.gang.status.phase, life.gang.status.ready) == ("Finished", 3)


STAGES_ONCE_DONE = {
    "it is there": SUCCEEDED,
    "it is being deleted": ENDING,
    "it is gone": None,
}


@pytest.mark.parametrize("stage", STAGES_ONCE_DONE.values(), ids=STAGES_ONCE_DONE)
def test_a_success_counts_once_whatever_becomes_of_its_object(stage: MemberStage | None) -> None:
    """Two of four are ready: with the one that is done they are three, at every look."""
    life = begun(4, ReadinessPolicy())
    rest = (changed(member(1, READY), admission=FIRST), changed(member(2, READY), admission=FIRST))
    life.look(changed(member(0, SUCCEEDED), admission=FIRST), *rest)

    for _ in range(3):
        life.look(*((changed(member(0, stage), admission=FIRST),) if stage else ()), *rest)

        assert life.gang.status.ready == 3


def test_what_ended_well_only_because_it_was_told_to_end_is_not_remembered() -> None:
    """It was being deleted before anybody saw it succeed."""
    life = begun(2, ReadinessPolicy())

    life.look(changed(member(0, ENDING), admission=FIRST), changed(member(1, READY), admission=FIRST))
    life.look(changed(member(1, READY), admission=FIRST))

    assert life.gang.status.ready == 1
    assert life.gang.status.succeeded == ()


def test_a_job_that_comes_back_half_way_needs_no_objects_of_what_is_done() -> None:
    """Two of four are done and collected, the others were stopped: the Job's last two are a quorum."""
    life = begun(4, owner="job-1")
    rest = tuple(changed(member(number, READY), admission=FIRST, owner="job-1") for number in (2, 3))
    done = tuple(changed(member(number, SUCCEEDED), admission=FIRST, owner="job-1") for number in (0, 1))
    life.look(*done, *rest)
    life.look(*rest)
    life.write(lifecycle.preempt(GangView(life.gang, rest, WAITING), "gives way", now_seconds=life.now))
    life.look()

    left = tuple(changed(member(number, GATED), owner="job-1") for number in (4, 5))
    let_go(life, left, SECOND)
    life.look(*(changed(member(number, READY), admission=SECOND, owner="job-1") for number in (4, 5)))

    assert life.condition(PODS_READY) == ("True", "Started")
    assert life.gang.status.ready == 4


@pytest.mark.parametrize("owner", ["", "job-2"], ids=["bare pods", "another Job"])
@pytest.mark.parametrize("is_there", [True, False], ids=["the old ones are there", "the old ones are gone"])
def test_members_that_come_after_the_work_is_done_start_together(owner: str, is_there: bool) -> None:
    """A finished gang is no running gang: the first member of the next run does not start alone, as a successor."""
    life = begun(2, owner="" if not owner else "job-1")
    old = tuple(changed(member(n, SUCCEEDED), admission=FIRST, owner="" if not owner else "job-1") for n in range(2))
    life.look(*old)
    old = old if is_there else ()
    life.look(*old)
    first, second = (changed(member(number, GATED), owner=owner) for number in (5, 6))

    life.look(*old, first)
    assert life.look(*old, first).act is GangAction.NOTHING
    assert life.condition(ADMITTED) == ("False", "WaitForQuorum")
    assert life.look(*old, first, second).act is GangAction.PLACE


def test_a_gang_of_which_some_are_done_and_gone_may_lose_as_many_as_before() -> None:
    """What is done cannot be lost, and does not make the others needed."""
    life = begun(4, minMember=3)
    rest = tuple(changed(member(number, READY), admission=FIRST) for number in range(1, 4))
    life.look(changed(member(0, SUCCEEDED), admission=FIRST), *rest)
    life.look(*rest)

    budgets = gang_budgets([GangView(life.gang, rest, WAITING)])

    assert budgets.allowed["gang team/g"] == 1


def test_the_memory_is_bounded_and_no_success_of_a_large_gang_is_lost() -> None:
    """Ten thousand are done at once and are collected in the order of their age: no more than so many are named, and
    in the end all of them were counted."""
    total = 10_000
    done = [member(number, SUCCEEDED) for number in range(total)]
    record = remember((), done, is_admitted=True)
    assert len(record[0].present) == PRESENT_MAX
    while done:
        done = sorted(done, key=lambda one: one.uid)[PRESENT_MAX // 2 :]
        record = remember(record, done, is_admitted=True)
        assert len(record[0].present) <= PRESENT_MAX

    assert record[0].count == total
    owned = [changed(member(number, SUCCEEDED), owner=f"job-{number}") for number in range(SUCCEEDED_MAX + 50)]
    assert len(remember((), owned, is_admitted=True)) == SUCCEEDED_MAX


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["succeed", "collect", "look"])), max_size=40))
def test_whoever_was_seen_to_succeed_counts_for_ever_and_once(steps: list[tuple[int, str]]) -> None:
    """Any order of successes, deletions and looks, against a set of the uids that were seen."""
    stages: dict[int, MemberStage] = dict.fromkeys(range(6), READY)
    life, seen = begun(6, ReadinessPolicy(), minMember=1), set[int]()
    for number, step in steps:
        if step == "succeed" and stages.get(number) is READY:
            stages[number] = SUCCEEDED
        elif step == "collect" and stages.get(number) is SUCCEEDED and number in seen:
            del stages[number]
        life.look(*(changed(member(n, stage), admission=FIRST) for n, stage in stages.items()))
        seen |= {n for n, stage in stages.items() if stage is SUCCEEDED}

        assert sum(entry.count for entry in life.gang.status.succeeded) == len(seen)
        assert life.gang.status.ready == 6


# Another admission

PAST: dict[str, GangMember] = {
    "it is evicted and terminates": changed(member(7, ENDING), admission=FIRST, is_victim=True),
    "it failed when kube-scheduler took it": changed(member(7, FAILED), admission=FIRST, is_victim=True),
    "it holds its GPUs until it has ended": replace(
        changed(member(7, ENDING), admission=FIRST, is_victim=True), holds=True
    ),
    "it is from before there were ids": changed(member(7, ENDING), is_victim=True),
    "it succeeded then": changed(member(7, SUCCEEDED), admission=FIRST),
}


@pytest.mark.parametrize("past", PAST.values(), ids=PAST)
def test_a_member_of_an_earlier_admission_says_nothing_about_this_one(past: GangMember) -> None:
    """The gang runs elsewhere by now and loses a member: it waits for the successor of that one, as if nobody else
    were there."""
    life = begun(2, admission=SECOND)
    ready, lost = changed(member(0, READY), admission=SECOND), changed(member(1, FAILED), admission=SECOND)

    decision = life.look(ready, lost, past, after=5)

    assert decision.act is GangAction.NOTHING
    assert life.condition(PODS_READY) == ("False", "WaitForRecovery")
    assert life.gang.status.ready == 1


def test_a_member_that_kube_scheduler_takes_in_this_admission_still_ends_it() -> None:
    """What tells the two apart is the id alone."""
    life = begun(2, admission=SECOND)
    ready, taken = (
        changed(member(0, READY), admission=SECOND),
        changed(member(1, ENDING), admission=SECOND, is_victim=True),
    )

    assert life.look(ready, taken).act is GangAction.EVICT
    assert life.condition(EVICTED) == ("True", "Preempted")


def test_an_eviction_leaves_the_owner_of_an_earlier_admission_alone() -> None:
    """The old Job still terminates; the new one's gang is evicted: the old one is not suspended once more."""
    life = begun(2, admission=SECOND, owner="job-2")
    old = replace(changed(member(7, ENDING), admission=FIRST, owner="job-1"), holds=True)
    own = tuple(changed(member(n, stage), admission=SECOND, owner="job-2") for n, stage in ((0, READY), (1, FAILED)))
    life.look(*own, old)

    decision = life.look(*own, old, after=WAITING.recovery_timeout_seconds + 1)

    assert decision.act is GangAction.EVICT
    assert [one.uid for one in decision.members] == [own[0].uid]


@pytest.mark.parametrize("stage", [STARTING, READY, GATED, MemberStage.HELD_BACK])
def test_whoever_has_not_ended_is_never_overlooked(stage: MemberStage) -> None:
    """Whatever id it bears: what runs, or may yet, is a member."""
    life = begun(2, admission=SECOND)
    other = changed(member(7, stage), admission=FIRST)

    view = GangView(life.gang, (other,), WAITING)

    assert view.members == (other,)
