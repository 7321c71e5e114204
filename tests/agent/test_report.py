"""The report: comparable over time, bounded, and without losses from unreadable values."""

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.evidence import EvidenceReading
from agent.links import rows_by_uuid
from agent.readings import DeviceFault, DeviceReading, FabricReading, LinksReading, MachineReading, MigReading
from agent.report import ReportContext, build_report, inventory_of, model_slug, uuids_by_slot
from agent.simulated import SimulatedBackend, play
from atoll.api import names
from atoll.api.node_status import (
    DEPARTED_MAX,
    INCIDENTS_MAX,
    PODS_MAX,
    DepartedDevice,
    Device,
    GpuNodeStatusReport,
    Incident,
    IncidentKind,
    Links,
    PodEvidence,
)
from tests.agent.builders import LATER, NOW, make_device, make_reading
from topology.model import DEVICES_MAX as LINKED_DEVICES_MAX
from topology.profiles import profile, profile_names

SIGHTING = EvidenceReading((), live_read=True, kubelet_read=True)
CIRCUMSTANCES = ReportContext(agent_version="1", boot_id="b1", node_uid="u1", position="7", now=NOW)
OBJECT_BYTES_MAX = 1_000_000


def report_of(
    reading: MachineReading,
    previous: GpuNodeStatusReport | None = None,
    *,
    now: str = NOW,
    boot: str = "b1",
    node_uid: str = "u1",
    **ids: int,
) -> GpuNodeStatusReport:
    """Build a report; ids default to those on record, then to the order of the slots."""
    context = replace(CIRCUMSTANCES, now=now, boot_id=boot, node_uid=node_uid)
    inventory = inventory_of(previous, reading, context)
    known = inventory.ids
    new = [uuid for uuid in uuids_by_slot(reading) if uuid not in known]
    free = (number for number in range(inventory.free_ids_from, 9000) if number not in known.values())
    ids = {**known, **dict(zip(new, free, strict=False)), **ids}
    return build_report(reading, ids=ids, evidence=SIGHTING, previous=previous, context=context)


def health(report: GpuNodeStatusReport) -> dict[str, tuple[str, str]]:
    return {device.uuid: (str(device.health.state), device.health.reason) for device in report.devices}


def condition(report: GpuNodeStatusReport, kind: str) -> tuple[str, str]:
    found = next(one for one in report.conditions if one.type == kind)
    return found.status, found.reason


def test_a_report_tells_the_machine() -> None:
    """Ids, islands and bandwidth of a DGX-1: two GPUs with two links reach 40 GB/s, all are one island."""
    reading = SimulatedBackend(play(profile("dgx1-v100"), seed="n1", order="reversed")).read()

    report = report_of(reading)

    assert [device.id for device in report.devices] == list(range(8))
    assert [device.index for device in report.devices] == list(range(7, -1, -1))
    assert {device.island for device in report.devices} == {"nvlink-group-0"}
    assert {device.bandwidth_gbps for device in report.devices} == {40.0}
    assert report.links.nvlink == profile("dgx1-v100").machine.links
    assert (report.device_count, report.healthy_count, report.models) == (8, 8, "nvidia-v100-sxm2-32gb")


def test_bandwidth_without_links_is_that_of_pcie() -> None:
    """Cards without NVLink tell the best PCIe path inside their NUMA island."""
    report = report_of(SimulatedBackend(play(profile("l40s-4"), seed="n1")).read())

    assert [device.island for device in report.devices] == ["numa-0", "numa-0", "numa-1", "numa-1"]
    assert {device.bandwidth_gbps for device in report.devices} == {20.0}


@given(st.permutations(range(8)))
def test_renumbering_changes_the_index_alone(order: list[int]) -> None:
    """Whatever order a reboot gives, devices, ids, islands and links of the report stay as they were."""
    machine = profile("dgx1-v100")
    before = report_of(SimulatedBackend(play(machine, seed="n1")).read())

    after = report_of(SimulatedBackend(play(machine, seed="n1", order=",".join(map(str, order)))).read(), before)

    assert after.links == before.links
    assert [device.index for device in after.devices] == [order.index(position) for position in range(8)]
    assert [device.model_copy(update={"index": 0}) for device in after.devices] == [
        device.model_copy(update={"index": 0}) for device in before.devices
    ]


def test_an_agent_that_cannot_read_the_pods_says_so_since_the_restore_until_it_reads() -> None:
    """Whoever starts after the restore, also the agent itself, learns it from the report."""
    blind, sighted = (replace(SIGHTING, live_read=is_read) for is_read in (False, True))
    steps = [(blind, False), (blind, True), (blind, False), (sighted, False), (blind, False), (sighted, True)]
    report, told = None, []
    for evidence, is_first in steps:
        context = replace(CIRCUMSTANCES, is_first_since_restore=is_first)
        report = build_report(make_reading(), ids={}, evidence=evidence, previous=report, context=context)
        told.append(report.evidence.unread_since_restore)

    assert told == [False, True, True, False, False, False]


def test_a_new_boot_is_told() -> None:
    """The boot id of a report is that of the machine, so that an old report is known as old."""
    reading = make_reading(make_device(0, "a"))

    report = build_report(
        reading,
        ids={"a": 0},
        evidence=SIGHTING,
        previous=report_of(reading),
        context=replace(CIRCUMSTANCES, boot_id="b2"),
    )

    assert report.boot_id == "b2"


@pytest.mark.parametrize(
    ("sick", "want"),
    [
        pytest.param(
            DeviceReading(index=1, pci_bus_id="00000000:02:00.0", fault="GPU is lost", is_lost=True),
            ("unhealthy", "GPU is lost"),
            id="its slot answers nothing",
        ),
        pytest.param(
            DeviceReading(index=1, fault="GPU is lost", is_lost=True),
            ("unhealthy", "GPU is lost"),
            id="its index answers nothing",
        ),
        pytest.param(None, ("unknown", "not seen by the driver"), id="not even counted"),
        pytest.param(make_device(1, "b", fault="reset required"), ("unhealthy", "reset required"), id="says it is ill"),
    ],
)
def test_unknown_is_not_gone(sick: DeviceReading | None, want: tuple[str, str]) -> None:
    """A device on record that cannot be seen stays, unhealthy or unknown with the reason, links and id included."""
    before = report_of(make_reading(*(make_device(position, name) for position, name in enumerate("abc"))))
    left = [make_device(0, "a"), *([sick] if sick else []), make_device(2, "c")]
    reading = make_reading(*left)
    if sick is not None and sick.uuid is None:
        reading = replace(reading, links=replace(reading.links, unread=frozenset({1})))

    report = report_of(reading, before, now=LATER)

    assert [device.id for device in report.devices] == [0, 1, 2]
    assert health(report) == {"a": ("healthy", ""), "b": want, "c": ("healthy", "")}
    assert report.links == before.links
    assert {device.island for device in report.devices} == {"nvlink-group-0"}
    assert (report.device_count, report.healthy_count) == (3, 2)
    assert condition(report, names.CONDITION_DEVICES_READABLE) == ("False", names.REASON_DEVICES_MISSING)


def test_an_unreadable_driver_makes_devices_unknown() -> None:
    """When nothing answers, the record stands, nothing is healthy, and the condition says why."""
    before = report_of(make_reading(make_device(0, "a"), make_device(1, "b")))

    report = report_of(MachineReading(devices=(), problem="driver not loaded"), before, now=LATER)

    assert set(health(report).values()) == {("unknown", "not seen by the driver")}
    assert report.links == before.links
    found = next(one for one in report.conditions if one.type == names.CONDITION_DEVICES_READABLE)
    assert (found.status, found.message) == ("False", "driver not loaded")


def test_a_device_that_comes_back_is_the_same() -> None:
    """After a reset the card has its id and its health; the time tells since when."""
    whole = make_reading(make_device(0, "a"), make_device(1, "b"))
    ill = report_of(make_reading(make_device(0, "a")), report_of(whole), now=LATER)

    report = report_of(whole, ill, now="2026-01-31T13:00:00.000000Z")

    assert health(report) == {"a": ("healthy", ""), "b": ("healthy", "")}
    assert [device.health.since for device in report.devices] == [NOW, "2026-01-31T13:00:00.000000Z"]


def test_a_replaced_card_takes_the_place_of_the_old() -> None:
    """A new uuid in the slot of one that is gone ends the old one's record; elsewhere it does not."""
    before = report_of(make_reading(make_device(0, "a"), make_device(1, "b")))

    same_slot = report_of(make_reading(make_device(0, "a"), make_device(1, "new")), before)
    other_slot = report_of(make_reading(make_device(0, "a"), make_device(1, "new", slot=5)), before)

    assert [(device.uuid, device.id) for device in same_slot.devices] == [("a", 0), ("new", 2)], (
        "the id of b stays its own"
    )
    assert [(device.uuid, device.id) for device in other_slot.devices] == [("a", 0), ("b", 1), ("new", 2)]


def test_slots_that_move_replace_nobody() -> None:
    """PCI addresses may move over a reboot: a known card in the slot of a lost one is no replacement."""
    before = report_of(make_reading(make_device(0, "a"), make_device(1, "b")))

    report = report_of(make_reading(make_device(0, "b", slot=0)), before)

    assert sorted(health(report)) == ["a", "b"]


@pytest.mark.parametrize(
    "name", ["product_name", "memory_bytes", "compute_capability", "numa_node", "pci_bus_id", "minor"]
)
def test_a_field_that_was_not_read_keeps_its_value(name: str) -> None:
    """One bad call does not take a fact away that the card cannot change."""
    before = report_of(make_reading(make_device(0, "a")))

    report = report_of(make_reading(make_device(0, "a", **{name: None})), before, now=LATER)

    assert report.devices == before.devices


def test_asymmetric_links_count_as_the_weaker_side() -> None:
    """Where two ends disagree the weaker one stands in the report, and a condition says so."""
    reading = make_reading(make_device(0, "a"), make_device(1, "b"))
    reading = replace(reading, links=replace(reading.links, links=(("X", "NV4"), ("SYS", "X"))))

    report = report_of(reading)

    assert report.links.nvlink == (("X", "SYS"), ("SYS", "X"))
    assert condition(report, names.CONDITION_LINKS_CONSISTENT) == ("False", names.REASON_LINKS_ASYMMETRIC)


def test_unreadable_links_leave_the_last_known() -> None:
    """A probe that failed keeps the matrix; without any it is the worst, never an error."""
    reading = make_reading(make_device(0, "a"), make_device(1, "b"))
    blind = replace(reading, links=LinksReading())

    assert report_of(blind, report_of(reading)).links.nvlink == (("X", "NV2"), ("NV2", "X"))
    assert report_of(blind).links.nvlink == (("X", "SYS"), ("SYS", "X"))
    assert condition(report_of(blind), names.CONDITION_LINKS_CONSISTENT) == ("False", names.REASON_LINKS_UNREAD)


def test_condition_times_move_with_the_status_alone() -> None:
    """A condition that still holds keeps the time since when it does."""
    reading = make_reading(make_device(0, "a"))
    before = report_of(reading)

    steady = report_of(reading, before, now=LATER)
    changed = report_of(MachineReading(devices=(), problem="x"), before, now=LATER)

    assert steady.conditions == before.conditions
    assert [one.last_transition_time for one in changed.conditions] == [LATER, LATER, NOW, NOW]


def test_evidence_and_fabric_are_passed_on() -> None:
    """What was seen of pods, how far it can be trusted, and which fabric the machine is in."""
    reading = replace(make_reading(make_device(0, "a")), fabric=FabricReading("c-1", "7", "completed"))
    pods = (PodEvidence(uid="p", live=True),)

    report = build_report(
        reading,
        ids={"a": 0},
        evidence=EvidenceReading(pods, live_read=False, kubelet_read=True),
        previous=None,
        context=CIRCUMSTANCES,
    )

    assert report.pods == pods
    assert (report.evidence.live_read, report.evidence.kubelet_read) == (False, True)
    assert report.evidence.pod_resource_version == "7"
    assert report.fabric is not None
    assert (report.fabric.cluster_uuid, report.fabric.clique_id, report.fabric.state) == ("c-1", "7", "completed")
    assert condition(report, names.CONDITION_EVIDENCE_READABLE) == ("False", names.REASON_EVIDENCE_UNREAD)


@pytest.mark.parametrize(
    ("state", "faults", "want"),
    [
        ("completed", {}, "True"),
        ("completed", {1: DeviceFault(IncidentKind.FABRIC, 3, message="joining failed with code 5")}, "False"),
        ("completed", {1: DeviceFault(IncidentKind.FABRIC_HEALTH, message="degraded")}, "True"),
        ("completed", {1: DeviceFault(IncidentKind.XID, 79, stands=False)}, "True"),
        ("inProgress", {0: DeviceFault(IncidentKind.FABRIC, 2, message="in progress")}, "False"),
    ],
    ids=["all joined", "one failed to join", "one is degraded", "one is ill", "all wait"],
)
def test_the_fabric_is_ready_when_no_card_is_left_out_for_it(
    state: str, faults: dict[int, DeviceFault], want: str
) -> None:
    """The condition says of the machine what is said of its cards, and names the one that keeps it from being true."""
    devices = [make_device(slot, f"g{slot}", signs=(faults[slot],) if slot in faults else ()) for slot in range(2)]
    reading = replace(make_reading(*devices), fabric=FabricReading("cluster", "1", state))

    found = next(one for one in report_of(reading).conditions if one.type == names.CONDITION_FABRIC_READY)

    assert found.status == want
    assert ("device 1: joining failed with code 5" in found.message) == ("joining" in str(faults.get(1)))


MIG_1G = MigReading("MIG-1", "1g.10gb", memory_bytes=None)


@pytest.mark.parametrize(
    ("facts", "unread", "want"),
    [
        ({}, (), ""),
        ({"memory_bytes": None}, (), "the memory size of 1 devices (0)"),
        ({"mig_enabled": True, "instances": (MIG_1G,)}, (), "the memory size of 1 devices (2)"),
        ({}, ("g0", "g1"), "the users of 2 devices (0, 1)"),
        ({"memory_bytes": None}, ("g1",), "the memory size of 1 devices (0) and the users of 1 devices (1)"),
        ({}, ("GPU-that-left",), ""),
    ],
    ids=["all told", "no memory", "an instance's", "users", "both", "users of a card that left"],
)
def test_what_is_not_read_of_a_sound_card_is_said(facts: dict[str, Any], unread: tuple[str, ...], want: str) -> None:
    """A card that answers may hide who uses it, or how large it is: the condition says which."""
    reading = make_reading(make_device(0, "g0", **facts), make_device(1, "g1"))
    evidence = replace(SIGHTING, uses_unread=unread)
    ids = {uuid: number for number, uuid in enumerate(uuids_by_slot(reading))}
    report = build_report(reading, ids=ids, evidence=evidence, previous=None, context=CIRCUMSTANCES)

    found = next(one for one in report.conditions if one.type == names.CONDITION_FACTS_READABLE)

    assert (found.status, want in found.message) == ("False" if want else "True", True)
    assert report.evidence.uses_unread == unread


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_makes_a_valid_report(name: str) -> None:
    """Each known machine's report survives the wire and is stable: a second look changes nothing."""
    reading = SimulatedBackend(play(profile(name), seed="n1")).read()
    report = report_of(reading)

    assert GpuNodeStatusReport.model_validate_json(json.dumps(report.to_json())) == report
    assert report_of(reading, report, now=LATER) == report


@pytest.mark.parametrize("count", [0, 64, 65, 512, 600])
def test_a_report_is_bounded(count: int) -> None:
    """However many devices, and however long their texts, the object stays below what etcd takes, and valid."""
    text = "y" * 5000
    devices = (
        make_device(number, f"GPU-{number:036}", product_name=text, fault=text, pci_bus_id=f"{number:08x}:00:00.0")
        for number in range(count)
    )
    report = report_of(make_reading(*devices))

    wire = json.dumps(report.to_json())

    assert len(wire) < OBJECT_BYTES_MAX
    assert GpuNodeStatusReport.model_validate_json(wire).device_count == min(count, 512)


@given(st.text(max_size=200), st.sampled_from(["nvidia", "amd"]))
def test_any_product_name_makes_a_valid_model(product_name: str, vendor: str) -> None:
    """A model is empty or a slug that a claim can name."""
    slug = model_slug(product_name, vendor=vendor)

    assert len(slug) <= 63
    assert slug == "" or (slug.startswith(f"{vendor}-") and slug[-1].isalnum() and slug.isascii())


@given(
    st.lists(st.sampled_from("abcd"), unique=True, max_size=4),
    st.lists(st.sampled_from("abcd"), unique=True, max_size=4),
)
def test_rows_are_square_whatever_the_sources(wanted: list[str], known: list[str]) -> None:
    """Sources may lack devices or be cut; the result always has one row and one cell per device."""
    rows = tuple(("NV1",) * (len(known) - 1) for _ in known)

    cells = rows_by_uuid(wanted, (rows, known))

    assert [len(row) for row in cells] == [len(wanted)] * len(wanted)
    assert all(cells[position][position] == "X" for position in range(len(wanted)))


def test_the_largest_report_fits_into_an_object() -> None:
    """64 devices with every incident they can remember, and the pods of a full node: below etcd's limit of 1.5 MB."""
    text = "x" * 128
    incidents = tuple(
        Incident(
            kind=IncidentKind.XID,
            code=code,
            message=text,
            first_time=NOW,
            last_time=NOW,
            quiet_since=NOW,
            boot_id="b" * 36,
            ended_time=NOW,
            ended_by="recovered",
        )
        for code in range(INCIDENTS_MAX)
    )
    devices = tuple(
        Device(
            id=number, uuid=f"GPU-{number:036d}", model="m" * 63, product_name=text, index=number, incidents=incidents
        )
        for number in range(LINKED_DEVICES_MAX)
    )
    departed = tuple(
        DepartedDevice(
            id=number, uuid=f"GPU-{number:036d}", model="m" * 63, boot_id="b" * 36, reason=text, incidents=incidents[:4]
        )
        for number in range(DEPARTED_MAX)
    )
    rows = tuple(tuple("NV18" for _ in devices) for _ in devices)
    pods = tuple(
        PodEvidence(uid=f"{number:036d}", live=True, kubelet=True, uuids=tuple(device.uuid for device in devices[:4]))
        for number in range(PODS_MAX)
    )
    report = GpuNodeStatusReport(devices=devices, departed=departed, links=Links(nvlink=rows, pcie=rows), pods=pods)

    assert len(orjson.dumps(report.to_json())) < 1_500_000
