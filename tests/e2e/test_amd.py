"""AMD cards on a real node: the agent reads them through AMD's own bindings; a container gets them in AMD's variable.

The library behind the bindings is a mock, which a test changes under the running node. The node has no AMD runtime, so
containers get the variable but no device (docs/runtimes.md).
"""

from collections.abc import Iterator
from typing import Any

import pytest

from atoll.api import names
from devcluster.machines import GpuMachine
from tests.e2e.machine_room import MachineRoom
from tests.e2e.world import HOLD, STAY, RealCluster
from topology.links import direct_links

pytestmark = pytest.mark.e2e

NODE = "instinct"
TELL = f'{HOLD}\necho "ROCR=$ROCR_VISIBLE_DEVICES"\n'
ECC_ERRORS = 20


def devices(world: RealCluster) -> list[dict[str, Any]]:
    """Return the cards as their agent reports them."""
    found: list[dict[str, Any]] = world.report(NODE)["status"]["devices"]
    return found


def found_cards(world: RealCluster, name: str) -> tuple[str, ...]:
    """Return what the container found in AMD's variable at its last start."""
    text = world.wait(lambda: "ROCR=" in (log := world.logs(name)) and log, f"{name} to tell its variable")
    assert isinstance(text, str)
    line = next(line for line in reversed(text.splitlines()) if line.startswith("ROCR="))
    return tuple(filter(None, line.removeprefix("ROCR=").split(",")))


@pytest.fixture
def instinct(machine_room: MachineRoom, room_world: RealCluster) -> Iterator[GpuMachine]:
    """The machine, whole again afterwards."""
    machine = machine_room.machines[NODE]
    yield machine
    machine.file.heal()
    for index in range(len(machine.file.order)):
        machine.file.set(index, ecc_uncorrected=0)
    machine.plug()
    room_world.wait(lambda: not ill(room_world), "the cards to be well again")


def ill(world: RealCluster) -> set[str]:
    """Return the cards that something is wrong with."""
    return {
        one["uuid"]
        for one in devices(world)
        if one["health"]["state"] != "healthy" or any(not told.get("endedTime") for told in one.get("incidents", []))
    }


def test_the_report_is_what_amds_library_tells(room_world: RealCluster, instinct: GpuMachine) -> None:
    """Names as ROCm takes them, xGMI links with their number, and the count on the Node."""
    file, world = instinct.file, room_world
    machine = file.profile.machine
    status = world.report(NODE)["status"]
    told = {one["index"]: one["uuid"] for one in status["devices"]}
    positions = [file.order[one["index"]] for one in status["devices"]]

    assert told == {index: file.uuid_of(position) for index, position in enumerate(file.order)}
    assert {(one["vendor"], one["model"]) for one in status["devices"]} == {("amd", "amd-instinct-mi250x")}
    assert [[direct_links(cell) for cell in row] for row in status["links"]["nvlink"]] == [
        [direct_links(machine.links[one][other]) for other in positions] for one in positions
    ]
    node = world.cluster.api.get(f"/api/v1/nodes/{NODE}")
    assert node["status"]["allocatable"][names.GPU_RESOURCE] == str(machine.count)


def test_a_pod_finds_its_cards_in_amds_variable_alone(room_world: RealCluster, instinct: GpuMachine) -> None:
    """Two cards joined by four links, named as promised, at the first start and at the next; none of NVIDIA's variables
    is set, and Atoll's RuntimeClass, which is NVIDIA's, is not injected."""
    world = room_world
    world.claim("pair", 2, vendor="amd")
    pod = world.pod("train", "pair", script=TELL + STAY)
    world.wait_running("train")
    allocation = world.allocation("train")
    found = found_cards(world, "train")
    positions = {instinct.file.uuid_of(position): position for position in instinct.file.order}

    assert allocation is not None
    assert found == allocation.uuids
    assert "runtimeClassName" not in pod["spec"]
    assert (world.seen("train").cuda, world.seen("train").nvidia) == ((), ())
    one, other = (positions[uuid] for uuid in found)
    assert instinct.file.profile.machine.links[one][other] == "XGMI4"

    world.restart_container("train")
    assert found_cards(world, "train") == found


def test_a_card_that_counts_memory_errors_is_given_to_nobody(room_world: RealCluster, instinct: GpuMachine) -> None:
    """Who holds it keeps it and is told; nobody new gets it until its counter is back at zero."""
    world = room_world
    world.claim("one", 1, vendor="amd")
    world.claim("eight", 8, vendor="amd")
    world.pod("train", "one", script=TELL + STAY)
    world.wait_running("train")
    (sick,) = found_cards(world, "train")
    index = next(one["index"] for one in devices(world) if one["uuid"] == sick)

    instinct.file.set(index, ecc_uncorrected=ECC_ERRORS)
    instinct.plug()
    world.wait_event("train", names.REASON_GPU_ILL)
    world.delete("train")
    world.wait(lambda: not world.leases(), "its card to be free")
    world.pod("whole", "eight", script=TELL + STAY)
    world.wait_rejected("whole")

    instinct.file.set(index, ecc_uncorrected=0)
    instinct.plug()
    world.wait_running("whole")
    assert sick in found_cards(world, "whole")


def test_a_card_that_is_lost_hides_no_other(room_world: RealCluster, instinct: GpuMachine) -> None:
    """The library refuses one card altogether: it stays on record, and seven are given out."""
    world = room_world
    before = [one["uuid"] for one in devices(world)]
    instinct.file.fail(3)
    instinct.plug()
    lost = instinct.file.uuid_of(instinct.file.order[3])
    world.wait(lambda: ill(world) == {lost}, "the card to be reported")

    assert [one["uuid"] for one in devices(world)] == before
    world.claim("seven", 7, vendor="amd")
    world.pod("rest", "seven", script=TELL + STAY)
    world.wait_running("rest")
    assert set(found_cards(world, "rest")) == set(before) - {lost}
