"""Bind on a real API server with a faulty network: the pod is bound with these GPUs, or nothing is left.

If the result is unknown, the Leases stay, so nobody else gets a GPU that a late Binding could still give out.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.api import names
from atoll.cluster.allocations import ANNOTATIONS_BYTES_MAX
from atoll.cluster.leases import RESERVATION_NAMESPACE, Reservation, lease_body
from atoll.cluster.objects import Pod
from atoll.cluster.pods import holder_of
from atoll.kube import paths
from tests.builders import report_json
from tests.extender.stage import NAMESPACE, WAIT_SECONDS, ExtenderHarness, Replica
from tests.fakes.fault_proxy import (
    Fault,
    Held,
    answering,
    answering_after,
    cut_before,
    doing,
    drop_answer,
    garbled,
)

pytestmark = pytest.mark.e2e

BINDING = r"POST .*/binding$"
LEASE_CREATE = r"POST .*/leases$"
LEASE_DELETE = r"DELETE .*/leases/"
POD_READ = r"GET .*/pods/"


@pytest.fixture
async def stage(control_plane: Path, tmp_path: Path) -> AsyncIterator[ExtenderHarness]:
    async with ExtenderHarness.open(control_plane, tmp_path) as stage:
        yield stage


@pytest.fixture
async def node(stage: ExtenderHarness) -> str:
    return await stage.add_node()


@pytest.fixture
async def replica(stage: ExtenderHarness, node: str) -> Replica:
    return await stage.add_replica()


async def test_bind_gives_a_linked_pair_and_says_so_everywhere(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """Annotations of pod and containers and the Leases name the same uuids, by one write per GPU and one more."""
    pod = await stage.add_pod(gpus=2, containers=("main", "helper"))
    await replica.knows(pod)

    assert await replica.bind(pod, node) == ""

    allocation = await stage.check_holds_exactly(pod)
    annotations = (await stage.pod(pod)).metadata.annotations
    uuids = ",".join(allocation.uuids)
    assert annotations[names.ALLOCATED] == f"{node}:{','.join(map(str, allocation.device_ids))}"
    assert annotations[names.UUIDS] == uuids
    for container in ("main", "helper"):
        assert annotations[names.CONTAINER_UUIDS_PREFIX + container] == uuids
        assert annotations[names.CONTAINER_DEVICES_PREFIX + container] == uuids
    machine = replica.mirror.ledger.nodes[node].machine
    assert machine.links[allocation.device_ids[0]][allocation.device_ids[1]] == "NV2"
    writes = [call for call in replica.proxy.requests if not call.startswith("GET")]
    assert len(writes) == 3


async def test_pod_that_the_mirror_has_not_seen_is_read(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """kube-scheduler may know a pod before we do; bind looks it up."""
    pod = await stage.add_pod(gpus=1)
    replica.mirror.ledger.drop_pod(pod.metadata.uid)

    assert await replica.bind(pod, node) == ""
    await stage.check_holds_exactly(pod)


# One fault on the Binding


@pytest.mark.parametrize(
    "fault",
    [cut_before, drop_answer, garbled, answering(500), answering(503), answering(429), answering_after(504)],
    ids=["cut before", "answer dropped", "garbled", "500", "503", "429", "504 after it was written"],
)
async def test_one_fault_on_the_binding_changes_nothing(
    stage: ExtenderHarness, node: str, replica: Replica, fault: Fault
) -> None:
    """An answer that does not come is asked for again, unchanged: the pod is bound once, with one set of GPUs."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, fault)

    assert await replica.bind(pod, node) == ""

    first = await stage.check_holds_exactly(pod)
    assert await replica.bind(pod, node) == ""
    assert await stage.check_holds_exactly(pod) == first
    assert len(await stage.leases()) == 2


async def test_repeat_is_answered_while_the_mirror_lags(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """A repeat that still sees the pod unbound finds what stands, adds nothing and keeps nothing of its own."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    unbound = replica.mirror.ledger.pods[pod.metadata.uid]
    assert await replica.bind(pod, node) == ""
    first = await stage.check_holds_exactly(pod)
    await replica.until(lambda: replica.mirror.ledger.allocation_of(pod.metadata.uid) is not None, "the bound pod")
    await replica.until(lambda: len(replica.mirror.ledger.leases_of(pod.metadata.uid)) == 2, "its Leases")

    for uuid in first.uuids:
        replica.mirror.ledger.drop_lease(_lease_name(replica, uuid, node))
    replica.mirror.ledger.put_pod(unbound)
    replica.mirror.ledger.assume("another", first)
    assert await replica.bind(pod, node) == ""

    assert await stage.check_holds_exactly(pod) == first
    assert len(await stage.leases()) == 2


def _lease_name(replica: Replica, uuid: str, node: str) -> str:
    devices = replica.mirror.ledger.nodes[node]
    return f"gpu-{node}-{devices.devices[devices.position_by_uuid[uuid]].id}"


async def test_pod_edited_between_read_and_bind(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """An edit moves the version under the Binding; bind sees that its Leases are held, and binds the new version."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, doing(lambda: stage.touch(pod)), times=2)

    assert await replica.bind(pod, node) == ""

    await stage.check_holds_exactly(pod)
    assert replica.proxy.count(BINDING) == 3


async def test_pod_edited_for_ever_is_given_up_cleanly(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """A pod that changes under every Binding is left to the next attempt, without Leases."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, doing(lambda: stage.touch(pod)), times=100)

    assert "changed faster" in await replica.bind(pod, node)
    assert await stage.leases() == {}


async def test_pod_filled_up_between_read_and_bind(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """The API server would bind it past its own limit, and never again take a status of kubelet's for it."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    filler = "y" * (ANNOTATIONS_BYTES_MAX - 40)
    replica.proxy.spoil(BINDING, doing(lambda: stage.touch(pod, filler)), times=1)

    assert names.REJECT_ANNOTATIONS in await replica.bind(pod, node)
    assert await stage.leases() == {}
    assert (await stage.pod(pod)).spec.node_name == ""


# Somebody else is there first


async def test_old_attempt_wakes_up_after_a_take_over(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """A Binding that was held up does not land once its reservation was taken back; another pod keeps the GPUs."""
    old = await stage.add_pod("old", gpus=8)
    new = await stage.add_pod("new", gpus=8)
    await replica.knows(old)
    other = await stage.add_replica()
    await other.knows(new)
    held = Held()
    replica.proxy.spoil(BINDING, held)

    binding = asyncio.create_task(replica.bind(old, node))
    await held.reached.wait()
    await stage.take_over(old)
    await other.until(lambda: not other.mirror.ledger.leases_of(old.metadata.uid), "the end of the reservation")
    assert await other.bind(new, node) == ""
    assert await held.release() == [409]

    assert "taken back" in await binding
    assert (await stage.pod(old)).spec.node_name == ""
    await stage.check_holds_exactly(new)
    assert await stage.check_no_double_use() == 8


async def test_take_over_that_comes_too_late_finds_the_pod_bound(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """A Lease marked after the Binding landed is not enough: the pod keeps its GPUs, and the repeat says so."""
    pod = await stage.add_pod(gpus=1)
    await replica.knows(pod)
    held = Held(after=True)
    replica.proxy.spoil(BINDING, held)

    binding = asyncio.create_task(replica.bind(pod, node))
    await held.reached.wait()
    with pytest.raises(AssertionError):
        await stage.take_over(pod)
    await held.release()

    assert await binding == ""
    await stage.check_holds_exactly(pod)


async def test_fenced_lease_is_not_relied_on(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """A new attempt does not build on a reservation that is being taken back; it takes the next best GPU."""
    pod = await stage.add_pod(gpus=1)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, answering(500), times=1000)
    held = Held()
    replica.proxy.spoil(BINDING, held)
    doubtful = asyncio.create_task(replica.bind(pod, node))
    await replica.until(lambda: len(replica.mirror.ledger.leases_of(pod.metadata.uid)) == 1, "the reservation")
    (uuid, lease), *_ = (await stage.leases()).items()
    path = paths.leases(names.SYSTEM_NAMESPACE, lease.metadata.name)
    await stage.api.patch(path, {"metadata": {"annotations": {names.LEASE_FENCED: "true"}}})

    other = await stage.add_replica()
    await other.knows(pod)
    assert await other.bind(pod, node) == ""

    allocation = await stage.allocation(pod)
    assert allocation is not None
    assert uuid not in allocation.uuids
    replica.proxy.heal()
    await doubtful
    assert await stage.allocation(pod) == allocation


async def test_adopted_lease_outlives_the_attempt_that_created_it(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """Two replicas bind one pod: when the first gives up it cannot delete the Lease that the second relies on."""
    pod = await stage.add_pod(gpus=1)
    other = await stage.add_replica()
    await asyncio.gather(replica.knows(pod), other.knows(pod))
    first, second = Held(), Held()
    replica.proxy.spoil(BINDING, first)
    replica.proxy.spoil(BINDING, answering(403, "Forbidden"))
    other.proxy.spoil(BINDING, second)

    one = asyncio.create_task(replica.bind(pod, node))
    await first.reached.wait()
    two = asyncio.create_task(other.bind(pod, node))
    await second.reached.wait()
    await stage.touch(pod)
    replica.proxy.spoil(POD_READ, answering(403, "Forbidden"))
    assert await first.release() == [409]
    assert "nor read" in await one

    assert len(await stage.leases()) == 1
    assert await second.release() == [409]
    assert await two == ""
    await stage.check_holds_exactly(pod)


async def test_leases_that_the_pod_holds_already_cost_two_calls_each(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """Each Lease of an earlier attempt, or of a gang's admission, is read once and written once; none is created. No
    bind shortens what is reserved: the others of a gang rely on it, however long the API server takes."""
    pod = await stage.add_pod(gpus=8)
    await replica.knows(pod)
    devices = replica.mirror.ledger.nodes[node].devices
    past, far = "2026-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"
    for number, device in enumerate(devices):
        deadline = far if number % 2 else past
        reservation = Reservation(node, "", holder_of(pod), "", "earlier", stage.now(), deadline)
        await stage.api.create(paths.leases(names.SYSTEM_NAMESPACE), lease_body(reservation, device.id, device.uuid))
    await replica.until(lambda: len(replica.mirror.ledger.leases_of(pod.metadata.uid)) == 8, "the reservation")

    assert await replica.bind(pod, node) == ""

    assert [replica.proxy.count(f"{verb} .*/leases") for verb in ("POST", "GET", "PUT")] == [0, 8, 8]
    await stage.check_holds_exactly(pod)
    deadlines = [lease.metadata.annotations[names.LEASE_DEADLINE] for lease in (await stage.leases()).values()]
    assert deadlines.count(far) == 4
    assert past not in deadlines


async def test_two_binds_of_one_pod_at_once_are_one(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """The second call waits for the first one's outcome; one for another node is refused meanwhile and afterwards."""
    elsewhere = await stage.add_node("b")
    await replica.until(lambda: elsewhere in replica.mirror.ledger.nodes, "the other report")
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    held = Held()
    replica.proxy.spoil(BINDING, held)

    first = asyncio.create_task(replica.bind(pod, node))
    await held.reached.wait()
    second = asyncio.create_task(replica.bind(pod, node))
    assert "under way" in await replica.bind(pod, elsewhere)
    await held.release()

    assert (await first, await second) == ("", "")
    await replica.until(lambda: replica.mirror.ledger.allocation_of(pod.metadata.uid) is not None, "the bound pod")
    assert "already bound" in await replica.bind(pod, elsewhere)
    allocation = await stage.check_holds_exactly(pod)
    assert set(await stage.leases()) == set(allocation.uuids)
    assert replica.proxy.count(BINDING) == 1


async def test_two_replicas_bind_one_pod_to_two_nodes(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """After a change of leader both may bind: one node gets the pod, and the other keeps no Lease of it."""
    elsewhere = await stage.add_node("b")
    other = await stage.add_replica()
    pod = await stage.add_pod(gpus=2)
    await asyncio.gather(replica.knows(pod), other.knows(pod))
    held = Held()
    replica.proxy.spoil(BINDING, held)

    one = asyncio.create_task(replica.bind(pod, node))
    await held.reached.wait()
    assert await other.bind(pod, elsewhere) == ""
    assert await held.release() == [409]

    assert f"already bound to node {elsewhere}" in await one
    await stage.check_holds_exactly(pod)
    assert len(await stage.leases()) == 2


async def test_binds_that_all_chose_before_any_has_reserved(stage: ExtenderHarness, replica: Replica) -> None:
    """Four binds at once, all of which have read what is free before the first Lease is written: four different GPUs,
    four Leases; the fifth pod finds the node full."""
    node = await stage.add_node("small", "t4-4")
    await replica.until(lambda: node in replica.mirror.ledger.nodes, "the report")
    pods = [await stage.add_pod(f"p{number}", gpus=1) for number in range(5)]
    for pod in pods:
        await replica.knows(pod)
    held = [Held() for _ in range(4)]
    for each in held:
        replica.proxy.spoil(LEASE_CREATE, each)

    binding = [asyncio.create_task(replica.bind(pod, node)) for pod in pods[:4]]
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(each.reached.wait() for each in held))
    assert await stage.leases() == {}
    assert await asyncio.gather(*(each.release() for each in held)) == [[201]] * 4
    assert await asyncio.gather(*binding) == [""] * 4

    given = [(await stage.check_holds_exactly(pod)).uuids for pod in pods[:4]]
    assert len({uuid for uuids in given for uuid in uuids}) == len(await stage.leases()) == 4
    assert "too few free GPUs" in await replica.bind(pods[4], node)
    assert len(await stage.leases()) == 4


async def test_lost_race_takes_the_next_best_set_of_the_node(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """A GPU that turns out taken is replaced on the same node, and the Lease that is not needed any more goes back."""
    first = await stage.add_pod("first", gpus=1)
    second = await stage.add_pod("second", gpus=2)
    other = await stage.add_replica()
    await asyncio.gather(replica.knows(second), other.knows(first))
    replica.proxy.spoil(LEASE_CREATE, doing(lambda: other.bind(first, node)))

    assert await replica.bind(second, node) == ""

    taken = await stage.check_holds_exactly(first)
    allocation = await stage.check_holds_exactly(second)
    assert not set(taken.uuids) & set(allocation.uuids)
    assert len(await stage.leases()) == 3


async def test_lost_race_for_the_last_set_fails_cleanly(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """When no set is left the bind fails and nothing of it stays; the winner keeps what it has."""
    first = await stage.add_pod("first", gpus=1)
    second = await stage.add_pod("second", gpus=8)
    other = await stage.add_replica()
    await asyncio.gather(replica.knows(second), other.knows(first))
    replica.proxy.spoil(LEASE_CREATE, doing(lambda: other.bind(first, node)))

    assert "too few free GPUs" in await replica.bind(second, node)

    await stage.check_holds_exactly(first)
    assert len(await stage.leases()) == 1
    assert node in replica.binder.failed_nodes(second.metadata.uid)


async def test_another_pods_lease_is_never_deleted(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """The clean-up of a bind that lost deletes what it created itself, with uid and version; never the winner's."""
    winner = await stage.add_pod("winner", gpus=1)
    loser = await stage.add_pod("loser", gpus=8)
    await asyncio.gather(replica.knows(winner), replica.knows(loser))
    assert await replica.bind(winner, node) == ""
    before = await stage.leases()
    await replica.until(lambda: replica.mirror.ledger.allocation_of(winner.metadata.uid) is not None, "the bound pod")
    await replica.until(lambda: len(replica.mirror.ledger.leases_of(winner.metadata.uid)) == 1, "its Lease")

    replica.mirror.ledger.put_pod(winner)
    for lease in before.values():
        replica.mirror.ledger.drop_lease(lease.metadata.name)
    assert await replica.bind(loser, node) != ""

    after = await stage.leases()
    assert [lease.metadata.uid for lease in after.values()] == [lease.metadata.uid for lease in before.values()]


async def test_report_that_changes_while_leases_are_written(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """The second round looks at the machine as it is then: positions of the old report mean nothing in the new."""
    first = await stage.add_pod("first", gpus=1)
    second = await stage.add_pod("second", gpus=1)
    other = await stage.add_replica()
    await asyncio.gather(replica.knows(second), other.knows(first))

    async def race_and_shrink() -> None:
        assert await other.bind(first, node) == ""
        report = report_json(node, "t4-4", ids=[7, 5, 0, 3], node_uid=replica.mirror.ledger.nodes[node].node_uid)
        await stage.api.patch(paths.gpunodestatuses(node, "status"), {"status": report["status"]})
        await replica.until(lambda: len(replica.mirror.ledger.nodes[node].devices) == 4, "the smaller machine")

    replica.proxy.spoil(LEASE_CREATE, doing(race_and_shrink))
    assert await replica.bind(second, node) == ""

    taken = await stage.check_holds_exactly(first)
    allocation = await stage.check_holds_exactly(second)
    assert not set(taken.uuids) & set(allocation.uuids)
    known = replica.mirror.ledger.nodes[node]
    assert [known.devices[known.position_by_uuid[uuid]].id for uuid in allocation.uuids] == list(allocation.device_ids)


async def fall_ill(stage: ExtenderHarness, replica: Replica, node: str, *ids: int) -> None:
    """Let the agent report that devices are ill, and wait until the extender knows it."""
    known = replica.mirror.ledger.nodes[node]
    before = known.usable
    status = report_json(node, "dgx1-v100", node_uid=known.node_uid)["status"]
    for device in status["devices"]:
        if device["id"] in ids:
            device["health"] = {"state": "unhealthy", "reason": "XID 79", "since": "2026-01-01T00:00:00Z"}
    await stage.api.patch(paths.gpunodestatuses(node, "status"), {"status": status})
    await replica.until(lambda: replica.mirror.ledger.nodes[node].usable != before, "the illness")


async def test_a_gpu_that_falls_ill_while_its_lease_is_written_is_replaced(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """The report comes between choice and Binding: the pod gets others, and no Lease of the first choice stays."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(LEASE_CREATE, doing(lambda: fall_ill(stage, replica, node, 0, 1, 2, 3)))

    assert await replica.bind(pod, node) == ""

    allocation = await stage.check_holds_exactly(pod)
    assert not {0, 1, 2, 3} & set(allocation.device_ids)


async def test_gpus_that_all_fall_ill_while_leases_are_written_are_given_back(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """Nothing else is left: no Binding, no Lease, and the answer says it, which becomes an event of the pod."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(LEASE_CREATE, doing(lambda: fall_ill(stage, replica, node, *range(8))))

    error = await replica.bind(pod, node)

    assert "became unhealthy or was withdrawn during the reservation" in error
    assert await stage.allocation(pod) is None
    assert await stage.leases() == {}


async def test_a_gpu_that_falls_ill_before_a_second_binding_is_not_bound(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """The first Binding is refused because the pod was edited; by the time of the second one the GPU is ill."""
    pod = await stage.add_pod(gpus=8)
    await replica.knows(pod)

    async def edit_and_fall_ill() -> None:
        await stage.touch(pod)
        await fall_ill(stage, replica, node, 3)

    replica.proxy.spoil(BINDING, doing(edit_and_fall_ill))
    error = await replica.bind(pod, node)

    assert "became unhealthy or was withdrawn during the reservation" in error
    assert await stage.allocation(pod) is None
    assert await stage.leases() == {}


# Certain failures


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_leases_that_cannot_be_created(stage: ExtenderHarness, node: str, replica: Replica, status: int) -> None:
    """While Leases cannot be written the bind fails, says why, leaves nothing, and the node is avoided for a while."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(LEASE_CREATE, answering(status), nth=2, times=1000)

    assert str(status) in await replica.bind(pod, node)

    assert await stage.leases() == {}
    assert replica.binder.failed_nodes(pod.metadata.uid) == {node}
    replica.proxy.heal()
    assert await replica.bind(pod, node) == ""
    await stage.check_holds_exactly(pod)


async def test_lease_whose_creation_was_never_answered_goes_back(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """A Lease that was written while every answer was lost is looked up and taken back too."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(LEASE_CREATE, answering_after(500), nth=2, times=1000)

    assert "500" in await replica.bind(pod, node)
    assert await stage.leases() == {}


async def test_refused_by_a_policy(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """A Binding that admission refuses fails with the reason, and nothing of it stays."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, answering(403, "Forbidden"))

    assert "403" in await replica.bind(pod, node)
    assert await stage.leases() == {}


async def test_pod_deleted_between_read_and_bind(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """A pod that is gone gets nothing, and nothing stays behind."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, doing(lambda: stage.delete(pod)))

    assert "no longer exists" in await replica.bind(pod, node)
    assert await stage.leases() == {}


async def test_pod_that_is_being_deleted(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """A pod that a finalizer still keeps is not bound any more."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    path = paths.pods(NAMESPACE, pod.metadata.name)
    await stage.api.patch(path, {"metadata": {"finalizers": ["test.example/keep"]}})
    replica.proxy.spoil(BINDING, doing(lambda: stage.delete(pod)))

    assert "being deleted" in await replica.bind(pod, node)
    assert await stage.leases() == {}
    await stage.api.patch(path, {"metadata": {"finalizers": None}})


async def test_successor_of_the_same_name_is_not_bound_for_its_predecessor(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """Identity is the uid: the Binding of a pod that was replaced does not touch the new one."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)

    async def replace() -> None:
        await stage.delete(pod)
        await stage.add_pod(gpus=2)

    replica.proxy.spoil(BINDING, doing(replace))

    assert "no longer exists" in await replica.bind(pod, node)
    assert (await stage.pod(pod)).spec.node_name == ""
    assert await stage.leases() == {}
    replica.mirror.ledger.drop_pod(pod.metadata.uid)
    assert "replaced by another" in await replica.bind(pod, node)


async def test_pod_that_somebody_else_bound(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """A pod bound past us has no GPUs of ours, and the answer says so."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    path = paths.binding(NAMESPACE, pod.metadata.name)
    body = {"metadata": {"name": pod.metadata.name}, "target": {"kind": "Node", "name": node}}
    replica.proxy.spoil(BINDING, doing(lambda: stage.api.create(path, body)))

    assert "without GPUs by somebody else" in await replica.bind(pod, node)
    assert await stage.leases() == {}


# In doubt


async def test_binding_in_doubt_keeps_the_leases_until_it_is_known(stage: ExtenderHarness, node: str) -> None:
    """While nobody answers, bind says so in time and the GPUs stay; the background finishes, the repeat succeeds."""
    replica = await stage.add_replica(answer_seconds=0.2)
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, drop_answer, times=1000)

    assert "stay reserved" in await replica.bind(pod, node)
    assert len(await stage.leases()) == 2

    replica.proxy.heal()
    await replica.binder.drain()
    assert await replica.bind(pod, node) == ""
    await stage.check_holds_exactly(pod)


async def test_refusal_after_an_unanswered_binding_proves_nothing(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """A copy of the Binding is still on its way when a repeat is refused: the Leases stay, and it may land."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    held = Held()
    replica.proxy.spoil(BINDING, held)
    replica.proxy.spoil(BINDING, answering(403, "Forbidden"))

    assert "may yet land" in await replica.bind(pod, node)

    assert len(await stage.leases()) == 2
    assert await held.release() == [201]
    await stage.check_holds_exactly(pod)
    await replica.until(lambda: replica.mirror.ledger.allocation_of(pod.metadata.uid) is not None, "the bound pod")
    assert await replica.bind(pod, node) == ""


async def test_pod_gone_after_an_unanswered_binding_keeps_the_leases(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """The pod may have been bound and force-deleted with its containers running: only the controllers may decide."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, drop_answer)
    replica.proxy.spoil(BINDING, doing(lambda: stage.delete(pod)))

    assert "may have landed" in await replica.bind(pod, node)
    assert len(await stage.leases()) == 2


async def test_pod_that_cannot_be_read_after_an_unanswered_binding(
    stage: ExtenderHarness, node: str, replica: Replica
) -> None:
    """No answer but the API server's own lets the Leases go: being forbidden to look is none."""
    pod = await stage.add_pod(gpus=2)
    await replica.knows(pod)
    replica.proxy.spoil(BINDING, drop_answer)
    replica.proxy.spoil(POD_READ, answering(403, "Forbidden"), times=1)

    assert await replica.bind(pod, node) in {"", "the API server has not answered within 6 s; the GPUs stay reserved"}

    await replica.binder.drain()
    await stage.check_holds_exactly(pod)


# Every call, every fault

FAULTS: dict[str, Fault] = {
    "cut before": cut_before,
    "answer dropped": drop_answer,
    "429": answering(429),
    "500": answering(500),
    "503": answering(503),
    "500 after it was written": answering_after(500),
    "garbled": garbled,
}
CALLS_MAX = 8


@pytest.mark.parametrize("name", list(FAULTS))
async def test_any_one_call_may_fail(stage: ExtenderHarness, node: str, replica: Replica, name: str) -> None:
    """Whichever call of a bind fails, in whichever way: bound with Leases, or unbound without; the repeat succeeds."""
    for number in range(1, CALLS_MAX + 1):
        await _check_with_faults(stage, node, replica, {number: FAULTS[name]})


@pytest.mark.long
@pytest.mark.parametrize("names_of_two", list(itertools.product(FAULTS, FAULTS)), ids=" then ".join)
async def test_any_two_calls_may_fail(
    stage: ExtenderHarness, node: str, replica: Replica, names_of_two: tuple[str, str]
) -> None:
    """The same for every pair of calls."""
    for first, second in itertools.combinations(range(1, CALLS_MAX + 1), 2):
        await _check_with_faults(
            stage, node, replica, {first: FAULTS[names_of_two[0]], second: FAULTS[names_of_two[1]]}
        )


async def _check_with_faults(stage: ExtenderHarness, node: str, replica: Replica, faults: dict[int, Fault]) -> None:
    pod = await stage.add_pod(f"at-{'-'.join(map(str, faults))}", gpus=2)
    await replica.knows(pod)
    for number, fault in faults.items():
        replica.proxy.spoil(r".", fault, nth=number)

    error = await replica.bind(pod, node)
    await replica.binder.drain()
    replica.proxy.heal()

    allocation = await stage.allocation(pod)
    if allocation is None:
        assert error
        assert await stage.leases() == {}, (faults, error)
    else:
        await stage.check_holds_exactly(pod)
    assert await replica.bind(pod, node) == ""
    again = await stage.check_holds_exactly(pod)
    assert allocation in {None, again}
    assert replica.mirror.ledger.assumed(pod.metadata.uid) is None
    await stage.delete(pod)
    for lease in (await stage.leases()).values():
        await stage.api.delete(paths.leases(names.SYSTEM_NAMESPACE, lease.metadata.name))
    await replica.until(lambda: not replica.mirror.ledger.leases_of(pod.metadata.uid), "the end of the Leases")


# GPUs of a reservation


async def _reserving(stage: ExtenderHarness, node: str, replica: Replica, *pods: str, gpus: int = 2) -> list[Pod]:
    """Reserve two GPUs and create pods that name the reservation; return them when the replica knows all of it."""
    reservation = await stage.reserve(node, 2, 3)
    found = [await stage.add_pod(name, gpus=gpus, annotations={names.RESERVATION: reservation}) for name in pods]
    for pod in found:
        await replica.knows(pod)
    await replica.until(lambda: replica.mirror.reservation_of(found[0]) is not None, "the reservation")
    await replica.until(lambda: len(replica.mirror.ledger.leases) == 2, "its Leases")
    return found


async def _kept(stage: ExtenderHarness) -> int:
    """Return how many Leases the reservation holds itself."""
    leases = (await stage.leases()).values()
    return sum(lease.spec.holder_identity.startswith(RESERVATION_NAMESPACE) for lease in leases)


@pytest.mark.parametrize("name", list(FAULTS))
async def test_leases_of_a_reservation_are_taken_over_or_go_back(
    stage: ExtenderHarness, node: str, replica: Replica, name: str
) -> None:
    """Whichever call fails: bound with both and they are the pod's, or unbound and both the reservation's again. None
    is created beside them, none deleted."""
    (pod,) = await _reserving(stage, node, replica, "p")
    for number in range(1, CALLS_MAX + 1):
        replica.proxy.spoil(r".", FAULTS[name], nth=number)
        await replica.bind(pod, node)
        await replica.binder.drain()
        replica.proxy.heal()
        if await stage.allocation(pod) is not None:
            break
        assert len(await stage.leases()) == 2
        await replica.until(lambda: replica.mirror.ledger.assumed(pod.metadata.uid) is None, "the end of the bind")
    assert await replica.bind(pod, node) == ""
    allocation = await stage.check_holds_exactly(pod)
    assert set(allocation.device_ids) == {2, 3}
    assert len(await stage.leases()) == 2


async def test_binding_that_is_refused_gives_them_back(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """The reservation has its GPUs again, and they were nobody's in between."""
    (pod,) = await _reserving(stage, node, replica, "p")
    replica.proxy.spoil(BINDING, answering(403, "Forbidden"))

    assert "403" in await replica.bind(pod, node)
    assert await _kept(stage) == 2
    assert not any(call.startswith("DELETE") for call in replica.proxy.requests)


async def test_one_of_two_pods_gets_what_is_reserved(stage: ExtenderHarness, node: str, replica: Replica) -> None:
    """Two extenders take the same Leases over at once: the version decides, and the other pod waits."""
    first, second = await _reserving(stage, node, replica, "a", "b")
    other = await stage.add_replica()
    for pod in (first, second):
        await other.knows(pod)
    await other.until(lambda: other.mirror.reservation_of(first) is not None, "the reservation")
    await other.until(lambda: len(other.mirror.ledger.leases) == 2, "its Leases")

    answers = await asyncio.gather(replica.bind(first, node), other.bind(second, node))

    assert answers.count("") <= 1
    bound = [pod for pod in (first, second) if await stage.allocation(pod) is not None]
    assert len(bound) == answers.count("")
    assert len(await stage.leases()) == 2
    assert await _kept(stage) == (0 if bound else 2)


# Many pods, two extenders


@pytest.mark.parametrize("spoiled", [False, True], ids=["healthy network", "faults at random"])
async def test_two_extenders_share_a_machine_room(
    stage: ExtenderHarness, node: str, replica: Replica, spoiled: bool
) -> None:
    """Two extenders bind the same pods at once: no GPU is used twice.

    Of a pod that both reserved for, the slower one's Lease may stay; swept as controllers do, every GPU finds its pod.
    """
    nodes = [node, await stage.add_node("b", "dgx-h100"), await stage.add_node("c", "l40s-8")]
    other = await stage.add_replica()
    await replica.until(lambda: set(nodes) <= set(replica.mirror.ledger.nodes), "the reports")
    sizes = [1, 2, 4, 1, 3, 2, 1, 4, 2, 1, 1, 2]
    pods = [await stage.add_pod(f"p{number}", gpus=size) for number, size in enumerate(sizes)]
    for pod in pods:
        await asyncio.gather(replica.knows(pod), other.knows(pod))
    if spoiled:
        for number, (proxy, fault) in enumerate(itertools.product((replica.proxy, other.proxy), FAULTS.values())):
            proxy.spoil(r"(leases|binding)", fault, nth=1 + number)

    async def place(extender: Replica, shift: int) -> None:
        order = pods[shift:] + pods[:shift]
        for pod in order:
            await _bind_anywhere(extender, pod, nodes)

    await asyncio.gather(place(replica, 0), place(other, 6))
    await asyncio.gather(replica.binder.drain(), other.binder.drain())
    replica.proxy.heal()
    other.proxy.heal()
    await stage.check_no_double_use()
    await stage.sweep(pods)
    await replica.until(lambda: _holders(replica) == _bound(replica), "the end of the stray Leases")
    for pod in pods:
        await _bind_anywhere(replica, pod, nodes)

    assert await stage.check_no_double_use() == sum(sizes)
    for pod in pods:
        await stage.check_holds_exactly(pod)


def _holders(replica: Replica) -> set[tuple[str, str]]:
    return {(lease.holder.uid, lease.device_uuid) for lease in replica.mirror.ledger.leases.values()}


def _bound(replica: Replica) -> set[tuple[str, str]]:
    ledger = replica.mirror.ledger
    found = ((uid, ledger.allocation_of(uid)) for uid in ledger.pods)
    return {(uid, uuid) for uid, allocation in found if allocation is not None for uuid in allocation.uuids}


async def _bind_anywhere(extender: Replica, pod: Pod, nodes: list[str]) -> None:
    """Try the nodes in order, as kube-scheduler's retries would, until the pod is bound somewhere."""
    for candidate in nodes:
        error = await extender.bind(pod, candidate)
        if error == "" or "already bound" in error:
            return
