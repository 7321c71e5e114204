"""`atoll audit` on a real control plane: what is broken is found and repaired under the shipped roles and policies."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from atoll.api import names
from atoll.cluster.leases import Holder, Reservation, lease_body
from devcluster.installation import EXTENDER_PORT
from tests.e2e.world import World

pytestmark = pytest.mark.e2e

CONTROLLERS = f"--as=system:serviceaccount:{names.SYSTEM_NAMESPACE}:atoll-controllers"
AT = "2026-01-01T00:00:00.000000Z"
EXTENDER = f"http://127.0.0.1:{EXTENDER_PORT}"


@pytest.fixture
def lonely(world: World) -> Iterator[World]:
    """A world whose controllers are down, so that nothing repairs itself."""
    world.installation.stop("controllers")
    yield world
    world.installation.start("controllers")


def audit(world: World, *arguments: str, token: str = "") -> tuple[int, Any]:
    """Run the audit beside the extender; return its status and its JSON, or what it said where there is none."""
    config = str(world.cluster.kubeconfig_inside)
    command = ["env", f"ATOLL_EXTENDER_TOKEN={token}", sys.executable, "-m", "atollctl", "audit", "-o", "json"]
    done = world.cluster.run(*command, "--kubeconfig", config, *arguments)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def auditor(world: World) -> str:
    """Make an account that may read an extender's memory, and return its token."""
    world.kubectl("create", "serviceaccount", "auditor")
    binding = ("create", "clusterrolebinding", f"auditor-{world.namespace}", "--clusterrole=atoll-auditor")
    assert world.kubectl(*binding, f"--serviceaccount={world.namespace}:auditor").returncode == 0
    return world.kubectl("create", "token", "auditor").stdout.strip()


def test_lost_lease_is_found_and_written_again(lonely: World) -> None:
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


def plant(world: World, pod: dict[str, Any], device_id: int, holder: str) -> str:
    """Write a Lease of the pod's node in the name of the controllers, as a careless hand might; return its name."""
    allocation = world.allocation(pod["metadata"]["name"])
    assert allocation is not None
    report = world.report(allocation.node)
    uuid = next(device["uuid"] for device in report["status"]["devices"] if device["id"] == device_id)
    who = Holder(*holder.split("/")) if holder.count("/") == 2 else Holder("nobody", "nobody", "nobody")
    reservation = Reservation(allocation.node, report["status"]["nodeUid"], who, "pair", "planted", AT, AT)
    body = lease_body(reservation, device_id, uuid)
    body["spec"]["holderIdentity"] = holder
    done = world.cluster.kubectl(CONTROLLERS, "create", "-f", "-", input=json.dumps(body))
    assert done.returncode == 0, done.stderr
    return str(body["metadata"]["name"])


def test_planted_leases_are_found_and_only_what_is_disproved_is_removed(lonely: World) -> None:
    """Three false Leases beside a sound pod: one is deleted, one leads to a question, one is left to a person."""
    lonely.claim("pair", 2, models=["nvidia-h100"])
    pod = lonely.pod("train", "pair")
    lonely.wait_running("train")
    uid = pod["metadata"]["uid"]
    allocation = lonely.allocation("train")
    assert allocation is not None
    free = sorted(set(range(len(lonely.report(allocation.node)["status"]["devices"]))) - set(allocation.device_ids))
    stray = plant(lonely, pod, free[0], f"{lonely.namespace}/train/{uid}")
    leaked = plant(lonely, pod, free[1], f"{lonely.namespace}/gone/11111111-2222-3333-4444-555555555555")
    unreadable = plant(lonely, pod, free[2], "nobody")

    status, findings = audit(lonely)
    planted = {"STRAY_LEASE": stray, "LEAKED_LEASE": leaked, "UNREADABLE_LEASE": unreadable}
    assert (status, {found["problem"]: found["subject"] for found in findings}) == (
        1,
        {problem: f"Lease {name}" for problem, name in planted.items()},
    )
    status, repaired = audit(lonely, "--repair")
    done = {found["problem"]: found["repaired"] for found in repaired}
    assert (status, done) == (1, {"STRAY_LEASE": True, "LEAKED_LEASE": True, "UNREADABLE_LEASE": False}), repaired

    status, left = audit(lonely)
    assert {found["problem"] for found in left} == {"LEAKED_LEASE", "UNREADABLE_LEASE"}
    assert len(lonely.leases(uid)) == 2
    lonely.cluster.kubectl("-n", names.SYSTEM_NAMESPACE, CONTROLLERS, "delete", "lease", unreadable)
    lonely.installation.start("controllers")
    lonely.wait(lambda: leaked not in {held["metadata"]["name"] for held in lonely.leases()}, "the proof of its end")
    assert audit(lonely) == (0, [])
    lonely.installation.stop("controllers")


def test_memory_of_the_extender_is_told_to_whom_a_role_allows_it(world: World) -> None:
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
