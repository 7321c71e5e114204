"""Terms of leadership: answers to a new leader use only data read in its term."""

from typing import Any

import pytest

from atoll.api import names
from atoll.cluster.objects import Lease, LeaseSpec, Metadata
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from extender.leader_watch import SchedulerLeaderWatch, is_new_term

AT = "2026-01-31T12:00:00.000000Z"
SOON = "2026-01-31T12:00:02.000000Z"
LATE = "2026-01-31T12:00:16.000001Z"


def spec(holder: str = "a", *, transitions: int = 1, renewed: str = AT) -> LeaseSpec:
    """Return what kube-scheduler writes."""
    return LeaseSpec(
        holder_identity=holder, lease_duration_seconds=15, renew_time=renewed, lease_transitions=transitions
    )


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (spec(), spec(renewed=SOON), False),
        (spec(), spec("b", transitions=2, renewed=SOON), True),
        (spec(), spec(transitions=3, renewed=SOON), True),
        (spec(), spec(renewed=LATE), True),
        (spec(renewed="nonsense"), spec(renewed=SOON), True),
        (None, spec(), True),
    ],
    ids=["renewed", "another holder", "back after another", "back after it ran out", "unreadable time", "first holder"],
)
def test_what_begins_a_term(before: LeaseSpec | None, now: LeaseSpec, expected: bool) -> None:
    """Renewals go on with a term; another holder, another count of transitions or a pause begin one."""
    assert is_new_term(before, now) == expected


class Mirror:
    """Counts how often it was told to begin anew."""

    def __init__(self, *, is_synced: bool) -> None:
        self.beginnings = 0
        self.leases = self
        self.synced = self
        self._is_synced = is_synced

    def is_set(self) -> bool:
        return self._is_synced

    def relist(self) -> None:
        self.beginnings += 1


def change(lease_spec: LeaseSpec, name: str = names.SCHEDULER_LEADER_LEASE) -> Change[Any]:
    """Return the change that shows a Lease."""
    return Change(ChangeKind.MODIFIED, Lease(Metadata(name), lease_spec))


def test_leases_of_others_and_our_own_start_begin_nothing() -> None:
    """The Lease that the first list shows is no change of leadership, nor is any other Lease, nor one given back."""
    mirror = Mirror(is_synced=False)
    terms = SchedulerLeaderWatch(mirror)  # type: ignore[arg-type]

    terms.observe(WatchedKind.LEASE, change(spec()))
    terms.observe(WatchedKind.LEASE, change(spec("b"), name="gpu-n1-0"))
    terms.observe(WatchedKind.HEARTBEAT, change(spec("b")))
    terms.observe(WatchedKind.LEASE, change(spec("", renewed=SOON)))
    assert mirror.beginnings == 0


def test_each_change_of_leadership_begins_anew() -> None:
    """A to B and back to A are two terms, and the second begins anew though the first is not over."""
    mirror = Mirror(is_synced=True)
    terms = SchedulerLeaderWatch(mirror)  # type: ignore[arg-type]

    for lease_spec in (spec(), spec(renewed=SOON), spec("b", transitions=2), spec(transitions=3)):
        terms.observe(WatchedKind.LEASE, change(lease_spec))
    assert mirror.beginnings == 3


def test_scheduler_may_lead_by_a_lease_of_another_name() -> None:
    """The setting says which Lease tells of terms, and no other one does."""
    mirror = Mirror(is_synced=True)
    terms = SchedulerLeaderWatch(mirror, "kube-scheduler-gpu")  # type: ignore[arg-type]

    terms.observe(WatchedKind.LEASE, change(spec()))
    assert mirror.beginnings == 0
    terms.observe(WatchedKind.LEASE, change(spec(), name="kube-scheduler-gpu"))
    assert mirror.beginnings == 1
