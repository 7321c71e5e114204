"""Reports of faulty machines, through the real bindings: every function of devcluster.mock_nvml.sick.

GPU 3 is the faulty one. "The others" are the other seven.
"""

import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.driver import Facts
from agent.driver_client import DriverWorker
from agent.errors import ReadingFailed
from agent.nvml import NvmlBackend
from atoll.api import names
from atoll.api.base import ObjectMeta
from atoll.api.node_status import GpuNodeStatus, GpuNodeStatusReport, HealthState, IncidentKind
from atoll.cluster.health import judge
from atoll.cluster.machines import node_devices
from atoll.cluster.transitions import Availability
from devcluster.mock_nvml import sick
from tests.agent.real_bindings import NOWHERE, Bench, machine_of

MakeBench = Callable[..., Bench]
MINUTES_MAX = 70


@pytest.fixture
def bench(mock_environment: Path) -> Iterator[MakeBench]:
    """Makes benches whose machine was seen well at a first look."""
    made: list[Bench] = []

    def make(name: str = "dgx-h100") -> Bench:
        made.append(Bench(mock_environment, machine_of(name)))
        made[-1].look()
        return made[-1]

    yield make
    for one in made:
        one.backend.close()


def standings(report: GpuNodeStatusReport) -> list[Availability]:
    status = GpuNodeStatus(metadata=ObjectMeta(name="n1"), status=report)
    return [judge(status).standings[device.uuid].state for device in report.devices]


def fall_ill(stage: Bench, story: sick.Story) -> GpuNodeStatusReport:
    stage.machine = story(stage.machine)
    return stage.look()


def usable(report: GpuNodeStatusReport) -> list[int]:
    devices = node_devices(GpuNodeStatus(metadata=ObjectMeta(name="n1"), status=report))
    assert devices is not None
    return [device.id for position, device in enumerate(devices.devices) if devices.usable >> position & 1]


@pytest.mark.parametrize(
    "story", [sick.lost, sick.lost_at_the_uuid, sick.lost_at_the_links, sick.silent, sick.crashing, sick.reset_required]
)
def test_one_sick_gpu_never_hides_the_others(bench: MakeBench, story: sick.Story) -> None:
    """Lost at the handle, at the uuid, at the links; silent; taking the library down; refused until reset: the
    others are read in full, keep their links and are given out; the sick one keeps its id and uuid and is not."""
    stage = bench()
    before = stage.report
    assert before is not None
    report = fall_ill(stage, story)

    assert [device.uuid for device in report.devices] == [device.uuid for device in before.devices]
    assert [device.health.state for device in report.devices] == [
        HealthState.UNHEALTHY if device.id == sick.ILL else HealthState.HEALTHY for device in report.devices
    ]
    assert usable(report) == [0, 1, 2, 4, 5, 6, 7]
    assert report.links == before.links
    told_before = story in {sick.lost_at_the_links, sick.reset_required}
    assert report.evidence.processes_read is told_before


def test_a_gpu_that_is_lost_from_the_start_is_not_guessed(bench: MakeBench, mock_environment: Path) -> None:
    """A new agent on a machine with a lost card reports seven, and says that the driver counts eight."""
    stage = Bench(mock_environment, sick.lost(machine_of("dgx-h100")))
    report = stage.look()
    stage.backend.close()

    assert (len(report.devices), report.healthy_count) == (7, 7)
    readable = next(one for one in report.conditions if one.type == names.CONDITION_DEVICES_READABLE)
    assert (readable.status, "8 counted by the driver, 1 of them" in readable.message) == ("False", True)


def test_a_quarantine_survives_the_agent_and_ends_with_a_reboot(bench: MakeBench) -> None:
    """XID 79, then the card answers again and the agent is restarted: it stays quarantined, and a reboot of the
    machine ends it."""
    stage = bench()
    fall_ill(stage, sick.lost)
    stage.machine.heal()
    stage.backend.close()
    for stage.minute in range(1, MINUTES_MAX):
        report = stage.look()
    assert standings(report)[sick.ILL] is Availability.QUARANTINED

    stage.boot_id = "b2"
    report = stage.look()

    assert standings(report) == [Availability.HEALTHY] * 8
    assert {one.ended_by for one in stage.device(sick.ILL).incidents} == {"reboot", "recovered"}


def test_a_reset_ends_what_only_a_reset_ends(bench: MakeBench) -> None:
    """XID 48, and the driver asks for a reset: once it does not ask any more, the card was reset and is well."""
    stage = bench()
    stage.machine.event(sick.ILL, 48).set(sick.ILL, **{"field.230": 1})
    assert standings(stage.look())[sick.ILL] is Availability.QUARANTINED
    stage.machine.set(sick.ILL, **{"field.230": 0})
    stage.minute = 5

    assert standings(stage.look())[sick.ILL] is Availability.HEALTHY
    assert {(one.kind, one.ended_by) for one in stage.device(sick.ILL).incidents} == {
        (IncidentKind.XID, "reset"),
        (IncidentKind.RECOVERY, "reset"),
    }


@pytest.mark.parametrize("xid", [13, 31, 43])
def test_errors_of_programs_are_told_and_harmless(bench: MakeBench, xid: int) -> None:
    """The number is on record, and the card stays in work."""
    stage = bench()
    stage.machine.event(sick.ILL, xid)

    assert standings(stage.look()) == [Availability.HEALTHY] * 8
    assert [(one.kind, one.code) for one in stage.device(sick.ILL).incidents] == [(IncidentKind.XID, xid)]


def test_a_card_that_comes_and_goes_is_not_given_out_in_between(bench: MakeBench) -> None:
    """Flapping is damped: each return must last longer than the one before, before the card is trusted again."""
    stage = bench()
    quiet = []
    for _ in range(4):
        stage.machine.fail(sick.ILL, "nvmlDeviceGetUUID")
        stage.minute += 1
        stage.look()
        stage.machine.heal()
        since = stage.minute
        while standings(stage.look())[sick.ILL] is not Availability.HEALTHY:
            stage.minute += 1
        quiet.append(stage.minute - since)

    assert quiet == sorted(quiet)
    assert quiet[-1] >= 4 * quiet[0] > 0


def test_a_silent_card_costs_one_deadline_and_one_worker(bench: MakeBench) -> None:
    """A hanging driver call is given up with its worker; the card is asked again ever more rarely, no worker is left
    over, and the card is back at once when the driver answers."""
    stage = bench()
    worker = stage.backend.steps
    assert isinstance(worker, DriverWorker)
    fall_ill(stage, sick.silent)
    for _ in range(20):
        report = stage.look()
    assert usable(report) == [0, 1, 2, 4, 5, 6, 7]
    assert worker.starts <= 7

    stage.machine.heal()
    for _ in range(17):
        report = stage.look()
    assert stage.device(sick.ILL).health.state is HealthState.HEALTHY


def test_a_driver_that_hangs_as_a_whole_is_one_clear_error(mock_environment: Path) -> None:
    """Nothing at all can be read: that is told, and tried again."""
    stage = Bench(mock_environment, machine_of("dgx-h100").hang("*", "nvmlInitWithFlags"))
    whole, stage.backend.steps = stage.backend.steps, DriverWorker(step_seconds=0.2, open_seconds=0.2)
    with pytest.raises(ReadingFailed, match="no answer within"):
        stage.look()
    stage.machine.heal()
    stage.backend.steps = whole

    assert stage.look().healthy_count == 8
    stage.backend.close()


def test_an_agent_without_descriptors_blames_no_card(bench: MakeBench) -> None:
    """No worker can be started: one clear error, and the next look that can start one finds every card well."""
    stage = bench()
    stage.backend.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(ReadingFailed, match="no worker can be started"):
            stage.backend.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    report = stage.look()
    assert report.healthy_count == 8
    assert [one for device in report.devices for one in device.incidents] == []


def test_a_worker_without_descriptors_in_the_agent_answers_on(bench: MakeBench) -> None:
    """The agent ran out of descriptors while its worker runs: waiting for an answer takes none, and no card pays."""
    stage = bench()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        reading = stage.backend.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert [device.fault for device in reading.devices] == [""] * 8


class OneStep:
    """Answers the first step of a device when it may, and counts them."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.steps: list[str] = []

    def ask(self, step: str, index: int = 0, others: Sequence[int] = ()) -> Facts:
        if step in {"open", "events"}:
            return {"open": {"count": 8}, "events": {"events": []}}[step]
        self.steps.append(step)
        self.asked.set()
        self.may_answer.wait()
        return {"uuid": f"GPU-{index}"}

    def close(self) -> None:
        """There is nothing to let go of."""


def test_a_look_ends_with_its_step_when_the_agent_stops() -> None:
    """SIGTERM in the middle of a look: no further step is asked, so that no worker is started for one, and the agent
    does not wait for a sick machine's remaining deadlines."""
    backend, steps = NvmlBackend(pci_devices=NOWHERE), OneStep()
    backend.steps = steps
    with ThreadPoolExecutor() as pool:
        look = pool.submit(backend.read)
        steps.asked.wait()
        backend.close()
        steps.may_answer.set()
        with pytest.raises(ReadingFailed, match="closed during the reading"):
            look.result()

    assert steps.steps == ["identity"]


def test_a_missing_driver_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, mock_environment: Path) -> None:
    """A machine without the driver says so, and what to look at."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nonexistent")
    stage = Bench(mock_environment, machine_of("dgx-h100"))
    with pytest.raises(ReadingFailed, match="check that the driver is loaded and its library is visible here"):
        stage.look()
    stage.backend.close()


def test_dead_links_weaken_their_card_alone(bench: MakeBench) -> None:
    """Six links of one card into the switch are down: its pairs count twelve, those of the others eighteen."""
    report = fall_ill(bench(), sick.dead_links)

    assert report.links.nvlink[sick.ILL] == ("NV12", "NV12", "NV12", "X", "NV12", "NV12", "NV12", "NV12")
    assert report.links.nvlink[0][1] == "NV18"
    assert [one.kind for one in report.devices[sick.ILL].incidents] == [IncidentKind.NVLINK]
    assert usable(report) == list(range(8))


def test_asymmetric_links_count_by_the_weaker_side(bench: MakeBench) -> None:
    """A card that reports no links though its peers do is joined to nobody, and a condition says so."""
    report = fall_ill(bench("dgx1-v100"), sick.asymmetric)

    assert not any(cell.startswith("NV") for cell in report.links.nvlink[sick.ILL])
    consistent = next(one for one in report.conditions if one.type == names.CONDITION_LINKS_CONSISTENT)
    assert (consistent.status, consistent.reason) == ("False", names.REASON_LINKS_ASYMMETRIC)
    islands = {device.island for device in report.devices if device.id != sick.ILL}
    assert report.devices[sick.ILL].island not in islands


def test_two_cards_that_cannot_talk(bench: MakeBench) -> None:
    """Peer access between two cards is broken; each works with all the others."""
    stage = bench("l40s-8")
    stage.machine.facts["pair.2.1.p2p"] = stage.machine.facts["pair.1.2.p2p"] = "1"
    report = stage.look()

    assert report.links.nvlink[1][2] == "SYS"
    assert report.links.nvlink[1][3] == "NODE"


def test_the_fabric_manager_is_not_started(bench: MakeBench) -> None:
    """Every card is well, the fabric is not: the report says so, and when it is done; nothing is restarted."""
    stage = bench()
    report = fall_ill(stage, sick.fabric_not_started)
    assert report.fabric is not None
    assert report.fabric.state == "notStarted"
    assert {device.health.state for device in report.devices} == {HealthState.HEALTHY}
    condition = next(one for one in report.conditions if one.type == names.CONDITION_FABRIC_READY)
    assert condition.status == "False"

    for index in range(8):
        stage.machine.set(index, fabric=f"3 0 7 0x0 {'ab' * 16}")
    stage.minute = 10
    stage.look()
    stage.minute = 12
    report = stage.look()
    assert report.fabric is not None
    assert (report.fabric.state, report.fabric.clique_id) == ("completed", "7")
    assert not any(not one.ended_time for device in report.devices for one in device.incidents)


def test_a_storm_of_memory_errors(bench: MakeBench) -> None:
    """Errors by the thousand quarantine the card, and are told in powers of two: a report is not written per error."""
    stage = bench()
    first = fall_ill(stage, sick.ecc_storm)
    stage.machine.set(sick.ILL, ecc_uncorrected_volatile=sick.ECC_ERRORS + 100)
    second = stage.look()

    assert standings(first)[sick.ILL] is Availability.QUARANTINED
    assert second.devices == first.devices


def test_mig_instances_are_devices(bench: MakeBench) -> None:
    """A card in MIG mode is given out by its instances alone, which name profile, parent and memory; a process shows on
    the instance that it runs in; an instance that was taken down is gone; the ids of the others never move."""
    stage = bench()
    stage.machine.set(sick.ILL, pids="4711:2:0")
    report = fall_ill(stage, sick.mig)
    instances = report.devices[8:]
    assert usable(report) == [0, 1, 4, 5, 6, 7, 8, 9]
    assert [one.mig.profile for one in instances if one.mig] == ["3g.40gb"] * 2
    assert {one.mig.parent_uuid for one in instances if one.mig} == {report.devices[sick.ILL].uuid}
    assert {one.memory_bytes for one in instances} == {sick.MIG_MIB << 20}
    reading = stage.backend.read()
    parent = report.devices[sick.ILL].uuid
    used = {uuid: pids for uuid, pids in reading.pids_by_uuid().items() if pids}
    assert (used, parent in reading.uuids_unread()) == ({instances[1].uuid: (4711,)}, False)

    stage.machine.facts = {key: value for key, value in stage.machine.facts.items() if ".mig.0." not in key}
    stage.machine.facts[f"gpu.{sick.ILL}.mig.0.uuid"] = "MIG-new"
    stage.machine.facts[f"gpu.{sick.ILL}.mig.0.name"] = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    report = stage.look()
    assert [(device.id, device.uuid) for device in report.devices[8:]] == [(9, instances[1].uuid), (10, "MIG-new")]


def test_a_process_of_an_instance_that_is_not_told_is_on_no_card_for_certain(bench: MakeBench) -> None:
    """The driver names the number of an instance that it does not list: nobody is seen on the card for it, and who uses
    card and instances is not known in full."""
    stage = bench()
    stage.machine.set(sick.ILL, pids="4711:5:0 4712")
    report = fall_ill(stage, sick.mig)
    reading = stage.backend.read()
    card, *parts = [one.uuid for one in (report.devices[sick.ILL], *report.devices[8:])]

    assert reading.pids_by_uuid()[card] == (4712,)
    assert reading.uuids_unread() >= {card, *parts}


def test_instances_of_a_card_that_is_lost_stay_on_record(bench: MakeBench) -> None:
    """Unknown is not gone: what the card was cut into is remembered, and not given out."""
    stage = bench()
    before = fall_ill(stage, sick.mig)
    stage.machine.fail(sick.ILL)
    report = stage.look()

    assert [device.uuid for device in report.devices] == [device.uuid for device in before.devices]
    assert usable(report) == [0, 1, 4, 5, 6, 7]


def test_renumbered_after_a_reboot(bench: MakeBench) -> None:
    """Ids stay with the cards, indices are those of the new boot."""
    stage = bench()
    before = stage.report
    assert before is not None
    stage.boot_id = "b2"
    report = fall_ill(stage, sick.renumbered)

    assert {device.uuid: device.id for device in report.devices} == {
        device.uuid: device.id for device in before.devices
    }
    assert [device.index for device in report.devices] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert report.links == before.links


def test_a_replaced_card_inherits_nothing(bench: MakeBench) -> None:
    """Another card in the slot of an ill one: the ill one is off the record with all that was wrong with it."""
    stage = bench()
    stage.machine.event(sick.ILL, 79)
    stage.look()
    ill = stage.device(sick.ILL).uuid
    stage.boot_id = "b2"
    report = fall_ill(stage, sick.replaced)

    assert len(report.devices) == 8
    assert ill not in {device.uuid for device in report.devices}
    assert standings(report) == [Availability.HEALTHY] * 8


def test_a_card_that_is_gone_without_an_error(bench: MakeBench) -> None:
    """The driver counts seven without any XID: the eighth stays on record as unknown, seven stay usable."""
    report = fall_ill(bench(), sick.gone)

    assert (len(report.devices), report.devices[7].health.state) == (8, HealthState.UNKNOWN)
    assert usable(report) == [0, 1, 2, 3, 4, 5, 6]


def test_a_slow_card_is_warned_of(bench: MakeBench) -> None:
    """Heat slows a card down: that is told, and it stays in work."""
    report = fall_ill(bench(), sick.slowed)

    assert usable(report) == list(range(8))
    assert [one.kind for one in report.devices[sick.ILL].incidents] == [IncidentKind.THROTTLE]
