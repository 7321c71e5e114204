"""Unknown is not absent: after a failed query every kind of fact keeps its last known value.

The real bindings over the mock library, which fails, hangs or renumbers under a running agent.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from agent.driver import PROCESSES_MAX
from agent.driver_client import DriverWorker
from agent.errors import ReadingFailed
from agent.nvml import NvmlBackend, recognized
from atoll.api import names
from atoll.api.node_status import HealthState, IncidentKind
from devcluster.mock_nvml import sick
from tests.agent.fake_nvml import FakeGpu, FakeNvml
from tests.agent.real_bindings import NOWHERE, Bench, machine_of
from topology.profiles import profile

UNKNOWN, UNSUPPORTED = 999, 3
MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(mock_environment: Path) -> Iterator[MakeBench]:
    """Makes benches whose machine was seen at a first look."""
    made: list[Bench] = []

    def make(name: str = "dgx-h100", story: sick.Story = lambda machine: machine) -> Bench:
        made.append(Bench(mock_environment, story(machine_of(name))))
        made[-1].look()
        return made[-1]

    yield make
    for one in made:
        one.backend.close()


@pytest.mark.parametrize(
    "call",
    ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"],
)
def test_instances_that_cannot_be_read_stay_on_record(bench: MakeBench, call: str) -> None:
    """A card that does not tell its instances has those that it had: their ids and Leases go to nobody else."""
    stage = bench(story=sick.mig)
    before = stage.report
    stage.machine.fail(sick.ILL, call, code=UNKNOWN)
    report = stage.look()

    assert before is not None
    assert [(one.id, one.uuid) for one in report.devices] == [(one.id, one.uuid) for one in before.devices]
    assert len(report.devices) == 10
    stage.machine.heal()
    assert stage.look().devices == before.devices


def test_an_instance_that_does_not_say_who_it_is_hides_no_other(bench: MakeBench) -> None:
    """Its card counts as read in part: what is not told is kept, what is told is taken."""
    stage = bench(story=sick.mig)
    before = stage.report
    assert before is not None
    kept = stage.machine.facts.pop(f"gpu.{sick.ILL}.mig.0.name")
    report = stage.look()

    assert [one.uuid for one in report.devices] == [one.uuid for one in before.devices]
    stage.machine.facts[f"gpu.{sick.ILL}.mig.0.name"] = kept


@pytest.mark.parametrize("name", ["pcie8-pix-pxb", "dgx-h100", "l40s-8"])
@pytest.mark.parametrize("call", ["nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus"])
@pytest.mark.parametrize("hangs", [False, True], ids=["refused", "hanging"])
def test_a_relation_that_cannot_be_read_is_as_it_was(bench: MakeBench, name: str, call: str, hangs: bool) -> None:
    """PCIe relations of a card that is not asked, or does not answer, do not become the worst ones."""
    stage = bench(name)
    before = stage.report
    assert before is not None
    stage.machine = stage.machine.hang(2, call) if hangs else stage.machine.fail(2, call, code=UNKNOWN)
    report = stage.look()

    assert (report.links.nvlink, report.links.pcie) == (before.links.nvlink, before.links.pcie)
    assert [one.island for one in report.devices] == [one.island for one in before.devices]
    assert [one.status for one in report.conditions if one.type == names.CONDITION_LINKS_CONSISTENT] == ["True"]
    assert {one.health.state for one in report.devices} == {HealthState.HEALTHY}


def test_a_fabric_that_cannot_be_read_is_as_it_was(bench: MakeBench) -> None:
    """Nobody's question about the fabric is answered: identity, state and condition stay. Told that there is none, it
    goes."""
    stage = bench("gb200-tray")
    before = stage.report
    assert before is not None
    assert before.fabric is not None
    stage.machine.fail("*", "nvmlDeviceGetGpuFabricInfoV", code=UNKNOWN)
    report = stage.look()

    assert report.fabric == before.fabric
    assert [one for one in report.conditions if one.type == names.CONDITION_FABRIC_READY] == [
        one for one in before.conditions if one.type == names.CONDITION_FABRIC_READY
    ]
    stage.machine.heal().fail("*", "nvmlDeviceGetGpuFabricInfoV", code=UNSUPPORTED)
    assert stage.look().fabric is None


@pytest.mark.parametrize(
    ("call", "code", "want"),
    [
        ("nvmlDeviceGetComputeRunningProcesses", pynvml.NVML_ERROR_UNKNOWN, True),
        ("nvmlDeviceGetGraphicsRunningProcesses", pynvml.NVML_ERROR_UNKNOWN, True),
        ("nvmlDeviceGetGraphicsRunningProcesses", pynvml.NVML_ERROR_NOT_SUPPORTED, False),
    ],
)
def test_who_draws_counts_as_much_as_who_computes(call: str, code: int, want: bool) -> None:
    """One of both lists cannot be read: others may use the card. Cards that do not draw have no such list."""
    gpu = FakeGpu("GPU-a", 1, pids=(7,), broken={call: code})
    reading = NvmlBackend(FakeNvml([gpu]), pci_devices=NOWHERE).read()

    assert (reading.uuids_unread() == {"GPU-a"}) == want
    assert reading.pids_by_uuid() == ({} if "Compute" in call else {"GPU-a": (7,)})


def test_more_processes_than_are_told_leave_the_card_unread() -> None:
    """A list that is cut says nothing of who is missing in it."""
    gpu = FakeGpu("GPU-a", 1, pids=tuple(range(1, PROCESSES_MAX + 2)))
    reading = NvmlBackend(FakeNvml([gpu]), pci_devices=NOWHERE).read()

    assert len(reading.pids_by_uuid()["GPU-a"]) == PROCESSES_MAX
    assert reading.uuids_unread() == {"GPU-a"}


def test_what_happened_before_a_hang_is_not_lost_with_the_worker(bench: MakeBench) -> None:
    """One card has an error while another one hangs: the worker is killed, and the error is told all the same."""
    stage = bench()
    stage.machine.event(0, 48).hang(sick.ILL)
    report = stage.look()

    assert [(one.kind, one.code) for one in report.devices[0].incidents] == [(IncidentKind.XID, 48)]


def test_a_card_that_hangs_where_one_listens_to_it_silences_no_other(bench: MakeBench) -> None:
    """One card cannot be listened to; the errors of the others are told from the first look on."""
    stage = bench(story=lambda machine: machine.hang(sick.ILL, "nvmlDeviceGetSupportedEventTypes"))
    stage.machine.event(0, 48)
    report = stage.look()

    assert [(one.kind, one.code) for one in report.devices[0].incidents] == [(IncidentKind.XID, 48)]
    assert [one.id for one in report.devices if one.health.state is not HealthState.HEALTHY] == [sick.ILL]


def test_a_card_that_hangs_in_comparisons_costs_few_workers(bench: MakeBench) -> None:
    """The one that hangs with everybody is found, and left out ever longer; the others are compared at every look."""
    stage = bench("pcie8-pix-pxb", lambda machine: machine.hang(2, "nvmlDeviceGetTopologyCommonAncestor"))
    worker = stage.backend.steps
    assert isinstance(worker, DriverWorker)
    report, starts = stage.report, worker.starts
    assert report is not None
    whole = profile("pcie8-pix-pxb").machine.links
    for one in range(8):
        for other in range(8):
            assert 2 in {one, other} or report.links.nvlink[one][other] == whole[one][other]
    for _ in range(8):
        stage.look()

    assert starts <= 4
    assert worker.starts - starts <= 3 * 3


def test_what_happened_before_a_look_that_fails_is_told_by_the_next(bench: MakeBench) -> None:
    """The driver can be opened no more in the middle of a look: what was heard until then is not forgotten."""
    stage = bench()
    stage.machine.event(0, 48).hang(sick.ILL).fail(-1, "nvmlInitWithFlags", code=UNKNOWN)
    with pytest.raises(ReadingFailed):
        stage.look()
    stage.machine.heal()
    report = stage.look()

    assert [(one.kind, one.code) for one in report.devices[0].incidents] == [(IncidentKind.XID, 48)]


LOST = {"lost": "GPU is lost"}


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        pytest.param([{"uuid": "a"}, LOST], ["a", "b"], id="a lost card is who was known at its index"),
        pytest.param([LOST, {"uuid": "a"}], [None, "a"], id="not one that says of itself that it is at another index"),
        pytest.param([{"uuid": "a"}, {"uuid": "a"}], ["a", None], id="of two that say the same, the second is nobody"),
        pytest.param([{"uuid": "c"}, {}], ["c", None], id="a card that works and does not say who it is, is nobody"),
        pytest.param([LOST, LOST, LOST], ["a", "b", None], id="a card that was never known is nobody"),
    ],
)
def test_who_a_silent_card_is(facts: list[dict[str, str]], want: list[str | None]) -> None:
    """A uuid stands for one card, and nobody is taken for another after a renumbering."""
    known = {0: {"uuid": "a", "bus_id": "1"}, 1: {"uuid": "b", "bus_id": "2"}}
    found = recognized([{"index": index, **one} for index, one in enumerate(facts)], known)

    assert [one.get("uuid") for one in found] == want


def test_two_cards_of_one_name_are_told(bench: MakeBench) -> None:
    """The second is a card that does not say who it is: the first and all others are given out, and the condition says
    that something is wrong."""
    stage = bench()
    stage.machine.set(5, uuid=stage.machine.facts["gpu.2.uuid"])
    report = stage.look()

    assert [one.id for one in report.devices if one.health.state != "healthy"] == [5]
    assert [one.status for one in report.conditions if one.type == names.CONDITION_DEVICES_READABLE] == ["False"]
