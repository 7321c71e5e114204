"""GPUs in foreign use on real nodes: reported by the agent, given to nobody, reported by events, then free again."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.simulated import play
from atoll.api import names
from atoll.cluster.consistency import Problem
from atollctl.audit import find_twice
from tests.e2e.world import RealCluster
from topology.profiles import profile

pytestmark = pytest.mark.e2e

NODE = "lovelace"
ALL = 8


class ForeignMachine:
    """What the agent of one node sees on its GPUs, beside what is there."""

    def __init__(self, world: RealCluster, path: Path) -> None:
        self.world = world
        self.path = path
        self.name = f"agent@{NODE}"
        self.before = world.installation.parts[self.name]

    def use(self, **processes: list[int]) -> None:
        """Let these processes use the GPUs at these positions, and nobody the others."""
        devices = {position.strip("_"): {"processes": pids} for position, pids in processes.items()}
        self.path.write_text(json.dumps({"devices": devices}))

    def begin(self) -> None:
        """Have the agent read the file."""
        arguments = (*self.before.arguments, "--simulated-state", str(self.path))
        self.world.installation.parts[self.name] = replace(self.before, arguments=arguments)
        self.world.installation.restart(self.name)

    def end(self) -> None:
        """Have the agent read what it read before, and wait until nobody is seen any more."""
        self.use()
        self.world.wait(lambda: not self.users(), "the report to show nobody on the GPUs")
        self.world.installation.parts[self.name] = self.before
        self.world.installation.restart(self.name)

    def users(self) -> list[Any]:
        """Return who is reported on GPUs."""
        status = self.world.report(NODE)["status"]
        return [*status.get("hostUses", []), *(pod for pod in status.get("pods", []) if pod.get("uuids"))]


@pytest.fixture
def machine(world: RealCluster) -> Iterator[ForeignMachine]:
    """The machine of one node, with nobody on its GPUs."""
    machine = ForeignMachine(world, world.cluster.shared_dir / f"state-{world.namespace}.json")
    machine.use()
    machine.begin()
    yield machine
    machine.end()


def problems(world: RealCluster) -> set[Problem]:
    """Return what the audit finds."""
    return {finding.problem for finding in asyncio.run(find_twice(world.cluster.kubeconfig))}


def test_gpu_that_a_process_of_the_machine_uses_is_given_to_nobody(world: RealCluster, machine: ForeignMachine) -> None:
    """Seven GPUs are left; who wants all eight waits, the audit names the process, and it ends with the use."""
    machine.use(_7=[1])
    world.wait(machine.users, "the agent to see the process")
    world.claim("all", ALL, models=["nvidia-l40s"])
    world.claim("rest", ALL - 1, models=["nvidia-l40s"])

    world.pod("wants-all", "all")
    world.wait_rejected("wants-all")
    assert problems(world) == {Problem.FOREIGN_HOST}
    world.pod("takes-the-rest", "rest")
    world.wait_running("takes-the-rest")
    used = {use["uuid"] for use in world.report(NODE)["status"]["hostUses"]}
    assert used.isdisjoint(world.seen("takes-the-rest").nvidia)
    world.delete("takes-the-rest")

    machine.use()
    world.wait_running("wants-all")
    assert len(world.seen("wants-all").nvidia) == ALL
    assert problems(world) == set()


def test_pod_that_uses_a_gpu_of_another_is_found(world: RealCluster, machine: ForeignMachine) -> None:
    """The holder's condition names the pod that sits on its GPU; the audit too; both are over when the pod ends."""
    world.claim("one", 1, models=["nvidia-l40s"])
    world.pod("holder", "one")
    world.wait_running("holder")
    (uuid,) = world.seen("holder").nvidia
    script = "read pid rest < /proc/self/stat\necho PID=$pid.\nexec sleep 100000"
    world.create(world.pod_body("stranger", None, script=script, hostPID=True, nodeName=NODE))
    world.wait_running("stranger")
    told = world.wait(lambda: "." in (log := world.logs("stranger")) and log, "the stranger to tell its pid")
    pid = int(told.partition("PID=")[2].partition(".")[0])
    played = play(profile("l40s-8"), seed=NODE)
    position = next(number for number in range(ALL) if played.uuid_of(number) == uuid)

    machine.use(**{f"_{position}": [pid]})
    condition = world.wait(lambda: promised(world, "holder"), "the holder to be told")
    assert condition["status"] == "False"
    assert f"{world.namespace}/stranger" in condition["message"]
    assert problems(world) == {Problem.FOREIGN_PROCESS}

    machine.use()
    world.wait(lambda: promised(world, "holder").get("status") == "True", "the holder to be told that it is over")
    assert problems(world) == set()


def promised(world: RealCluster, name: str) -> dict[str, Any]:
    """Return the pod's condition about its GPUs, empty where it has none."""
    conditions = world.get(name)["status"].get("conditions", [])
    return next((c for c in conditions if c["type"] == names.POD_AS_PROMISED), {})
