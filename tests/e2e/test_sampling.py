"""kube-scheduler looks at all of 1,000 nodes for a pod with GPUs, or by its own default at 420 at a time. The one that
fits, or has the better GPUs, is found both ways, and nobody is evicted meanwhile. The real control plane and all of
Atoll, no containers."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import yaml

from atoll.api import names
from atoll.kube import paths
from bench.stand import NAMESPACE, make_namespace, write_reports
from devcluster import DevCluster
from devcluster.installation import DEPLOY, Installation
from devcluster.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

PARTS = ("webhook", "extender", "controllers")
COMMON, RARE = "dgx-a100", "dgx-h100"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
SHIPPED = DEPLOY / "scheduler" / "config.yaml"
NODES = 1000
PODS = 8
CLAIMS = {"rare": ["nvidia-h100"], "better": ["nvidia-h100", "nvidia-a100"]}


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    """A thousand machines of one model and two of another, one of which is taken by a pod of low priority."""
    with DevCluster.start(f"sampling-{uuid4().hex[:6]}", nodes=(), scheduler=False) as made:
        installation = Installation(made)
        made.start_kwok()
        installation.apply_manifests()
        make_namespace(made)
        for prefix, count, shape in (("common", NODES, COMMON), ("rare", 2, RARE)):
            made.create_fake_nodes(
                count, prefix=prefix, labels={"example.com/model": prefix}, allocatable={names.GPU_RESOURCE: "8"}
            )
            write_reports(made, (shape,), prefix=prefix)
        for part in PARTS:
            installation.start(part, wait=False)
        installation.start_scheduler()
        installation.wait_ready(PARTS)
        for claim, models in CLAIMS.items():
            spec = {"devices": {"count": 8, "models": models}}
            body = {"apiVersion": names.API_VERSION, "kind": "GpuClaim", "metadata": {"name": claim}, "spec": spec}
            made.api.request("POST", paths.gpuclaims(NAMESPACE), body)
        for name, value in (("low", 1), ("high", 1000)):
            made.api.request("POST", CLASSES, {"metadata": {"name": name}, "value": value})
        create(made, "holder", priorityClassName="low", nodeSelector={"example.com/model": "rare"})
        wait_until(lambda: node_of(made, "holder"), what="the holder to be bound", timeout_seconds=60)
        yield installation


def create(cluster: DevCluster, name: str, *, claim: str = "rare", **spec: Any) -> None:
    """Create a pod that asks for a whole machine of the rare model, or of that rather than of the common one."""
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "1", "memory": "64Mi"}}}
    metadata = {"name": name, "annotations": {names.CLAIM: claim}}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container], **spec}}
    cluster.api.request("POST", paths.pods(NAMESPACE), body)


def node_of(cluster: DevCluster, name: str) -> str:
    """Return the pod's node, empty while it has none."""
    return str(cluster.api.get(paths.pods(NAMESPACE, name))["spec"].get("nodeName", ""))


def refusals(cluster: DevCluster, name: str) -> int:
    """Return how many attempts of kube-scheduler failed, by the events."""
    events = cluster.api.get(f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")["items"]
    mine = (one for one in events if one["regarding"]["name"] == name and one["reason"] == "FailedScheduling")
    return sum(one.get("series", {}).get("count", 1) for one in mine)


@pytest.fixture(params=[False, True], ids=["a sample", "as shipped"], scope="module")
def is_shipped(
    request: pytest.FixtureRequest, installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> bool:
    """kube-scheduler as shipped, or with its own default of the share of nodes that it looks at. A first pod is bound:
    the extender answers a new leader with 503 for a moment."""
    shipped = bool(request.param)
    config = yaml.safe_load(SHIPPED.read_text())
    if not shipped:
        config["profiles"] = [{"schedulerName": one["schedulerName"]} for one in config["profiles"]]
    file = tmp_path_factory.mktemp("scheduler") / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    installation.start_scheduler(file)
    name = f"first-{shipped}".lower()
    create(installation.cluster, name, claim="better", nodeSelector={"example.com/model": "common"})
    wait_until(lambda: node_of(installation.cluster, name), what=f"{name} to be bound", timeout_seconds=60)
    return shipped


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_one_node_is_found(installation: Installation, claim: str, *, is_shipped: bool) -> None:
    """Bound to the one node that fits, or that is better, and nobody is evicted: on the first attempt where all nodes
    are looked at, on the first or the second where a sample is."""
    cluster, refused = installation.cluster, list[int]()
    for number in range(PODS):
        name = f"{claim}-{number}-{is_shipped}".lower()
        create(cluster, name, claim=claim, priorityClassName="high")
        wait_until(lambda name=name: node_of(cluster, name), what=f"{name} to be bound", timeout_seconds=60)  # type: ignore[misc]
        refused.append(refusals(cluster, name))
        assert node_of(cluster, name).startswith("rare")
        assert node_of(cluster, name) != node_of(cluster, "holder")
        assert "deletionTimestamp" not in cluster.api.get(paths.pods(NAMESPACE, "holder"))["metadata"]
        assert "nominatedNodeName" not in cluster.api.get(paths.pods(NAMESPACE, name))["status"]
        cluster.api.request("DELETE", paths.pods(NAMESPACE, name), {"gracePeriodSeconds": 1})
        wait_until(lambda name=name: name not in held(cluster), what="its GPUs to be free", timeout_seconds=60)  # type: ignore[misc]
    assert max(refused) == (0 if is_shipped else 1), (
        "in a sample some attempt looks past the node, and none does so twice"
    )


def held(cluster: DevCluster) -> str:
    """Return the holders of all GPU Leases."""
    leases = cluster.api.get(paths.leases(names.SYSTEM_NAMESPACE))["items"]
    return " ".join(lease["spec"].get("holderIdentity") or "" for lease in leases)
