"""The path of one pod: from a GpuClaim to what its container sees, on real nodes."""

import pytest

from tests.e2e.world import World

pytestmark = pytest.mark.e2e


def test_two_contiguous_gpus_on_a_dgx1_are_directly_linked(world: World) -> None:
    """Container, annotations and Leases name the same two uuids, and the two GPUs share a direct NVLink."""
    world.claim("pair", 2, models=["nvidia-v100"])
    world.pod("train", "pair")
    pod = world.wait_running("train")

    allocation = world.allocation("train")
    seen = world.seen("train")
    leases = world.leases(pod["metadata"]["uid"])
    report = world.report("volta")["status"]
    positions = {device["uuid"]: position for position, device in enumerate(report["devices"])}
    first, second = (positions[uuid] for uuid in seen.nvidia)

    assert allocation is not None
    assert allocation.node == pod["spec"]["nodeName"] == "volta"
    assert seen.cuda == seen.nvidia == allocation.uuids
    assert sorted(lease["metadata"]["annotations"]["gpu.scheduling/device-uuid"] for lease in leases) == sorted(
        seen.nvidia
    )
    assert report["links"]["nvlink"][first][second].startswith("NV")


def test_a_pod_without_a_claim_starts_as_usual(world: World) -> None:
    """Atoll leaves pods alone that ask for no GPU."""
    world.pod("plain", None, script="echo CUDA=${CUDA_VISIBLE_DEVICES-unset}; sleep 600")
    pod = world.wait_running("plain")

    assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert "env" not in pod["spec"]["containers"][0]
