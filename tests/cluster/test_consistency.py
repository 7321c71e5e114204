"""The audit finds each broken promise, and nothing in a consistent cluster."""

from typing import Any

import msgspec
import pytest

from atoll.api import names
from atoll.api.node_status import DepartedDevice, GpuNodeStatus, HostUse, PodEvidence
from atoll.cluster.allocations import Allocation, ContainerDevices, allocation_annotations
from atoll.cluster.consistency import PROMISES, Printed, Problem, audit
from atoll.cluster.leases import RESERVATION_NAMESPACE, Holder
from atoll.cluster.objects import Lease, Pod
from tests.builders import NOW, make_allocation, make_lease, make_pod, make_report, uuid_of

MUCH_LATER = "2026-01-31T13:00:00.000000Z"


def holder(name: str) -> Holder:
    """Return the identity of the pod that `bound` makes under this name."""
    return Holder("team", name, f"uid-of-{name}")


def bound(name: str, *ids: int, values: dict[str, str] | None = None, **options: Any) -> Pod:
    """Return a running pod with these devices of n1; `values` are its containers' uuids, by default all for main."""
    allocation: Allocation = options.pop("allocation", make_allocation("n1", *ids))
    everything = {"main": ",".join(allocation.uuids)}
    containers = tuple(ContainerDevices(name, value, value) for name, value in (values or everything).items())
    annotations = {**allocation_annotations(allocation, containers), **options.pop("annotations", {})}
    return make_pod(name, node="n1", phase=options.pop("phase", "Running"), annotations=annotations, **options)


def leases(name: str, *ids: int, **options: Any) -> list[Lease]:
    """Return the Leases of a pod's devices."""
    return [make_lease("n1", device_id, holder=holder(name), **options) for device_id in ids]


def unreadable() -> Lease:
    """Return a Lease whose holder says nothing."""
    raw = msgspec.to_builtins(make_lease("n1", 4))
    raw["spec"]["holderIdentity"] = "nobody"
    return msgspec.convert(raw, Lease)


def using(name: str, *ids: int) -> GpuNodeStatus:
    """Return a report in which a pod's processes use these devices."""
    report = make_report()
    assert report.status is not None
    entry = PodEvidence(uid=f"uid-of-{name}", live=True, uuids=tuple(uuid_of("n1", number) for number in ids))
    return report.model_copy(update={"status": report.status.model_copy(update={"pods": (entry,)})})


def hosting(*ids: int) -> GpuNodeStatus:
    """Return a report in which processes outside of pods use these devices."""
    report = make_report()
    assert report.status is not None
    uses = tuple(HostUse(uuid=uuid_of("n1", number), count=1, pids=(4711,)) for number in ids)
    return report.model_copy(update={"status": report.status.model_copy(update={"host_uses": uses})})


def lacking(number: int) -> GpuNodeStatus:
    """Return a report of a machine that this device has left."""
    report = make_report()
    assert report.status is not None
    left = DepartedDevice(id=number, uuid=uuid_of("n1", number))
    stays = tuple(device for device in report.status.devices if device.id != number)
    return report.model_copy(
        update={"status": report.status.model_copy(update={"devices": stays, "departed": (left,)})}
    )


SOUND = [bound("a", 0, 1), bound("b", 2), make_pod("w"), make_pod("plain", gpus=None, node="n1")]
SOUND_LEASES = [*leases("a", 0, 1), *leases("b", 2), make_lease("n1", 5, holder=holder("w"))]
FOREIGN = Allocation("n1", (0,), (uuid_of("n1", 1),))

BROKEN: list[tuple[str, list[Pod], list[Lease], list[GpuNodeStatus], set[Problem]]] = [
    (
        "two pods on one GPU",
        [bound("a", 0), bound("b", 0)],
        leases("a", 0),
        [],
        {Problem.DOUBLE_USE, Problem.FOREIGN_LEASE},
    ),
    (
        "one card under two ids",
        [bound("a", 1), bound("b", allocation=FOREIGN)],
        [*leases("a", 1), *leases("b", 0, uuid=uuid_of("n1", 1))],
        [],
        {Problem.DOUBLE_USE},
    ),
    ("processes on another's GPU", [bound("a", 0)], leases("a", 0), [using("a", 0, 3)], {Problem.FOREIGN_PROCESS}),
    (
        "processes of a pod without GPUs",
        [make_pod("x", gpus=None, node="n1")],
        [],
        [using("x", 3)],
        {Problem.FOREIGN_PROCESS},
    ),
    (
        "a GPU of a reservation that is gone",
        [],
        [make_lease("n1", 5, holder=Holder(RESERVATION_NAMESPACE, "nightly", "uid-of-nightly"))],
        [],
        {Problem.KEPT_FOR_NOBODY},
    ),
    ("processes of a pod that is gone", [], [], [using("gone", 3)], {Problem.FOREIGN_PROCESS}),
    (
        "processes of a pod that is gone, on a GPU that another has by now",
        [bound("a", 0)],
        leases("a", 0),
        [using("gone", 0)],
        {Problem.FOREIGN_PROCESS},
    ),
    ("a card that was taken out under its pod", [bound("a", 0)], leases("a", 0), [lacking(0)], {Problem.GONE_GPU}),
    ("processes of the machine itself", [bound("a", 0)], leases("a", 0), [hosting(5)], {Problem.FOREIGN_HOST}),
    ("holder gone", [], leases("a", 0), [], {Problem.LEAKED_LEASE}),
    ("holder ended", [bound("a", 0, phase="Succeeded")], leases("a", 0), [], {Problem.LEAKED_LEASE}),
    (
        "holder gone without proof",
        [],
        leases("a", 0, annotations={names.LEASE_IN_DOUBT: "why"}),
        [],
        {Problem.DOUBTFUL_LEASE},
    ),
    ("holder bound to other GPUs", [bound("a", 0)], leases("a", 0, 3), [], {Problem.STRAY_LEASE}),
    (
        "reservation that nobody took back",
        [make_pod("w")],
        [make_lease("n1", 5, holder=holder("w"))],
        [],
        {Problem.OVERDUE_LEASE},
    ),
    ("Lease without sense", [], [unreadable()], [], {Problem.UNREADABLE_LEASE}),
    ("Lease missing", [bound("a", 0, 1)], leases("a", 0), [], {Problem.MISSING_LEASE}),
    ("bound without allocation", [make_pod("a", node="n1")], [], [], {Problem.MISSING_ALLOCATION}),
    (
        "allocation without sense",
        [bound("a", 0, annotations={names.ALLOCATED: "n1"})],
        [],
        [],
        {Problem.MALFORMED_ALLOCATION},
    ),
    (
        "report knows another card",
        [bound("a", 0)],
        leases("a", 0),
        [make_report(uuids={0: "GPU-new"})],
        {Problem.WRONG_UUID},
    ),
    ("Lease knows another card", [bound("a", 0)], leases("a", 0, uuid="GPU-old"), [], {Problem.WRONG_LEASE_UUID}),
    (
        "a container has too little",
        [bound("a", 0, 1, values={"main": uuid_of("n1", 0)})],
        leases("a", 0, 1),
        [],
        {Problem.WRONG_CONTAINER_VALUE},
    ),
    (
        "a container has another's",
        [bound("a", 0, values={"main": uuid_of("n1", 7)})],
        leases("a", 0),
        [],
        {Problem.WRONG_CONTAINER_VALUE},
    ),
    (
        "a container computes on another's",
        [bound("a", 0, annotations={f"{names.CONTAINER_DEVICES_PREFIX}main": uuid_of("n1", 7)})],
        leases("a", 0),
        [],
        {Problem.WRONG_CONTAINER_VALUE},
    ),
    (
        "a container was told too many numbers",
        [bound("a", 0, annotations={f"{names.CONTAINER_DEVICES_PREFIX}main": "0,1"})],
        leases("a", 0),
        [],
        {Problem.WRONG_CONTAINER_VALUE},
    ),
    (
        "the machine was renumbered",
        [bound("a", 0, annotations={f"{names.CONTAINER_DEVICES_PREFIX}main": "0"})],
        leases("a", 0),
        [make_report(indices=[3, 1, 2, 0, 4, 5, 6, 7])],
        {Problem.STALE_NUMBERS},
    ),
    (
        "same uid, another name",
        [bound("a", 0, uid="u")],
        [make_lease("n1", 0, holder=Holder("team", "b", "u"))],
        [],
        {Problem.WRONG_HOLDER_NAME},
    ),
]


def test_sound_cluster_has_no_findings() -> None:
    """Running, waiting, reserving and plain pods together break no promise."""
    assert audit(SOUND, SOUND_LEASES, [make_report()]) == ()


@pytest.mark.parametrize(("pods", "held", "reports", "problems"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_broken_promise_is_found(
    pods: list[Pod], held: list[Lease], reports: list[GpuNodeStatus], problems: set[Problem]
) -> None:
    """Each fault gives exactly its findings, each with its promise and in words that name the object."""
    findings = audit(pods, held, reports, now=MUCH_LATER, reservations=())
    assert {finding.problem for finding in findings} == problems
    assert all(finding.promise == PROMISES[finding.problem] and finding.subject for finding in findings)


def test_reservation_under_way_is_sound() -> None:
    """A bind that is not over has time until its deadline; one that somebody else's clock wrote is no alarm either."""
    assert audit(SOUND, SOUND_LEASES, [], now=NOW) == ()
    assert audit(SOUND, SOUND_LEASES, []) == ()


def test_container_that_outlived_its_pod_keeps_its_gpu() -> None:
    """The Lease stays until the end is proven; that is one finding, and its processes no other."""
    problems = {finding.problem for finding in audit([], leases("a", 0), [using("a", 0)])}
    assert problems == {Problem.LEAKED_LEASE}


def test_numbers_are_as_good_as_uuids() -> None:
    """A claim may want numbers: as many as the container has GPUs."""
    told = {f"{names.CONTAINER_DEVICES_PREFIX}main": "0,1"}
    assert audit([bound("a", 0, 1, annotations=told)], leases("a", 0, 1), [make_report()]) == ()


def test_pod_that_has_ended_uses_nothing() -> None:
    """The agent's report may be half a minute older than a pod's end, and must not raise an alarm."""
    ended = bound("a", 0, phase="Succeeded")
    assert audit([ended], [], [using("a", 0)]) == ()


def test_namesake_holds_nothing() -> None:
    """A successor of the same name is not the holder: its predecessor's Lease is a leak."""
    successor = bound("a", 0, uid="another")
    problems = {finding.problem for finding in audit([successor], leases("a", 0), [])}
    assert problems == {Problem.LEAKED_LEASE, Problem.FOREIGN_LEASE}


@pytest.mark.parametrize(
    ("printed", "is_sound"),
    [
        (Printed("uid-of-a", "main", nvidia=(uuid_of("n1", 0), uuid_of("n1", 1))), True),
        (Printed("uid-of-a", "main", cuda=(uuid_of("n1", 0), uuid_of("n1", 1))), True),
        (Printed("uid-of-a", "main", nvidia=(uuid_of("n1", 1), uuid_of("n1", 0))), False),
        (Printed("uid-of-a", "main", nvidia=("all",)), False),
        (Printed("uid-of-a", "other", nvidia=()), True),
        (Printed("uid-of-a", "other", nvidia=("0",)), False),
        (Printed("unknown", "main", nvidia=("0",)), True),
        (Printed("uid-of-a", "main"), True),
    ],
)
def test_printed_values(printed: Printed, *, is_sound: bool) -> None:
    """What a container printed is what its annotation says, in the same order."""
    findings = audit(SOUND, SOUND_LEASES, [], [printed])
    assert [finding.problem for finding in findings] == ([] if is_sound else [Problem.WRONG_PRINTED_VALUE])


def test_other_leases_are_left_alone() -> None:
    """Leader election lives in the same namespace."""
    raw = msgspec.to_builtins(make_lease())
    raw["metadata"] = {"name": "atoll-controllers"}
    assert audit([], [msgspec.convert(raw, Lease)], []) == ()


def test_findings_are_ordered_and_unique() -> None:
    """Two runs over the same objects tell the same, whatever the order of the lists."""
    pods, held = [bound("a", 0), bound("b", 0)], leases("a", 0, 3)
    assert audit(pods, held, []) == audit(pods[::-1], [*held[::-1], *held], [])
