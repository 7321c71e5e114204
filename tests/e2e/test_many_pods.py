"""Many pods request more GPUs than exist: no GPU is shared or idle, and waiting pods show the reason."""

from collections.abc import Iterable
from typing import Any

import pytest

from atoll.api import names
from tests.e2e.world import RealCluster
from topology.choice import Reason

pytestmark = pytest.mark.e2e

SIZES = (8, 4, 2, 1) * 5 + (1,) * 30
"""50 pods in the order of their arrival, 105 GPUs: more than all machines have, and enough ones to fill every gap."""


def gpu_count(world: RealCluster) -> int:
    """Return how many GPUs all agents report."""
    reports = world.cluster.api.get("/apis/gpu.scheduling/v1/gpunodestatuses")["items"]
    return sum(len(report["status"]["devices"]) for report in reports)


def bound(world: RealCluster) -> list[dict[str, Any]]:
    """Return the pods that have a node."""
    return [pod for pod in world.pods() if pod["spec"].get("nodeName")]


def waiting_names(world: RealCluster) -> set[str]:
    """Return the names of the pods without a node."""
    return {pod["metadata"]["name"] for pod in world.pods() if not pod["spec"].get("nodeName")}


def gpus_of(pods: Iterable[dict[str, Any]]) -> list[str]:
    """Return the uuids that the pods' annotations name, in no order."""
    return [uuid for pod in pods for uuid in pod["metadata"]["annotations"][names.UUIDS].split(",")]


def wait_full(world: RealCluster) -> None:
    """Wait until every GPU of the cluster belongs to a pod of the test, and every container has taken its locks."""
    total = gpu_count(world)
    world.wait(lambda: len(gpus_of(bound(world))) >= total, f"all {total} GPUs to be given away")
    used = gpus_of(bound(world))
    assert len(used) == len(set(used)) == total
    for pod in bound(world):
        name = pod["metadata"]["name"]
        world.wait_running(name)
        assert sorted(world.seen(name).nvidia) == sorted(gpus_of([pod]))
    world.check_no_contention()


def test_fifty_pods_share_nothing_and_leave_no_gpu_idle(world: RealCluster) -> None:
    """Of 50 pods of mixed sizes as many run as there are GPUs for; the rest says why it waits, and follows later."""
    for size in sorted(set(SIZES)):
        world.claim(f"size-{size}", size)
    for number, size in enumerate(SIZES):
        world.pod(f"pod-{number:02}", f"size-{size}")

    wait_full(world)
    short = f"4 Insufficient {names.GPU_RESOURCE}"
    for name in waiting_names(world):
        world.wait(lambda name=name: short in world.message(name), f"kube-scheduler to tell {name} what is missing")
    told = world.wait(lambda: told_reasons(world), "a waiting pod to be told what is missing")
    assert set(told) <= {Reason.TOO_FEW_FREE, names.REJECT_NEVER_FITS}
    world.check_audit()

    leaving = {len(gpus_of([pod])): pod["metadata"]["name"] for pod in bound(world)}.values()
    for name in leaving:  # one of each size that runs
        world.delete(name)
    world.wait(lambda: not set(leaving) & {pod["metadata"]["name"] for pod in world.pods()}, "them to be gone")
    wait_full(world)
    world.check_audit()


def reasons(note: str) -> list[str]:
    """Return the reasons of one event, each behind the number of nodes that have it."""
    return note.partition(": ")[2].partition("; ")[0].split(", ")


def told_reasons(world: RealCluster) -> list[str]:
    """Return the reasons that events give to waiting pods: `N GPUs asked, ...: 3 REASON, 1 REASON; what to do next`."""
    path = f"/apis/events.k8s.io/v1/namespaces/{world.namespace}/events"
    events = [event for event in world.cluster.api.get(path)["items"] if event["reason"] == names.REASON_WAITING]
    missing = [entry for event in events for entry in reasons(event["note"])]
    return [entry.partition(" ")[2] for entry in missing]


def test_freed_gpus_wake_exactly_the_pod_that_fits(world: RealCluster) -> None:
    """While the controllers are away nothing is freed and nobody woken; back again, they wake whom the GPUs fit."""
    machines = {"hopper": "nvidia-h100", "volta": "nvidia-v100", "lovelace": "nvidia-l40s"}
    for node, model in machines.items():
        world.claim(node, 8, models=[model])
        world.pod(f"{node}-holder", node)
    for node in machines:
        world.wait_running(f"{node}-holder")
        world.pod(f"{node}-next", node)
    for node in machines:
        world.wait_rejected(f"{node}-next")
    uid = world.get("hopper-holder")["metadata"]["uid"]
    before = woken(world)

    world.installation.stop("controllers")
    try:
        world.delete("hopper-holder")  # kube-scheduler tries again by itself: it sees room, the extender sees Leases
        world.wait(lambda: Reason.TOO_FEW_FREE in world.message("hopper-next"), "the retry to be refused")
        world.wait(
            lambda: "hopper-holder" not in {p["metadata"]["name"] for p in world.pods()}, "the holder to be gone"
        )
        assert len(world.leases(uid)) == 8
        assert woken(world) == before
    finally:
        world.installation.start("controllers")

    world.wait_running("hopper-next")
    world.wait_event("hopper-next", names.REASON_POD_WOKEN)
    assert woken(world) - before == {"hopper-next"}
    assert waiting_names(world) == {"volta-next", "lovelace-next"}
    world.check_audit()


def woken(world: RealCluster) -> set[str]:
    """Return the names of the pods that bear the controllers' mark of a wake-up."""
    return {pod["metadata"]["name"] for pod in world.pods() if names.WOKEN in pod["metadata"]["annotations"]}
