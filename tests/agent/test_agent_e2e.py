"""The agent on a real node: with its own identity, a real kubelet and running containers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from atoll.api import names
from devcluster import DevCluster, DevNodeSpec
from devcluster.errors import AdminApiError

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = ("namespaces.yaml", "crds", "rbac/agent.yaml", "policies/node-agents.yaml")
AGENT, NODE = "agent@dgx1", "dgx1"
ORDER = "1,0,3,2,5,4,7,6"
WAIT_SECONDS = 240.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """One real node that plays a DGX-1V whose NVML order differs from the ids, and the agent on it."""
    with DevCluster.start(
        f"agent-{uuid4().hex[:6]}", nodes=[DevNodeSpec(NODE, profile="dgx1-v100")], scheduler=False
    ) as one:
        for manifest in MANIFESTS:
            one.kubectl("apply", "--server-side", "-f", str(DEPLOY / manifest), check=True)
        one.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=True)
        start_agent(one)
        wait(lambda: sequence(one) >= 2, "the first two reports")
        wait(lambda: status(one)["evidence"]["kubeletRead"], "the kubelet to let the agent read its pods")
        yield one


def start_agent(cluster: DevCluster) -> None:
    """Start the agent in the node's namespaces with a token that is bound to the node."""
    kubeconfig = cluster.service_account_kubeconfig(names.HEARTBEAT_NAMESPACE, "atoll-agent", node=NODE)
    settings = {
        "--node": NODE,
        "--backend": "simulated",
        "--profile": "dgx1-v100",
        "--simulated-order": ORDER,
        "--cgroup-root": cluster.node(NODE).cgroup_root,
        "--kubeconfig": str(kubeconfig),
        "--pod-resources": "/var/lib/kubelet/pod-resources/kubelet.sock",
        "--poll-seconds": "2",
        "--start-jitter-seconds": "0",
    }
    words = [word for setting in settings.items() for word in setting]
    cluster.spawn(AGENT, [sys.executable, "-m", "agent", *words], node=NODE)


def status(cluster: DevCluster) -> dict[str, Any]:
    """Return the report; empty while there is none, or while the API server still takes up the new kind."""
    try:
        found: dict[str, Any] = cluster.api.get(f"/apis/gpu.scheduling/v1/gpunodestatuses/{NODE}")
    except AdminApiError as error:
        if error.status not in {404, 429}:
            raise
        return {}
    return found.get("status", {})


def sequence(cluster: DevCluster) -> int:
    return int(status(cluster).get("evidence", {}).get("sequence", 0))


def evidence(cluster: DevCluster, uid: str) -> tuple[bool, bool] | None:
    """Return whether the pod is live and listed, None where the report does not name it."""
    found = (pod for pod in status(cluster).get("pods", []) if pod["uid"] == uid)
    return next(((pod["live"], pod["kubelet"]) for pod in found), None)


def capacity(cluster: DevCluster) -> tuple[str | None, str | None]:
    node = cluster.api.get(f"/api/v1/nodes/{NODE}")["status"]
    return node["capacity"].get(names.GPU_RESOURCE), node["allocatable"].get(names.GPU_RESOURCE)


def wait(question: Callable[[], T], what: str) -> T:
    """Return the first true answer."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline, f"waited {WAIT_SECONDS:.0f} s for {what}"
        time.sleep(0.1)
    return answer


def run_pod(cluster: DevCluster, name: str, *, grace_seconds: int = 3) -> str:
    """Bind a pod to the node by hand, wait until its container runs and the report shows it; returns its uid."""
    container = {
        "name": "main",
        "image": "localhost/busybox:1",
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"],
        "resources": {"limits": {names.GPU_RESOURCE: "2"}},
    }
    spec = {
        "nodeName": NODE,
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": grace_seconds,
        "containers": [container],
    }
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    pod = cluster.api.request("POST", "/api/v1/namespaces/default/pods", body)
    uid = str(pod["metadata"]["uid"])
    path = f"/api/v1/namespaces/default/pods/{name}"
    wait(lambda: cluster.api.get(path)["status"]["phase"] == "Running", f"{name} to run")
    wait(lambda: evidence(cluster, uid) == (True, True), f"{name} in the report")
    return uid


def force_delete(cluster: DevCluster, name: str) -> None:
    cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false", check=True)


def test_the_kubelet_tells_what_it_handed_out(cluster: DevCluster) -> None:
    """The real kubelet answers the call that is written by hand; were it not understood, every GPU would be unread."""
    wait(lambda: status(cluster)["evidence"]["processesRead"], "the kubelet's pod resources")


def test_the_report_and_the_capacity_are_published_under_the_agents_own_rights(cluster: DevCluster) -> None:
    """Eight devices whose index differs from the id, complete evidence, a heartbeat, and eight GPUs on the Node."""
    report = status(cluster)

    assert [(device["id"], device["index"]) for device in report["devices"]] == [
        (position, int(index)) for position, index in enumerate(ORDER.split(","))
    ]
    assert (report["evidence"]["liveRead"], report["evidence"]["kubeletRead"]) == (True, True)
    node = cluster.api.get(f"/api/v1/nodes/{NODE}")
    assert report["nodeUid"] == node["metadata"]["uid"]
    assert report["bootId"] == node["status"]["nodeInfo"]["bootID"]
    wait(lambda: capacity(cluster) == ("8", "8"), "the capacity")
    path = f"/apis/coordination.k8s.io/v1/namespaces/{names.HEARTBEAT_NAMESPACE}/leases"
    heartbeats = wait(lambda: cluster.api.get(path)["items"], "the heartbeat")
    assert [(lease["metadata"]["name"], lease["spec"]["holderIdentity"]) for lease in heartbeats] == [(NODE, NODE)]


def test_a_force_deleted_pod_is_live_until_its_container_ended(cluster: DevCluster) -> None:
    """The kubelet forgets the pod at once while the container ignores TERM; the report says both, then neither."""
    uid = run_pod(cluster, "forced", grace_seconds=12)  # several polls see it live and unlisted

    force_delete(cluster, "forced")

    wait(lambda: evidence(cluster, uid) == (True, False), "the pod to be unlisted and live")
    wait(lambda: evidence(cluster, uid) is None, "the pod to be gone")
    assert status(cluster)["evidence"]["liveRead"]


def test_a_paused_kubelet_proves_nothing(cluster: DevCluster) -> None:
    """Kubelet silent and pod force-deleted: the container lives, and the report neither drops it nor claims to know."""
    uid = run_pod(cluster, "paused")
    cluster.signal(f"kubelet@{NODE}", "STOP")
    try:
        force_delete(cluster, "paused")
        wait(lambda: not status(cluster)["evidence"]["kubeletRead"], "the kubelet to be reported unread")
        assert evidence(cluster, uid) == (True, True)
    finally:
        cluster.signal(f"kubelet@{NODE}", "CONT")

    wait(lambda: evidence(cluster, uid) is None, "the pod to be gone once the kubelet is back")


def test_a_killed_agent_comes_back_with_the_same_ids(cluster: DevCluster) -> None:
    """SIGKILL, and a deletion while nobody watched: same ids, growing sequence, and no trace of the pod."""
    uid = run_pod(cluster, "unseen")
    before = status(cluster)
    cluster.signal(AGENT, "KILL")
    cluster.wait_exit(AGENT)
    force_delete(cluster, "unseen")

    start_agent(cluster)

    wait(lambda: sequence(cluster) >= before["evidence"]["sequence"] + 2, "two new reports")
    wait(lambda: evidence(cluster, uid) is None, "the pod to be gone")
    assert [(device["uuid"], device["id"]) for device in status(cluster)["devices"]] == [
        (device["uuid"], device["id"]) for device in before["devices"]
    ]


def test_a_kubelet_restart_and_a_reset_leave_the_capacity(cluster: DevCluster) -> None:
    """The kubelet starts again, and somebody writes 0: eight GPUs stand there again."""
    cluster.restart_kubelet(NODE)
    zero = {"status": {"capacity": {names.GPU_RESOURCE: "0"}, "allocatable": {names.GPU_RESOURCE: "0"}}}
    cluster.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", json.dumps(zero), check=True)

    wait(lambda: capacity(cluster) == ("8", "8"), "the capacity to be back")
