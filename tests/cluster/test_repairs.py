"""States of Leases for their holders, and the Leases that a bound pod must have."""

from collections.abc import Mapping

import pytest

from atoll.api import names
from atoll.cluster.leases import LeaseRecord, parse_lease
from atoll.cluster.objects import Pod
from atoll.cluster.repairs import (
    LeaseState,
    device_of_lease_name,
    lease_state,
    owner_of_unreadable,
    required_leases,
)
from tests.builders import LATER, NOW, make_allocation, make_devices, make_lease, make_pod, uuid_of

AFTER_DEADLINE = "2026-01-31T12:01:00.000001Z"


def record(node: str = "n1", device_id: int = 0, **annotations: str) -> LeaseRecord:
    """Return a Lease record whose reservation ends at LATER."""
    return parse_lease(make_lease(node, device_id, annotations=annotations))


def bound(*ids: int, node: str = "n1", annotations: Mapping[str, str] | None = None, phase: str = "Running") -> Pod:
    """Return a pod that is bound with these devices."""
    return make_pod(node=node, allocation=make_allocation(node, *ids), annotations=annotations, phase=phase)


NO_DEADLINE = record(**{names.LEASE_DEADLINE: "soon"})
STANDINGS: list[tuple[str, LeaseRecord, Pod | None, str, LeaseState]] = [
    ("bound to it", record(), bound(0, 1), AFTER_DEADLINE, LeaseState.HELD),
    ("bound to it, reservation not over", record(), bound(0), NOW, LeaseState.HELD),
    (
        "bound to its card under a new id",
        record(device_id=5, **{names.LEASE_DEVICE_UUID: uuid_of("n1", 0)}),
        bound(0),
        AFTER_DEADLINE,
        LeaseState.HELD,
    ),
    ("bind under way", record(), make_pod(), NOW, LeaseState.RESERVED),
    ("made late, for a pod that was bound to another device meanwhile", record(), bound(1), NOW, LeaseState.STRAY),
    ("never bound, deadline is now", record(), make_pod(), LATER, LeaseState.OVERDUE),
    ("never bound, deadline passed", record(), make_pod(), AFTER_DEADLINE, LeaseState.OVERDUE),
    ("never bound, no readable deadline", NO_DEADLINE, make_pod(), NOW, LeaseState.OVERDUE),
    ("bound to another device", record(), bound(1), AFTER_DEADLINE, LeaseState.STRAY),
    ("bound to another node", record(), bound(0, node="n2"), AFTER_DEADLINE, LeaseState.STRAY),
    ("bound without an allocation", record(), make_pod(node="n1"), AFTER_DEADLINE, LeaseState.STRAY),
    (
        "annotation cannot be read",
        record(),
        bound(0, annotations={names.UUIDS: ""}),
        AFTER_DEADLINE,
        LeaseState.UNCLEAR,
    ),
    ("ended", record(), bound(0, phase="Succeeded"), NOW, LeaseState.DEPARTED),
    ("unknown", record(), None, NOW, LeaseState.DEPARTED),
]


@pytest.mark.parametrize(("lease", "pod", "now", "state"), [s[1:] for s in STANDINGS], ids=[s[0] for s in STANDINGS])
def test_standing(lease: LeaseRecord, pod: Pod | None, now: str, state: LeaseState) -> None:
    """Only a reservation that is over, of a pod that is not bound to the device, is anybody's business."""
    assert lease_state(lease, pod, now) is state


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        pytest.param(bound(0, 3), {"gpu-n1-0", "gpu-n1-3"}, id="bound"),
        pytest.param(make_pod(allocation=make_allocation("n1", 0)), set(), id="not bound, annotation forged"),
        pytest.param(make_pod(node="n2", allocation=make_allocation("n1", 0)), set(), id="annotation of another node"),
        pytest.param(bound(0, phase="Failed"), set(), id="ended"),
        pytest.param(bound(0, annotations={names.UUIDS: "a,b"}), set(), id="cannot be read"),
    ],
)
def test_required_leases(pod: Pod, expected: set[str]) -> None:
    """A Lease is required for each device of a bound pod that has not ended, under the pod's own identity."""
    required = required_leases(pod)
    assert {lease.name for lease in required} == expected
    assert all(lease.holder.uid == pod.metadata.uid for lease in required)


def test_unreadable_lease_belongs_to_the_pod_that_names_its_device() -> None:
    """The Lease's name decides, whatever its annotations say; two claimants prove nothing."""
    first = bound(0)
    assert owner_of_unreadable("gpu-n1-0", {"a": first}) == required_leases(first)[0]
    assert owner_of_unreadable("gpu-n1-0", {"a": first, "b": bound(0, 1)}) is None
    assert owner_of_unreadable("gpu-n1-7", {"a": first}) is None


def test_device_is_found_by_lease_name() -> None:
    """Names of nodes may end in numbers too: the name is compared as a whole, never taken apart."""
    nodes = {"n1": make_devices("n1"), "n1-1": make_devices("n1-1")}
    assert device_of_lease_name("gpu-n1-1-0", nodes) == ("n1-1", 0, uuid_of("n1-1", 0))
    assert device_of_lease_name("gpu-n1-1", nodes) == ("n1", 1, uuid_of("n1", 1))
    assert device_of_lease_name("gpu-n9-1", nodes) is None
