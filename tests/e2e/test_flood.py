"""Floods of the webhook on a real cluster, while a bystander starts pods: its failure policy refuses what it misses."""

from collections.abc import Iterator

import pytest

from tests.e2e.hostile_tenant import flood
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

PODS_BEFORE, PODS = 4, 8
FLOODS = {
    "flood-of-connections": {"connections": 1024, "body_bytes": 60_000},
    "flood-of-bodies": {"connections": 3 * 53, "body_bytes": 7_999_999},
}
"""More connections than the webhook takes, and more bytes than it has memory for."""


@pytest.fixture
def flooded(world: RealCluster) -> Iterator[RealCluster]:
    """Yield the namespace while the floods go on."""
    for name, options in FLOODS.items():
        flood(world.cluster, name, **options)
    yield world
    for name in FLOODS:
        world.cluster.signal(name, "KILL")
        world.cluster.wait_exit(name)


def test_a_bystanders_pods_start_through_every_flood(flooded: RealCluster) -> None:
    """Each is admitted within the webhook's timeout and runs; also by a webhook that starts amid the flood, to which
    the API server has no connection yet."""
    flooded.claim("one", 1)
    for number in range(PODS):
        if number == PODS_BEFORE:
            flooded.installation.restart("webhook")
        flooded.pod(f"bystander-{number}", "one", terminationGracePeriodSeconds=1)
        flooded.wait_running(f"bystander-{number}")

    assert all(flooded.cluster.processes()[name].running for name in FLOODS)
