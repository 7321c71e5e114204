"""Lifecycle of a machine with a real kubelet: its driver is replaced, a card is removed during a reboot, then the
machine is gone for good.

The tests run in this order and share one machine.
"""

import shlex
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
from tests.docs_blocks import REPOSITORY, commands
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

NODE = DevNodeSpec("hopper", profile="dgx-h100")
OPTIONS = {"agent": ("--poll-seconds", "2", "--heartbeat-seconds", "5", "--driver-restart-seconds", "8")}
AGENT = f"agent@{NODE.name}"
DRIVERS = ("580.159.04", "590.44.01", "595.10.02")
PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)"


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
        machine = GpuMachine(node.gpu_folder, node.profile, seed=node.name, driver=DRIVERS[0])
        machine.plug()
        installation = Installation(cluster, options=OPTIONS, machines={node.name: machine})
        installation.install()
        with RealCluster.of_one_test(installation) as world:
            yield Room(world, machine)


def stop(world: RealCluster) -> None:
    """Pull the plug of the machine."""
    world.cluster.stop_node(NODE.name)
    world.cluster.wait_exit(AGENT)


def answers(world: RealCluster, page: str) -> bool:
    """True if a page of the agent answers 200."""
    url = f"http://127.0.0.1:{world.installation.parts[AGENT].health_port}/{page}"
    return world.cluster.run(sys.executable, "-c", PROBE, url, node=NODE.name).returncode == 0


def users(world: RealCluster, library: Path) -> str:
    """Return the processes of the node that have the driver's library open, as `fuser` would."""
    script = f"grep -ls {library} /proc/[0-9]*/maps || true"
    return world.cluster.run("/bin/sh", "-c", script, node=NODE.name).stdout.strip()


def condition(world: RealCluster) -> str:
    """Return the message of the report's condition DevicesReadable, empty while all devices are read."""
    found = {one["type"]: one for one in world.report(NODE.name)["status"]["conditions"]}["DevicesReadable"]
    return "" if found["status"] == "True" else str(found["message"])


def procedure() -> tuple[list[list[str]], list[list[str]]]:
    """Return the commands of docs/hardware.md that replace a driver: those before and those after its reload."""
    (block,) = (one for one in commands(REPOSITORY / "docs" / "hardware.md") if names.DRIVER_HOLD in one.text)
    before, comment, after = block.text.partition("# on the node")
    assert comment
    lines = ([line for line in part.splitlines() if line.startswith("kubectl ")] for part in (before, after))
    return tuple([shlex.split(line.replace("NODE", NODE.name), comments=True)[1:] for line in part] for part in lines)  # type: ignore[return-value]


def test_a_driver_is_replaced_under_the_agent(room: Room) -> None:
    """By the documented commands: GPU pods are found and drained, no process has the driver open, and the same agent
    reads the new one. The drained pod's successor starts on it."""
    world, machine = room.world, room.machine
    world.claim("one", 1)
    template = world.pod_body("train", "one", terminationGracePeriodSeconds=1)
    template["metadata"] = {**template["metadata"], "labels": {"app": "train"}}
    replicas = {"metadata": {"name": "train"}, "spec": {"selector": {"matchLabels": {"app": "train"}}}}
    replicas["spec"]["template"] = {"metadata": template["metadata"], "spec": template["spec"]}
    world.cluster.api.request("POST", f"/apis/apps/v1/namespaces/{world.namespace}/replicasets", replicas)
    (first,) = world.wait(lambda: running(world), "the pod to run")
    process = world.cluster.processes()[AGENT].pid
    assert users(world, machine.library)
    before, after = procedure()

    answered = [world.cluster.kubectl(*words, check=True).stdout for words in before]
    assert first in answered[1]
    world.wait(lambda: "the driver was released" in condition(world), "the agent to release the driver")
    assert not users(world, machine.library)
    assert answers(world, "readyz")
    assert not running(world)
    machine.install_library(DRIVERS[1])
    machine.load_driver(DRIVERS[1])
    machine.plug()
    for words in after:
        world.cluster.kubectl(*words, check=True)

    world.wait(lambda: not condition(world), "the agent to read the new driver")
    (second,) = world.wait(lambda: running(world), "the successor to run")
    assert first != second
    assert world.cluster.processes()[AGENT].pid == process
    world.cluster.api.request("DELETE", f"/apis/apps/v1/namespaces/{world.namespace}/replicasets/train")


def test_signals_let_the_driver_go(room: Room) -> None:
    """SIGUSR1 and SIGUSR2 do what the label does, in the same process; after SIGTERM the agent ends in order, and no
    process has the driver open."""
    world, machine = room.world, room.machine
    assert users(world, machine.library)
    world.cluster.signal(AGENT, "USR1")
    world.wait(lambda: "SIGUSR1" in condition(world), "the report to say who released the driver")
    assert not users(world, machine.library)
    world.cluster.signal(AGENT, "USR2")
    world.wait(lambda: not condition(world) and users(world, machine.library), "the agent to take the driver up")

    world.cluster.signal(AGENT, "TERM")
    assert world.cluster.wait_exit(AGENT) == 0
    assert not users(world, machine.library)
    world.installation.start(AGENT)
    world.wait(lambda: not condition(world), "the new agent to read the driver")


def running(world: RealCluster) -> list[str]:
    """Return the names of the running pods."""
    return [pod["metadata"]["name"] for pod in world.pods() if pod["status"]["phase"] == "Running"]


def test_an_agent_with_the_library_of_another_driver_asks_for_a_new_container(room: Room) -> None:
    """Its container still has the library of the driver before: it is not ready at once and not live after a while. The
    container that the kubelet starts then has the library that fits."""
    world, machine = room.world, room.machine
    label = ("label", "node", NODE.name)
    world.cluster.kubectl(*label, f"{names.DRIVER_HOLD}={names.DRIVER_RELEASED}", check=True)
    world.wait(lambda: "the driver was released" in condition(world), "the agent to release the driver")
    machine.load_driver(DRIVERS[2])
    machine.plug()
    world.cluster.kubectl(*label, f"{names.DRIVER_HOLD}-", check=True)
    world.wait(lambda: not answers(world, "readyz"), "readiness to fail")
    world.wait(lambda: "version mismatch" in condition(world), "the report to say why")
    world.wait(lambda: not answers(world, "livez"), "liveness to fail")

    machine.install_library(DRIVERS[2])
    machine.plug()
    world.installation.restart(AGENT)

    world.wait(lambda: answers(world, "livez") and answers(world, "readyz"), "the new agent to be ready")
    world.wait(lambda: not condition(world), "the agent to read the driver")


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
    world.installation.start(AGENT)
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
