"""Isolation by runtime set-up: devices in /dev of real containers with NVIDIA's own runtime.

The table of docs/runtimes.md names these tests. The image sets NVIDIA_VISIBLE_DEVICES=all, as CUDA images do. Each
set-up that this machine cannot run has a probe, which fails once the machine can run it.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.api import names
from devcluster.errors import AdminApiError
from devcluster.machines import GpuMachine
from devcluster.nvidia import DEVICE_MAJOR, STRICT_HANDLER
from tests.e2e.machine_room import (
    ASK_FOR_ALL,
    MachineRoom,
    device_nodes,
    looking_container,
    looking_pod,
    nodes_of,
    runtime_class,
)
from tests.e2e.world import RealCluster, Seen

pytestmark = pytest.mark.e2e

ALL_OF_HOPPER = {f"nvidia{minor}" for minor in range(8)}
ALL_OF_AMPERE = {f"nvidia{minor}" for minor in range(4)}
BY_HAND = {"runtimeClassName": names.RUNTIME_CLASS}
CDI_ANNOTATION = {"cdi.k8s.io/test": "nvidia.com/gpu=all"}
"""By which engines and device plugins ask a runtime for devices."""


@pytest.fixture
def one(room_world: RealCluster) -> RealCluster:
    """The world with a claim `one` for one of hopper's GPUs, and `small` for one of ampere's."""
    room_world.claim("one", 1, models=["nvidia-h100"])
    room_world.claim("small", 1, models=["nvidia-a100"])
    return room_world


def unclaimed(world: RealCluster, name: str, node: str, **spec: Any) -> set[str]:
    """Start a pod that asks Atoll for nothing and the runtime for everything; return its device nodes."""
    body = looking_pod(world, name, None, nodeSelector={"kubernetes.io/hostname": node}, **spec)
    body["spec"]["containers"][0]["env"] = [ASK_FOR_ALL]
    body["metadata"]["annotations"].update(CDI_ANNOTATION)
    world.create(body)
    world.wait_running(name)
    return device_nodes(world, name)


def test_claimed_pods_get_their_devices_and_unclaimed_ones_get_nothing(one: RealCluster) -> None:
    """runc is the default, Atoll's class is injected: who holds a GPU finds its node, who asks for all finds none.

    A claimed pod that asks the runtime for other devices by annotation is not created."""
    asking = looking_pod(one, "asking", "one")
    asking["metadata"]["annotations"].update(CDI_ANNOTATION)
    with pytest.raises(AdminApiError, match=r"cdi\.k8s\.io/test"):
        one.create(asking)
    pod = one.create(looking_pod(one, "claimed", "one"))
    one.wait_running("claimed")

    seen = one.seen("claimed")
    assert pod["spec"]["runtimeClassName"] == names.RUNTIME_CLASS
    assert len(seen.nvidia) == 1
    assert device_nodes(one, "claimed") == nodes_of(one, "hopper", seen.nvidia)
    assert unclaimed(one, "unclaimed", "hopper") == set()


def test_containers_of_one_pod_find_their_own_parts_only(one: RealCluster) -> None:
    """Two containers split a claim, a third asks for nothing and finds nothing, though its image asks for all."""
    one.claim("three", 3, models=["nvidia-h100"])
    counts = {"trainer": 2, "loader": 1, "exporter": None}
    containers = [looking_container(one, name, gpus=count) for name, count in counts.items()]
    one.create(looking_pod(one, "split", "three", containers=containers))
    one.wait_running("split")

    seen = {name: one.seen("split", name).nvidia for name in counts}
    found = {name: device_nodes(one, "split", name) for name in counts}
    assert {name: len(uuids) for name, uuids in seen.items()} == {"trainer": 2, "loader": 1, "exporter": 0}
    assert found == {name: nodes_of(one, "hopper", uuids) for name, uuids in seen.items()}
    assert found["trainer"].isdisjoint(found["loader"])


def test_a_container_cannot_open_a_device_that_it_was_not_given(one: RealCluster) -> None:
    """Root in the container makes a node of the neighbour's GPU; the kernel still refuses to open it.

    The own device gets past that wall: there is no driver behind it here, which is another error.
    """
    one.create(looking_pod(one, "prisoner", "one"))
    one.wait_running("prisoner")
    (own,) = device_nodes(one, "prisoner")
    other = next(iter(ALL_OF_HOPPER - {own}))

    def open_node(node: str) -> str:
        minor = node.removeprefix("nvidia")
        made = f"/tmp/{node}-{DEVICE_MAJOR}"
        script = f"[ -e {made} ] || mknod {made} c {DEVICE_MAJOR} {minor}; cat {made}"
        return one.kubectl("exec", "prisoner", "--", "sh", "-c", script).stderr

    one.wait(lambda: "No such device" in open_node(own), "the own device to be let through")
    assert "Operation not permitted" in open_node(other)


@pytest.fixture
def without_webhook(one: RealCluster) -> Iterator[RealCluster]:
    """The world with the webhook's configuration deleted; afterwards it is there again."""
    path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{names.WEBHOOK_CONFIGURATION}"
    stored = one.cluster.api.get(path)
    one.cluster.api.request("DELETE", path)
    yield one
    kept = {key: stored["metadata"][key] for key in ("name", "labels") if key in stored["metadata"]}
    one.cluster.api.request("POST", path.rpartition("/")[0], {**stored, "metadata": kept})


def test_the_class_by_hand_is_refused(one: RealCluster) -> None:
    """Under Atoll's class the image's own variable would give everything, so that nobody chooses the class himself."""
    answer = one.kubectl("create", "-f", "-", text=json.dumps(looking_pod(one, "thief", None, **BY_HAND))).stderr

    assert "is for pods that ask Atoll for GPUs" in answer
    assert one.pods() == []


def test_the_class_by_hand_is_refused_without_the_webhook(without_webhook: RealCluster) -> None:
    """Somebody deletes the webhook's configuration: the policy alone refuses the pod that nobody shaped."""
    world = without_webhook
    body = json.dumps(looking_pod(world, "thief", None, **BY_HAND))
    answers: list[str] = []

    world.wait(lambda: "ValidatingAdmissionPolicy" in try_once(world, body, answers), "the webhook to be forgotten")

    assert "none of the pod's containers counts GPUs" in answers[-1]
    assert world.pods() == []


def try_once(world: RealCluster, body: str, answers: list[str]) -> str:
    """Create the pod as a dry run, and keep the answer."""
    answers.append(world.kubectl("create", "--dry-run=server", "-f", "-", text=body).stderr)
    return answers[-1]


@pytest.fixture
def ampere(machine_room: MachineRoom) -> Iterator[GpuMachine]:
    """The machine of ampere; afterwards nobody computes on it."""
    machine = machine_room.machines["ampere"]
    yield machine
    for index in range(len(machine.file.order)):
        machine.file.set(index, pids=None)
    machine.plug()


def test_a_default_runtime_of_nvidias_gives_everything_to_whoever_asks(one: RealCluster, ampere: GpuMachine) -> None:
    """The set-up that is no wall: claimed pods get their own, but any image takes all. Atoll can only tell."""
    one.create(looking_pod(one, "claimed", "small"))
    one.wait_running("claimed")

    seen = one.seen("claimed")
    assert device_nodes(one, "claimed") == nodes_of(one, "ampere", seen.nvidia)
    assert unclaimed(one, "unclaimed", "ampere") == ALL_OF_AMPERE

    (stolen,) = (device for device in one.report("ampere")["status"]["devices"] if device["uuid"] in seen.nvidia)
    ampere.file.set(stolen["index"], pids=process_id(one, "unclaimed", "ampere"))
    ampere.plug()
    for name in ("unclaimed", "claimed"):
        one.wait_event(name, names.REASON_FOREIGN_USE)


def process_id(world: RealCluster, name: str, node: str) -> int:
    """Return a process of a pod, as the driver of its node numbers it."""
    uid = world.get(name)["metadata"]["uid"]
    script = f"grep -l 'pod{uid}/' /proc/[0-9]*/cgroup | head -1"
    path = world.cluster.run("sh", "-c", script, node=node).stdout
    return int(path.split("/")[2])


@pytest.fixture
def nvidias_own_class(one: RealCluster) -> Iterator[RealCluster]:
    """The world with the RuntimeClass that NVIDIA's operator brings; afterwards it is gone."""
    runtime_class(one, "nvidia", "nvidia")
    yield one
    one.kubectl("delete", "runtimeclass", "nvidia")


def test_a_class_of_nvidias_own_is_a_way_around_unless_the_optional_policy_shuts_it(
    nvidias_own_class: RealCluster,
) -> None:
    """NVIDIA's operator brings a class for everybody; policies/optional keeps unclaimed pods from it."""
    world = nvidias_own_class
    assert unclaimed(world, "around", "hopper", runtimeClassName="nvidia") == ALL_OF_HOPPER

    policy = str(Path(__file__).parents[2] / "deploy" / "policies" / "optional" / "unclaimed-pods.yaml")
    body = json.dumps(looking_pod(world, "refused", None, runtimeClassName="nvidia"))
    applied = world.cluster.kubectl("apply", "-f", policy)
    try:
        assert applied.returncode == 0, applied.stderr
        answers: list[str] = []
        world.wait(lambda: "this pod chooses GPUs by RuntimeClass" in try_once(world, body, answers), "the policy")
    finally:
        world.cluster.kubectl("delete", "-f", policy)


def test_a_runtime_that_distrusts_the_variable_gives_claimed_pods_nothing(one: RealCluster) -> None:
    """`accept-nvidia-visible-devices-envvar-when-unprivileged = false` alone discards Atoll's variable too."""
    runtime_class(one, "strict", STRICT_HANDLER)
    one.create(looking_pod(one, "claimed", "one", runtimeClassName="strict"))
    one.wait_running("claimed")

    assert len(one.seen("claimed").nvidia) == 1
    assert device_nodes(one, "claimed") == set()
    assert unclaimed(one, "unclaimed", "hopper", runtimeClassName="strict") == set()


def test_without_any_runtime_of_nvidias_there_is_the_variable_and_nothing_else(one: RealCluster) -> None:
    """Plain runc: the variable tells a program what it holds; devices come from elsewhere, for everybody or nobody."""
    runtime_class(one, "plain", "runc")
    one.create(looking_pod(one, "claimed", "one", runtimeClassName="plain"))
    one.wait_running("claimed")

    seen = one.seen("claimed")
    assert len(seen.nvidia) == 1
    assert seen.cuda == seen.nvidia
    assert device_nodes(one, "claimed") == set()


def test_an_empty_variable_means_no_device_in_every_set_up(one: RealCluster) -> None:
    """A claimed pod bound past Atoll has no annotations: whatever its image says, it finds no GPU."""
    one.claim("nowhere", 1, models=["nvidia-r300"])
    for node in ("hopper", "ampere"):
        name = f"past-{node}"
        one.create(looking_pod(one, name, "nowhere"))
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        one.cluster.api.request("POST", f"/api/v1/namespaces/{one.namespace}/pods/{name}/binding", body)
        one.wait_running(name)

        assert one.seen(name) == Seen((), (), "")
        assert device_nodes(one, name) == set()


PROBES: dict[str, Callable[[], bool]] = {
    "legacy hook of NVIDIA's toolkit": lambda: shutil.which("nvidia-container-cli") is not None,
    "GPU operator with a driver": lambda: Path("/proc/driver/nvidia/version").exists(),
    "CRI-O": lambda: shutil.which("crio") is not None,
    "Kata Containers": lambda: Path("/dev/kvm").exists() and shutil.which("kata-runtime") is not None,
    "AMD's runtime": lambda: Path("/dev/kfd").exists(),
}
"""Rows of the table that are not shown here, and what would be needed to show them."""


@pytest.mark.parametrize("row", PROBES)
def test_what_cannot_be_shown_here_still_cannot(row: str) -> None:
    """On a machine where the probe passes, the row can be shown, and this test fails until it is."""
    assert not PROBES[row](), f"this machine could show the row {row!r} of docs/runtimes.md: write its test"
    pytest.skip(f"{row}: this machine has no such thing")


@pytest.mark.parametrize("row", PROBES)
def test_a_row_that_can_be_shown_is_a_failure(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each skipped row runs its own probe, and fails once that one passes."""
    ran: list[str] = []
    for one in PROBES:
        monkeypatch.setitem(PROBES, one, lambda one=one: ran.append(one) or True)

    with pytest.raises(AssertionError, match="write its test"):
        test_what_cannot_be_shown_here_still_cannot(row)
    assert ran == [row]


def test_the_room_plays_what_the_tests_take_for_granted(machine_room: MachineRoom, room_world: RealCluster) -> None:
    """Index, minor number and id of the machines' GPUs differ, or these tests would not tell them apart."""
    for node, machine in machine_room.nvidia.items():
        devices = [device for device in room_world.report(node)["status"]["devices"] if not device.get("mig")]
        assert any(device["index"] != device["minor"] for device in devices)
        assert {device["uuid"] for device in devices} <= set(machine.file.facts.values())
