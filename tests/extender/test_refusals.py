"""Machines whose kubelet rejects pods: the owner's pods go to other nodes first, and failed pods hold nothing."""

import msgspec
import pytest

from atoll.api import names
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import ContainerState, ContainerStatus, OwnerReference, Pod, PodStatus, Present, Terminated
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from extender.node_backoff import (
    OWNERS_MAX,
    PAUSE_SECONDS_MAX,
    PAUSE_SECONDS_MIN,
    REFUSALS_MAX,
    ROW_FORGOTTEN_SECONDS,
    ROW_MAX,
    WINDOW_SECONDS,
    NodeBackoff,
)
from tests.builders import make_allocation, make_pod, make_report
from tests.extender.test_verdicts import ask, judge
from tests.fakes.clock import ManualClock

REFUSED = PodStatus(phase="Failed", reason="UnexpectedAdmissionError")
BEGUN = (ContainerStatus("main", ContainerState(terminated=Terminated())),)


def owned(name: str, *, owner: str = "a-job", node: str = "", status: PodStatus | None = None) -> Pod:
    """Return a GPU pod of an owner."""
    pod = make_pod(name, node=node)
    reference = OwnerReference(kind="Job", name=owner, uid=f"uid-of-{owner}", controller=True)
    metadata = msgspec.structs.replace(pod.metadata, owner_references=(reference,))
    return Pod(metadata, pod.spec, status or pod.status)


def refuse(
    refusals: NodeBackoff, count: int, *, status: PodStatus = REFUSED, owner: str = "a-job", node: str = "n1"
) -> None:
    """Let kubelet of a node refuse pods one after another."""
    for number in range(count):
        before, after = (owned(f"p{number}", owner=owner, node=node, status=one) for one in (None, status))
        refusals.observe(WatchedKind.POD, Change(ChangeKind.MODIFIED, after, old=before))


async def test_third_refusal_puts_the_node_last_for_that_owner_alone() -> None:
    """A deployment over a broken machine does not fill the cluster with failed pods; others may still try it."""
    clock = ManualClock()
    refusals = NodeBackoff(clock)
    refuse(refusals, REFUSALS_MAX - 1)
    assert refusals.nodes(owned("next")) == frozenset()

    refuse(refusals, 1)
    assert refusals.nodes(owned("next")) == {"n1"}
    assert refusals.nodes(owned("next", owner="another-job")) == frozenset()
    assert refusals.nodes(make_pod("of-nobody")) == frozenset()

    await clock.advance(WINDOW_SECONDS)
    assert refusals.nodes(owned("next")) == frozenset()


RUNNING = PodStatus(phase="Running", container_statuses=(ContainerStatus("main", ContainerState(running=Present())),))


async def test_an_owner_whose_pods_are_refused_in_a_row_waits_twice_as_long_each_time() -> None:
    """A ReplicaSet that makes a pod for each refused one makes a few an hour, not one a second."""
    clock = ManualClock()
    refusals = NodeBackoff(clock)
    made = 0
    for _ in range(3600):
        if not refusals.pauses(owned("next")):
            refuse(refusals, 1, node=f"n{made % 20}")
            made += 1
        await clock.advance(1.0)

    assert 15 <= made <= 25


async def test_the_pause_is_that_of_the_owner_alone_and_ends() -> None:
    """Fewer refusals, other owners, bare pods and members of gangs, which have pauses of their own, do not wait."""
    clock = ManualClock()
    refusals = NodeBackoff(clock)
    refuse(refusals, ROW_MAX - 1)
    assert not refusals.pauses(owned("next"))

    refuse(refusals, 1)
    member = owned("member")
    metadata = msgspec.structs.replace(member.metadata, annotations={names.GANG: "g"})
    assert refusals.pauses(owned("next"))
    assert not refusals.pauses(owned("next", owner="another-job"))
    assert not refusals.pauses(make_pod("of-nobody"))
    assert not refusals.pauses(msgspec.structs.replace(member, metadata=metadata))

    await clock.advance(PAUSE_SECONDS_MIN)
    assert not refusals.pauses(owned("next"))


async def test_a_pod_that_starts_ends_the_row() -> None:
    """One broken machine among many does not make an owner wait whose other pods start."""
    refusals = NodeBackoff(ManualClock())
    refuse(refusals, ROW_MAX)
    refuse(refusals, 1, status=RUNNING, node="n2")

    assert not refusals.pauses(owned("next"))
    refuse(refusals, ROW_MAX - 1)
    assert not refusals.pauses(owned("next"))


async def test_a_row_that_is_long_over_begins_anew() -> None:
    """What was refused yesterday delays nobody today; the longest pause is bounded."""
    clock = ManualClock()
    refusals = NodeBackoff(clock)
    refuse(refusals, 50)
    await clock.advance(PAUSE_SECONDS_MAX - 1)
    assert refusals.pauses(owned("next"))

    await clock.advance(ROW_FORGOTTEN_SECONDS)
    refuse(refusals, 1)
    assert not refusals.pauses(owned("next"))


@pytest.mark.parametrize(
    "status",
    [
        PodStatus(phase="Failed", reason="Evicted", container_statuses=BEGUN),
        PodStatus(phase="Failed", container_statuses=BEGUN),
        PodStatus(phase="Failed"),
        PodStatus(phase="Succeeded", container_statuses=BEGUN),
    ],
    ids=["evicted while it ran", "its program failed", "somebody set the phase", "done"],
)
def test_other_ends_are_no_refusals(status: PodStatus) -> None:
    """A program that fails says nothing of its machine."""
    refusals = NodeBackoff(ManualClock())
    refuse(refusals, REFUSALS_MAX, status=status)

    assert refusals.nodes(owned("next")) == frozenset()


def test_pods_that_had_failed_before_are_not_counted() -> None:
    """After a restart thousands of old failed pods are listed; they say nothing of today."""
    refusals = NodeBackoff(ManualClock())
    for number in range(REFUSALS_MAX):
        old = owned(f"p{number}", node="n1", status=REFUSED)
        refusals.observe(WatchedKind.POD, Change(ChangeKind.ADDED, old))
        refusals.observe(WatchedKind.POD, Change(ChangeKind.MODIFIED, old, old=old))

    assert refusals.nodes(owned("next")) == frozenset()


def test_memory_is_bounded() -> None:
    """Any number of owners takes no more memory than a fixed one."""
    refusals = NodeBackoff(ManualClock())
    for number in range(OWNERS_MAX + 10):
        refuse(refusals, 1, owner=f"job-{number}")

    assert len(refusals._seen) == OWNERS_MAX


def test_refused_node_is_taken_when_no_other_fits() -> None:
    """It comes last; it is not closed."""
    ledger = Ledger()
    for node in ("n1", "n2"):
        ledger.put_report(make_report(node, "t4-4"))
        ledger.put_heartbeat(node, 0.0, 1e9)
    assert list(judge(ledger, ask(1), failed_nodes=frozenset({"n1"})).feasible) == ["n2"]
    ledger.drop_report("n2")
    assert list(judge(ledger, ask(1), failed_nodes=frozenset({"n1"})).feasible) == ["n1"]


def test_thousands_of_failed_pods_hold_nothing_and_cost_filter_nothing() -> None:
    """5,000 failed pods that name every GPU of a node: all are free, and nothing that filter reads has grown."""
    ledger = Ledger()
    ledger.put_report(make_report("n1", "t4-4"))
    ledger.put_heartbeat("n1", 0.0, 1e9)
    for number in range(5_000):
        pod = make_pod(f"p{number}", gpus=4, node="n1", allocation=make_allocation("n1", 0, 1, 2, 3), phase="Failed")
        ledger.put_pod(pod)

    assert ledger.free("n1", now_seconds=0.0) == 0b1111
    assert len(ledger.cells(now_seconds=0.0)) == 1
    assert all(not ledger.holds("n1", number, f"GPU-{number}") for number in range(4))
    assert list(judge(ledger, ask(4), ["n1"]).feasible) == ["n1"]
