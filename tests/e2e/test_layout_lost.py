"""A reboot does not bring a MIG layout back, on a real kubelet: pods of its instances cannot start again there."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from atoll.api import names
from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from devcluster.machines import GpuMachine
from devcluster.nvidia import NvidiaRuntime
from tests.e2e.machine_room import INSTANCES, ORDERS, SPLIT_GPU, MachineRoom, looking_pod
from tests.e2e.world import RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NODE = DevNodeSpec("ampere", profile="hgx-a100-4-redstone", nvidia=NvidiaRuntime.DEFAULT)
IN_VAIN = {"CreateContainerError", "RunContainerError", "CrashLoopBackOff"}
OPTIONS = {
    "agent": ("--poll-seconds", "2"),
    "controllers": ("--stranded-after-seconds", "5"),
    "webhook": ("--inject-runtime-class",),
}


@pytest.fixture
def room() -> Iterator[tuple[MachineRoom, RealCluster]]:
    """One machine with a split card, and a namespace."""
    with DevCluster.start(f"mig-{uuid4().hex[:6]}", nodes=(NODE,), scheduler=False) as cluster:
        (node,) = cluster.nodes
        machine = GpuMachine(node.gpu_folder, node.profile, seed=node.name, order=ORDERS[node.name])
        machine.file.split(SPLIT_GPU, *INSTANCES)
        machine.plug()
        installation = Installation(cluster, options=OPTIONS, machines={node.name: machine})
        installation.install()
        with RealCluster.of_one_test(installation) as world:
            yield MachineRoom(installation, {node.name: machine}), world


def states(world: RealCluster) -> dict[str, str]:
    """Return the phase of each pod by name; that of one whose container is not started, with the kubelet's reason."""
    found = {}
    for pod in world.pods():
        waiting = [one["state"].get("waiting", {}) for one in pod["status"].get("containerStatuses", ())]
        reasons = [one["reason"] for one in waiting if "reason" in one]
        found[pod["metadata"]["name"]] = str(reasons[0] if reasons else pod["status"]["phase"])
    return found


def template(world: RealCluster) -> dict[str, Any]:
    """Return the template of a pod that needs one instance."""
    pod = looking_pod(world, "train", "slice", terminationGracePeriodSeconds=1)
    return {"metadata": {**pod["metadata"], "labels": {"app": "train"}}, "spec": pod["spec"]}


def test_a_pod_whose_instance_a_reboot_did_not_bring_back_is_replaced(room: tuple[MachineRoom, RealCluster]) -> None:
    """Its kubelet starts its container again in vain, and would for ever. The successor waits for an instance of the
    profile, and runs once the layout is there again."""
    machines, world = room
    world.claim("slice", 1, migProfile=INSTANCES[0][0])
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "train"}}, "template": template(world)}
    sets = f"/apis/apps/v1/namespaces/{world.namespace}/replicasets"
    world.cluster.api.request("POST", sets, {"metadata": {"name": "train"}, "spec": spec})
    world.wait(lambda: list(states(world).values()) == ["Running"], "the pod to run")
    (first,) = states(world)

    machines.reboot(NODE, order=ORDERS[NODE.name])

    world.wait(lambda: states(world).get(first) in IN_VAIN, "the runtime to refuse the instance that is gone")
    world.wait_event(first, names.REASON_GPUS_GONE)
    world.wait(lambda: first not in states(world), "the pod to be evicted")
    (successor,) = world.wait(lambda: states(world), "its successor")
    told = world.wait_rejected(successor)
    assert any(text in told for text in (names.REJECT_NEVER_FITS, "Insufficient")), told

    machine = machines.machines[NODE.name]
    machine.file.split(SPLIT_GPU, *INSTANCES)
    machine.plug()
    world.wait(lambda: states(world).get(successor) == "Running", "the successor to run")
    world.cluster.api.request("DELETE", f"{sets}/train?propagationPolicy=Background")
