"""A highly available release over its lifecycle: demo, killed leaders, upgrade, rollback, uninstall.

The tests run in the order of a cluster's lifecycle and share one cluster of three real nodes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from atoll.api import names
from atoll.api.times import parse_microtime
from devcluster import chart
from devcluster.demo.observer import Observer
from devcluster.demo.scenes import Play, check, contend, delete_midway, run_examples, show_machines
from devcluster.demo.stage import Terminal
from devcluster.errors import AdminApiError
from tests.e2e.release import CONFIGURATION, ChartRelease, gpu_node
from tests.e2e.world import RealCluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

NODES = (gpu_node("hopper", "dgx-h100"), gpu_node("volta", "dgx1-v100"), gpu_node("lovelace", "l40s-8"))
HIGHLY_AVAILABLE = ("--values", chart.CHART / "values-ha.yaml")
LEASES = {"controllers": "atoll-controllers", "scheduler": names.SCHEDULER_LEADER_LEASE}
ELECTION_SECONDS = 6.0 + 1.0
"""Of values-ha.yaml: a Lease runs out, and the standby looks once more."""
ELECTIONS_MAX = 3.0
"""On a machine on which three nodes share two cores, all of them may stand still for a moment."""
NEXT = "0.2.0"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"


@pytest.fixture(scope="module")
def release() -> Iterator[ChartRelease]:
    """A cluster on which the chart was installed with the values for high availability."""
    with ChartRelease.cluster_for(NODES) as release:
        release.install(*HIGHLY_AVAILABLE)
        yield release


@pytest.fixture
def world(release: ChartRelease) -> Iterator[RealCluster]:
    """A namespace for one test; afterwards its pods are gone and the audit finds nothing."""
    with RealCluster.of_one_test(release.installation) as world:
        yield world


def test_the_demo_holds_on_an_installed_release(release: ChartRelease) -> None:
    """Machines, examples, hand-over, deletions and the demo's own check of every promise, with every part in a pod."""
    play = Play(Terminal(), Observer(release.cluster), release.installation)
    for scene in (show_machines, run_examples, contend, delete_midway, check):
        scene(play)
    release.cluster.kubectl("delete", "namespace", "demo", "--wait=false", check=True)


@pytest.mark.parametrize("component", LEASES)
def test_the_standby_takes_over_from_a_killed_leader(release: ChartRelease, world: RealCluster, component: str) -> None:
    """Nobody waits for a new pod: the replica that was there leads when the Lease has run out, as fast as an election
    goes, and GPUs are freed and given as before."""
    lease = LEASES[component]
    world.claim("four", 4)
    world.pod("before", "four")
    world.wait_running("before")
    leader = release.leader(lease)
    standby = set(release.pods(component)) - {leader}
    assert len(standby) == 1

    release.kill(leader)
    silent_since = parse_microtime(release.leadership(lease)["renewTime"])
    world.delete("before")
    world.pod("after", "four")

    successor = world.wait(lambda: release.leader(lease) not in {"", leader} and release.leader(lease), "a new leader")
    assert {successor} == standby
    took = (parse_microtime(release.leadership(lease)["acquireTime"]) - silent_since).total_seconds()
    print(f"{component}: led by the standby {took:.1f} s after the last word of the killed leader")
    assert took < ELECTIONS_MAX * ELECTION_SECONDS
    world.wait_running("after")
    release.wait_rollouts()


def test_one_webhook_of_two_is_enough(release: ChartRelease, world: RealCluster) -> None:
    """A pod without GPUs is created at once, one with GPUs as soon as the API server has left the dead replica."""
    world.claim("one", 1)
    victim, survivor = sorted(release.pods("webhook"))

    release.kill(victim)
    world.pod("plain", None)
    created = patiently(world, lambda: world.pod("train", "one"))

    assert created["spec"]["schedulerName"] == names.SCHEDULER_NAME
    assert release.pods("webhook")[survivor]["status"]["containerStatuses"][0]["restartCount"] == 0
    world.wait_running("plain")
    world.wait_running("train")
    release.wait_rollouts()


def test_upgrade_and_rollback_move_no_gpu(release: ChartRelease, world: RealCluster, tmp_path: Path) -> None:
    """Pods that run keep GPUs and containers; those that come and go meanwhile get theirs and give them back."""
    world.claim("four", 4)
    world.claim("one", 1)
    for name in ("first", "second"):
        world.pod(name, "four")
        world.wait_running(name)
    before = {name: facts_of(world, name) for name in ("first", "second")}
    trusted = release.bundles()
    release.load_image(f"atoll:{NEXT}")
    package = chart.package(tmp_path, "--version", NEXT, "--app-version", NEXT)

    meanwhile(world, "up", lambda: release.upgrade(package, *HIGHLY_AVAILABLE))
    assert images(release) == {f"atoll:{NEXT}"}
    assert {name: facts_of(world, name) for name in before} == before
    assert release.bundles() == trusted
    world.check_audit()

    meanwhile(world, "down", lambda: release.rollback(1))
    assert images(release) == {"atoll:0.1.0"}
    assert {name: facts_of(world, name) for name in before} == before
    assert release.bundles() == trusted
    world.check_no_contention()


def test_uninstall_leaves_pods_running_and_bricks_nothing(release: ChartRelease) -> None:
    """Webhook and policies are gone, pods and the books stay; installed again, Atoll goes on where it stopped."""
    world = RealCluster.enter(release.installation, f"t-{uuid4().hex[:8]}")
    world.claim("four", 4)
    world.pod("train", "four")
    world.wait_running("train")
    before = facts_of(world, "train")

    release.uninstall()

    assert world.maybe(CONFIGURATION) is None
    assert [item["metadata"]["name"] for item in release.cluster.api.get(POLICIES)["items"]] == []
    assert facts_of(world, "train") == before
    assert len(world.leases(before["uid"])) == 4
    assert world.maybe(f"/apis/gpu.scheduling/v1/namespaces/{world.namespace}/gpuclaims/four")
    release.cluster.start_scheduler()
    world.pod("plain", None)
    world.wait_running("plain")

    release.install(*HIGHLY_AVAILABLE)

    world.pod("other", "four")
    world.wait_running("other")
    assert facts_of(world, "train") == before
    assert not set(world.seen("other").nvidia) & set(world.seen("train").nvidia)
    world.leave()


def facts_of(world: RealCluster, name: str) -> dict[str, Any]:
    """Return what no change of Atoll's version may change about a pod."""
    pod = world.get(name)
    return {
        "uid": pod["metadata"]["uid"],
        "annotations": pod["metadata"]["annotations"],
        "starts": [status["restartCount"] for status in pod["status"]["containerStatuses"]],
        "container": [status["containerID"] for status in pod["status"]["containerStatuses"]],
        "leases": sorted(lease["metadata"]["name"] for lease in world.leases(pod["metadata"]["uid"])),
        "seen": world.seen(name),
    }


def images(release: ChartRelease) -> set[str]:
    """Return the images of Atoll's containers."""
    return {
        container["image"]
        for component in ("agent", "controllers", "scheduler", "webhook")
        for pod in release.pods(component).values()
        for container in pod["spec"]["containers"]
        if container["name"] != "kube-scheduler"
    }


def meanwhile(world: RealCluster, prefix: str, act: Callable[[], None]) -> None:
    """Do something while pods with a GPU each come and go."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        done = pool.submit(act)
        count = 0
        while not done.done() or count == 0:
            count += 1
            name = f"{prefix}-{count}"
            patiently(world, lambda name=name: world.pod(name, "one"))  # type: ignore[misc]
            world.wait_running(name)
            assert len(world.seen(name).nvidia) == 1
            world.delete(name)
        done.result()


def patiently(world: RealCluster, create: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Create a pod as its owner would, which tries again when a webhook does not answer."""

    def attempt() -> dict[str, Any] | None:
        try:
            return create()
        except AdminApiError as error:
            if "failed calling webhook" in str(error):
                return None
            raise

    return world.wait(attempt, "the API server to reach a webhook") or {}
