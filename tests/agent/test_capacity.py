"""Capacity of the Node: kube-scheduler counts it, and kubelet would fail running pods if it were too small."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.capacity import capacity_patch, in_use, offer, with_withdrawn
from atoll.api import names
from atoll.api.node_status import Device, GpuNodeStatusReport, Health, HealthState, Mig
from atoll.cluster.objects import Metadata, Node, NodeStatus, Pod
from tests.agent.builders import make_pod

GPU = names.GPU_RESOURCE


def node(capacity: str | None, allocatable: str | None) -> Node:
    """A node that offers these counts beside its cpu."""
    counts = {"capacity": capacity, "allocatable": allocatable}
    status = {key: {"cpu": "8", **({GPU: count} if count is not None else {})} for key, count in counts.items()}
    return Node(Metadata(name="n1"), status=NodeStatus(**status))


def report(*devices: Device) -> GpuNodeStatusReport:
    return GpuNodeStatusReport(devices=devices)


def device(device_id: int, **facts: object) -> Device:
    return Device(id=device_id, uuid=f"GPU-{device_id}", model="nvidia-t4", index=device_id, **facts)


@pytest.mark.parametrize(
    ("capacity", "allocatable", "offered", "used", "want"),
    [
        pytest.param(None, None, 8, 0, ("8", "8"), id="first time"),
        pytest.param("8", "8", 8, 3, None, id="steady"),
        pytest.param("0", "0", 8, 3, ("8", "8"), id="the kubelet reset it"),
        pytest.param("8", None, 8, 0, (None, "8"), id="the kubelet has not computed allocatable yet"),
        pytest.param(None, None, 8, 8, ("8", "8"), id="the Node was made anew under running pods"),
        pytest.param("8", "8", 6, 8, None, id="two cards left, all eight are in use: never below use"),
        pytest.param("8", "8", 6, 7, ("7", "7"), id="two cards left, seven in use"),
        pytest.param("8", "8", 6, 2, ("6", "6"), id="two cards left, few in use"),
        pytest.param("8", "8", 0, 0, ("delete", "delete"), id="withdrawn: the key goes, never 0"),
        pytest.param("0", "0", 0, 0, ("delete", "delete"), id="a 0 of somebody else's goes too"),
        pytest.param(None, None, 0, 0, None, id="no GPUs, nothing to say"),
        pytest.param("8", "8", 0, 2, ("2", "2"), id="withdrawn while in use"),
        pytest.param("nonsense", "8k", 8, 0, ("8", "8"), id="somebody wrote nonsense"),
    ],
)
def test_what_is_written(
    capacity: str | None, allocatable: str | None, offered: int, used: int, want: tuple[str | None, str | None] | None
) -> None:
    """Capacity and allocatable become the larger of what is there and what is used; 0 is the key's deletion."""
    patch = capacity_patch(node(capacity, allocatable), offered={GPU: offered}, used={GPU: used})

    if want is None:
        assert patch is None
        return
    assert patch is not None
    for key, count in zip(("capacity", "allocatable"), want, strict=True):
        expected = {} if count is None else {GPU: None if count == "delete" else count}
        assert patch["status"][key] == expected


@given(
    st.integers(0, 16), st.integers(0, 16), st.sampled_from([None, "0", "4", "16"]), st.sampled_from([None, "0", "4"])
)
def test_running_pods_always_fit(offered: int, used: int, capacity: str | None, allocatable: str | None) -> None:
    """After the patch the node offers at least what is used, the same in both places, never 0; and then it is quiet."""
    before = node(capacity, allocatable)
    patch = capacity_patch(before, offered={GPU: offered}, used={GPU: used})
    changes = patch["status"] if patch else {"capacity": {}, "allocatable": {}}

    counts = [
        {GPU: getattr(before.status, key).get(GPU), **changes[key]}.get(GPU) for key in ("capacity", "allocatable")
    ]

    assert counts[0] == counts[1]
    assert counts[0] == (str(max(offered, used)) if max(offered, used) else None)
    assert capacity_patch(node(*counts), offered={GPU: offered}, used={GPU: used}) is None


@pytest.mark.parametrize(
    ("pods", "want"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([make_pod("a", gpus=2), make_pod("b", gpus=1), make_pod("c")], 3, id="sum over pods"),
        pytest.param([make_pod("a", gpus=2, phase="Succeeded")], 0, id="ended pods use nothing"),
        pytest.param([make_pod("a", gpus=2, phase="Pending")], 2, id="bound pods that have not started do"),
        pytest.param([make_pod("a", gpus=0)], 0, id="zero"),
        pytest.param([make_pod("a", gpus=1, init_gpus=4)], 4, id="the kubelet counts the hungriest init container"),
    ],
)
def test_use_is_what_the_kubelet_would_count(pods: list[Pod], want: int) -> None:
    """The use of a node is the sum that kubelet's admission compares with allocatable."""
    assert in_use(pods, [GPU]) == {GPU: want}


def test_sick_devices_count_and_mig_parents_do_not() -> None:
    """Health never moves the count; a GPU in MIG mode counts by its instances alone, each profile by itself."""
    sick = device(1, health=Health(state=HealthState.UNHEALTHY, reason="XID 79"))
    instances = [device(3 + i, mig=Mig(profile=one)) for i, one in enumerate(("1g.10gb", "1g.10gb", "1g.10gb+me"))]

    assert offer(report(device(0), sick, device(2, mig=Mig(enabled=True)), *instances)) == {
        GPU: 2,
        "gpu.scheduling/mig-1g.10gb": 2,
        "gpu.scheduling/mig-1g.10gb.me": 1,
    }


def test_a_profile_that_is_no_more_is_withdrawn() -> None:
    """A card that was cut differently takes the old profile's resource off the Node, and leaves the rest alone."""
    shown = {GPU: "8", "cpu": "4", "gpu.scheduling/mig-3g.40gb": "2"}
    node = Node(Metadata(name="n1"), status=NodeStatus(capacity=shown, allocatable=shown))

    assert with_withdrawn({GPU: 7}, node) == {GPU: 7, "gpu.scheduling/mig-3g.40gb": 0}
