"""A Lease is deleted by hand, then its pod by force: the device is not given out without proof."""

import orjson
import pytest

from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.leases import RESERVATION_NAMESPACE, Holder, lease_name
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod, decode_pod
from atoll.cluster.transitions import Occupancy
from tests.builders import make_allocation, make_lease, make_pod, pod_json, report_json, uuid_of

HOLDER = Holder("team", "p", "u1")
NAME = lease_name("n1", 0)
LOST_AT, LEFT_AT = 50, 60


def pod(version: int, **options: object) -> Pod:
    """Return the holder, bound to device 0 of n1."""
    return make_pod(uid="u1", node="n1", allocation=make_allocation("n1", 0), version=str(version), **options)


def report(sequence: int, *, position: int = LEFT_AT, live: bool = False) -> GpuNodeStatus:
    """Return a complete report of n1 that speaks of u1 only while its sandbox lives."""
    body = report_json("n1", "t4-4")
    body["status"]["pods"] = [{"uid": "u1", "live": True, "kubelet": True}] if live else []
    body["status"]["evidence"] = {
        "sequence": sequence, "podResourceVersion": str(position), "liveRead": True, "kubeletRead": True,
    }  # fmt: skip
    return GpuNodeStatus.model_validate_json(orjson.dumps(body))


def is_free(ledger: Ledger) -> bool:
    """Tell whether device 0 may be sold."""
    return bool(ledger.free("n1", now_seconds=0.0) & 1)


@pytest.fixture
def ledger() -> Ledger:
    """A ledger in which u1 holds device 0 of n1, by annotation and by Lease."""
    ledger = Ledger()
    ledger.put_report(report(1, position=1, live=True))
    ledger.put_pod(pod(40))
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    return ledger


def test_lease_of_a_bind_that_was_rolled_back_is_not_missed() -> None:
    """A pod that was never bound has started nothing."""
    ledger = Ledger()
    ledger.put_report(report(1))
    ledger.put_pod(make_pod(uid="u1", version="40"))
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))

    ledger.drop_lease(NAME, version=LOST_AT)
    ledger.drop_pod("u1", final=make_pod(uid="u1", version=str(LEFT_AT)))

    assert is_free(ledger)


@pytest.mark.parametrize("is_pod_first", [False, True], ids=["Lease first", "pod first"])
def test_lease_lost_before_its_pod_went_is_kept_in_mind(ledger: Ledger, is_pod_first: bool) -> None:
    """Whichever watch is faster, the device is in doubt, and the ledger says which Lease must be written again."""
    acts = [
        lambda: ledger.drop_lease(NAME, version=LOST_AT),
        lambda: ledger.drop_pod("u1", final=pod(LEFT_AT)),
    ]
    for act in reversed(acts) if is_pod_first else acts:
        act()

    assert not is_free(ledger)
    assert ledger.occupancy("n1", 0, uuid_of("n1", 0)) is Occupancy.IN_DOUBT
    assert [record.lease_name for record in ledger.lost.records("u1")] == [NAME]
    assert list(ledger.lost.departed()) == ["u1"]


@pytest.mark.parametrize("is_pod_first", [False, True], ids=["Lease first", "pod first"])
def test_lease_that_ended_after_its_pod_was_released(ledger: Ledger, is_pod_first: bool) -> None:
    """A Lease goes after its pod when the controllers had proof; a pod watch that is late does not undo that."""
    acts = [
        lambda: ledger.drop_lease(NAME, version=LEFT_AT + 1),
        lambda: ledger.drop_pod("u1", final=pod(LEFT_AT)),
    ]
    for act in reversed(acts) if is_pod_first else acts:
        act()

    assert is_free(ledger)
    assert not ledger.lost.is_known("u1")


def test_lease_that_is_written_again_takes_over(ledger: Ledger) -> None:
    """From then on the Lease holds the device, and its end frees it."""
    ledger.drop_lease(NAME, version=LOST_AT)
    ledger.drop_pod("u1", final=pod(LEFT_AT))
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    assert ledger.lost.records("u1") == ()
    assert not is_free(ledger)

    ledger.drop_lease(NAME, version=LEFT_AT + 9)
    assert is_free(ledger)


def test_of_two_lost_leases_one_that_is_written_again_does_not_free_the_other() -> None:
    """Somebody deleted both; the pod goes before the second is written again."""
    ledger, pair = Ledger(), make_allocation("n1", 0, 1)
    ledger.put_report(report(1, position=1, live=True))
    ledger.put_pod(make_pod(uid="u1", node="n1", allocation=pair, version="40"))
    for device_id in (0, 1):
        ledger.put_lease(make_lease("n1", device_id, holder=HOLDER))
    for device_id in (0, 1):
        ledger.drop_lease(lease_name("n1", device_id), version=LOST_AT)
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    ledger.drop_pod("u1", final=make_pod(uid="u1", node="n1", allocation=pair, version=str(LEFT_AT)))

    assert ledger.free("n1", now_seconds=0.0) & 0b11 == 0
    assert [record.device_id for record in ledger.lost.records("u1")] == [1]


def test_lease_written_again_while_the_pod_lives_was_never_lost(ledger: Ledger) -> None:
    """The usual repair leaves nothing behind."""
    ledger.drop_lease(NAME, version=LOST_AT)
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    ledger.drop_pod("u1", final=pod(LEFT_AT))
    ledger.drop_lease(NAME, version=LEFT_AT + 1)

    assert is_free(ledger)


def test_reports_that_prove_the_end_free_the_device(ledger: Ledger) -> None:
    """Where nobody writes the Lease again, the agent's word counts: seen live, and past the pod's end no longer."""
    ledger.drop_lease(NAME, version=LOST_AT)
    ledger.drop_pod("u1", final=pod(LEFT_AT))
    ledger.put_report(report(2, position=LEFT_AT - 1))
    ledger.put_report(report(3, live=True))
    assert not is_free(ledger)

    ledger.put_report(report(4))
    assert is_free(ledger)
    assert not ledger.lost.is_known("u1")


def test_pod_whose_end_kubelet_told_holds_nothing(ledger: Ledger) -> None:
    """Terminated by kubelet's own word is proof, with or without a Lease."""
    ledger.drop_lease(NAME, version=LOST_AT)
    body = pod_json(uid="u1", node="n1", allocation=make_allocation("n1", 0), phase="Succeeded", version=str(LEFT_AT))
    body["status"]["containerStatuses"] = [{"name": "main", "state": {"terminated": {"exitCode": 0}}}]
    ledger.drop_pod("u1", final=decode_pod(orjson.dumps(body)))

    assert is_free(ledger)


def test_stray_lease_that_ends_is_not_lost(ledger: Ledger) -> None:
    """A Lease beside the pod's own devices holds nothing when it is gone, however the pod leaves."""
    ledger.put_lease(make_lease("n1", 1, holder=HOLDER))
    ledger.drop_lease(lease_name("n1", 1), version=LOST_AT)
    ledger.drop_pod("u1", final=pod(LEFT_AT))

    assert ledger.lost.records("u1") == ()
    assert ledger.free("n1", now_seconds=0.0) & 2


def test_a_restore_voids_what_versions_told(ledger: Ledger) -> None:
    """A pod that left at a version that is yet to come would keep its device for ever: no report can be past it."""
    ledger.drop_lease(NAME, version=LOST_AT)
    ledger.drop_pod("u1", final=pod(LEFT_AT))
    ledger.put_report(report(2, position=3))
    ledger.put_report(report(3, position=3))
    before = is_free(ledger)

    ledger.forget_versions()

    assert (before, is_free(ledger)) == (False, True)


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted by force", "set Failed by somebody"])
@pytest.mark.parametrize("is_listed", [True, False], ids=["Lease gone in a gap", "Lease gone before the start"])
def test_pod_without_its_lease_keeps_its_device_until_its_end_is_proven(is_listed: bool, is_deleted: bool) -> None:
    """Nobody saw when the Lease went: the controllers write it again, and reports prove the end as for any other."""
    ledger = Ledger()
    ledger.put_report(report(1, position=1))
    ledger.put_pod(pod(40))
    if is_listed:
        ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
        ledger.drop_lease(NAME)
    if is_deleted:
        ledger.drop_pod("u1", final=pod(LEFT_AT))
    else:
        ledger.put_pod(pod(LEFT_AT, phase="Failed"))

    assert not is_free(ledger)
    assert [record.lease_name for record in ledger.lost.records("u1")] == [NAME]

    ledger.put_report(report(2))
    assert not is_free(ledger)
    ledger.put_report(report(3))
    assert is_free(ledger)
    assert not ledger.lost.is_known("u1")


@pytest.mark.parametrize("lost_at", [None, LEFT_AT + 1], ids=["nothing of its Lease", "its Lease deleted on proof"])
def test_pod_that_ended_by_the_word_of_kubelet_leaves_nothing(lost_at: int | None) -> None:
    """A late watch of Leases changes nothing about kubelet's word."""
    ledger = Ledger()
    ledger.put_report(report(1, position=1))
    ledger.put_pod(pod(40))
    if lost_at is not None:
        ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    body = pod_json(uid="u1", node="n1", allocation=make_allocation("n1", 0), phase="Succeeded", version=str(LEFT_AT))
    body["status"]["containerStatuses"] = [{"name": "main", "state": {"terminated": {"exitCode": 0}}}]
    ended = decode_pod(orjson.dumps(body))
    ledger.put_pod(ended)
    if lost_at is not None:
        ledger.drop_lease(NAME, version=lost_at)

    assert is_free(ledger)
    ledger.drop_pod("u1", final=ended)
    assert is_free(ledger)
    assert not ledger.lost.is_known("u1")


def test_lease_that_ended_before_anybody_saw_its_pod_bound_was_released() -> None:
    """The watch of pods is far behind: the Lease was deleted on proof after the pod's end, which is seen much later."""
    ledger = Ledger()
    ledger.put_report(report(1, position=1))
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    ledger.drop_lease(NAME, version=LEFT_AT + 1)
    ledger.put_pod(pod(40))
    ledger.drop_pod("u1", final=pod(LEFT_AT))

    assert is_free(ledger)
    assert not ledger.lost.is_known("u1")


def test_lease_that_returned_to_its_reservation_was_released() -> None:
    """A Lease that a GpuReservation takes over from an ended pod changes its holder and is not deleted."""
    ledger = Ledger()
    ledger.put_report(report(1, position=1))
    ledger.put_pod(pod(40))
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    ledger.put_lease(make_lease("n1", 0, holder=Holder(RESERVATION_NAMESPACE, "r", "r1"), version=str(LEFT_AT + 1)))
    ledger.drop_pod("u1", final=pod(LEFT_AT))

    assert ledger.lost.records("u1") == ()


@pytest.mark.parametrize(
    ("deleted_at", "stays_held"), [(LOST_AT, True), (LEFT_AT + 1, False)], ids=["lost before", "released after"]
)
def test_lease_that_is_seen_only_after_its_pod_went_is_judged_by_its_end(deleted_at: int, stays_held: bool) -> None:
    """The watch of Leases is behind: it shows the Lease and its deletion when the pod is long gone."""
    ledger = Ledger()
    ledger.put_report(report(1, position=1))
    ledger.put_pod(pod(40))
    ledger.drop_pod("u1", final=pod(LEFT_AT))
    ledger.put_lease(make_lease("n1", 0, holder=HOLDER))
    ledger.drop_lease(NAME, version=deleted_at)

    assert is_free(ledger) is not stays_held
    assert ledger.lost.is_known("u1") is stays_held


def test_pod_that_was_terminal_at_first_sight_holds_nothing_without_a_lease() -> None:
    """Its Lease was there until somebody had proof; its object may stay for weeks."""
    ledger = Ledger()
    ledger.put_report(report(1, position=1))
    ledger.put_pod(pod(LEFT_AT, phase="Failed"))
    ledger.drop_pod("u1", final=pod(LEFT_AT + 9, phase="Failed"))

    assert is_free(ledger)
    assert not ledger.lost.is_known("u1")


def test_pod_and_lease_that_went_in_one_gap_hold_nothing(ledger: Ledger) -> None:
    """Both deletions are inferred, which is what a release on proof looks like after a gap."""
    ledger.drop_lease(NAME)
    ledger.drop_pod("u1", final=pod(40))

    assert is_free(ledger)
    assert not ledger.lost.is_known("u1")
