"""Clusters without IPv4, and with both families: the demo's main scenes, with every part in a pod.

kubelets probe the parts at their pods' addresses, the API server calls the webhook there, and agents call kubelets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from atoll.api import names
from devcluster.addresses import IpFamily
from devcluster.demo.observer import Observer
from devcluster.demo.scenes import Play, check, contend, delete_midway, run_examples, show_machines
from devcluster.demo.stage import Terminal
from tests.e2e.release import ChartRelease, gpu_node

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

NODES = (gpu_node("hopper", "dgx-h100"), gpu_node("volta", "dgx1-v100"), gpu_node("lovelace", "l40s-8"))
VERSIONS = {IpFamily.IPV6: {6}, IpFamily.DUAL: {4, 6}}


@pytest.fixture(scope="module", params=VERSIONS)
def release(request: pytest.FixtureRequest) -> Iterator[ChartRelease]:
    """A cluster of these families on which the chart was installed."""
    with ChartRelease.cluster_for(NODES, ip_family=request.param) as release:
        release.install()
        yield release


def test_the_demo_holds_in_every_family(release: ChartRelease) -> None:
    """Machines, examples, hand-over, deletions and the demo's check of every promise; agents read their kubelets."""
    play = Play(Terminal(), Observer(release.cluster), release.installation)
    for scene in (show_machines, run_examples, contend, delete_midway, check):
        scene(play)

    versions = VERSIONS[release.cluster.layout.network.family]
    for component in ("agent", "controllers", "scheduler", "webhook"):
        for pod in release.pods(component).values():
            assert {ip_address(one["ip"]).version for one in pod["status"]["podIPs"]} == versions
    for node in release.cluster.api.get("/api/v1/nodes")["items"]:
        addresses = [one["address"] for one in node["status"]["addresses"] if one["type"] == "InternalIP"]
        assert {ip_address(one).version for one in addresses} == versions
        report = release.cluster.api.get(f"/apis/gpu.scheduling/v1/gpunodestatuses/{node['metadata']['name']}")
        told = {one["type"]: one["status"] for one in report["status"]["conditions"]}
        assert told[names.CONDITION_EVIDENCE_READABLE] == "True"
    release.cluster.kubectl("delete", "namespace", "demo", "--wait=false", check=True)
