"""Behaviour of kube-scheduler on which Atoll relies: the real one, the shipped configuration, and a stub extender."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from atoll.api import names
from atoll.cluster.host_fit import free
from atoll.cluster.objects import decode_node, decode_pod
from devcluster import DevCluster
from devcluster.installation import DEPLOY, shipped_scheduler_flags

pytestmark = pytest.mark.e2e

STUB = Path(__file__).parents[1] / "fakes" / "stub_extender.py"
PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"
WAIT_SECONDS = 240.0


class Stage:
    """A control plane with one hand-made node of one GPU, the stock scheduler, and the stub."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder

    def create_node(self, name: str, size: dict[str, str]) -> None:
        """Create a Ready node of this size that no kubelet looks after."""
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
        path = f"/api/v1/nodes/{name}"
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
        status = {"allocatable": size, "capacity": size, "conditions": [ready]}
        self.cluster.api.request("POST", "/api/v1/nodes", {"metadata": metadata, "spec": {}})
        self.cluster.api.request("PATCH", f"{path}/status", {"status": status}, content_type=MERGE)
        self.wait(lambda: not self.cluster.api.get(path)["spec"].get("taints"), f"node {name} to be open")

    def create_pod(self, **more: Any) -> str:
        """Create a pod that wants the GPU, and return its name; keywords go to its spec."""
        name = f"pod-{uuid4().hex[:6]}"
        resources = {"limits": {names.GPU_RESOURCE: "1"}}
        container = {"name": "main", "image": "none", "resources": resources}
        spec = {"schedulerName": names.SCHEDULER_NAME, "containers": [container], **more}
        self.cluster.api.request("POST", PODS, {"metadata": {"name": name}, "spec": spec})
        return name

    def annotate(self, name: str) -> None:
        """Change an annotation of a waiting pod."""
        body = {"metadata": {"annotations": {"example.com/touched": uuid4().hex}}}
        self.cluster.api.request("PATCH", f"{PODS}/{name}", body, content_type=MERGE)

    def calls(self, verb: str, pod: str) -> int:
        """Return how often the stub was asked about the pod."""
        log = self.folder / "calls"
        return log.read_text().splitlines().count(f"{verb} {pod}") if log.exists() else 0

    def order(self, *pods: str) -> list[str]:
        """Return the verbs of the calls about these pods, in their order."""
        rows = (line.split(" ") for line in (self.folder / "calls").read_text().splitlines())
        return [verb for verb, pod in rows if pod in pods]

    def unanswered_binds(self) -> int:
        """Return how many binds the stub still holds."""
        log = self.folder / "calls"
        verbs = [line.partition(" ")[0] for line in log.read_text().splitlines()] if log.exists() else []
        return verbs.count("bind") - verbs.count("answered")

    def wait_refused_twice(self, *pods: str) -> None:
        """Wait until the stub has refused the pods at first, and again after the scheduler's own status patch."""
        for pod in pods:
            self.wait(lambda pod=pod: self.calls("filter", pod) >= 2, f"{pod} to be refused twice")

    def message(self, name: str) -> str:
        """Return why the pod waits."""
        conditions = self.cluster.api.get(f"{PODS}/{name}")["status"].get("conditions", [])
        return next((c.get("message", "") for c in conditions if c["type"] == "PodScheduled"), "")

    def switch(self, name: str, *, on: bool) -> None:
        """Set or clear one of the stub's files."""
        (self.folder / name).touch() if on else (self.folder / name).unlink(missing_ok=True)

    def wait(self, question: Callable[[], Any], what: str) -> None:
        """Wait until the answer is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not question():
            assert time.monotonic() < deadline, f"waited {WAIT_SECONDS:.0f} s for {what}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The stage, started once."""
    folder = tmp_path_factory.mktemp("stub")
    with DevCluster.start(f"facts-{uuid4().hex[:6]}", nodes=[], scheduler=False) as cluster:
        for file in ("namespaces.yaml", "crds", "rbac"):
            cluster.kubectl("apply", "-f", str(DEPLOY / file), check=True)
        stage = Stage(cluster, folder)
        stage.create_node("one", {"cpu": "8", "memory": "16Gi", "pods": "110", names.GPU_RESOURCE: "1"})
        cluster.spawn("stub", [sys.executable, str(STUB), str(folder)])
        identity = cluster.service_account_kubeconfig(names.SYSTEM_NAMESPACE, "atoll-scheduler")
        cluster.start_scheduler(DEPLOY / "scheduler" / "config.yaml", identity, flags=shipped_scheduler_flags())
        yield stage


@pytest.fixture
def stage(running: Stage) -> Iterator[Stage]:
    """The stage without pods, the stub accepting nodes and holding binds."""
    running.switch("reject", on=False)
    running.switch("answer-binds", on=False)
    yield running
    running.switch("answer-binds", on=True)
    running.cluster.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", check=True)
    running.wait(lambda: running.unanswered_binds() == 0, "the stub to hold no bind any more")


@pytest.fixture
def two_refused(stage: Stage) -> tuple[str, str]:
    """Two pods that the stub has refused twice: at first, and again after the scheduler's own status patch."""
    stage.switch("reject", on=True)
    pods = (stage.create_pod(), stage.create_pod())
    stage.wait_refused_twice(*pods)
    return pods


def test_counts_hold_gpus_while_a_bind_is_in_flight(stage: Stage) -> None:
    """While one pod's bind is unanswered, kube-scheduler itself refuses a second pod for the node's only GPU."""
    first = stage.create_pod()
    stage.wait(lambda: stage.calls("bind", first) == 1, "the first bind to be under way")
    second = stage.create_pod()
    stage.wait(lambda: "Insufficient" in stage.message(second), "the second pod to be refused")

    assert names.GPU_RESOURCE in stage.message(second)
    assert stage.calls("filter", second) == 0


def test_a_failed_bind_is_tried_again(stage: Stage) -> None:
    """An error in the bind reply gives the node back, and the pod comes again by itself."""
    pod = stage.create_pod()
    stage.wait(lambda: stage.calls("bind", pod) == 1, "the bind to be under way")
    stage.switch("answer-binds", on=True)
    stage.wait(lambda: stage.calls("bind", pod) >= 2, "the bind to be tried again")

    assert stage.calls("filter", pod) >= 2


def test_a_refused_pod_rests_after_two_attempts(stage: Stage, two_refused: tuple[str, str]) -> None:
    """With a constant message there is no loop: while a third pod is tried and refused, nobody else is asked about."""
    first, second = two_refused
    stage.wait_refused_twice(stage.create_pod())

    assert (stage.calls("filter", first), stage.calls("filter", second)) == (2, 2)


def test_an_annotation_wakes_the_pod_that_carries_it_alone(stage: Stage, two_refused: tuple[str, str]) -> None:
    """This is how the controllers wake exactly the pods that fit."""
    first, second = two_refused
    stage.annotate(first)
    stage.wait(lambda: stage.calls("filter", first) >= 3, "the annotated pod to be tried again")
    stage.wait_refused_twice(stage.create_pod())

    assert stage.calls("filter", second) == 2


def test_deleting_a_lease_wakes_nobody(stage: Stage, two_refused: tuple[str, str]) -> None:
    """A freed GPU Lease is no event for kube-scheduler; without a wake-up of ours its pods would wait."""
    first, second = two_refused
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases"
    stage.cluster.api.request("POST", leases, {"metadata": {"name": "gpu-one-0"}})
    stage.cluster.api.request("DELETE", f"{leases}/gpu-one-0")
    stage.annotate(first)
    stage.wait(lambda: stage.calls("filter", first) >= 3, "a later wake-up to be seen")
    stage.wait_refused_twice(stage.create_pod())

    assert stage.calls("filter", second) == 2


RESIZES: dict[str, tuple[str, str, str, str]] = {
    "not-looked-at": ("2", "", "", ""),
    "larger-not-given": ("4", "2", "2", ""),
    "smaller-not-taken": ("1", "2", "2", ""),
    "promised-more": ("2", "1", "3", ""),
    "larger-later": ("4", "2", "2", "Deferred"),
    "larger-never": ("100", "2", "2", "Infeasible"),
    "larger-never-promised-more": ("100", "2", "3", "Infeasible"),
}
"""Cores asked, run with and promised, and why the kubelet has not resized the pod yet."""
CORES = 64


def resize(stage: Stage, name: str) -> int:
    """Create a node with one pod that is being resized; return what Atoll counts as free there, in thousandths."""
    asked, runs_with, promised, why = RESIZES[name]
    size = {"cpu": str(CORES), "memory": "16Gi", "pods": "110"}
    stage.create_node(name, size)
    container = {"name": "c", "image": "none", "resources": {"requests": {"cpu": asked}}}
    spec = {"nodeName": name, "containers": [container], "tolerations": [{"operator": "Exists"}]}
    stage.cluster.api.request("POST", PODS, {"metadata": {"name": name}, "spec": spec})
    told: dict[str, Any] = {"name": "c", "ready": True, "restartCount": 0, "image": "none", "imageID": ""}
    if runs_with:
        told |= {"resources": {"requests": {"cpu": runs_with}}, "allocatedResources": {"cpu": promised}}
    conditions = [{"type": "PodResizePending", "status": "True", "reason": why}] if why else []
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": [told] if runs_with else []}
    stage.cluster.api.request("PATCH", f"{PODS}/{name}/status", {"status": status}, content_type=MERGE)
    read = {kind: json.dumps(stage.cluster.api.get(path)).encode() for kind, path in
            (("pod", f"{PODS}/{name}"), ("node", f"/api/v1/nodes/{name}"))}  # fmt: skip
    return free(decode_node(read["node"]), [decode_pod(read["pod"])])["cpu"]


def probe(stage: Stage, name: str, *, cpu: int) -> None:
    """Create a pod that wants so much of one node."""
    container = {"name": "c", "image": "none", "resources": {"requests": {"cpu": f"{cpu}m"}}}
    spec = {"nodeSelector": {"kubernetes.io/hostname": name}, "containers": [container]}
    stage.cluster.api.request("POST", PODS, {"metadata": {"name": f"probe-{name}"}, "spec": spec})


def test_kube_scheduler_counts_a_resized_pod_as_atoll_does(stage: Stage) -> None:
    """On a node with one such pod, a pod that wants a thousandth more than is free by our count waits; one that wants
    exactly that is bound."""
    counted = {name: resize(stage, name) for name in RESIZES}
    for name, cpu in counted.items():
        probe(stage, name, cpu=cpu + 1)
    for name in RESIZES:
        stage.wait(lambda name=name: "Insufficient cpu" in stage.message(f"probe-{name}"), f"{name} to be too full")
        stage.cluster.kubectl("delete", "pod", f"probe-{name}", "--force", "--grace-period=0", check=True)
    for name, cpu in counted.items():
        probe(stage, name, cpu=cpu)

    for name in RESIZES:
        path = f"{PODS}/probe-{name}"
        stage.wait(lambda path=path: stage.cluster.api.get(path)["spec"].get("nodeName"), f"{name} to have room")
