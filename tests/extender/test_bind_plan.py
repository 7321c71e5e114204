"""The bind plan: devices, and the exact values that each container will see."""

from typing import Any

import pytest

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.cluster.allocations import ANNOTATIONS_BYTES_MAX, annotations_bytes
from atoll.cluster.machines import NodeDevices
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request, Verdict, request_of
from extender.bind_plan import BindPlan, binding_body, plan_bind
from tests.builders import make_claim, make_devices, make_pod, uuid_of
from topology.choice import Reason

SIDECAR = {"name": "proxy", "restartPolicy": "Always"}


def plan(pod: Pod, devices: NodeDevices, *, free: int | None = None, **claim: Any) -> BindPlan:
    """Return the plan of the pod, whose claim has these fields."""
    answer = plan_bind(pod, devices, devices.all if free is None else free, _request(pod, claim), VisibleDevices.UUID)
    assert isinstance(answer, BindPlan)
    return answer


def _request(pod: Pod, claim: dict[str, Any]) -> Request:
    found = make_claim(**claim) if claim else None
    request = request_of(pod, found)
    assert isinstance(request, Request)
    return request


def seen(answer: BindPlan, container: str) -> tuple[str, str]:
    """Return CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES of a container."""
    return (
        answer.annotations[names.CONTAINER_DEVICES_PREFIX + container],
        answer.annotations[names.CONTAINER_UUIDS_PREFIX + container],
    )


def test_every_container_sees_the_whole_set() -> None:
    """Init containers too: all annotations that the webhook's references name are there."""
    pod = make_pod(gpus=2, containers=("a", "b"), init_containers=("setup", SIDECAR))
    devices = make_devices("n1", "t4-4")
    answer = plan(pod, devices, free=0b1100)

    assert answer.allocation.device_ids == (2, 3)
    uuids = f"{uuid_of('n1', 2)},{uuid_of('n1', 3)}"
    assert {seen(answer, container) for container in ("a", "b", "setup", "proxy")} == {(uuids, uuids)}
    assert answer.annotations[names.ALLOCATED] == "n1:2,3"
    assert answer.annotations[names.UUIDS] == uuids


@pytest.mark.parametrize("spare", [0, -1])
def test_a_pod_that_would_be_bound_past_the_limit_of_annotations_is_refused(spare: int) -> None:
    """The API server would let it be bound, and then refuse every status of kubelet's: its end would never be seen."""
    devices = make_devices("n1", "t4-4")
    added = annotations_bytes(plan(make_pod(gpus=1), devices).annotations)
    filler = {"x": "y" * (ANNOTATIONS_BYTES_MAX - added - len("x") - spare)}
    pod = make_pod(gpus=1, annotations=filler)

    answer = plan_bind(pod, devices, devices.all, _request(make_pod(gpus=1), {}), VisibleDevices.UUID)

    assert isinstance(answer, BindPlan) is (spare >= 0)


def test_containers_that_asked_for_their_own_see_parts() -> None:
    """The set is split in order, sidecars first; who asked for none has no value, which the variable shows as empty."""
    pod = make_pod(
        gpus={"proxy": 1, "a": 2, "b": 0, "c": 1}, containers=("a", "b", "c"), init_containers=("setup", SIDECAR)
    )
    answer = plan(pod, make_devices("n1", "dgx1-v100"))

    parts = {container: seen(answer, container)[1].split(",") for container in ("proxy", "a", "c")}
    assert [len(parts[container]) for container in ("proxy", "a", "c")] == [1, 2, 1]
    assert {uuid for part in parts.values() for uuid in part} == set(answer.allocation.uuids)
    for container in ("b", "setup"):
        assert answer.annotations.get(names.CONTAINER_UUIDS_PREFIX + container, "") == ""
        assert answer.annotations.get(names.CONTAINER_DEVICES_PREFIX + container, "") == ""


@pytest.mark.parametrize(
    ("mode", "runtime_class", "expected"),
    [
        ("uuid", "", f"{uuid_of('n1', 9)},{uuid_of('n1', 1)}"),
        ("uuid", names.RUNTIME_CLASS, f"{uuid_of('n1', 9)},{uuid_of('n1', 1)}"),
        ("index", "", "0,3"),
        ("index", names.RUNTIME_CLASS, "0,1"),
        ("index", "nvidia", "0,3"),
    ],
    ids=["uuid", "uuid, isolating", "index", "index, isolating", "index, a foreign runtime class"],
)
def test_modes_on_a_machine_whose_indices_are_not_its_ids(mode: str, runtime_class: str, expected: str) -> None:
    """Numbers are NVML indices where the container sees all GPUs, and count from 0 where it sees only its own."""
    devices = make_devices("n1", "t4-4", ids=[7, 3, 9, 1], indices=[2, 1, 0, 3])
    claim = {"count": 2, "spec": {"visibleDevices": mode}}
    pod = make_pod(gpus=2, claim=make_claim(**claim), runtimeClassName=runtime_class)

    answer = plan(pod, devices, free=0b1100, **claim)

    assert answer.allocation.device_ids == (9, 1)
    assert seen(answer, "main") == (expected, f"{uuid_of('n1', 9)},{uuid_of('n1', 1)}")


def test_cluster_decides_the_mode_where_the_claim_does_not() -> None:
    """A pod without a claim gets the mode of the cluster's setting."""
    pod, devices = make_pod(gpus=1), make_devices("n1", "t4-4", indices=[3, 2, 1, 0])

    answer = plan_bind(pod, devices, 0b0001, _request(pod, {}), VisibleDevices.INDEX)

    assert isinstance(answer, BindPlan)
    assert seen(answer, "main")[0] == "3"


def test_mig_instances_are_named_by_uuid_in_every_mode() -> None:
    """An instance has no index of its own."""
    instance = {"mig": {"profile": "3g.40gb"}}
    claim = {"count": 1, "migProfile": "3g.40gb", "spec": {"visibleDevices": "index"}}
    pod = make_pod(gpus=1, claim=make_claim(**claim), resource="gpu.scheduling/mig-3g.40gb")

    answer = plan(pod, make_devices("n1", "t4-4", devices={2: instance}), **claim)

    assert seen(answer, "main") == (uuid_of("n1", 2), uuid_of("n1", 2))


def test_no_set_is_a_reason() -> None:
    """What does not fit is refused with the same words as in filter."""
    pod = make_pod(gpus=2)

    answer = plan_bind(pod, make_devices("n1", "t4-4"), 0b1, _request(pod, {}), VisibleDevices.UUID)

    assert answer == Rejection(str(Reason.TOO_FEW_FREE), Verdict.BUSY)


def test_binding_is_fenced() -> None:
    """It names uid and version of the pod as it was read, so that it cannot land on any other."""
    body = binding_body(make_pod("p", uid="u1"), "n1", {"a": "b"}, "42")

    assert body["metadata"] == {
        "name": "p",
        "namespace": "team",
        "uid": "u1",
        "resourceVersion": "42",
        "annotations": {"a": "b"},
    }
    assert body["target"] == {"apiVersion": "v1", "kind": "Node", "name": "n1"}
