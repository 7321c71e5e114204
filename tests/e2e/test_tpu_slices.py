"""Jobs that ask for a TPU slice, in a hall of fake TPU hosts: two slices of four hosts. The real control plane and all
of Atoll, no containers. The objects are what `atoll job render` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import yaml

from atoll.api import names
from atoll.jobs.settings import RenderSettings
from atoll.kube import paths
from atoll.ml.tables import TPU_RESOURCE, TPU_TOPOLOGY_LABEL, TPU_TYPE_LABEL
from bench.stand import NAMESPACE, make_namespace
from devcluster import DevCluster
from devcluster.installation import Installation
from devcluster.waiting import wait_until
from tests.e2e.test_gang_hall import GANGS, HOST, KIND, PARTS, WAIT_SECONDS
from tests.jobs.test_job_examples import EXAMPLES, result_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SLICE = RenderSettings().slice_level
HOSTS = 4
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
LEVELS = {"levels": [{"nodeLabel": SLICE}, {"nodeLabel": HOST}]}


class SliceHall:
    """The cluster, and what the tests ask of it."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.api = cluster.api

    def add_slice(self, name: str) -> None:
        """Add the hosts of a v5e slice 4x4, each with four chips: name-0, name-1, ..."""
        labels = {TPU_TYPE_LABEL: "tpu-v5-lite-podslice", TPU_TOPOLOGY_LABEL: "4x4", SLICE: name}
        room = {TPU_RESOURCE: "4", "cpu": "64", "memory": "512Gi"}
        self.cluster.create_fake_nodes(HOSTS, prefix=name, labels=labels, allocatable=room)

    def submit(self, name: str) -> None:
        """Apply the objects of the example job under another name."""
        text = yaml.safe_dump_all(result_of(EXAMPLES / "tpu.yaml").objects).replace("t5-training", name)
        self.cluster.kubectl("apply", f"--namespace={NAMESPACE}", "-f", "-", input=text, check=True)

    def pods(self, job: str) -> list[dict[str, Any]]:
        """Return the pods of a job."""
        found = self.api.get(paths.pods(NAMESPACE))["items"]
        return [pod for pod in found if pod["metadata"].get("labels", {}).get("app") == job]

    def hosts(self, job: str) -> list[str]:
        """Return the nodes of the job's bound pods."""
        return sorted(pod["spec"]["nodeName"] for pod in self.pods(job) if pod["spec"].get("nodeName"))

    def wait_reason(self, job: str, reason: str) -> str:
        """Wait until the job's gang has this reason; return the message."""
        told: dict[str, Any] = {}

        def has_reason() -> bool:
            status = self.api.get(f"{GANGS}/{job}").get("status", {})
            found = [one for one in status.get("conditions", []) if one["type"] == names.CONDITION_ADMITTED]
            told.update(found[0] if found else {})
            return told.get("reason") == reason

        wait_until(has_reason, what=f"gang {job} to be {reason}", timeout_seconds=WAIT_SECONDS)
        return str(told["message"])

    def wait_whole(self, job: str, name: str) -> None:
        """Wait until all pods of a job run on the slice, one on each host."""
        want = [f"{name}-{number}" for number in range(HOSTS)]
        wait_until(lambda: self.hosts(job) == want, what=f"{job} on {name}", timeout_seconds=WAIT_SECONDS)

    def end(self, job: str) -> None:
        """Delete a job and its pods."""
        self.api.request("DELETE", f"{JOBS}/{job}?propagationPolicy=Foreground")
        wait_until(lambda: not self.pods(job), what=f"the pods of {job} to go", timeout_seconds=WAIT_SECONDS)


@pytest.fixture(scope="module")
def hall() -> Iterator[SliceHall]:
    """Two slices with Atoll."""
    with DevCluster.start(f"slices-{uuid4().hex[:6]}", nodes=(), scheduler=False) as cluster:
        installation = Installation(cluster)
        cluster.start_kwok()
        installation.apply_manifests()
        make_namespace(cluster)
        cluster.kubectl("apply", "-f", str(EXAMPLES / "priority-classes.yaml"), check=True)
        made = SliceHall(cluster)
        made.add_slice("left")
        made.add_slice("right")
        for part in PARTS:
            installation.start(part, wait=False)
        installation.start_scheduler()
        installation.wait_ready(PARTS)
        topology = {**KIND, "kind": "Topology", "metadata": {"name": "slices"}, "spec": LEVELS}
        cluster.api.request("POST", "/apis/gpu.scheduling/v1/topologies", topology)
        yield made


def test_a_job_has_one_whole_slice_or_waits_and_holds_nothing(hall: SliceHall) -> None:
    """One host of the left slice is taken: the first job has the right one. The second job finds three hosts there and
    none to add from elsewhere: all of its pods wait. It starts, whole, when the host is free; a third one when the
    first job ends."""
    blocker = {"limits": {TPU_RESOURCE: "4"}}
    container = {"name": "main", "image": "none", "resources": blocker}
    pod = {"metadata": {"name": "blocker"}, "spec": {"nodeName": "left-2", "containers": [container]}}
    hall.api.request("POST", paths.pods(NAMESPACE), {"apiVersion": "v1", "kind": "Pod", **pod})
    hall.submit("first")
    hall.wait_whole("first", "right")

    hall.submit("second")
    message = hall.wait_reason("second", "WaitForRoom")
    assert f"topology {SLICE} fits 3 of 4 pods" in message
    assert [hall.hosts("second"), len(hall.pods("second"))] == [[], HOSTS]
    assert all(pod["spec"]["schedulingGates"] == [{"name": names.GANG_GATE}] for pod in hall.pods("second"))
    hall.api.request("DELETE", f"{paths.pods(NAMESPACE)}/blocker")
    hall.wait_whole("second", "left")

    hall.submit("third")
    hall.wait_reason("third", "WaitForRoom")
    assert hall.hosts("third") == []
    hall.end("first")
    hall.wait_whole("third", "right")
