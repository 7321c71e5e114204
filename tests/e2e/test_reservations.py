"""Two teams and one reservation on a real control plane: only one may use its GPUs, and they return to it."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from atoll.api import names
from atoll.api.times import text_of
from devcluster.installation import Installation
from tests.e2e.world import RealCluster, unless_missing

pytestmark = pytest.mark.e2e

PATH = "/apis/gpu.scheduling/v1/gpureservations"
MODEL = ["nvidia-l40s"]


class Reserved:
    """A reservation of one test, named like its namespace."""

    def __init__(self, world: RealCluster) -> None:
        self.world, self.name = world, f"nightly-{world.namespace}"

    def create(self, count: int, **spec: Any) -> None:
        """Reserve GPUs of lovelace for the pods of the test's namespace."""
        shape = {"count": count, "models": MODEL, **spec.pop("shape", {})}
        spec = {"shape": shape, "namespaces": [self.world.namespace], **spec}
        head = {"apiVersion": names.API_VERSION, "kind": "GpuReservation", "metadata": {"name": self.name}}
        self.world.cluster.api.request("POST", PATH, head | {"spec": spec})

    def delete(self) -> None:
        """Delete it, unless it is gone."""
        with unless_missing():
            self.world.cluster.api.request("DELETE", f"{PATH}/{self.name}")

    def status(self) -> dict[str, Any]:
        """Return its status."""
        found = self.world.maybe(f"{PATH}/{self.name}") or {}
        status: dict[str, Any] = found.get("status", {})
        return status

    def wait(self, phase: str, *, idle: int, used: int) -> None:
        """Wait for a phase and these counts."""
        wanted = {"phase": phase, "idle": idle, "used": used}
        self.world.wait(lambda: wanted.items() <= self.status().items(), f"{wanted}, not {self.status()}")

    def devices(self, node: str = "lovelace") -> set[int]:
        """Return the device ids on a node that belong to it."""
        return {device for entry in self.status()["nodes"] if entry["node"] == node for device in entry["ids"]}

    def pod(self, world: RealCluster, name: str, claim: str, **options: Any) -> None:
        """Create a pod that names it."""
        world.create(self.pod_body(world, name, claim, **options))

    def pod_body(self, world: RealCluster, name: str, claim: str, **options: Any) -> dict[str, Any]:
        """Return a pod that names it."""
        body = world.pod_body(name, claim, **options)
        body["metadata"]["annotations"][names.RESERVATION] = self.name
        return body

    def gang(self, world: RealCluster, name: str, count: int, claim: str) -> list[str]:
        """Create a gang of pods that name it; return their names."""
        members = [f"{name}-{number}" for number in range(count)]
        for member in members:
            body = self.pod_body(world, member, claim)
            body["metadata"]["annotations"] |= {names.GANG: name, names.GANG_SIZE: str(count)}
            world.create(body)
        return members


@pytest.fixture
def reserved(world: RealCluster) -> Iterator[Reserved]:
    """A reservation that is gone after the test."""
    found = Reserved(world)
    yield found
    found.delete()
    world.wait(lambda: not leases_of(world, found), "the reservation's GPUs to be free")


def leases_of(world: RealCluster, reserved: Reserved) -> list[Any]:
    """Return the Leases that the reservation holds itself."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases"
    holder = f"@reservation/{reserved.name}/"
    return [
        one for one in world.cluster.api.get(path)["items"] if one["spec"].get("holderIdentity", "").startswith(holder)
    ]


def test_two_teams_and_one_reservation(installation: Installation, world: RealCluster, reserved: Reserved) -> None:
    """One team's nightly job finds its GPUs though the other has taken all else, gives them back to the reservation and
    not to who waits, and runs nowhere else; the other team may not use it, and is told so."""
    with RealCluster.of_one_test(installation) as other:
        for each in (world, other):
            each.claim("two", 2, models=MODEL)
            each.claim("four", 4, models=MODEL)
        reserved.create(4)
        reserved.wait("Active", idle=4, used=0)

        other.pod("all-else", "four")
        other.wait_running("all-else")
        other.pod("greedy", "two")
        other.wait_rejected("greedy")
        reserved.pod(other, "stranger", "two")
        assert names.REJECT_RESERVATION_FOREIGN in other.wait_rejected("stranger")
        reserved.pod(world, "nightly", "two")
        world.wait_running("nightly")
        reserved.wait("Active", idle=2, used=2)
        allocation = world.allocation("nightly")
        assert allocation is not None
        assert set(allocation.device_ids) <= reserved.devices()

        world.delete("nightly")
        reserved.wait("Active", idle=4, used=0)
        reserved.pod(world, "again", "four")
        world.wait_running("again")
        reserved.pod(world, "waits", "two")
        other.delete("all-else")
        other.wait_running("greedy")
        assert world.wait_rejected("waits")
        assert world.get("waits")["spec"].get("nodeName") is None, "two GPUs are free beside the reservation"
        world.delete("again")
        world.wait_running("waits")
        world.check_audit()


def test_its_end_frees_what_nobody_uses_and_leaves_the_rest(world: RealCluster, reserved: Reserved) -> None:
    """At its end, and when it is deleted, idle GPUs are everybody's; a pod that runs keeps its own until it ends."""
    world.claim("two", 2, models=MODEL)
    world.claim("all", 8, models=MODEL)
    reserved.create(8, shape={"unit": "node"})
    reserved.wait("Active", idle=8, used=0)
    reserved.pod(world, "runs", "two")
    world.wait_running("runs")

    ends = {"spec": {"ends": text_of(0)}}
    done = world.kubectl("patch", "gpureservation", reserved.name, "--type=merge", f"-p={ends}".replace("'", '"'))
    assert done.returncode == 0, done.stderr
    reserved.wait("Ended", idle=0, used=2)
    reserved.pod(world, "late", "two")
    assert names.REJECT_RESERVATION_OVER in world.wait_rejected("late")
    world.pod("anybody", "two")
    world.wait_running("anybody")
    assert world.get("runs")["status"]["phase"] == "Running"
    world.delete("runs")
    world.delete("late")
    world.delete("anybody")
    reserved.delete()
    world.pod("everybody", "all")
    world.wait_running("everybody")


def test_its_gpus_return_when_the_owner_of_a_pod_is_deleted(world: RealCluster, reserved: Reserved) -> None:
    """A deleted Job takes its pods with it, and the reservation has their GPUs again. When the reservation is deleted
    first, the pods keep theirs, and all are free once their Job is deleted."""
    world.claim("two", 2, models=MODEL)
    world.claim("all", 8, models=MODEL)
    reserved.create(4)
    for is_deleted in (False, True):
        reserved.wait("Active", idle=4, used=0)
        pod = reserved.pod_body(world, "nightly", "two")
        template = {"metadata": {**pod["metadata"], "name": None}, "spec": {**pod["spec"], "restartPolicy": "Never"}}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "nightly"}, "spec": {"template": template}}
        done = world.kubectl("create", "-f", "-", text=yaml.safe_dump(job))
        assert done.returncode == 0, done.stderr
        reserved.wait("Active", idle=2, used=2)
        (name,) = (one["metadata"]["name"] for one in world.pods())
        world.wait_running(name)
        if is_deleted:
            reserved.delete()
            world.wait(lambda: not leases_of(world, reserved), "what was idle to be free")
            assert world.get(name)["status"]["phase"] == "Running"
            assert len(world.leases()) == 2
        assert world.kubectl("delete", "job", "nightly", "--cascade=background").returncode == 0
        world.wait(lambda: not world.pods(), "the pod to go with its Job")
    world.pod("everybody", "all")
    world.wait_running("everybody")
    world.check_audit()


def test_a_gang_starts_whole_within_it_or_waits(world: RealCluster, reserved: Reserved) -> None:
    """Its containers see GPUs of the reservation, which return to it; a gang behind it waits beside free GPUs."""
    world.claim("two", 2, models=MODEL)
    reserved.create(4)
    reserved.wait("Active", idle=4, used=0)
    first = reserved.gang(world, "first", 2, "two")
    for name in first:
        world.wait_running(name)
    reserved.wait("Active", idle=0, used=4)
    uuids = {one["id"]: one["uuid"] for one in world.report("lovelace")["status"]["devices"]}
    own = {uuids[device] for device in reserved.devices()}
    seen = [world.seen(name).nvidia for name in first]
    assert sorted(uuid for each in seen for uuid in each) == sorted(own)

    second = reserved.gang(world, "second", 2, "two")
    world.wait_event(second[0], names.REASON_GANG_WAITING)
    assert all("nodeName" not in world.get(name)["spec"] for name in second)
    for name in first:
        world.delete(name)
    for name in second:
        world.wait_running(name)
    assert {uuid for name in second for uuid in world.seen(name).nvidia} == own
