"""AMD's cards through the shape of its own library: the same promises as for NVIDIA's."""

import json
from pathlib import Path

import pytest

from agent import __main__ as program
from agent.amd import AmdBackend
from atoll.api.node_status import HealthState, IncidentKind
from tests.agent.fake_amdsmi import FakeAmdSmi
from tests.agent.real_bindings import report_of
from tests.agent.test_golden import compare
from topology.links import direct_links
from topology.profiles import profile, profile_names

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
