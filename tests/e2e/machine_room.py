"""Three nodes whose agents read simulated GPUs through the vendor's real bindings; two have NVIDIA's own runtime.

`hopper` has runc as default runtime and NVIDIA's as a handler, which Atoll recommends. `ampere` has NVIDIA's as
default, which many installers set, and its first GPU is split. `instinct` has AMD cards and no AMD runtime. The webhook
puts pods with NVIDIA claims into Atoll's RuntimeClass. A container that runs `LOOK` prints its device nodes and
variables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from devcluster.machines import GpuMachine
from devcluster.nvidia import NvidiaRuntime
from tests.e2e.world import HOLD, STAY, RealCluster

HOPPER = DevNodeSpec("hopper", profile="dgx-h100", nvidia=NvidiaRuntime.HANDLER)
AMPERE = DevNodeSpec("ampere", profile="hgx-a100-4-redstone", nvidia=NvidiaRuntime.DEFAULT)
INSTINCT = DevNodeSpec("instinct", profile="mi250x-8gcd")
ORDERS = {
    "hopper": (3, 0, 6, 1, 7, 4, 2, 5),
    "ampere": (1, 0, 3, 2),
    "instinct": (5, 0, 3, 1, 2, 4, 7, 6),
}
"""NVML index -> position; it differs from minor number and device id, so a mix-up fails."""
SWITCHES = {"hopper": ((0, 2), (1, 3), (4, 7), (5, 6))}
"""Positions of the GPUs that share a PCIe switch and a network adapter."""
SPLIT_GPU = 0
"""NVML index of ampere's GPU that is split."""
INSTANCES = (("3g.20gb", 19_968), ("3g.20gb", 19_968))
OPTIONS = {
    "agent": ("--poll-seconds", "2"),
    "controllers": ("--lease-duration-seconds", "4", "--renew-deadline-seconds", "3", "--retry-seconds", "0.5"),
    "webhook": ("--inject-runtime-class",),
}
LOOK = f"""
{HOLD}
echo "NODES=$(ls /dev | grep '^nvidia[0-9]' | tr '\\n' ' ')"
"""
ASK_FOR_ALL = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """A cluster with Atoll, and the simulated machines of its nodes."""

    installation: Installation
    machines: dict[str, GpuMachine]

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[MachineRoom]:
        """Start the nodes, plug their GPUs in and install Atoll."""
        with DevCluster.start(f"room-{uuid4().hex[:6]}", nodes=(HOPPER, AMPERE, INSTINCT), scheduler=False) as cluster:
            machines = {
                node.name: GpuMachine(
                    node.gpu_folder,
                    node.profile,
                    seed=node.name,
                    order=ORDERS[node.name],
                    switches=SWITCHES.get(node.name, ()),
                )
                for node in cluster.nodes
            }
            machines["ampere"].file.split(SPLIT_GPU, *INSTANCES)
            for machine in machines.values():
                machine.plug()
            installation = Installation(cluster, options=OPTIONS, machines=machines)
            installation.install()
            yield cls(installation, machines)

    @property
    def nvidia(self) -> dict[str, GpuMachine]:
        """Machines with NVIDIA cards."""
        return {name: machine for name, machine in self.machines.items() if not machine.is_amd}

    def reboot(self, spec: DevNodeSpec, *, order: Sequence[int]) -> None:
        """Kill a node and boot it with other NVML indices; return when its agent reports again."""
        agent = f"agent@{spec.name}"
        self.installation.cluster.stop_node(spec.name)
        self.installation.cluster.wait_exit(agent)
        self.machines[spec.name].renumber(order)
        self.machines[spec.name].plug()
        self.installation.cluster.add_node(spec)
        self.installation.start(agent)


def looking_container(world: RealCluster, name: str, *, gpus: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return a container that prints its GPUs and keeps running; its image requests all GPUs."""
    made = world.container(name, script=LOOK + STAY, gpus=gpus)
    return {**made, "image": "localhost/cuda:1", **fields}


def looking_pod(world: RealCluster, name: str, claim: str | None, **spec: Any) -> dict[str, Any]:
    """Return a pod with one looking container, `main`."""
    return world.pod_body(name, claim, **{"containers": [looking_container(world, "main")], **spec})


def device_nodes(world: RealCluster, name: str, container: str = "main") -> set[str]:
    """Return the GPU device nodes in the container's /dev at its last start."""
    text = world.wait(lambda: "NODES=" in (log := world.logs(name, container)) and log, f"{name} to list its devices")
    assert isinstance(text, str)
    line = next(line for line in reversed(text.splitlines()) if line.startswith("NODES="))
    return set(line.removeprefix("NODES=").split())


def nodes_of(world: RealCluster, node: str, uuids: Sequence[str]) -> set[str]:
    """Return the device nodes of GPUs, from the minor numbers in the agent's report."""
    devices = {device["uuid"]: device for device in world.report(node)["status"]["devices"]}
    return {f"nvidia{devices[uuid]['minor']}" for uuid in uuids}


def runtime_class(world: RealCluster, name: str, handler: str) -> None:
    """Create a RuntimeClass if it does not exist."""
    body = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler}
    done = world.kubectl("apply", "-f", "-", text=json.dumps(body))
    assert done.returncode == 0, done.stderr
