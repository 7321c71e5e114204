"""Events in the middle of a gang's admission: deletion, re-creation under its name, lost members, refusals."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from tests.builders import make_allocation, pod_json
from tests.controllers.gang_harness import GANGS, TOPOLOGIES, GangHarness, cluster, settled, term
from tests.controllers.harness import PODS, strip_version
from tests.fakes.api_server import answering

pytestmark = pytest.mark.asyncio

RESERVED = 11
"""The write after which all Leases stand, the gang is admitted, and nobody was let go."""
RACK, HOST = "example.com/rack", "kubernetes.io/hostname"


def add_gang(made: GangHarness, name: str = "g", count: int = 2, **spec: Any) -> None:
    """Create a gang and all of its members, four GPUs each."""
    made.add_gang(name, count, **spec)
    for number in range(count):
        made.add_member(name, number)


def is_let_go(made: GangHarness, *members: str) -> bool:
    """Tell whether these members may start and hold their four GPUs."""
    return all(not made.is_gated(member) and len(made.leases_of(member)) == 4 for member in members)


async def reserve(made: GangHarness, folder: Path) -> None:
    """Let a leader die when everything is reserved."""
    async with term(made, folder, dies_at=RESERVED) as first:
        await settled(first, first.api.dead.is_set)
    assert made.reason("g") == "Admitted"
    assert made.held() == 8
    assert made.is_gated("g-0")
    assert made.is_gated("g-1")


async def test_a_gang_that_is_deleted_when_its_gpus_are_reserved_leaves_nothing_held(tmp_path: Path) -> None:
    """Nobody would let its members go any more: they stay gated, and hold nothing."""
    async with cluster() as made:
        add_gang(made)
        await reserve(made, tmp_path)
        made.server.remove(f"{GANGS}/g")
        async with term(made, tmp_path) as second:
            await settled(second, lambda: made.held() == 0)
        assert made.is_gated("g-0")
        assert made.is_gated("g-1")


async def test_a_gang_that_is_created_anew_in_the_middle_is_admitted_anew(tmp_path: Path) -> None:
    """Same name, another gang: what was reserved for the first is given back, and the second begins at the start."""
    async with cluster() as made:
        add_gang(made)
        await reserve(made, tmp_path)
        made.server.remove(f"{GANGS}/g")
        made.add_gang("g", 2)
        async with term(made, tmp_path) as second:
            await settled(second, lambda: is_let_go(made, "g-0", "g-1") and made.reason("g") == "Admitted")
        tokens = {lease["metadata"]["annotations"][names.LEASE_GANG] for lease in made.leases_of("g-0")}
        assert tokens == {f"team/g/{made.gang('g')['metadata']['uid']}"}
        assert made.gang("g")["status"]["admissions"] == 1
        assert made.held() == 8


async def test_a_member_that_goes_before_the_gates_open_undoes_the_admission(tmp_path: Path) -> None:
    """One of two is deleted: the other is not let go alone, and the gang is admitted whole when both are there."""
    async with cluster("n1", "n2") as made:
        add_gang(made)
        await reserve(made, tmp_path)
        made.delete("g-1")
        async with term(made, tmp_path) as second:
            await settled(second, lambda: not made.leases_of("g-0") and made.reason("g") == "WaitForQuorum")
            assert made.is_gated("g-0")
            made.add_member("g", 2)
            await settled(second, lambda: is_let_go(made, "g-0", "g-2"))


async def test_a_member_that_takes_no_pin_ends_the_admission(tmp_path: Path) -> None:
    """The API server finds one member's pin invalid: the gang does not hold its GPUs for ever, it waits out a pause."""
    async with cluster() as made:
        made.server.fail(
            answering(422, "Invalid"), times=1000, containing="PATCH /api/v1/namespaces/team/pods/g-1/status"
        )
        async with term(made, tmp_path) as running:
            add_gang(made)
            await settled(running, lambda: made.reason("g", names.CONDITION_EVICTED) == "MemberRefused", seconds=20)
            await settled(running, lambda: made.held() == 0 or f"{PODS}/g-0" not in made.server.objects, seconds=20)
            await settled(running, lambda: not made.leases_of("g-1"), seconds=20)

    assert made.is_gated("g-1")
    assert made.gang("g")["status"]["requeueState"]["count"] == 1


async def test_a_new_leader_and_a_new_topology_forget_nothing_that_runs(tmp_path: Path) -> None:
    """A gang runs; the next leader finds its topology created anew with a further level: the same GPUs are held, and
    a gang that waits gets none of them."""
    async with cluster() as made:
        topology = {"metadata": {"name": "t"}, "spec": {"levels": [{"nodeLabel": HOST}]}}
        made.server.remove("/api/v1/nodes/n1")
        made.add_node("n1", labels={HOST: "n1", RACK: "a"})
        made.server.put(f"{TOPOLOGIES}/t", topology)
        whole = {"mode": "required", "level": HOST}
        async with term(made, tmp_path) as first:
            add_gang(made, topology=whole)
            await settled(first, lambda: is_let_go(made, "g-0", "g-1"))
            made.run_all("g", 2)
            await settled(first, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
            held = sorted(lease["metadata"]["uid"] for lease in (*made.leases_of("g-0"), *made.leases_of("g-1")))
        made.server.remove(f"{TOPOLOGIES}/t")
        levels = [{"nodeLabel": RACK}, {"nodeLabel": HOST}]
        made.server.put(f"{TOPOLOGIES}/t", {**topology, "spec": {"levels": levels}})
        async with term(made, tmp_path) as second:
            add_gang(made, "late", topology=whole)
            await settled(second, lambda: made.reason("late") == "WaitForRoom")
            again = sorted(lease["metadata"]["uid"] for lease in (*made.leases_of("g-0"), *made.leases_of("g-1")))

        assert again == held
        assert made.held() == 8
        assert made.reason("g", names.CONDITION_PODS_READY) == "Started"
        assert made.gang("g")["status"]["admissions"] == 1


async def test_what_a_running_gang_lacks_comes_before_a_newcomer(tmp_path: Path) -> None:
    """A machine goes, a member with it; the successor and a more important new gang wait for the same four GPUs. The
    machine returns: the gang that runs is made whole, and the newcomer waits on."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        put_holder(made, "other", "n2", range(4))
        await settled(running, lambda: len(made.leases_of("other")) == 4)
        add_gang(made, count=3)
        await settled(running, lambda: is_let_go(made, "g-0", "g-1", "g-2"))
        made.run_all("g", 3)
        await settled(running, lambda: made.reason("g", names.CONDITION_PODS_READY) == "Started")
        (lost,) = (f"g-{n}" for n in range(3) if made.pod(f"g-{n}")["spec"]["nodeName"] == "n2")
        node = made.server.objects["/api/v1/nodes/n2"]
        made.server.put("/api/v1/nodes/n2", {**node, "spec": {"unschedulable": True}})
        made.end(lost, "Failed")
        await settled(running, lambda: made.leases_of(lost) == [])
        made.add_member("g", 3)
        made.add_gang("new", 1)
        made.add_member("new", 0, priority=100)
        await settled(running, lambda: made.reason("new") in {"WaitForRoom", "WaitForNodes", "NeverFits"})
        assert made.is_gated("g-3")

        node = made.server.objects["/api/v1/nodes/n2"]
        made.server.put("/api/v1/nodes/n2", {**node, "spec": {}})
        await settled(running, lambda: is_let_go(made, "g-3"))
        assert made.leases_of("new-0") == []


def put_holder(made: GangHarness, name: str, node: str, devices: Iterable[int]) -> None:
    """Put a running pod without a gang."""
    allocation = make_allocation(node, *devices)
    body = pod_json(name, gpus=len(allocation.device_ids), node=node, allocation=allocation, priority=1000)
    made.server.put(f"{PODS}/{name}", strip_version({**body, "status": {"phase": "Running"}}))
