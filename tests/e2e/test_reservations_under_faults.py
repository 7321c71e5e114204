"""A nightly job of one team beside another team, while parts of Atoll are killed and the machine is lost."""

import subprocess
import sys
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from atoll.api.times import text_of
from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from tests.e2e.conftest import OPTIONS
from tests.e2e.test_reservations import MODEL, Reserved
from tests.e2e.world import RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NODES = tuple(DevNodeSpec(name, profile="l40s-8") for name in ("lovelace", "ada"))
SOON_SECONDS = 15.0


@pytest.fixture(scope="module")
def hall() -> Iterator[Installation]:
    """A cluster of its own: one of its two machines does not come back."""
    with DevCluster.start(f"night-{uuid4().hex[:6]}", nodes=NODES, scheduler=False) as cluster:
        options = {**OPTIONS, "agent": ("--poll-seconds", "2", "--heartbeat-seconds", "5")}
        installation = Installation(cluster, options=options)
        installation.install()
        yield installation


def kill_all(installation: Installation) -> None:
    """Kill everything of Atoll's that decides, and start it again."""
    parts = [name for name in installation.parts if name.startswith(("controllers", "extender"))]
    for part in parts:
        installation.kill(part)
    for part in parts:
        installation.start(part, wait=False)
    installation.wait_ready(parts)


def lose(node: str, *worlds: RealCluster) -> None:
    """Pull the plug of a machine, delete its Node and its pods, and say that it is gone for good."""
    world = worlds[0]
    world.cluster.stop_node(node)
    assert world.cluster.kubectl("delete", "node", node).returncode == 0
    for each in worlds:
        for pod in each.pods():
            if pod["spec"].get("nodeName") == node:
                each.delete(pod["metadata"]["name"], force=True)
    words = ("node", "forget", node, "--reason", "burnt", "--kubeconfig", str(world.cluster.kubeconfig))

    def is_believed() -> bool:
        command = (sys.executable, "-m", "atollctl", *words)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    world.wait(is_believed, "the last heartbeat to be old enough")


def test_nightly_job_has_its_gpus_whatever_fails(hall: Installation) -> None:
    """Its time comes while nobody leads. A kill while it starts moves none of its GPUs. When its machine is lost, the
    reservation takes other GPUs as they fall free, and the job runs there. When the reservation is deleted, the job
    keeps what it has, and all of it is free afterwards."""
    with RealCluster.of_one_test(hall) as world, RealCluster.of_one_test(hall) as other:
        reserved = Reserved(world)
        for each in (world, other):
            each.claim("two", 2, models=MODEL)
            each.claim("four", 4, models=MODEL)
        reserved.create(4, shape={"level": "kubernetes.io/hostname"}, starts=text_of(time.time() + SOON_SECONDS))
        reserved.wait("Pending", idle=0, used=0)
        kill_all(hall)
        reserved.wait("Active", idle=4, used=0)
        (home,) = (entry["node"] for entry in reserved.status()["nodes"])
        away = next(node.name for node in NODES if node.name != home)
        before = reserved.devices(home)
        for number in range(4):
            other.pod(f"other-{number}", "four")
        world.wait(lambda: phases(other).count("Running") == 3, "the other team to have all but the reservation")

        members = reserved.gang(world, "nightly", 2, "two")
        kill_all(hall)
        for name in members:
            world.wait_running(name)
        held = [allocation for name in members if (allocation := world.allocation(name)) is not None]
        assert {device for one in held for device in one.device_ids} == before == reserved.devices(home)

        lose(home, world, other)
        reserved.wait("Filling", idle=0, used=0)
        (waiting,) = {pod["metadata"]["name"] for pod in other.pods()} - {*running(other)}
        other.delete(waiting)
        other.delete(running(other)[0])
        reserved.wait("Active", idle=4, used=0)
        other.pod("late", "four")
        assert len(reserved.devices(away)) == 4
        members = reserved.gang(world, "again", 2, "two")
        for name in members:
            world.wait_running(name)

        reserved.delete()
        kill_all(hall)
        assert phases(world) == ["Running", "Running"]
        for name in members:
            world.delete(name)
        world.wait(lambda: not world.leases(), "its GPUs to be free")
        other.wait(lambda: phases(other).count("Running") == 2, "the other team to have them")


def phases(world: RealCluster) -> list[str]:
    """Return the phases of the pods."""
    return [pod["status"]["phase"] for pod in world.pods()]


def running(world: RealCluster) -> list[str]:
    """Return the names of the pods that run."""
    return sorted(pod["metadata"]["name"] for pod in world.pods() if pod["status"]["phase"] == "Running")
