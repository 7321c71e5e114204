"""Clusters that the tests of this folder share: one with four real nodes and all of Atoll, one with NVIDIA's runtime.

Every test uses its own namespace and deletes its pods; afterwards `atoll audit` must find nothing.
"""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from devcluster import DevCluster, DevNodeSpec
from devcluster.installation import Installation
from tests.e2e.machine_room import MachineRoom
from tests.e2e.world import RealCluster

NODES = (
    DevNodeSpec("volta", profile="dgx1-v100"),
    DevNodeSpec("hopper", profile="dgx-h100"),
    DevNodeSpec("lovelace", profile="l40s-8"),
    DevNodeSpec("grace", profile="gb200-tray"),
)
OPTIONS = {
    "agent": ("--poll-seconds", "5", "--simulated-order", "shuffled"),
    "controllers": ("--lease-duration-seconds", "4", "--renew-deadline-seconds", "3", "--retry-seconds", "0.5"),
}
"""NVML order differs from device ids, and a new leader takes over within seconds."""


@pytest.fixture(scope="session")
def installation() -> Iterator[Installation]:
    """Yield a cluster with Atoll installed from deploy/, every part with its own identity."""
    with DevCluster.start(f"e2e-{uuid4().hex[:6]}", nodes=NODES, scheduler=False) as cluster:
        installed = Installation(cluster, options=OPTIONS)
        installed.install()
        yield installed


@pytest.fixture
def world(installation: Installation, request: pytest.FixtureRequest) -> Iterator[RealCluster]:
    """Yield a namespace for one test; afterwards its pods are gone and the audit finds nothing."""
    with RealCluster.of_one_test(installation) as world:
        yield world


@pytest.fixture(scope="session")
def machine_room() -> Iterator[MachineRoom]:
    """Yield the cluster whose agents read simulated GPUs through the real bindings, with NVIDIA's own runtime."""
    with MachineRoom.open() as room:
        yield room


@pytest.fixture
def room_world(machine_room: MachineRoom) -> Iterator[RealCluster]:
    """Yield a namespace of the machine room for one test."""
    with RealCluster.of_one_test(machine_room.installation) as world:
        yield world
