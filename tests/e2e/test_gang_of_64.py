"""A gang of 64 over three levels of fake machines: the real control plane and all of Atoll, no containers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from atoll.api import names
from atoll.kube import paths
from bench.stand import NAMESPACE, make_namespace, write_reports
from devcluster import Cluster
from devcluster.api import Request
from devcluster.errors import StartError
from devcluster.installation import Installation
from devcluster.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BLOCK, RACK, HOST = "example.com/block", "example.com/rack", "kubernetes.io/hostname"
HOSTS, RACK_HOSTS, BLOCK_HOSTS, MEMBERS = 32, 4, 16, 64
PARTS = ("webhook", "extender", "controllers")


def labels_of(number: int) -> dict[str, str]:
    """Two blocks of four racks of four hosts."""
    return {BLOCK: f"b{number // BLOCK_HOSTS}", RACK: f"r{number // RACK_HOSTS % 4}", HOST: f"node-{number}"}


@pytest.fixture
def hall() -> Iterator[Cluster]:
    """Fake machines of eight GPUs each, with Atoll."""
    with Cluster.start(f"hall-{uuid4().hex[:6]}", nodes=(), scheduler=False) as cluster:
        installation = Installation(cluster)
        cluster.start_kwok()
        cluster.create_fake_nodes(HOSTS, prefix="node", labels=labels_of, allocatable={names.GPU_RESOURCE: "8"})
        installation.apply_manifests()
        make_namespace(cluster)
        write_reports(cluster, ("dgx-h100",))
        for part in PARTS:
            installation.start(part, wait=False)
        installation.start_scheduler()
        installation.wait_ready(PARTS)
        yield cluster


@contextmanager
def told(hall: Cluster, gang: str) -> Iterator[None]:
    """Add to a failure what the gang and its first member say."""
    try:
        yield
    except StartError as error:
        status = hall.api.get(gang).get("status")
        first = hall.api.get(paths.pods(NAMESPACE, "wide-0"))
        raise AssertionError(f"{error}; gang: {status}; pod: {first['spec']} {first['status']}") from error


def test_64_members_fill_one_block_by_racks_and_hosts(hall: Cluster) -> None:
    """All in one block, 16 consecutive ranks in one rack, four in one host; 128 GPUs, each held once."""
    gangs = f"/apis/gpu.scheduling/v1/namespaces/{NAMESPACE}/gpugangs"
    levels = {"levels": [{"nodeLabel": BLOCK}, {"nodeLabel": RACK}, {"nodeLabel": HOST}]}
    kind = {"apiVersion": names.API_VERSION}
    hall.api.request(
        "POST",
        "/apis/gpu.scheduling/v1/topologies",
        {**kind, "kind": "Topology", "metadata": {"name": "hall"}, "spec": levels},
    )
    claim = {"gangRef": "wide", "devices": {"count": 2}}
    hall.api.request(
        "POST", paths.gpuclaims(NAMESPACE), {**kind, "kind": "GpuClaim", "metadata": {"name": "two"}, "spec": claim}
    )
    slices = [{"level": RACK, "size": 16}, {"level": HOST, "size": 4}]
    wanted = {"mode": "required", "level": BLOCK, "slices": slices}
    spec = {"topologyName": "hall", "podSets": [{"name": "workers", "count": MEMBERS, "topology": wanted}]}
    hall.api.request("POST", gangs, {**kind, "kind": "GpuGang", "metadata": {"name": "wide"}, "spec": spec})
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "1", "memory": "64Mi"}}}
    hall.api.request_all(
        Request(
            "POST",
            paths.pods(NAMESPACE),
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"wide-{number}",
                    "annotations": {names.CLAIM: "two", names.GANG: "wide"},
                    "labels": {"batch.kubernetes.io/job-completion-index": str(number)},
                },
                "spec": {"containers": [container]},
            },
        )
        for number in range(MEMBERS)
    )

    def homes() -> dict[int, int]:
        pods = hall.api.get(paths.pods(NAMESPACE))["items"]
        found = {int(pod["metadata"]["name"].removeprefix("wide-")): pod["spec"].get("nodeName") for pod in pods}
        return {rank: int(node.removeprefix("node-")) for rank, node in found.items() if node}

    with told(hall, f"{gangs}/wide"):
        wait_until(lambda: len(homes()) == MEMBERS, what="64 members to be bound", timeout_seconds=120)
    placed = homes()
    assert len({node // BLOCK_HOSTS for node in placed.values()}) == 1
    assert all(placed[rank] // RACK_HOSTS == placed[rank // 16 * 16] // RACK_HOSTS for rank in placed)
    assert all(placed[rank] == placed[rank // 4 * 4] for rank in placed)
    assert set(Counter(placed.values()).values()) == {4}
    leases = hall.api.get(paths.leases(names.SYSTEM_NAMESPACE))["items"]
    held = [one for one in leases if one["metadata"]["name"].startswith("gpu-")]
    assert len(held) == 2 * MEMBERS
