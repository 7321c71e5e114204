"""Atoll as an administrator installs it: `kubectl apply -k deploy`, every part a pod on a real node.

Nothing of Atoll runs beside the cluster: the image is the one that `make image` assembles, the scheduler is the chart's
own, the agents find the driver's library where NVIDIA's runtime puts it, and every part talks to the API server as the
ServiceAccount of its pod.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

from atoll.api import names
from devcluster import Cluster, NodeSpec
from devcluster.atoll_image import write_atoll_image
from devcluster.images import ensure_image, program_image
from devcluster.installation import DEPLOY, Installation
from devcluster.machines import GpuMachine
from devcluster.nvidia import NvidiaRuntime
from devcluster.paths import cache_root
from devcluster.state import cgroup_root
from tests.e2e.world import World

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

GPU_LABEL = {"nvidia.com/gpu.present": "true"}
NODES = (
    NodeSpec("hopper", profile="dgx-h100", nvidia=NvidiaRuntime.HANDLER, labels=GPU_LABEL),
    NodeSpec("volta", profile="dgx1-v100", nvidia=NvidiaRuntime.HANDLER, labels=GPU_LABEL),
)
ROLLOUTS = (
    "deployment/atoll-controllers",
    "deployment/atoll-webhook",
    "deployment/atoll-scheduler",
    "daemonset/atoll-agent",
)
ROLLOUT_SECONDS = 400


@pytest.fixture(scope="module")
def installed() -> Iterator[Installation]:
    """A cluster on which deploy/ was applied as it is, but for what differs between clusters."""
    with Cluster.start(f"pods-{uuid4().hex[:6]}", nodes=NODES, scheduler=True) as cluster:
        atoll = cluster.layout.folder / "atoll.tar"
        write_atoll_image(atoll)
        for image in (atoll, scheduler_image(cluster)):
            cluster.load_image(image)
        for node in cluster.nodes:
            GpuMachine(node.gpu_folder, node.profile, seed=node.name, library_in_containers=True).plug()
        done = cluster.kubectl("apply", "--server-side", "-k", str(overlay(cluster)))
        assert done.returncode == 0, done.stderr
        wait_rollouts(cluster)
        cluster.stop_scheduler()  # as a cluster's own is stopped once Atoll's runs
        yield Installation(cluster)


@pytest.fixture
def world(installed: Installation) -> Iterator[World]:
    """A namespace for one test; afterwards its pods are gone and the audit finds nothing."""
    world = World.enter(installed, f"t-{uuid4().hex[:8]}")
    yield world
    world.leave()


def scheduler_image(cluster: Cluster) -> Path:
    """Return an image of the cluster's own version of kube-scheduler, under the name that deploy/ gives it."""
    program = cluster.program("kube-scheduler")
    return ensure_image(cache_root(), program_image(f"docker.io/library/kube-scheduler:v{cluster.kubernetes}", program))


def overlay(cluster: Cluster) -> Path:
    """Write what differs on this cluster, as its administrator would, and return the folder.

    The version of kube-scheduler, the webhook's RuntimeClass, a poll interval for impatient people, and what several
    nodes on one machine do not share with it: the root of their cgroups, and the id of their boot.
    """
    folder = cluster.layout.folder / "overlay"
    shutil.copytree(DEPLOY, folder / "deploy")
    boot_id = {"name": "boot-id", "mountPath": "/host/boot-id", "readOnly": True}
    on_node = {"name": "boot-id", "hostPath": {"path": "/proc/sys/kernel/random/boot_id", "type": "File"}}
    words = (
        f"--cgroup-root={cgroup_root(cluster.name, '$(ATOLL_AGENT_NODE)')}",
        "--boot-id-file=/host/boot-id",
        "--poll-seconds=5",
        "--start-jitter-seconds=0.1",
    )
    agent = [
        *(added("containers/0/args", word) for word in words),
        added("containers/0/volumeMounts", boot_id),
        added("volumes", on_node),
    ]
    patches = [
        ("DaemonSet", "atoll-agent", agent),
        ("Deployment", "atoll-webhook", [added("containers/0/args", "--inject-runtime-class")]),
    ]
    body = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["deploy"],
        "images": [{"name": "kube-scheduler", "newTag": f"v{cluster.kubernetes}"}],
        "patches": [
            {"target": {"kind": kind, "name": name}, "patch": json.dumps(operations)}
            for kind, name, operations in patches
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(body))
    return folder


def added(where: str, value: object) -> dict[str, object]:
    """Return the JSON patch that adds to a list of a part's pod."""
    return {"op": "add", "path": f"/spec/template/spec/{where}/-", "value": value}


def wait_rollouts(cluster: Cluster) -> None:
    """Wait until every replica of every part is available."""
    for target in ROLLOUTS:
        done = cluster.kubectl(
            "-n", names.SYSTEM_NAMESPACE, "rollout", "status", target, f"--timeout={ROLLOUT_SECONDS}s"
        )
        assert done.returncode == 0, f"{target}: {done.stdout}{done.stderr}{describe(cluster)}"


def describe(cluster: Cluster) -> str:
    """Return what an administrator would look at first."""
    namespace = ("-n", names.SYSTEM_NAMESPACE)
    pods = cluster.kubectl(*namespace, "get", "pods", "-o", "wide").stdout
    events = cluster.kubectl(*namespace, "get", "events", "--sort-by=.lastTimestamp").stdout
    logs = cluster.kubectl(
        *namespace, "logs", "-l", "app.kubernetes.io/name=atoll", "--all-containers", "--tail=15", "--prefix"
    ).stdout
    return f"\n{pods}\n{events[-4000:]}\n{logs[-8000:]}"


def test_a_claimed_pod_gets_its_gpus(world: World) -> None:
    """With every part in a container: what the pod sees, its annotations and its Leases name the same GPUs."""
    world.claim("pair", 2)
    world.pod("train", "pair")
    try:
        world.wait_running("train")
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n{world.kubectl('describe', 'pod', 'train').stdout}{describe(world.cluster)}"
        ) from error
    allocation = world.allocation("train")
    assert allocation is not None
    assert set(world.seen("train").nvidia) == set(allocation.uuids)
    assert len(world.leases(world.get("train")["metadata"]["uid"])) == 2
