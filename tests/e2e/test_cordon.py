"""`atoll gpu` on a real cluster: an administrator cordons one GPU, uncordons it, and declares it healthy."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine_room import MachineRoom, looking_pod
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

OPERATOR, STRANGER = "operator", "stranger"
NODE, COUNT = "hopper", 8


def atoll_gpu(world: RealCluster, kubeconfig: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `atoll gpu` as the account of that file."""
    return world.cluster.run(sys.executable, "-m", "atollctl", "gpu", *words, "--kubeconfig", str(kubeconfig))


@pytest.fixture
def accounts(room_world: RealCluster) -> Iterator[dict[str, Path]]:
    """Kubeconfigs of an account with the role for machines, and of one with none."""
    world = room_world
    for account in (OPERATOR, STRANGER):
        assert world.kubectl("create", "serviceaccount", account).returncode == 0
    binding = f"machines-{world.namespace}"
    words = ("--clusterrole=atoll-machine-operator", f"--serviceaccount={world.namespace}:{OPERATOR}")
    done = world.cluster.kubectl("create", "clusterrolebinding", binding, *words)
    assert done.returncode == 0, done.stderr
    yield {one: world.cluster.service_account_kubeconfig(world.namespace, one) for one in (OPERATOR, STRANGER)}
    world.cluster.kubectl("delete", "clusterrolebinding", binding)


def cordons(world: RealCluster) -> list[tuple[str, str]]:
    """Return the cordons of the node as (uuid, reason)."""
    return [(one["uuid"], one["reason"]) for one in world.report(NODE)["spec"].get("cordons", [])]


def test_a_cordoned_gpu_goes_to_no_new_pod_until_it_is_given_back(
    room_world: RealCluster, accounts: dict[str, Path]
) -> None:
    """Who holds the GPU keeps it, who comes later waits, and starts when the cordon is gone. Only the role for machines
    may do it."""
    world = room_world
    world.claim("one", 1, models=["nvidia-h100"])
    world.claim("whole", COUNT, models=["nvidia-h100"])
    world.create(looking_pod(world, "holder", "one"))
    world.wait_running("holder")
    allocation = world.allocation("holder")
    assert allocation is not None
    (number,), (uuid,) = allocation.device_ids, allocation.uuids
    target = f"{NODE}/{number}"

    refused = atoll_gpu(world, accounts[STRANGER], "cordon", target, "--reason", "mine")
    assert (refused.returncode, cordons(world)) == (2, [])
    assert "forbidden" in refused.stderr

    done = atoll_gpu(world, accounts[OPERATOR], "cordon", target, "--reason", "fan is loud")
    assert done.returncode == 0, done.stderr
    assert cordons(world) == [(uuid, "fan is loud")]
    world.restart_container("holder")
    assert world.seen("holder").nvidia == (uuid,)

    world.delete("holder")
    world.wait(lambda: not world.leases(), "its GPU to be free")
    world.create(looking_pod(world, "late", "whole"))
    world.wait_rejected("late")
    listed = atoll_gpu(world, accounts[OPERATOR], "list").stdout
    assert [line for line in listed.splitlines() if f"{target} " in line and "cordoned" in line], listed
    world.claim("rest", COUNT - 1, models=["nvidia-h100"])
    world.create(looking_pod(world, "others", "rest"))
    world.wait_running("others")
    assert uuid not in world.seen("others").nvidia
    world.delete("others")

    done = atoll_gpu(world, accounts[OPERATOR], "uncordon", target)
    assert done.returncode == 0, done.stderr
    assert cordons(world) == []
    world.wait_running("late")
    assert uuid in world.seen("late").nvidia


def standing(world: RealCluster, accounts: dict[str, Path], target: str) -> str:
    """Return the line of a GPU in `atoll gpu list`."""
    listed = atoll_gpu(world, accounts[OPERATOR], "list").stdout
    return next((line for line in listed.splitlines() if f"{target} " in line), "")


def test_a_quarantined_gpu_is_given_out_again_when_it_is_released(
    machine_room: MachineRoom, room_world: RealCluster, accounts: dict[str, Path]
) -> None:
    """An uncorrectable error, and the word of an administrator that the card is well: only the role for machines may
    give it, and whoever waited for the card starts."""
    world, machine = room_world, machine_room.machines[NODE]
    device = world.report(NODE)["status"]["devices"][0]
    target = f"{NODE}/{device['id']}"
    machine.file.event(device["index"], 48)
    machine.plug()
    world.wait(lambda: "quarantined" in standing(world, accounts, target), "the card to be quarantined")
    world.claim("whole", COUNT, models=["nvidia-h100"])
    world.create(looking_pod(world, "train", "whole"))
    world.wait_rejected("train")

    refused = atoll_gpu(world, accounts[STRANGER], "release", target, "--reason", "mine")
    assert (refused.returncode, "forbidden" in refused.stderr) == (2, True)

    done = atoll_gpu(world, accounts[OPERATOR], "release", target, "--reason", "card was reseated")
    assert (done.returncode, done.stdout) == (0, f"GPU {target} is released: card was reseated\n"), done.stderr
    assert "healthy" in standing(world, accounts, target)
    world.wait_running("train")
    assert device["uuid"] in world.seen("train").nvidia
