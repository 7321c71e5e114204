"""Only containers whose indices belong to other GPUs after a reboot are evicted."""

from typing import Any

import pytest

from atoll.api import names
from atoll.cluster.allocations import Allocation, ContainerDevices, allocation_annotations
from atoll.cluster.objects import Pod
from atoll.cluster.renumbering import StaleContainer, stale_containers
from tests.builders import make_allocation, make_pod, make_report, uuid_of

AS_BOUND = [0, 1, 2, 3, 4, 5, 6, 7]
REVERSED = AS_BOUND[::-1]
LAST_FIRST = [7, 0, 1, 2, 3, 4, 5, 6]
GONE = {"health": {"state": "unknown"}}


def told(cuda: str, *ids: int, nvidia: str | None = None, **options: Any) -> Pod:
    """Return a running pod with these devices of n1, whose container main was told `cuda`."""
    allocation: Allocation = make_allocation("n1", *ids)
    uuids = ",".join(allocation.uuids) if nvidia is None else nvidia
    annotations = allocation_annotations(allocation, (ContainerDevices("main", cuda, uuids),))
    annotations |= options.pop("annotations", {})
    options = {"node": "n1", "phase": "Running", **options}
    return make_pod("p", annotations=annotations, **options)


def instance(profile: str) -> dict[str, Any]:
    """Return the fields of a MIG instance, whose index counts within its parent."""
    return {"mig": {"enabled": True, "profile": profile}}


STALE: list[tuple[str, Pod, dict[str, Any], StaleContainer]] = [
    ("number went to another card", told("0", 0), {"indices": REVERSED}, StaleContainer("main", (0,), (7,))),
    (
        "number went to a sick card",
        told("0", 0),
        {"indices": REVERSED, "sick": [7]},
        StaleContainer("main", (0,), (7,)),
    ),
    ("number with zeros before it", told("00000", 0), {"indices": REVERSED}, StaleContainer("main", (0,), (7,))),
    ("one of two", told("0,7", 0, 7), {"indices": LAST_FIRST}, StaleContainer("main", (0, 7), (6, 7))),
    (
        "own card not counted any more, its number with a healthy one",
        told("1", 1),
        {"indices": [0, 1, 1, 2, 3, 4, 5, 6], "devices": {1: GONE}},
        StaleContainer("main", (1,), (1,)),
    ),
    (
        "own card replaced, its number with the new one",
        told("1", 1),
        {"uuids": {1: "GPU-spare"}},
        StaleContainer("main", (1,), ()),
    ),
    (
        "a container that starts before the others",
        told(
            uuid_of("n1", 0),
            0,
            init_containers=["init"],
            annotations={
                f"{names.CONTAINER_DEVICES_PREFIX}init": "0",
                f"{names.CONTAINER_UUIDS_PREFIX}init": uuid_of("n1", 0),
            },
        ),
        {"indices": REVERSED},
        StaleContainer("init", (0,), (7,)),
    ),
]

RIGHT: list[tuple[str, Pod, dict[str, Any]]] = [
    ("as bound", told("0,1", 0, 1), {}),
    ("numbers differ from ids from the first", told("7,6", 0, 1), {"indices": REVERSED}),
    ("the whole machine, in another order", told("0,1,2,3,4,5,6,7", *AS_BOUND), {"indices": REVERSED}),
    ("own cards changed places", told("0,7", 0, 7), {"indices": REVERSED}),
    ("uuids", told(uuid_of("n1", 0), 0), {"indices": REVERSED}),
    ("no GPU for this container", told("", 0, nvidia=""), {"indices": REVERSED}),
    ("the runtime isolates", told("0", 0, runtimeClassName=names.RUNTIME_CLASS), {"indices": REVERSED}),
    ("ended", told("0", 0, phase="Succeeded"), {"indices": REVERSED}),
    ("not bound", told("0", 0, node=""), {"indices": REVERSED}),
    ("allocation without sense", told("0", 0, annotations={names.UUIDS: ""}), {"indices": REVERSED}),
    ("numbers without sense", told("0,x", 0), {"indices": REVERSED}),
    ("number without end", told("0" * 5000, 0), {"indices": REVERSED}),
    ("AMD reads uuids alone", told("0", 0), {"indices": REVERSED, "devices": {n: {"vendor": "amd"} for n in AS_BOUND}}),
    (
        "the last number of a card that is gone",
        told("0", 1),
        {"indices": [0, 0, 1, 2, 3, 4, 5, 6], "devices": {0: GONE}},
    ),
    ("own card gone, its number with nobody", told("1", 1), {"devices": {1: GONE}}),
    ("instances count within their parent", told("0", 0), {"indices": [0] * 8, "devices": {
        number: instance("1g.5gb") for number in AS_BOUND[1:]}}),
    ("own uuid unknown, its number with nobody", told("9", 0, nvidia="GPU-x"), {}),
]  # fmt: skip


@pytest.mark.parametrize(("pod", "report", "expected"), [row[1:] for row in STALE], ids=[row[0] for row in STALE])
def test_number_of_another_gpu_is_stale(pod: Pod, report: dict[str, Any], expected: StaleContainer) -> None:
    """The container is named with what it was told and what would be right."""
    status = make_report(**report).status
    assert status is not None
    assert stale_containers(pod, status.devices) == (expected,)


@pytest.mark.parametrize(("pod", "report"), [row[1:] for row in RIGHT], ids=[row[0] for row in RIGHT])
def test_whatever_is_right_or_unproven_is_left_alone(pod: Pod, report: dict[str, Any]) -> None:
    """An eviction ends work: nothing but a proven foreign number calls for one."""
    status = make_report(**report).status
    assert status is not None
    assert stale_containers(pod, status.devices) == ()


def test_empty_report_proves_nothing() -> None:
    """A machine whose driver does not answer yet evicts nobody."""
    assert stale_containers(told("0", 0), ()) == ()
