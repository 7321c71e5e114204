"""Inventory of a machine over time: which cards leave it, on which proof, and what remains recorded."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.capacity import offer
from agent.readings import DeviceFault, DeviceReading, MachineReading, MigReading
from atoll.api.node_status import DEPARTED_INSTANCES_MAX, DEPARTED_MAX, GpuNodeStatusReport, HealthState, IncidentKind
from tests.agent.builders import make_device, make_reading
from tests.agent.test_report import report_of
from topology.model import DEVICES_MAX as LINKED_DEVICES_MAX

CARDS = ("U0", "U1", "U2", "U3")
Look = tuple[str, MachineReading]


def machine_with(*uuids: str | None, count: int | None = None, removed: str = "", unseen: str = "") -> MachineReading:
    """A machine in whose slots, in order, these cards sit; None: an empty slot."""
    devices = tuple(make_device(slot, uuid, slot=slot) for slot, uuid in enumerate(uuids) if uuid is not None)
    reading = make_reading(*(_at(device, index) for index, device in enumerate(devices)))
    return MachineReading(
        reading.devices,
        reading.links,
        expected_count=len(devices) if count is None else count,
        slots_removed=frozenset({removed} if removed else ()),
        slots_unseen=(unseen,) if unseen else (),
    )


def _at(device: DeviceReading, index: int) -> DeviceReading:
    return DeviceReading(**{name: getattr(device, name) for name in device.__slots__} | {"index": index})


WHOLE = machine_with(*CARDS)
WITHOUT_U3 = machine_with(*CARDS[:3])
SLOT_3 = "00000000:04:00.0"
DEAF = MachineReading((), problem="driver not loaded")
NAMELESS = MachineReading((*WITHOUT_U3.devices, DeviceReading(index=3, uuid=None)), WITHOUT_U3.links, expected_count=4)

HISTORIES: dict[str, tuple[list[Look], set[str], set[str]]] = {
    "card fails in a boot": ([("b1", WHOLE), ("b1", WITHOUT_U3), ("b1", WITHOUT_U3)], {"U3"}, set()),
    "first look of a boot without it": ([("b1", WHOLE), ("b2", WITHOUT_U3)], {"U3"}, set()),
    "second look of a boot without it": ([("b1", WHOLE), ("b2", WITHOUT_U3), ("b2", WITHOUT_U3)], set(), {"U3"}),
    "fell off the bus, then a boot": ([("b1", WHOLE), ("b1", WITHOUT_U3), ("b2", WITHOUT_U3), ("b2", WITHOUT_U3)],
                                      set(), {"U3"}),
    "driver is slower than the agent": ([("b1", WHOLE), ("b2", DEAF), ("b2", WITHOUT_U3)], {"U3"}, set()),
    "driver failed, then two looks": ([("b1", WHOLE), ("b2", DEAF), ("b2", WITHOUT_U3), ("b2", WITHOUT_U3)], set(),
                                      {"U3"}),
    "a card that does not say who it is": ([("b1", WHOLE), ("b2", NAMELESS), ("b2", NAMELESS)], {"U3"}, set()),
    "a card that the driver misses": ([("b1", WHOLE), *[("b2", machine_with(*CARDS[:3], unseen=SLOT_3))] * 3], {"U3"},
                                      set()),
    "the driver counts more than it names": ([("b1", WHOLE), *[("b2", machine_with(*CARDS[:3], count=4))] * 3], {"U3"},
                                             set()),
    "seen in this boot, then lost": ([("b1", WHOLE), ("b2", WHOLE), ("b2", WITHOUT_U3), ("b2", WITHOUT_U3)], {"U3"},
                                     set()),
    "boots that cannot be told apart": ([("", WHOLE), *[("", WITHOUT_U3)] * 3], {"U3"}, set()),
    "the kernel lists its slot no more": ([("b1", WHOLE), ("b1", machine_with(*CARDS[:3], removed=SLOT_3))], set(),
                                          {"U3"}),
    "another slot is listed no more": ([("b1", WHOLE), ("b1", machine_with(*CARDS[:3], removed="00000000:09:00.0"))],
                                       {"U3"}, set()),
    "its slot has another card": ([("b1", WHOLE), ("b1", machine_with(*CARDS[:3], "U9"))], set(), {"U3"}),
    "two cards for one": ([("b1", WHOLE), *[("b2", machine_with("U9", None, "U2", "U3"))] * 2], set(), {"U0", "U1"}),
    "cards change places": ([("b1", WHOLE), *[("b2", machine_with("U3", "U2", "U1", "U0"))] * 2], set(), set()),
    "it comes back": ([("b1", WHOLE), *[("b2", WITHOUT_U3)] * 2, ("b3", WHOLE)], set(), set()),
    "every card was taken out": ([("b1", WHOLE), *[("b2", machine_with())] * 3], set(CARDS), set()),
}  # fmt: skip


def live(history: list[Look], *, node_uid: str = "u1") -> GpuNodeStatusReport:
    """Return the last report of a machine that was looked at so."""
    report = None
    for hour, (boot, reading) in enumerate(history):
        report = report_of(reading, report, now=f"2026-01-31T{hour:02d}:00:00.000000Z", boot=boot, node_uid=node_uid)
    assert report is not None
    return report


@pytest.mark.parametrize("name", HISTORIES)
def test_a_card_leaves_on_proof_and_never_without(name: str) -> None:
    """What is unknown stays on record and offered; what left is told apart, and counts no more."""
    history, unknown, gone = HISTORIES[name]

    report = live(history)

    assert {one.uuid for one in report.devices if one.health.state is not HealthState.HEALTHY} == unknown
    assert {one.uuid for one in report.departed} == gone
    assert not {one.uuid for one in report.devices} & gone
    assert offer(report)["gpu.scheduling/gpu"] == len(report.devices)


def test_a_card_that_left_says_who_it_was_and_what_was_wrong() -> None:
    """Its history stays readable: id, card, slot, when and why it went, and what was open."""
    xid = DeviceFault(IncidentKind.XID, 79, message="XID 79", stands=False)
    sick = machine_with(*CARDS[:3], None)
    devices = (*sick.devices, make_device(3, "U3", signs=(xid,)))
    whole = MachineReading(devices, WHOLE.links, expected_count=4)

    report = live([("b1", whole), ("b2", WITHOUT_U3), ("b2", WITHOUT_U3)])

    (left,) = report.departed
    assert (left.id, left.uuid, left.pci_bus_id, left.boot_id) == (3, "U3", SLOT_3, "b1")
    assert (left.left_time, left.reason) == ("2026-01-31T02:00:00.000000Z", "the machine was booted without it")
    assert [(one.kind, one.code) for one in left.incidents] == [(IncidentKind.XID, 79)]


def test_a_card_that_was_unplugged_and_comes_back_is_as_ill_as_it_was() -> None:
    """To let the bus forget a card and find it again is no cure that anybody has seen: id and open XID stay."""
    xid = DeviceFault(IncidentKind.XID, 79, message="XID 79", stands=False)
    ill = MachineReading((*WITHOUT_U3.devices, make_device(3, "U3", signs=(xid,))), WHOLE.links, expected_count=4)
    unplugged = machine_with(*CARDS[:3], removed=SLOT_3)

    report = live([("b1", ill), ("b1", unplugged), ("b1", WHOLE)])

    back = report.devices[3]
    assert (back.id, back.uuid, [one.code for one in back.incidents if not one.ended_time]) == (3, "U3", [79])
    assert not report.departed


def test_another_machine_under_the_old_name_begins_anew() -> None:
    """Node, boot and every card are others: nobody says that the old cards left, for they may be in use elsewhere."""
    old = live([("b1", WHOLE)])
    other = machine_with("V0", "V1")

    report = report_of(other, old, boot="b9", node_uid="u2")

    assert [(one.uuid, one.id) for one in report.devices] == [("V0", 0), ("V1", 1)]
    assert not report.departed
    assert [(one.node_uid, one.sequence) for one in report.former_nodes] == [("u1", old.evidence.sequence)]


@pytest.mark.parametrize(
    ("boot", "node_uid", "reading"),
    [
        ("b1", "u2", machine_with("V0", "V1")),
        ("b9", "u1", machine_with("V0", "V1")),
        ("b9", "u2", machine_with("V0", "U1")),
        ("b9", "u2", DEAF),
    ],
    ids=["same boot", "same Node", "one card is known", "nothing could be read"],
)
def test_a_machine_that_may_be_the_old_one_keeps_its_record(boot: str, node_uid: str, reading: MachineReading) -> None:
    """One thing in common is enough: the cards that are not seen stay unknown, or left by what their slots show."""
    report = report_of(reading, live([("b1", WHOLE)]), boot=boot, node_uid=node_uid)

    assert {"U2", "U3"} <= {one.uuid for one in (*report.devices, *report.departed)}


def test_eight_swaps_of_eight_cards_leave_what_is_there() -> None:
    """Each time all eight are replaced over a boot; in the end eight are offered, with links, and ids of their own,
    which no card had before, listed or not."""
    report, ids = None, set[int]()
    for swap in range(20):
        cards = machine_with(*(f"S{swap}-{slot}" for slot in range(8)))
        for _ in range(2):
            report = report_of(cards, report, boot=f"b{swap}")
        ids |= {device.id for device in report.devices}

    assert report is not None
    assert len(report.devices) == offer(report)["gpu.scheduling/gpu"] == 8
    assert len(report.links.nvlink) == 8
    assert len(report.departed) == DEPARTED_MAX
    assert len(ids) == 160, "no id was used for two cards"


def split(*profiles: str, unread: bool = False, **more: str) -> MachineReading:
    """Two cards; the first is split into the instances M0, M1, ... of these profiles."""
    parent, other = machine_with("U0", "U1").devices
    instances = tuple(MigReading(f"M{number}", profile, memory_bytes=None) for number, profile in enumerate(profiles))
    parent = replace(parent, mig_enabled=True, instances=instances, instances_unread=unread)
    return replace(machine_with("U0", "U1"), devices=(parent, other), **more)


M0, NONE = split("3g.40gb"), split()
INSTANCES: dict[str, tuple[list[Look], bool, bool]] = {
    "destroyed while the machine runs": ([("b1", M0), ("b1", NONE)], False, False),
    "the first look of a boot": ([("b1", M0), ("b2", NONE)], True, False),
    "not made again over a boot": ([("b1", M0), ("b2", NONE), ("b2", NONE)], False, True),
    "made again a moment after the boot": ([("b1", M0), ("b2", NONE), ("b2", M0)], True, False),
    "made again much later": ([("b1", M0), *[("b2", NONE)] * 3, ("b2", M0)], True, False),
    "its card does not list what it has": ([("b1", M0), *[("b2", split(unread=True))] * 3], True, False),
    "its card was taken out": ([("b1", M0), *[("b2", machine_with(None, "U1"))] * 2], False, True),
    "its card is not seen": ([("b1", M0), *[("b1", machine_with(None, "U1"))] * 3], True, False),
    "its card was replaced": ([("b1", M0), ("b1", machine_with("U9", "U1"))], False, True),
}
"""Whether M0 is on record after the last look, and whether it departed."""


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_leaves_with_its_card_or_over_a_boot(name: str) -> None:
    """Departed instances free the GPUs of pods that left. Within a boot another instance may be at the same place, so
    that its end alone proves nothing."""
    history, is_kept, has_departed = INSTANCES[name]

    report = live(history)

    assert ("M0" in {device.uuid for device in report.devices}) == is_kept
    assert ("M0" in {one.uuid for one in report.departed}) == has_departed
    shown = next((device for device in report.devices if device.uuid == "M0"), None)
    assert shown is None or (shown.mig is not None and shown.mig.profile == "3g.40gb")


def test_instances_push_no_card_out_of_the_record() -> None:
    """A card left once; since then the layout changed at every boot."""
    report = live([("b0", machine_with("U0", "U1", "U2")), *[("b1", machine_with("U0", "U1"))] * 2])
    for number in range(200):
        reading = split("3g.40gb")
        instance = replace(reading.devices[0].instances[0], uuid=f"M-{number}")
        reading = replace(reading, devices=(replace(reading.devices[0], instances=(instance,)), reading.devices[1]))
        for _ in range(2):
            report = report_of(reading, report, boot=f"c{number}")

    assert len(report.departed) == 1 + DEPARTED_INSTANCES_MAX
    assert report.departed[0].uuid == "U2"


@given(st.integers(0, 2**32), st.integers(10, 60))
def test_whatever_is_swapped_the_record_is_bounded_and_no_id_is_double(seed: int, looks: int) -> None:
    """Cards come, go, fail and change places over boots: what is seen is on record, and links are told of it."""
    chance = random.Random(seed)
    report, boot, cards = None, 0, list(CARDS)
    news: Callable[[], str] = iter(f"N{number}" for number in range(10_000)).__next__
    for _ in range(looks):
        if chance.random() < 0.4:
            boot += 1
            cards = [card if chance.random() < 0.6 else news() for card in cards]
        shown = [card if chance.random() < 0.9 else None for card in cards]
        report = report_of(machine_with(*shown), report, boot=f"b{boot}")
        assert {card for card in shown if card} <= {one.uuid for one in report.devices}
        taken = [one.id for one in (*report.devices, *report.departed)]
        assert len(set(taken)) == len(taken)
        assert len(report.devices) <= LINKED_DEVICES_MAX
        assert len(report.links.nvlink) == len(report.devices)


def test_absent_cards_without_proof_do_not_fill_the_record() -> None:
    """A machine whose boots nobody can tell apart, with cards in ever new slots: the longest absent make room."""
    report = None
    for number in range(70):
        device = make_device(0, f"H{number}", slot=number)
        report = report_of(
            make_reading(device), report, boot="", now=f"2026-01-31T00:{number // 60:02d}:{number % 60:02d}Z"
        )

    assert report is not None
    assert len(report.devices) == LINKED_DEVICES_MAX
    assert len(report.links.nvlink) == LINKED_DEVICES_MAX
    assert "H69" in {one.uuid for one in report.devices}
