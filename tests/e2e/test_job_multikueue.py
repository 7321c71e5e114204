"""Jobs that Kueue sends to another cluster (MultiKueue), with two real clusters and the real Kueue in both.

Neither cluster has nodes: the test plays the kubelet of the one pod.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import DevCluster
from devcluster.kueue import Kueue
from tests.e2e.running_service import RunningService, wait
from tests.e2e.test_two_clusters import OPERATOR, RULES, SECRET, TENANT, atoll, prepared, shown, submit

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

RELAY = Path(__file__).with_name("relay.py")
PORT = 9700
QUEUE = "tenant-acme-queue"
FILE: dict[str, Any] = {
    "flavors": [{"name": "any"}],
    "tenants": [{"name": "acme", "queues": [{"flavors": [{"flavor": "any", "quota": {"gpu": 8}}]}]}],
}


@pytest.fixture(scope="module")
def clusters() -> Iterator[tuple[DevCluster, DevCluster]]:
    """Two clusters with Kueue; the first one's Kueue reaches the second one's API server."""
    with (
        DevCluster.start(f"manager-{os.getpid()}", scheduler=False) as home,
        DevCluster.start(f"east-{os.getpid()}", scheduler=False) as east,
        tempfile.TemporaryDirectory() as folder,
    ):
        for cluster in (home, east):
            Kueue(prepared(cluster)).install()
        config = yaml.safe_load(east.kubeconfig.read_text())
        outside = config["clusters"][0]["cluster"]["server"].removeprefix("https://")
        socket = f"{folder}/east"
        with subprocess.Popen([sys.executable, RELAY, socket, outside]) as relay:
            home.spawn("relay", [sys.executable, RELAY, f"127.0.0.1:{PORT}", socket])
            keep(home, OPERATOR, config)
            config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{PORT}"
            keep(home, "kueue-system", config)
            yield home, east
            relay.kill()


def keep(home: DevCluster, namespace: str, config: dict[str, Any]) -> None:
    """Write a kubeconfig into a Secret named east."""
    content = base64.b64encode(yaml.safe_dump(config).encode()).decode()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "east"}, "data": {"kubeconfig": content}}
    home.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(secret), check=True)


@pytest.fixture
def service(clusters: tuple[DevCluster, DevCluster], tmp_path: Path) -> Iterator[RunningService]:
    """A service in the first cluster."""
    service = RunningService(clusters[0], tmp_path, rules=RULES, namespaces=(OPERATOR,))
    service.start()
    yield service
    service.kill()


def found(cluster: DevCluster, kind: str, name: str, *where: str) -> dict[str, Any]:
    """Return an object; empty if it is not there."""
    done = cluster.kubectl("get", kind, name, "-o", "json", *where)
    one: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return one


def play(cluster: DevCluster, pod: str, phase: str) -> None:
    """Report a pod's phase as its kubelet does."""
    ready = [{"type": "Ready", "status": str(phase == "Running")}]
    status = json.dumps({"status": {"phase": phase, "conditions": ready}})
    cluster.kubectl("patch", pod, "-n", TENANT, "--subresource=status", "--type=merge", "-p", status, check=True)


def is_true(one: dict[str, Any], kind: str) -> bool:
    """Return whether a condition holds."""
    conditions = one.get("status", {}).get("conditions", [])
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def test_a_job_runs_in_the_cluster_that_kueue_sends_it_to(
    service: RunningService, clusters: tuple[DevCluster, DevCluster]
) -> None:
    """MC-6, C-13: the file becomes a MultiKueueCluster, its config and the check of the queue, all accepted. The job
    and its labels arrive in the other cluster, where the service leaves the copy alone; its state and place are shown.
    At its end nothing stays. What would stay behind is refused. Whatever is deleted by hand comes back."""
    home, east = clusters
    atoll(service, "cluster", "register", "east", "--secret", SECRET)
    there, here = service.folder / "east.yaml", service.folder / "home.yaml"
    there.write_text(json.dumps(FILE))
    sent = json.loads(json.dumps(FILE)) | {"multikueue": [{"name": "elsewhere", "clusters": {"east": "east"}}]}
    sent["tenants"][0]["queues"][0]["multikueue"] = "elsewhere"
    here.write_text(json.dumps(sent))
    atoll(service, "queue", "apply", "-f", str(there), "--cluster", "east")
    atoll(service, "queue", "apply", "-f", str(here))
    wait(lambda: is_true(found(home, "multikueuecluster", "east"), "Active"), "Kueue to reach the other cluster")
    wait(lambda: is_true(found(home, "admissioncheck", "elsewhere"), "Active"), "an active check")
    wait(lambda: is_true(found(home, "clusterqueue", QUEUE), "Active"), "an active queue")
    wait(lambda: is_true(found(east, "clusterqueue", QUEUE), "Active"), "an active queue there")

    submit(service, "far", "local", job_type="batch", labels={"team": "x"})
    wait(lambda: found(east, "job", "far", "-n", TENANT), "the job in the other cluster")
    wait(lambda: shown(service, "far")["status"] == "admitted", "the job to be admitted")
    labels = found(east, "job", "far", "-n", TENANT)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/multikueue-origin"]
    assert labels["team"] == "x"
    wait(lambda: "sent it to cluster east" in atoll(service, "job", "show", "far"), "the history to say where it is")
    wait(lambda: east.kubectl("get", "pods", "-n", TENANT, "-o", "name").stdout.strip(), "its pod")
    assert not home.kubectl("get", "pods", "-n", TENANT, "-o", "name").stdout.strip()
    service.kill()
    service.start()  # looks at every object of every cluster anew
    wait(lambda: shown(service, "far")["status"] == "admitted", "the service to be back")

    pod = east.kubectl("get", "pods", "-n", TENANT, "-o", "name").stdout.strip()
    play(east, pod, "Running")
    wait(lambda: shown(service, "far")["status"] == "running", "the job to run")
    play(east, pod, "Succeeded")
    wait(lambda: shown(service, "far")["status"] == "succeeded", "the job to end")
    wait(lambda: not found(east, "job", "far", "-n", TENANT), "the copy to go")

    refused = service.folder / "refused.yaml"
    job = {"name": "web", "job_type": "service", "tenant_id": "acme", "container": {"image": "busybox:1"}}
    refused.write_text(yaml.safe_dump(job))
    told = atoll(service, "job", "submit", "-f", str(refused), status=1)
    assert "MultiKueue leaves Deployment" in told
    home.kubectl("delete", "multikueueconfig", "elsewhere", check=True)
    wait(lambda: found(home, "multikueueconfig", "elsewhere"), "the config to come back")
