"""Machines that leave and join while gangs run and wait: power off, and a new node that a gang uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.api import names
from devcluster import DevNodeSpec
from tests.e2e.test_gangs import H100, JOBS, Yard, job_body
from tests.e2e.world import HOLD, STAY, RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1500)]

LOST = DevNodeSpec("hopper", profile="dgx-h100")


@pytest.fixture
def yard(world: RealCluster) -> Iterator[Yard]:
    """Gangs of a namespace of its own; its Jobs end with the test."""
    yield Yard(world)
    path = JOBS.format(world.namespace)
    for job in world.cluster.api.get(path)["items"]:
        world.cluster.api.request("DELETE", f"{path}/{job['metadata']['name']}?propagationPolicy=Background")


def start_spread_job(yard: Yard) -> None:
    """Start a Job of two members on two machines, one of them the one that will be lost. A lost pod is a failed try."""
    world = yard.world
    yard.gang("train", count=2)
    claim = {
        "apiVersion": names.API_VERSION,
        "kind": "GpuClaim",
        "metadata": {"name": "member"},
        "spec": {"gangRef": "train", "devices": {"count": 4}},
    }
    world.cluster.api.request("POST", f"/apis/gpu.scheduling/v1/namespaces/{world.namespace}/gpuclaims", claim)
    job = job_body(yard, "train", "member", count=2, script=HOLD + STAY)
    job["spec"]["backoffLimit"] = 6
    template = job["spec"]["template"]
    template["metadata"]["labels"] = {"app": "train"}
    term = {"labelSelector": {"matchLabels": {"app": "train"}}, "topologyKey": "kubernetes.io/hostname"}
    wanted = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [LOST.name]}]}
    template["spec"]["affinity"] = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": wanted}]},
    }
    template["spec"]["tolerations"] = [
        {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
        for taint in ("not-ready", "unreachable")
    ]
    world.cluster.api.request("POST", JOBS.format(world.namespace), job)


def test_a_member_on_a_lost_node_is_replaced_and_a_node_that_is_added_starts_a_gang(yard: Yard) -> None:
    """A machine loses power and its Node is deleted: the member gets another place, the others run on. A gang that
    needs such a machine holds nothing until one is added, and then starts."""
    world = yard.world
    cluster = world.cluster
    start_spread_job(yard)
    yard.wait_running("train", 2)
    assert LOST.name in {pod["spec"]["nodeName"] for pod in world.pods()}
    (survivor,) = (pod["metadata"]["uid"] for pod in world.pods() if pod["spec"]["nodeName"] != LOST.name)

    cluster.stop_node(LOST.name)
    try:
        cluster.wait_exit(f"agent@{LOST.name}")

        def running_elsewhere() -> bool:
            live = [pod for pod in world.pods() if "deletionTimestamp" not in pod["metadata"]]
            places = [pod["spec"].get("nodeName") for pod in live if pod["status"]["phase"] == "Running"]
            return len(places) == 2 and LOST.name not in places

        world.wait(running_elsewhere, "the lost member to run elsewhere", seconds=600)
        assert survivor in {pod["metadata"]["uid"] for pod in world.pods()}
        assert yard.status("train")["admissions"] == 1
        world.cluster.api.request("DELETE", f"/api/v1/nodes/{LOST.name}")
        world.claim("four", 4, **H100)
        yard.gang("x", count=2)
        for number in range(2):
            yard.member("x", number, "four")
        yard.wait_reason("x", "NeverFits", "WaitForNodes", "WaitForRoom")
        assert yard.leases("x") == 0
    finally:
        cluster.add_node(LOST)
        world.installation.start(f"agent@{LOST.name}")
    yard.wait_running("x", 2)
