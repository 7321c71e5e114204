"""One cluster with four real nodes and all of Atoll, and one with NVIDIA's runtime, shared by the tests of this folder.

Every test works in a namespace of its own and leaves no pod behind; the check at its end is the product's own audit.
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
"""NVML order differs from device ids, and a killed leader is succeeded in seconds."""


@pytest.fixture(scope="session")
def installation() -> Iterator[Installation]:
    """A running cluster with Atoll installed from deploy/, every part under its own identity."""
    with DevCluster.start(f"e2e-{uuid4().hex[:6]}", nodes=NODES, scheduler=False) as cluster:
        installed = Installation(cluster, options=OPTIONS)
        installed.install()
        yield installed


@pytest.fixture
def world(installation: Installation, request: pytest.FixtureRequest) -> Iterator[RealCluster]:
    """A namespace for one test; afterwards its pods are gone and the audit finds nothing."""
    with RealCluster.of_one_test(installation) as world:
        yield world


@pytest.fixture(scope="session")
def machine_room() -> Iterator[MachineRoom]:
    """The cluster whose agents read played GPUs by the real bindings, under NVIDIA's own runtime."""
    with MachineRoom.open() as room:
        yield room


@pytest.fixture
def room_world(machine_room: MachineRoom) -> Iterator[RealCluster]:
    """A namespace of that cluster for one test."""
    with RealCluster.of_one_test(machine_room.installation) as world:
        yield world
