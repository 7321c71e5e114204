"""Every part of Atoll is stopped: pods without GPUs are unaffected, pods that hold GPUs keep them."""

import json
from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.world import HOLD, STAY, TELL, RealCluster

pytestmark = pytest.mark.e2e

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - {name: main, image: "localhost/busybox:1", command: [sleep, "600"]}
"""


@pytest.fixture
def without_atoll(world: RealCluster) -> Iterator[RealCluster]:
    """The world with a GPU pod `train` running and every part of Atoll stopped; afterwards all parts run again."""
    world.claim("pair", 2)
    world.pod("train", "pair")
    world.wait_running("train")
    world.seen("train")
    parts = world.installation.parts
    for name in parts:
        world.installation.stop(name)
    yield world
    for name in parts:
        world.installation.start(name, wait=False)
    world.installation.wait_ready(parts)


def test_pods_without_a_claim_start_as_usual(without_atoll: RealCluster) -> None:
    """A pod, a Job and a Deployment start; a GPU pod is refused in words; who holds GPUs keeps them over a restart."""
    world = without_atoll
    before = world.seen("train")

    world.pod("plain", None, script=HOLD + STAY)
    job = world.kubectl("create", "job", "task", "--image=localhost/busybox:1", "--", "true")
    deployment = world.kubectl("apply", "-f", "-", text=DEPLOYMENT)
    refused = world.kubectl("create", "-f", "-", text=yaml.safe_dump(world.pod_body("gpu", "pair")))
    world.restart_container("train")

    assert job.returncode == 0, job.stderr
    assert deployment.returncode == 0, deployment.stderr
    assert refused.returncode != 0
    assert "failed calling webhook" in refused.stderr
    world.wait_running("plain")
    world.wait(lambda: ready_replicas(world) == 3, "the Deployment to be ready")
    completed = world.kubectl("wait", "--for=condition=complete", "--timeout=240s", "job/task")
    assert completed.returncode == 0, completed.stderr
    assert world.seen("plain").nvidia == ()
    assert world.seen("train") == before
    world.kubectl("delete", "deployment", "web", "--cascade=foreground")  # or it would replace pods that leave


def test_a_gpu_pod_that_waits_gets_no_gpu_while_nobody_keeps_the_ledger(world: RealCluster) -> None:
    """Without the extender kube-scheduler binds plain pods only; with it back the waiting pod gets its GPUs."""
    world.claim("one", 1)
    world.installation.kill("extender")
    try:
        world.pod("gpu", "one")
        world.pod("plain", None, script=TELL + "\n" + STAY)
        world.wait_running("plain")
        world.wait(lambda: world.message("gpu"), "kube-scheduler to have tried the GPU pod")
        assert "nodeName" not in world.get("gpu")["spec"]
        assert world.leases() == []
    finally:
        world.installation.start("extender")

    world.wait_running("gpu")
    assert len(world.seen("gpu").nvidia) == 1


def ready_replicas(world: RealCluster) -> int:
    """Return how many pods of the Deployment are ready."""
    status = json.loads(world.kubectl("get", "deployment", "web", "-o", "json").stdout)["status"]
    return int(status.get("readyReplicas", 0))
