"""AMD's cards through the shape of its own library: the same promises as for NVIDIA's."""

import pytest

from agent.amd import AmdBackend
from atoll.api.node_status import HealthState
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
