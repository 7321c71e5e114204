"""Lifecycle of a machine with a real kubelet: a card is removed during a reboot, then the machine is gone for good."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from atoll.api import names
from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from devcluster.machines import GpuMachine
from devcluster.mock_nvml import sick
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

NODE = DevNodeSpec("hopper", profile="dgx-h100")
OPTIONS = {"agent": ("--poll-seconds", "2", "--heartbeat-seconds", "5")}


@dataclass(frozen=True, slots=True)
class Room:
    """One node with a played machine whose agent reads it through the real bindings."""

    world: RealCluster
    machine: GpuMachine


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    """A cluster of its own: its only node does not come back."""
    with DevCluster.start(f"gone-{uuid4().hex[:6]}", nodes=(NODE,), scheduler=False) as cluster:
        (node,) = cluster.nodes
        machine = GpuMachine(node.gpu_folder, node.profile, seed=node.name)
        machine.plug()
        installation = Installation(cluster, options=OPTIONS, machines={node.name: machine})
        installation.install()
        with RealCluster.of_one_test(installation) as world:
            yield Room(world, machine)


def stop(world: RealCluster) -> None:
    """Pull the plug of the machine."""
    world.cluster.stop_node(NODE.name)
    world.cluster.wait_exit(f"agent@{NODE.name}")


def atoll(world: RealCluster, kubeconfig: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `atoll` as the account of that file."""
    return world.cluster.run(sys.executable, "-m", "atollctl", *words, "--kubeconfig", str(kubeconfig))


def test_a_card_that_is_taken_out_over_a_reboot_leaves_the_inventory(room: Room) -> None:
    """Seven are offered, in the report and on the Node; the eighth keeps its id and its story."""
    world = room.world
    before = {one["uuid"]: one["id"] for one in world.report(NODE.name)["status"]["devices"]}
    stop(world)
    sick.gone(room.machine.file)
    room.machine.plug()
    world.cluster.add_node(NODE)
    world.installation.start(f"agent@{NODE.name}")
    world.wait(lambda: world.report(NODE.name)["status"].get("departed"), "the card to leave the inventory")

    status = world.report(NODE.name)["status"]
    after = {one["uuid"]: one["id"] for one in status["devices"]}
    (left,) = status["departed"]
    assert after == {uuid: device_id for uuid, device_id in before.items() if uuid != left["uuid"]}
    assert left["id"] == before[left["uuid"]]
    node = f"/api/v1/nodes/{NODE.name}"
    world.wait(
        lambda: (world.maybe(node) or {"status": {}})["status"].get("allocatable", {}).get(names.GPU_RESOURCE) == "7",
        "the Node to offer seven",
    )
    assert left["reason"] == "the machine was booted without it"


def test_a_machine_that_is_gone_for_good_is_forgotten_by_its_own_verb(room: Room) -> None:
    """Its Node is deleted and its pod by force: the GPU stays in doubt until somebody who may says that the machine is
    gone; whoever may only cordon may not. Then Leases, report and heartbeat go."""
    world = room.world
    world.claim("one", 1)
    world.create(world.pod_body("train", "one"))
    world.wait_running("train")
    stop(world)
    assert world.cluster.kubectl("delete", "node", NODE.name).returncode == 0
    world.kubectl("delete", "pod", "train", "--force", "--grace-period=0")
    world.wait(lambda: any(names.LEASE_IN_DOUBT in str(one) for one in world.leases()), "the GPU to be in doubt")
    accounts = {}
    for account, role in (("operator", "atoll-machine-operator"), ("releaser", "atoll-machine-releaser")):
        world.kubectl("create", "serviceaccount", account)
        words = (f"--clusterrole={role}", f"--serviceaccount={world.namespace}:{account}")
        world.cluster.kubectl("create", "clusterrolebinding", f"{account}-{world.namespace}", *words)
        accounts[account] = world.cluster.service_account_kubeconfig(world.namespace, account)
    words = ("node", "forget", NODE.name, "--reason", "scrapped")

    world.wait(lambda: "declare-gone" in atoll(world, accounts["operator"], *words).stderr, "the policy to refuse")
    assert world.leases()
    done = atoll(world, accounts["releaser"], *words)
    assert done.returncode == 0, done.stderr
    world.wait(lambda: not world.leases(), "the GPU to be free")
    report = f"/apis/gpu.scheduling/v1/gpunodestatuses/{NODE.name}"
    beat = f"/apis/coordination.k8s.io/v1/namespaces/atoll-nodes/leases/{NODE.name}"
    world.wait(lambda: world.maybe(report) is None and world.maybe(beat) is None, "report and heartbeat to go")
