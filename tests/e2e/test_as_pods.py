"""Atoll as an administrator installs it: `helm install`, every part a pod on a real node.

The plain manifests have the same objects (tests/deploy/test_chart.py), so `kubectl apply -k deploy` needs no test here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.release import ChartRelease, gpu_node
from tests.e2e.world import RealCluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="real nodes need root on Linux"),
]

NODES = (gpu_node("hopper", "dgx-h100"),)
"""One, as the image is unpacked on each; tests/e2e/test_chart.py takes three."""


@pytest.fixture(scope="module")
def release() -> Iterator[ChartRelease]:
    """A cluster on which the chart was installed by Helm."""
    with ChartRelease.cluster_for(NODES) as release:
        release.install()
        yield release


@pytest.fixture
def world(release: ChartRelease) -> Iterator[RealCluster]:
    """A namespace for one test; afterwards its pods are gone and the audit finds nothing."""
    with RealCluster.of_one_test(release.installation) as world:
        yield world


def test_a_claimed_pod_gets_its_gpus(release: ChartRelease, world: RealCluster) -> None:
    """With every part in a container: what the pod sees, its annotations and its Leases name the same GPUs."""
    world.claim("pair", 2)
    world.pod("train", "pair")
    try:
        world.wait_running("train")
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n{world.kubectl('describe', 'pod', 'train').stdout}{release.describe()}"
        ) from error
    allocation = world.allocation("train")
    assert allocation is not None
    assert set(world.seen("train").nvidia) == set(allocation.uuids)
    assert len(world.leases(world.get("train")["metadata"]["uid"])) == 2
