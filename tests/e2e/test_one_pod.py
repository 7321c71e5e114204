"""One pod on real nodes: from a GpuClaim to the GPUs that its containers see, at the first start and at restarts."""

from collections.abc import Callable

import pytest

from atoll.api import names
from tests.e2e.world import HOLD, STAY, TELL, RealCluster, Seen

pytestmark = pytest.mark.e2e


def lease_uuids(world: RealCluster, pod_uid: str) -> list[str]:
    """Return the uuids of the GPUs whose Leases the pod holds, sorted."""
    return sorted(lease["metadata"]["annotations"][names.LEASE_DEVICE_UUID] for lease in world.leases(pod_uid))


def test_two_contiguous_gpus_on_a_dgx1_are_directly_linked(world: RealCluster) -> None:
    """Container, annotations and Leases name the same two uuids, and the two GPUs share a direct NVLink."""
    world.claim("pair", 2, models=["nvidia-v100"])
    world.pod("train", "pair")
    pod = world.wait_running("train")

    allocation = world.allocation("train")
    seen = world.seen("train")
    report = world.report("volta")["status"]
    positions = {device["uuid"]: position for position, device in enumerate(report["devices"])}
    first, second = (positions[uuid] for uuid in seen.nvidia)

    assert allocation is not None
    assert allocation.node == pod["spec"]["nodeName"] == "volta"
    assert seen.cuda == seen.nvidia == allocation.uuids
    assert lease_uuids(world, pod["metadata"]["uid"]) == sorted(seen.nvidia)
    assert report["links"]["nvlink"][first][second].startswith("NV")


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(lambda world, node: None, id="container-restart"),
        pytest.param(lambda world, node: world.cluster.restart_kubelet(node), id="kubelet-and-container-restart"),
        pytest.param(lambda world, node: world.installation.restart(f"agent@{node}"), id="agent-and-container-restart"),
    ],
)
def test_every_start_of_a_container_sees_the_same_gpus(
    world: RealCluster, disturb: Callable[[RealCluster, str], None]
) -> None:
    """What was promised at bind is what the container sees whenever kubelet starts it, by whichever kubelet."""
    world.claim("three", 3, models=["nvidia-h100"])
    world.pod("train", "three")
    pod = world.wait_running("train")
    before = world.seen("train")

    disturb(world, pod["spec"]["nodeName"])
    world.restart_container("train")

    assert len(before.nvidia) == 3
    assert world.seen("train") == before
    assert lease_uuids(world, pod["metadata"]["uid"]) == sorted(before.nvidia)


@pytest.mark.parametrize("mode", ["uuid", "index"])
def test_ids_are_never_taken_for_nvml_indices(world: RealCluster, mode: str) -> None:
    """Where the driver counts the GPUs in another order, both modes still show the GPUs whose Leases the pod holds."""
    world.claim("all", 8, models=["nvidia-h100"], visibleDevices=mode)
    pod = world.pod("train", "all")
    world.wait_running("train")

    seen = world.seen("train")
    allocation = world.allocation("train")
    devices = {device["uuid"]: device for device in world.report("hopper")["status"]["devices"]}
    indices = tuple(str(devices[uuid]["index"]) for uuid in seen.nvidia)
    ids = tuple(devices[uuid]["id"] for uuid in seen.nvidia)

    assert tuple(map(str, ids)) != indices, "this machine's indices equal its ids, so that the test proves nothing"
    assert allocation is not None
    assert allocation.device_ids == ids
    assert lease_uuids(world, pod["metadata"]["uid"]) == sorted(seen.nvidia)
    assert seen == (
        Seen(indices, allocation.uuids, "PCI_BUS_ID")
        if mode == "index"
        else Seen(allocation.uuids, allocation.uuids, "")
    )


def test_containers_that_ask_get_disjoint_parts(world: RealCluster) -> None:
    """Sidecar and containers see their own counts, together the pod's set; who asks for nothing sees nothing."""
    world.claim("four", 4, models=["nvidia-h100"])
    body = world.pod_body(
        "split",
        "four",
        containers=[world.container("trainer", gpus=2), world.container("loader", gpus=1), world.container("exporter")],
        initContainers=[
            world.container("prepare", script=TELL),
            {**world.container("cache", gpus=1), "restartPolicy": "Always"},
        ],
    )
    world.create(body)
    world.wait_running("split")

    seen = {name: world.seen("split", name) for name in ("cache", "trainer", "loader", "exporter", "prepare")}
    allocation = world.allocation("split")
    together = [uuid for one in seen.values() for uuid in one.nvidia]

    assert allocation is not None
    assert {name: len(one.nvidia) for name, one in seen.items()} == {
        "cache": 1,
        "trainer": 2,
        "loader": 1,
        "exporter": 0,
        "prepare": 0,
    }
    assert sorted(together) == sorted(allocation.uuids)
    assert all(one.cuda == one.nvidia for one in seen.values())


def test_containers_that_do_not_ask_share_the_whole_set(world: RealCluster) -> None:
    """Init container, sidecar and every container see all GPUs of the pod."""
    world.claim("pair", 2)
    body = world.pod_body(
        "shared",
        "pair",
        containers=[world.container("main"), world.container("logger", script=TELL + "\n" + STAY)],
        initContainers=[
            world.container("prepare", script=HOLD),
            {**world.container("watch", script=TELL + "\n" + STAY), "restartPolicy": "Always"},
        ],
    )
    world.create(body)
    world.wait_running("shared")

    allocation = world.allocation("shared")
    assert allocation is not None
    for container in ("main", "logger", "prepare", "watch"):
        seen = world.seen("shared", container)
        assert seen.cuda == seen.nvidia == allocation.uuids, container


def test_a_bare_resource_means_a_claim_of_that_count(world: RealCluster) -> None:
    """Without a GpuClaim `gpu.scheduling/gpu` gives the pod that many GPUs, held and shown like claimed ones."""
    body = world.pod_body("bare", None, containers=[world.container("main", gpus=2)])
    pod = world.create(body)
    world.wait_running("bare")

    seen = world.seen("bare")
    assert len(seen.nvidia) == 2
    assert seen.cuda == seen.nvidia
    assert lease_uuids(world, pod["metadata"]["uid"]) == sorted(seen.nvidia)


def test_a_pod_without_a_claim_starts_as_usual(world: RealCluster) -> None:
    """Atoll leaves pods alone that ask for no GPU."""
    script = "echo CUDA=${CUDA_VISIBLE_DEVICES-unset} NVIDIA=${NVIDIA_VISIBLE_DEVICES-unset} ORDER=\n"
    world.pod("plain", None, script=script + STAY)
    pod = world.wait_running("plain")

    assert world.seen("plain") == Seen(("unset",), ("unset",), "")
    assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert "env" not in pod["spec"]["containers"][0]
