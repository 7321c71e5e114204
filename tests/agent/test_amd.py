"""AMD cards through the interface of AMD's library: the same promises as for NVIDIA's."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent import __main__ as program
from agent.amd import AmdBackend
from atoll.api import names
from atoll.api.node_status import HealthState, IncidentKind
from devcluster.mock_amdsmi import AmdMachineFile, build, environment
from tests.agent.fake_amdsmi import FakeAmdSmi
from tests.agent.real_bindings import NOWHERE, Bench, report_of
from tests.agent.test_golden import compare
from topology.links import direct_links
from topology.profiles import profile, profile_names

UNKNOWN = 7
AMD = [name for name in profile_names() if profile(name).machine.vendor == "amd"]


@pytest.mark.parametrize("name", AMD)
def test_every_known_machine_is_reported_as_it_is(name: str) -> None:
    """xGMI links, NUMA nodes and cards come out of the library as the known machine has them."""
    known = profile(name)
    report = report_of(AmdBackend(FakeAmdSmi(known)), None)

    told = [[direct_links(cell) for cell in row] for row in report.links.nvlink]
    assert told == [[direct_links(cell) for cell in row] for row in known.machine.links]
    assert tuple(device.numa_node for device in report.devices) == known.machine.numa
    assert {(device.vendor, device.model) for device in report.devices} == {("amd", known.model)}
    assert {device.health.state for device in report.devices} == {HealthState.HEALTHY}
    compare(name, report)


def test_a_card_is_named_as_its_variable_names_it() -> None:
    """ROCR_VISIBLE_DEVICES takes GPU- and sixteen digits; nothing else would be understood there."""
    reading = AmdBackend(FakeAmdSmi(profile("mi300x-8"))).read()

    assert reading.devices[1].uuid == "GPU-00a5000000000001"


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        ("amdsmi_get_gpu_memory_total", "memory_bytes"),
        ("amdsmi_topo_get_numa_node_number", "numa_node"),
        ("amdsmi_get_gpu_process_list", "process_ids"),
        ("amdsmi_get_gpu_device_bdf", "pci_bus_id"),
    ],
)
def test_one_refused_call_costs_one_fact(call: str, fact: str) -> None:
    """What one card does not tell is unknown, and the others tell everything."""
    whole = AmdBackend(FakeAmdSmi(profile("mi300x-8"))).read()
    reading = AmdBackend(FakeAmdSmi(profile("mi300x-8"), broken={call: {3}})).read()

    assert getattr(reading.devices[3], fact) is None
    assert [one for one in reading.devices if one.index != 3] == [one for one in whole.devices if one.index != 3]


def test_processes_are_told() -> None:
    """Which processes use a card."""
    reading = AmdBackend(FakeAmdSmi(profile("mi300x-8"), pids={2: [12, 11]})).read()

    assert reading.devices[2].process_ids == (11, 12)


@pytest.fixture(scope="session")
def amd_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mock of AMD's library, compiled."""
    return build(tmp_path_factory.mktemp("mock-amdsmi"))


@pytest.fixture
def bench(amd_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """Makes benches that read by AMD's own bindings, in the worker process."""
    made: list[Bench] = []
    for variable, value in environment(amd_library, tmp_path / "machine").items():
        monkeypatch.setenv(variable, value)

    def make(name: str = "mi300x-8") -> Bench:
        machine = AmdMachineFile(profile(name), seed="golden")
        for position in machine.order:
            machine.set(position, serial=f"0x{0xA5_0000_0000_0000 + position:016X}")
        made.append(Bench(tmp_path / "machine", machine, AmdBackend(step_seconds=2.0, pci_devices=NOWHERE)))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()


@pytest.mark.parametrize("name", AMD)
def test_amds_own_bindings_tell_the_same(bench: Callable[..., Bench], name: str) -> None:
    """What the stand-in tells is what the bindings make of the library's answers, number by number."""
    compare(name, bench(name).look())


def test_the_bindings_way_of_saying_that_nothing_is_known(bench: Callable[..., Bench]) -> None:
    """An unknown NUMA node is the greatest number there is, a missing name N/A, a missing serial number zero: none of
    them is taken at its word, and cards without serial numbers are not one card."""
    stage = bench()
    for index in (2, 3):
        stage.machine.set(index, serial="0x0")
    stage.machine.set(4, numa=-1).set(5, name=None)
    report = stage.look()

    assert len({device.uuid for device in report.devices}) == 8
    assert (report.devices[4].numa_node, report.devices[5].model) == (None, "")
    assert {device.health.state for device in report.devices} == {HealthState.HEALTHY}


@pytest.mark.parametrize(
    "call", ["amdsmi_get_gpu_asic_info", "amdsmi_get_gpu_device_bdf", "amdsmi_topo_get_link_type", "*"]
)
def test_a_question_that_fails_changes_nobodys_identity_or_links(bench: Callable[..., Bench], call: str) -> None:
    """A card that does not tell its serial number once must not become another card under its other name."""
    stage = bench("mi250x-8gcd")
    before = stage.look()
    stage.machine.fail(3, call, code=UNKNOWN)
    report = stage.look()

    assert [(one.id, one.uuid, one.pci_bus_id) for one in report.devices] == [
        (one.id, one.uuid, one.pci_bus_id) for one in before.devices
    ]
    assert report.links == before.links
    assert {one.id for one in report.devices if one.health.state is not HealthState.HEALTHY} <= {3}
    stage.machine.heal()
    assert stage.look().devices[:3] == before.devices[:3]


def test_two_partitions_of_one_card_are_not_counted_twice(bench: Callable[..., Bench]) -> None:
    """Partitions of a card share its serial number: one stands for it, the other is told as a card without a name."""
    stage = bench()
    stage.machine.set(1, serial=stage.machine.facts["gpu.0.serial"])
    report = stage.look()

    assert len(report.devices) == 7
    assert [one.status for one in report.conditions if one.type == names.CONDITION_DEVICES_READABLE] == ["False"]


@pytest.mark.parametrize("how", ["amdsmi_get_gpu_asic_info", "amdsmi_topo_get_link_type"])
def test_a_card_that_hangs_in_amds_library_hides_nobody(bench: Callable[..., Bench], how: str) -> None:
    """The worker is given up with the step, and the others are read by the next one."""
    stage = bench()
    before = stage.look()
    stage.machine.hang(3, how)
    report = stage.look()

    assert [one.health.state for one in report.devices if one.id != 3] == [HealthState.HEALTHY] * 7
    assert report.links == before.links


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("raise OSError('no libamd_smi.so')", "cannot import amdsmi: OSError: no libamd_smi.so"),
        ("print('Unable to find libamd_smi.so')\nraise KeyError('libamd_smi.so')", "cannot import amdsmi: KeyError"),
    ],
)
def test_bindings_that_cannot_be_imported_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, want: str
) -> None:
    """Without ROCm the module may be missing, or print and break: the report says so, and has no device."""
    (tmp_path / "amdsmi.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    program.main(["--node", "n1", "--backend", "amd", "--once", "--pci-devices", "/nonexistent"])
    report = json.loads(capsys.readouterr().out)

    assert report.get("devices", []) == []
    assert any(want in one["message"] for one in report["conditions"])


STAND_IN = """
import time
from pathlib import Path

from tests.agent.fake_amdsmi import FakeAmdSmi
from topology.profiles import profile

_machine = FakeAmdSmi(profile("mi300x-8"))
_hangs = Path(__file__).with_name("hangs")


def __getattr__(name):
    def call(*arguments):
        if name == "amdsmi_get_gpu_asic_info" and arguments == (3,) and _hangs.exists():
            time.sleep(3600)
        return getattr(_machine, name)(*arguments)

    return call if name.startswith("amdsmi_") else getattr(_machine, name)
"""


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose module amdsmi the worker imports; card 3 hangs while the file `hangs` is there."""
    (tmp_path / "amdsmi.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "hangs"


def test_the_agent_prints_the_report_of_an_amd_machine(rocm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole program with its worker process, which imports the vendor's module."""
    assert not rocm.exists()
    status = program.main(["--node", "n1", "--backend", "amd", "--once", "--pci-devices", "/nonexistent"])
    report = json.loads(capsys.readouterr().out)

    assert status == 0
    assert [device["uuid"] for device in report["devices"]] == [f"GPU-00a50000{number:08x}" for number in range(8)]
    assert {device["island"] for device in report["devices"]} == {"nvlink-group-0"}


def test_a_card_that_hangs_costs_one_worker_and_hides_nobody(rocm: Path) -> None:
    """The same wall as for NVIDIA's cards: the step is given up with its worker, and the card stays on record."""
    backend = AmdBackend(step_seconds=2.0)
    whole = report_of(backend, None)
    rocm.touch()
    report = report_of(backend, whole)
    backend.close()

    assert [device.health.state for device in report.devices] == [
        HealthState.UNHEALTHY if device.id == 3 else HealthState.HEALTHY for device in report.devices
    ]
    assert report.links.nvlink == whole.links.nvlink


def test_a_card_that_refuses_everything_stays_on_record() -> None:
    """Unknown is not gone: no uuid, no address, and still the device that it was."""
    whole = report_of(AmdBackend(FakeAmdSmi(profile("mi300x-8"))), None)
    calls = ("amdsmi_get_gpu_asic_info", "amdsmi_get_gpu_device_uuid", "amdsmi_get_gpu_device_bdf")
    report = report_of(AmdBackend(FakeAmdSmi(profile("mi300x-8"), broken={call: {3} for call in calls})), whole)

    assert [device.uuid for device in report.devices] == [device.uuid for device in whole.devices]
    assert [device.id for device in report.devices if device.health.state is not HealthState.HEALTHY] == [3]


def test_memory_errors_are_told() -> None:
    """AMD tells no XIDs; what its cards count is judged by the same table."""
    machine = FakeAmdSmi(profile("mi300x-8"), ecc={2: 20})
    report = report_of(AmdBackend(machine), None)

    assert [(one.kind, one.count) for one in report.devices[2].incidents] == [(IncidentKind.ECC, 16)]
