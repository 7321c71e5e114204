"""Preemption on a real control plane: by count through kube-scheduler, by islands through the controllers.

The machine lovelace has eight cards without NVLink, four per NUMA node: two islands. A pod with policy `spread` takes
one of each, so enough GPUs stay free, but not in one island.
"""

import pytest

from atoll.api import names
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
MODEL = ["nvidia-l40s"]
HIGH = "tests-high"


def furnish(world: RealCluster) -> None:
    """Make a priority class, and claims for two GPUs apart and four together."""
    if world.maybe(f"{CLASSES}/{HIGH}") is None:
        world.cluster.api.request("POST", CLASSES, {"metadata": {"name": HIGH}, "value": 1000})
    world.claim("apart", 2, models=MODEL, policy="spread")
    world.claim("island", 4, models=MODEL, policy="island")


def islands_of(world: RealCluster, name: str) -> set[str]:
    """Return the islands of a running pod's GPUs, as its machine reports them."""
    allocation = world.allocation(name)
    assert allocation is not None
    devices = world.report(allocation.node)["status"]["devices"]
    return {device["island"] for device in devices if device["uuid"] in allocation.uuids}


def running(world: RealCluster) -> set[str]:
    """Return the pods that run and are not being deleted."""
    return {
        pod["metadata"]["name"]
        for pod in world.pods()
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    }


def test_pod_of_lower_priority_makes_room_for_an_island(world: RealCluster) -> None:
    """Six GPUs are free and no four of them joined: the controllers evict the pod in between, and nobody is left out.

    The eviction is one through the eviction API; while the victim ends, a newcomer of low priority takes none of the
    GPUs that are being freed.
    """
    furnish(world)
    world.claim("one", 1, models=MODEL)
    world.pod("between", "apart")
    world.wait_running("between")
    assert len(islands_of(world, "between")) == 2

    world.pod("high", "island", priorityClassName=HIGH)
    world.wait(lambda: names.KEPT in world.get("high")["metadata"]["annotations"], "GPUs to be kept for the pod")
    world.pod("newcomer", "one")
    world.wait_running("high")

    assert len(islands_of(world, "high")) == 1
    assert len(world.seen("high").nvidia) == 4
    kept = world.get("high")["metadata"]["annotations"][names.KEPT]
    allocation = world.allocation("high")
    assert allocation is not None
    assert set(kept.rpartition(":")[2].split(",")) == set(map(str, allocation.device_ids))
    world.wait_running("newcomer")
    world.wait(lambda: "between" not in running(world), "the victim to be gone")
    world.wait(
        lambda: any(event["reason"] == names.REASON_GPUS_FREEING for event in world.events("high")),
        "the pod to be told what is done for it",
    )


def test_budget_keeps_the_island_from_being_freed(world: RealCluster) -> None:
    """A pod whose budget allows no disruption is not evicted; the pod that wants the island waits and says why."""
    furnish(world)
    body = world.pod_body("between", "apart")
    body["metadata"]["labels"] = {"app": "guarded"}
    world.create(body)
    world.wait_running("between")
    budget = {
        "metadata": {"name": "guard"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}},
    }
    budgets = f"/apis/policy/v1/namespaces/{world.namespace}/poddisruptionbudgets"
    world.cluster.api.request("POST", budgets, budget)
    world.wait(lambda: world.cluster.api.get(f"{budgets}/guard").get("status", {}).get("currentHealthy"), "the budget")

    world.pod("high", "island", priorityClassName=HIGH)
    assert "island" in world.wait_rejected("high")
    world.wait(
        lambda: any(event["reason"] == names.REASON_WAITING for event in world.events("high")), "the pod to be told"
    )
    world.cluster.api.request("DELETE", f"{budgets}/guard")
    world.wait_running("high")
    assert len(islands_of(world, "high")) == 1


def test_kube_scheduler_s_victims_are_completed(world: RealCluster) -> None:
    """The count is short: kube-scheduler preempts for four GPUs, and the extender adds whom the island needs.

    Four pods hold one GPU of each island twice; two of them would be enough by count, and useless.
    """
    furnish(world)
    for number in range(4):
        world.pod(f"low-{number}", "apart")
    for number in range(4):
        world.wait_running(f"low-{number}")

    world.pod("high", "island", priorityClassName=HIGH)
    world.wait_running("high")

    assert len(islands_of(world, "high")) == 1
    assert world.get("high")["spec"]["nodeName"] == "lovelace"
    assert len(running(world) - {"high"}) == 0
