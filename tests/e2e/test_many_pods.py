"""Many pods that want more GPUs than there are: nobody shares, nothing lies idle, and who waits knows why."""

from collections.abc import Iterable
from typing import Any

import pytest

from atoll.api import names
from tests.e2e.world import World
from topology.choice import Reason

pytestmark = pytest.mark.e2e

SIZES = (8, 4, 2, 1) * 5 + (1,) * 30
"""50 pods in the order of their arrival, 105 GPUs: more than all machines have, and enough ones to fill every gap."""


def gpu_count(world: World) -> int:
    """Return how many GPUs all agents report."""
    reports = world.cluster.api.get("/apis/gpu.scheduling/v1/gpunodestatuses")["items"]
    return sum(len(report["status"]["devices"]) for report in reports)


def bound(world: World) -> list[dict[str, Any]]:
    """Return the pods that have a node."""
    return [pod for pod in world.pods() if pod["spec"].get("nodeName")]


def waiting_names(world: World) -> set[str]:
    """Return the names of the pods without a node."""
    return {pod["metadata"]["name"] for pod in world.pods() if not pod["spec"].get("nodeName")}


def gpus_of(pods: Iterable[dict[str, Any]]) -> list[str]:
    """Return the uuids that the pods' annotations name, in no order."""
    return [uuid for pod in pods for uuid in pod["metadata"]["annotations"][names.UUIDS].split(",")]


def wait_full(world: World) -> None:
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


def test_fifty_pods_share_nothing_and_leave_no_gpu_idle(world: World) -> None:
    """Of 50 pods of mixed sizes as many run as there are GPUs for; the rest says why it waits, and follows later."""
    for size in sorted(set(SIZES)):
        world.claim(f"size-{size}", size)
    for number, size in enumerate(SIZES):
        world.pod(f"pod-{number:02}", f"size-{size}")

    wait_full(world)
    for name in waiting_names(world):
        assert f"4 Insufficient {names.GPU_RESOURCE}" in world.wait_rejected(name)
    told = world.wait(lambda: told_reasons(world), "a waiting pod to be told what is missing")
    assert set(told) <= {Reason.TOO_FEW_FREE, names.REJECT_NEVER_FITS}
    world.check_audit()

    leaving = {len(gpus_of([pod])): pod["metadata"]["name"] for pod in bound(world)}.values()
    for name in leaving:  # one of each size that runs
        world.delete(name)
    world.wait(lambda: not set(leaving) & {pod["metadata"]["name"] for pod in world.pods()}, "them to be gone")
    wait_full(world)
    world.check_audit()


def told_reasons(world: World) -> list[str]:
    """Return the reasons that events give to waiting pods: `N GPUs asked, ...: 3 REASON, 1 REASON`."""
    path = f"/apis/events.k8s.io/v1/namespaces/{world.namespace}/events"
    events = [event for event in world.cluster.api.get(path)["items"] if event["reason"] == names.REASON_WAITING]
    missing = [entry for event in events for entry in event["note"].partition(": ")[2].split(", ")]
    return [entry.partition(" ")[2] for entry in missing]


def test_freed_gpus_wake_exactly_the_pods_that_fit(world: World) -> None:
    """While the controllers are away nothing is freed and nobody woken; back again, they wake whom the GPUs fit."""
    world.claim("hopper-8", 8, models=["nvidia-h100"])
    world.claim("hopper-4", 4, models=["nvidia-h100"])
    world.claim("volta-8", 8, models=["nvidia-v100"])
    for holder, claim in (("hopper", "hopper-8"), ("volta", "volta-8")):
        world.pod(holder, claim)
        world.wait_running(holder)
    uid = world.get("hopper")["metadata"]["uid"]
    candidates = ("hopper-a", "hopper-b", "hopper-c")
    for name, claim in (*((name, "hopper-4") for name in candidates), ("volta-a", "volta-8")):
        world.pod(name, claim)
        world.wait_rejected(name)

    world.installation.stop("controllers")
    try:
        world.delete("hopper")
        for name in candidates:  # kube-scheduler's own retry: it sees room, the extender sees Leases
            world.wait(lambda name=name: Reason.TOO_FEW_FREE in world.message(name), f"{name} to be tried again")
        assert len(world.leases(uid)) == 8
        assert woken(world) == set()
    finally:
        world.installation.start("controllers")

    running = world.wait(
        lambda: len(started := running_names(world) & set(candidates)) == 2 and started, "two of three to run"
    )
    assert woken(world) == running
    for name in running:
        assert names.REASON_POD_WOKEN in {event["reason"] for event in world.events(name)}
    assert len(waiting_names(world)) == 2
    world.check_audit()


def running_names(world: World) -> set[str]:
    """Return the names of the pods that run."""
    return {pod["metadata"]["name"] for pod in world.pods() if pod["status"]["phase"] == "Running"}


def woken(world: World) -> set[str]:
    """Return the names of the pods that bear the controllers' mark of a wake-up."""
    return {pod["metadata"]["name"] for pod in world.pods() if names.WOKEN in pod["metadata"]["annotations"]}
