"""`atoll audit` on a real control plane: it finds and repairs damage with the shipped roles and policies."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from atoll.api import names
from devcluster.installation import EXTENDER_PORT
from tests.e2e.world import RealCluster

pytestmark = pytest.mark.e2e

CONTROLLERS = f"--as=system:serviceaccount:{names.SYSTEM_NAMESPACE}:atoll-controllers"
EXTENDER = f"http://127.0.0.1:{EXTENDER_PORT}"


@pytest.fixture
def lonely(world: RealCluster) -> Iterator[RealCluster]:
    """A world whose controllers are down, so that nothing repairs itself."""
    world.installation.stop("controllers")
    yield world
    world.installation.start("controllers")


def audit(world: RealCluster, *arguments: str, token: str = "") -> tuple[int, Any]:
    """Run the audit beside the extender; return its status and its JSON, or what it said where there is none."""
    config = str(world.cluster.kubeconfig_inside)
    command = ["env", f"ATOLL_EXTENDER_TOKEN={token}", sys.executable, "-m", "atollctl", "audit", "-o", "json"]
    done = world.cluster.run(*command, "--kubeconfig", config, *arguments)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def auditor(world: RealCluster) -> str:
    """Make an account that may read an extender's memory, and return its token."""
    world.kubectl("create", "serviceaccount", "auditor")
    binding = ("create", "clusterrolebinding", f"auditor-{world.namespace}", "--clusterrole=atoll-auditor")
    assert world.kubectl(*binding, f"--serviceaccount={world.namespace}:auditor").returncode == 0
    return world.kubectl("create", "token", "auditor").stdout.strip()


def test_lost_lease_is_found_and_written_again(lonely: RealCluster) -> None:
    """A bound pod's Lease is gone and the controllers are down: the audit says so, and writes it on demand."""
    lonely.claim("pair", 2)
    pod = lonely.pod("train", "pair")
    lonely.wait_running("train")
    lease = lonely.leases(pod["metadata"]["uid"])[0]["metadata"]["name"]
    assert audit(lonely) == (0, [])

    lonely.cluster.kubectl("-n", names.SYSTEM_NAMESPACE, CONTROLLERS, "delete", "lease", lease)
    status, (finding,) = audit(lonely)
    assert (status, finding["problem"], finding["detail"]) == (1, "MISSING_LEASE", lease)
    assert finding["nextStep"]

    status, (repaired,) = audit(lonely, "--repair")
    assert (status, repaired["repaired"]) == (0, True), repaired
    assert audit(lonely) == (0, [])
    holders = {held["spec"]["holderIdentity"] for held in lonely.leases(pod["metadata"]["uid"])}
    assert holders == {f"{lonely.namespace}/train/{pod['metadata']['uid']}"}


def test_memory_of_the_extender_is_told_to_whom_a_role_allows_it(world: RealCluster) -> None:
    """The extender asks the real API server about the caller; its memory agrees with what the API server holds."""
    world.claim("pair", 2)
    world.pod("train", "pair")
    world.wait_running("train")

    status, said = audit(world, "--extender", EXTENDER, token="nobody-knows-this")
    assert status == 2
    assert "401" in said
    stranger = world.kubectl("create", "token", "default").stdout.strip()
    status, said = audit(world, "--extender", EXTENDER, token=stranger)
    assert status == 2
    assert "403" in said
    token = auditor(world)
    world.wait(lambda: audit(world, "--extender", EXTENDER, token=token) == (0, []), "the memory to agree")
    world.kubectl("delete", "clusterrolebinding", f"auditor-{world.namespace}")
