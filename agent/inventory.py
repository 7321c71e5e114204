"""Which devices are on record, and which have left: an inventory that shrinks by proof and never fills up.

In: the report before and this look. Out: the record that the next report is built on, and the cards that left. Pure.
A card that is not seen stays on record, unknown: a driver that fails and a card that is gone look alike. It leaves when

* another card sits in its slot;
* the kernel, which listed its slot, lists it no more;
* the machine was booted since it was last seen, and a second look of that boot names every card there is without it.

A card that left keeps its id and what was wrong with it for as long as it is among the last DEPARTED_MAX, and has both
again when it comes back. A Node that was made anew on a machine that was booted since, without any card that is known,
is another machine: nothing of the record is its own, and nothing is said of where those cards are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from agent.instances import is_instance
from agent.readings import MachineReading
from atoll.api.node_status import (
    DEPARTED_INCIDENTS_MAX,
    DEPARTED_MAX,
    DEVICES_MAX,
    DepartedDevice,
    Device,
    GpuNodeStatusReport,
    Incident,
)
from topology.model import DEVICES_MAX as LINKED_DEVICES_MAX


class DepartureProof(StrEnum):
    """What shows that a card left the machine."""

    REPLACED = "another card sits in its slot"
    UNPLUGGED = "the kernel lists its slot no more"
    BOOTED_WITHOUT = "the machine was booted without it"


@dataclass(frozen=True, slots=True)
class MachineInventory:
    """record: devices by uuid, seen or not. departed: cards that left, the oldest first."""

    record: Mapping[str, Device] = field(default_factory=dict)
    departed: tuple[DepartedDevice, ...] = ()

    @property
    def ids(self) -> dict[str, int]:
        """Every id that no other card may get, by uuid."""
        return {one.uuid: one.id for one in self.departed} | {uuid: one.id for uuid, one in self.record.items()}


ABSENT_MAX: Final = LINKED_DEVICES_MAX
"""Devices of a record with absent ones: links are told for no more, and a machine without links is of little use."""


def take_stock(
    previous: GpuNodeStatusReport | None, reading: MachineReading, *, boot_id: str, node_uid: str, now: str
) -> MachineInventory:
    """Return what is on record after this look. A record in which two devices share an id, as only a hand can write it,
    is none: ids come from the Leases again."""
    if previous is None or _is_another_machine(previous, reading, boot_id=boot_id, node_uid=node_uid):
        return MachineInventory()
    record = {device.uuid: _with_boot(device, previous.boot_id) for device in previous.devices}
    if len({device.id for device in record.values()}) < len(record):
        record = {}
    seen = _seen(reading)
    proofs = _departures(record, reading, seen, has_booted=_booted_without(previous, reading, boot_id))
    left = tuple(_departed(record[uuid], proof, now) for uuid, proof in proofs.items() if not is_instance(record[uuid]))
    here = {uuid: device for uuid, device in record.items() if uuid not in proofs}
    here = _bounded(here, seen) | {
        one.uuid: _returned(one) for one in previous.departed if one.uuid in seen - set(here)
    }
    taken = {device.id for device in here.values()}
    kept = (one for one in previous.departed if one.uuid not in here and one.id not in taken)
    return MachineInventory(here, (*kept, *left)[-DEPARTED_MAX:])


def _seen(reading: MachineReading) -> set[str]:
    cards = {device.uuid for device in reading.devices if device.uuid is not None}
    return cards | {instance.uuid for device in reading.devices for instance in device.instances}


def _is_complete(reading: MachineReading) -> bool:
    """Tell whether the look names every card there is."""
    is_told = not reading.problem and not reading.slots_unseen and all(device.uuid for device in reading.devices)
    return bool(is_told and reading.devices and reading.expected_count in {None, len(reading.devices)})


def _is_another_machine(previous: GpuNodeStatusReport, reading: MachineReading, *, boot_id: str, node_uid: str) -> bool:
    known = {device.uuid for device in previous.devices} | {card.uuid for card in previous.departed}
    changed = all(
        now and was and now != was for now, was in ((boot_id, previous.boot_id), (node_uid, previous.node_uid))
    )
    return changed and _is_complete(reading) and not known & _seen(reading)


def _booted_without(previous: GpuNodeStatusReport, reading: MachineReading, boot_id: str) -> str:
    """Return the boot in which a look before this one saw cards, as this one does; empty where that is not so."""
    was_seen = any(device.boot_id == boot_id for device in previous.devices)
    return boot_id if previous.boot_id == boot_id and was_seen and _is_complete(reading) else ""


def _departures(
    record: Mapping[str, Device], reading: MachineReading, seen: set[str], *, has_booted: str
) -> dict[str, DepartureProof]:
    new_slots = {one.pci_bus_id for one in reading.devices if one.uuid and one.uuid not in record and one.pci_bus_id}
    proofs: dict[str, DepartureProof] = {}
    for uuid, device in record.items():
        if uuid in seen:
            continue
        if device.pci_bus_id in new_slots:
            proofs[uuid] = DepartureProof.REPLACED
        elif device.pci_bus_id and device.pci_bus_id in reading.slots_removed:
            proofs[uuid] = DepartureProof.UNPLUGGED
        elif has_booted and device.boot_id not in {"", has_booted}:
            proofs[uuid] = DepartureProof.BOOTED_WITHOUT
    return proofs


def _bounded(record: Mapping[str, Device], seen: set[str]) -> dict[str, Device]:
    """Return the record without the devices that are absent for longest, where there are more than a report can use."""
    absent = sorted((uuid for uuid in record if uuid not in seen), key=lambda uuid: record[uuid].health.since or "")
    room = max(0, (ABSENT_MAX if len(seen) <= ABSENT_MAX else DEVICES_MAX) - len(seen))
    evicted = set(absent[: max(0, len(absent) - room)])
    return {uuid: device for uuid, device in record.items() if uuid not in evicted}


def _with_boot(device: Device, boot_id: str) -> Device:
    """Return a card with the boot in which it was last seen; one of an older agent's record was so in that boot."""
    return device if device.boot_id or is_instance(device) else device.model_copy(update={"boot_id": boot_id})


def _departed(device: Device, proof: DepartureProof, now: str) -> DepartedDevice:
    return DepartedDevice(
        id=device.id,
        uuid=device.uuid,
        model=device.model,
        vendor=device.vendor,
        serial=device.serial,
        pci_bus_id=device.pci_bus_id,
        boot_id=device.boot_id,
        left_time=now,
        reason=proof,
        incidents=tuple(_worth_keeping(device))[-DEPARTED_INCIDENTS_MAX:],
    )


def _worth_keeping(device: Device) -> Iterable[Incident]:
    return sorted(device.incidents, key=lambda one: (not one.ended_time, one.last_time))


def _returned(departed: DepartedDevice) -> Device:
    """Return a card that is back, with what is remembered of it; the look tells the rest."""
    return Device(
        id=departed.id,
        uuid=departed.uuid,
        model=departed.model,
        index=0,
        vendor=departed.vendor,
        serial=departed.serial,
        pci_bus_id=departed.pci_bus_id,
        boot_id=departed.boot_id,
        incidents=departed.incidents,
    )
