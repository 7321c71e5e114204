"""The whole chain on real nodes: driver's library, agent, ledger, runtime, container.

The agent uses the real NVML bindings; the library behind them is a mock, which a test changes under the running node.
Containers use NVIDIA's own runtime, so /dev shows which GPUs they can use.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from atoll.api import names
from devcluster.machines import GpuMachine
from tests.e2e.machine_room import (
    HOPPER,
    INSTANCES,
    SPLIT_GPU,
    SWITCHES,
    MachineRoom,
    device_nodes,
    looking_container,
    looking_pod,
    nodes_of,
    runtime_class,
)
from tests.e2e.world import RealCluster, Seen

pytestmark = pytest.mark.e2e

MIG_RESOURCE = names.mig_resource(INSTANCES[0][0])


def devices(world: RealCluster, node: str) -> list[dict[str, Any]]:
    """Return the devices of a node as its agent reports them."""
    found: list[dict[str, Any]] = world.report(node)["status"]["devices"]
    return found


def device(world: RealCluster, node: str, uuid: str) -> dict[str, Any]:
    """Return one device by its uuid."""
    return next(one for one in devices(world, node) if one["uuid"] == uuid)


def is_instance(one: dict[str, Any]) -> bool:
    """Tell whether a device is a MIG instance."""
    return bool(one.get("mig", {}).get("profile"))


def allocatable(world: RealCluster, node: str, resource: str) -> int:
    """Return how much of a resource the Node offers."""
    status = world.cluster.api.get(f"/api/v1/nodes/{node}")["status"]
    return int(status["allocatable"].get(resource, 0))


def container_id(world: RealCluster, name: str) -> str:
    """Return the id of the container that runs in a pod of one; empty while none does."""
    statuses = world.get(name)["status"].get("containerStatuses", [])
    return next((str(one.get("containerID", "")) for one in statuses if "running" in one["state"]), "")


def test_the_report_is_what_the_drivers_library_tells(machine_room: MachineRoom, room_world: RealCluster) -> None:
    """Uuid, index, minor number, links and nearest adapter of every GPU; the counts on the Node follow from them."""
    for node, machine in machine_room.nvidia.items():
        whole = {one["index"]: one for one in devices(room_world, node) if not is_instance(one)}
        told = {index: machine.file.facts[f"gpu.{index}.uuid"] for index in range(len(machine.file.order))}
        assert {index: one["uuid"] for index, one in whole.items()} == told
        assert [whole[index]["minor"] for index in sorted(whole)] == list(machine.file.order)

    links = room_world.report("hopper")["status"]["links"]
    assert links["nvswitch"] is True
    assert {one["island"] for one in devices(room_world, "hopper")} == {"nvlink-group-0"}
    assert adapters(room_world, "hopper") == {frozenset(group) for group in SWITCHES["hopper"]}
    room_world.wait(lambda: allocatable(room_world, "hopper", names.GPU_RESOURCE) == 8, "hopper's count")
    room_world.wait(lambda: allocatable(room_world, "ampere", names.GPU_RESOURCE) == 3, "ampere's count of whole GPUs")
    room_world.wait(lambda: allocatable(room_world, "ampere", MIG_RESOURCE) == len(INSTANCES), "the count of instances")


def adapters(world: RealCluster, node: str) -> set[frozenset[int]]:
    """Return the minor numbers of the GPUs below each network adapter's switch; minor numbers follow the slots here."""
    minors = [one["minor"] for one in devices(world, node)]
    nics = world.report(node)["status"]["links"]["nics"]
    return {frozenset(minors[at] for at, cell in enumerate(nic["cells"]) if cell == "PIX") for nic in nics}


def test_a_pair_of_gpus_shares_an_adapter_where_all_else_is_equal(room_world: RealCluster) -> None:
    """Behind switches every pair is equal by NVLink: a pod of two gets GPUs below one PCIe switch."""
    room_world.claim("two", 2, models=["nvidia-h100"])
    room_world.create(looking_pod(room_world, "pair", "two"))
    room_world.wait_running("pair")
    found = frozenset(int(node.removeprefix("nvidia")) for node in device_nodes(room_world, "pair"))

    assert found in adapters(room_world, "hopper")


def test_claims_of_a_mig_profile_get_an_instance_each_by_uuid(
    machine_room: MachineRoom, room_world: RealCluster
) -> None:
    """Variable and device nodes are those of one instance; a whole GPU that is split is nobody's."""
    world = room_world
    world.claim("slice", 1, migProfile=INSTANCES[0][0])
    facts = machine_room.machines["ampere"].file.facts
    instances = {facts[f"gpu.{SPLIT_GPU}.mig.{number}.uuid"] for number in range(len(INSTANCES))}
    given = set()
    for name in ("first", "second"):
        world.create(looking_pod(world, name, "slice"))
        world.wait_running(name)
        seen = world.seen(name)
        assert seen.cuda == seen.nvidia
        assert device_nodes(world, name) == {f"nvidia{facts[f'gpu.{SPLIT_GPU}.minor']}"}
        given |= set(seen.nvidia)
    assert given == instances

    world.create(looking_pod(world, "third", "slice"))
    assert MIG_RESOURCE in world.wait_rejected("third")
    world.claim("four", 4, models=["nvidia-a100"])
    world.create(looking_pod(world, "four", "four"))
    assert names.GPU_RESOURCE in world.wait_rejected("four")


@pytest.fixture
def hopper(machine_room: MachineRoom, room_world: RealCluster) -> Iterator[GpuMachine]:
    """The machine of hopper, whole again afterwards, and what it suffered forgiven."""
    machine = machine_room.machines["hopper"]
    yield machine
    machine.file.heal()
    machine.plug()
    room_world.wait(
        lambda: all(one["health"]["state"] == "healthy" for one in devices(room_world, "hopper")), "hopper to recover"
    )
    release(room_world, "hopper", [one["uuid"] for one in devices(room_world, "hopper") if incidents(one)])


def incidents(one: dict[str, Any]) -> list[tuple[str, int]]:
    """Return what is wrong with a device, as (kind, code)."""
    told = one.get("incidents", [])
    return [(incident["kind"], incident.get("code", 0)) for incident in told if not incident.get("endedTime")]


def release(world: RealCluster, node: str, uuids: Sequence[str]) -> None:
    """Say as an administrator that the incidents of these GPUs are over."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    body = {"spec": {"releases": [{"uuid": uuid, "time": now, "by": "tests", "reason": "repaired"} for uuid in uuids]}}
    done = world.kubectl("patch", "gpunodestatus", node, "--type=merge", "-p", json.dumps(body))
    assert done.returncode == 0, done.stderr


def test_a_reboot_that_renumbers_changes_no_containers_gpu(
    machine_room: MachineRoom, room_world: RealCluster, hopper: GpuMachine
) -> None:
    """By uuid, and by number under a runtime that isolates, a container finds the same GPUs; by the driver's bare
    numbers it would find others, so its pod is evicted."""
    world = room_world
    runtime_class(world, "plain", "runc")
    world.claim("by-uuid", 2, models=["nvidia-h100"])
    world.claim("by-number", 2, models=["nvidia-h100"], visibleDevices="index")
    world.create(looking_pod(world, "uuid", "by-uuid"))
    world.create(looking_pod(world, "number", "by-number"))
    world.create(looking_pod(world, "bare-number", "by-number", runtimeClassName="plain"))
    kept = ("uuid", "number")
    for name in (*kept, "bare-number"):
        world.wait_running(name)
    before = {name: (world.seen(name), device_nodes(world, name)) for name in kept}
    containers = {name: container_id(world, name) for name in kept}
    bare = world.seen("bare-number")
    boot = world.report("hopper")["status"]["bootId"]
    assert bare.cuda == tuple(str(device(world, "hopper", uuid)["index"]) for uuid in bare.nvidia)
    assert before["number"][0].cuda == ("0", "1")

    machine_room.reboot(HOPPER, order=tuple(reversed(hopper.file.order)))

    world.wait(lambda: world.report("hopper")["status"]["bootId"] != boot, "a report of the new boot")
    for name in kept:
        world.wait(lambda name=name: container_id(world, name) not in ("", containers[name]), f"{name} to start again")
        after: tuple[Seen, set[str]] = (world.seen(name), device_nodes(world, name))
        assert after == before[name]
        assert after[1] == nodes_of(world, "hopper", after[0].nvidia)
    world.wait_event("bare-number", names.REASON_GPUS_RENUMBERED)
    world.wait(lambda: "bare-number" not in {pod["metadata"]["name"] for pod in world.pods()}, "it to be evicted")


def test_a_gpu_that_is_lost_under_a_running_pod_is_given_to_nobody(room_world: RealCluster, hopper: GpuMachine) -> None:
    """The other seven stay usable. A container that starts again does not get another GPU in its place."""
    world = room_world
    world.claim("two", 2, models=["nvidia-h100"])
    world.claim("six", 6, models=["nvidia-h100"])
    world.claim("one", 1, models=["nvidia-h100"])
    world.create(looking_pod(world, "train", "two"))
    world.wait_running("train")
    sick, _ = world.seen("train").nvidia
    index = device(world, "hopper", sick)["index"]

    hopper.file.event(index, 79).fail(index)
    hopper.plug()

    world.wait(lambda: device(world, "hopper", sick)["health"]["state"] != "healthy", "the GPU to be reported")
    world.wait_event("train", names.REASON_GPU_ILL)
    world.create(looking_pod(world, "rest", "six"))
    world.wait_running("rest")
    assert sick not in world.seen("rest").nvidia
    world.create(looking_pod(world, "late", "one"))
    world.wait_rejected("late")
    world.delete("rest")
    world.wait_running("late")

    world.kubectl("exec", "train", "--", "kill", "-TERM", "1")
    world.wait(
        lambda: "unresolvable CDI devices" in start_problem(world, "train"), "the runtime to refuse the container"
    )
    assert sick in start_problem(world, "train")


def test_a_quarantined_gpu_stays_with_its_pod_and_goes_to_no_other(room_world: RealCluster, hopper: GpuMachine) -> None:
    """After an uncorrectable error the container that holds the GPU starts again with it; nobody new gets it until an
    administrator releases it."""
    world = room_world
    world.claim("one", 1, models=["nvidia-h100"])
    world.claim("eight", 8, models=["nvidia-h100"])
    world.create(looking_pod(world, "train", "one"))
    world.wait_running("train")
    before = (world.seen("train"), device_nodes(world, "train"))
    (sick,) = before[0].nvidia

    hopper.file.event(device(world, "hopper", sick)["index"], 48)
    hopper.plug()
    world.wait(lambda: ("xid", 48) in incidents(device(world, "hopper", sick)), "the error to be reported")
    world.wait_event("train", names.REASON_GPU_ILL)
    world.restart_container("train")

    assert (world.seen("train"), device_nodes(world, "train")) == before
    world.delete("train")
    world.wait(lambda: not world.leases(), "its GPU to be free")
    world.create(looking_pod(world, "whole", "eight"))
    world.wait_rejected("whole")
    release(world, "hopper", [sick])
    world.wait_running("whole")
    assert sick in world.seen("whole").nvidia


def start_problem(world: RealCluster, name: str) -> str:
    """Return why the container of a pod does not start, or did not last time."""
    (status,) = world.get(name)["status"]["containerStatuses"]
    states = (status["state"], status.get("lastState", {}))
    return " ".join(str(told.get("message", "")) for state in states for told in state.values())


def test_containers_of_a_split_claim_restart_with_their_own_part(room_world: RealCluster) -> None:
    """Each container of the pod finds its own device nodes again, and who asked for none still finds none."""
    world = room_world
    world.claim("three", 3, models=["nvidia-h100"])
    counts = {"trainer": 2, "loader": 1, "exporter": None}
    containers = [looking_container(world, name, gpus=count) for name, count in counts.items()]
    world.create(looking_pod(world, "split", "three", containers=containers))
    world.wait_running("split")
    before = {name: (world.seen("split", name), device_nodes(world, "split", name)) for name in counts}

    for name in ("loader", "exporter"):
        world.restart_container("split", name)

    assert {name: (world.seen("split", name), device_nodes(world, "split", name)) for name in counts} == before
