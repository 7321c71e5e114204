"""Impossible values from the driver: the report stays valid, and only the affected card loses facts.

The values are those that the library's types allow: all bits set, texts that are empty, endless or missing, uuids that
repeat or change, instances that duplicate others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.driver import Facts
from agent.driver_client import DriverWorker
from agent.errors import ReadingFailed
from agent.evidence import EvidenceReading
from agent.identities import LeaseLookup, assign
from agent.nvml import recognized
from agent.nvml_reading import machine_reading
from agent.readings import MachineReading
from agent.report import ReportContext, build_report, inventory_of, uuids_by_slot
from agent.sanitize import sanitize
from atoll.api.node_status import GpuNodeStatusReport, HealthState
from tests.agent.real_bindings import Bench, machine_of
from tests.agent.test_soak import check

BYTE, WORD, LONG = (1 << 8) - 1, (1 << 32) - 1, (1 << 64) - 1
words = st.sampled_from([0, 1, 2, 3, 5, 90, WORD >> 1, WORD]) | st.integers(0, WORD)
longs = st.sampled_from([0, 1, 80 << 30, LONG >> 1, LONG]) | st.integers(0, LONG)
texts = st.sampled_from(["", "GPU-1", "GPU-2", "all", "a,b", "N/A", "ä\ufffd", "x" * 95]) | st.text(max_size=95)
maybe: Any = st.none()
processes = st.lists(st.tuples(words, maybe | words, maybe | words).map(list), max_size=4)
instance = st.fixed_dictionaries(
    {
        "uuid": maybe | st.sampled_from(["MIG-1", "MIG-2", "GPU-1", ""]) | texts,
        "product_name": maybe | st.sampled_from(["A MIG 1g.5gb", "A MIG 1g 5gb", "A MIG 1", "A MIG 1g.5gb+me"]) | texts,
        "memory_bytes": maybe | longs,
        "gpu_instance": maybe | words,
        "compute_instance": maybe | words,
    }
)
link = st.tuples(st.booleans(), maybe | words, maybe | st.sampled_from(["00000000:01:00.0", "", "?"]) | texts).map(list)
fabric = st.fixed_dictionaries(
    {"state": words, "status": words, "clique": words, "mask": words, "cluster": st.sampled_from(["0" * 32, "f" * 32])}
)
FACTS = {
    "uuid": texts,
    "product_name": texts,
    "serial": texts,
    "memory_bytes": longs,
    "compute_capability": st.tuples(words, words).map(list),
    "bus_id": st.sampled_from(["00000000:01:00.0", "00000000:02:00.0"]) | texts.map(lambda text: text[:31]),
    "minor": words,
    "architecture": words,
    "numa_mask": st.sampled_from([0, 1, 3, (1 << 1024) - 1]),
    "cpu_mask": st.sampled_from([0, 0xF0F, (1 << 1024) - 1, sum(1 << cpu for cpu in range(0, 1024, 2))]),
    "pcie_generation": words,
    "ecc": words,
    "power_management": words,
    "ecc_uncorrected": longs,
    "ecc_corrected": longs,
    "remapped": st.lists(words, min_size=4, max_size=4),
    "retired_pending": words,
    "throttle": longs,
    "link_mbps": words,
    "recovery_action": words,
    "mig": words,
    "instances": st.lists(instance, max_size=3),
    "uninstanced": st.booleans(),
    "processes": processes,
    "unlisted": st.booleans(),
    "links": st.lists(link, max_size=4),
    "fabric": fabric | st.just({}),
    "pairs": st.lists(st.tuples(st.integers(0, 3), maybe | words, maybe | words).map(list), max_size=4),
    "lost": texts,
    "fault": texts,
    "silent": texts,
}
device = st.fixed_dictionaries({}, optional={name: maybe | told for name, told in FACTS.items()})
machines = st.lists(device, max_size=4).map(lambda found: [{**one, "index": at} for at, one in enumerate(found)])
events = st.lists(st.tuples(st.sampled_from(["GPU-1", None]), words, longs).map(list), max_size=4)


def reading_of(facts: Sequence[Facts], told: Sequence[Any] = ()) -> MachineReading:
    return machine_reading(recognized([sanitize(one) for one in facts], {}), events=told)


def report_of(reading: MachineReading, previous: GpuNodeStatusReport | None = None) -> GpuNodeStatusReport:
    context = ReportContext("1", "b1", "", "7", "2026-01-01T00:00:00.000000Z")
    known = inventory_of(previous, reading, context).ids
    leases: dict[int, str | None] = {}
    while isinstance(step := assign(uuids_by_slot(reading), known=known, leases=leases), LeaseLookup):
        leases |= dict.fromkeys(step.ids)
    return build_report(
        reading,
        ids=step.ids,
        evidence=EvidenceReading((), live_read=True, kubelet_read=True),
        previous=previous,
        context=context,
    )


@given(machines, machines, events)
def test_whatever_the_driver_answers_the_report_is_valid(first: Any, second: Any, told: Any) -> None:
    """Two looks, the second on the record of the first: any reader can use both reports, and no number is beyond what
    the API server keeps."""
    report = report_of(reading_of(first))
    again = report_of(reading_of(second, told), report)

    for one in (report, again):
        if one.devices:
            check(one)
        for device in one.devices:
            assert device.memory_bytes < 1 << 63
            assert all(incident.count < 1 << 63 for incident in device.incidents)


GARBAGE = {
    "uuid": "GPU-3,all",
    "memory_bytes": LONG,
    "compute_capability": [WORD, WORD],
    "pcie_generation": WORD,
    "ecc_uncorrected": LONG,
    "recovery_action": WORD,
    "minor": WORD,
    "serial": "",
    "product_name": "",
    "bus_id": "\ufffd" * 31,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_nonsense_of_one_card_costs_that_card_at_most(name: str) -> None:
    """All bits set, or no text: the fact keeps its last value, and the other card is as it was."""
    whole: list[Facts] = [
        {
            "index": index,
            "uuid": f"GPU-{index}",
            "product_name": "NVIDIA H100 80GB HBM3",
            "serial": f"1{index}",
            "memory_bytes": 80 << 30,
            "compute_capability": [9, 0],
            "bus_id": f"00000000:0{index + 1}:00.0",
            "minor": index,
            "pcie_generation": 5,
            "ecc_uncorrected": 0,
            "recovery_action": 0,
        }
        for index in range(2)
    ]
    before = report_of(reading_of(whole))
    whole[1][name] = GARBAGE[name]
    after = report_of(reading_of(whole), before)

    assert after.devices[0] == before.devices[0]
    if name != "uuid":
        assert after.devices == before.devices
    assert (after.devices[1].uuid, after.devices[1].id) == ("GPU-1", 1)
    assert (after.devices[1].health.state is HealthState.UNHEALTHY) == (name == "uuid")


def test_instances_that_say_what_another_said_are_told_once() -> None:
    """One uuid twice would make the report of the whole node useless; what one of the two is, stays unknown."""
    instance = {"uuid": "MIG-1", "product_name": "A MIG 1g.5gb", "memory_bytes": 1 << 32}
    twin = {**instance, "gpu_instance": 1, "compute_instance": 0}
    told: Facts = {"mig": 1, "instances": [twin, twin], "uninstanced": False}
    cards = [{**told, "index": index, "uuid": f"GPU-{index}"} for index in range(2)]
    reading = reading_of(cards)
    report = report_of(reading)

    assert sorted(one.uuid for one in report.devices) == ["GPU-0", "GPU-1", "MIG-1"]
    assert [one.instances_unread for one in reading.devices] == [True, True]
    assert report.devices[0].mig is not None
    check(report)


def test_a_name_that_is_no_text_costs_the_name_alone(mock_environment: Path) -> None:
    """The real bindings cannot decode it, and raise what is not the library's own error: the card stays in work under
    the name that it had, and no worker is lost."""
    stage = Bench(mock_environment, machine_of("dgx-h100"))
    before = stage.look()
    written = mock_environment.read_bytes()
    mock_environment.write_bytes(written.replace(b"gpu.3.name NVIDIA", b"gpu.3.name \xff\xfe\xfa"))
    assert mock_environment.read_bytes() != written
    report = report_of(stage.backend.read(), before)
    worker = stage.backend.steps
    stage.backend.close()

    assert report.devices == before.devices
    assert isinstance(worker, DriverWorker)
    assert worker.starts == 1


@pytest.mark.parametrize("count", [257, WORD])
def test_a_count_that_cannot_be_is_one_clear_error(mock_environment: Path, count: int) -> None:
    """A driver that counts four billion cards is not asked for each of them."""
    stage = Bench(mock_environment, machine_of("dgx-h100"))
    stage.machine.facts["count"] = str(count)
    with pytest.raises(ReadingFailed, match=f"counts {count} devices, which is impossible"):
        stage.look()
    stage.machine.facts["count"] = "8"

    assert stage.look().healthy_count == 8
    stage.backend.close()


@pytest.mark.parametrize("count", [0, 1])
def test_a_machine_of_few_cards_is_reported(mock_environment: Path, count: int) -> None:
    """No card, or one: a valid report, and no complaint."""
    stage = Bench(mock_environment, machine_of("dgx-h100"))
    stage.machine.facts["count"] = str(count)
    report = stage.look()
    stage.backend.close()

    assert (report.device_count, report.healthy_count) == (count, count)
    assert GpuNodeStatusReport.model_validate(report.to_json()) == report


def test_a_card_that_tells_another_uuid_at_each_look_is_another_card(mock_environment: Path) -> None:
    """It gets an id of its own, and hides nobody; the record does not grow."""
    stage = Bench(mock_environment, machine_of("dgx-h100"))
    before = stage.look()
    for number in range(3):
        stage.machine.set(3, uuid=f"GPU-{number:08x}-0000-0000-0000-000000000000")
        report = stage.look()
        check(report)
    stage.backend.close()

    assert len(report.devices) == 8
    assert [one for one in report.devices if one.id < 8] == [one for one in before.devices if one.id != 3]
    assert [one.id for one in report.departed] == [3, 8, 9]
