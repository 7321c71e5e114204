"""The machine's inventory: devices on record and departed ones. It only shrinks on proof, and is bounded. Pure.

Computes the record for the next report from the previous report and this observation. A card that is not seen stays on
record as unknown, because a failing driver and a missing card look alike. It departs when

* another card is in its slot;
* the kernel listed its slot before, and no longer does;
* the machine was booted since the card was last seen, and a second complete observation of that boot lacks it.

A MIG instance departs with its card, and when its card, which answers, lacks it in a boot after the one in which it was
last seen: within one boot another instance may be at its place, which a container of the former could open.

A departed card keeps its id and incidents while it is among the last DEPARTED_MAX, and gets both back when it returns.
The ids of cards that are not listed any more go to nobody else.
A new Node on a machine that was booted since, without any known card, is another machine: it inherits nothing from the
record, and the record tells nothing about where those cards are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from agent.instances import cards_with_instances, is_instance, parent_of
from agent.readings import MachineReading
from atoll.api.node_status import (
    DEPARTED_INCIDENTS_MAX,
    DEPARTED_INSTANCES_MAX,
    DEPARTED_MAX,
    DEVICES_MAX,
    DepartedDevice,
    Device,
    GpuNodeStatusReport,
    Incident,
    Mig,
)
from topology.model import DEVICES_MAX as LINKED_DEVICES_MAX


class DepartureProof(StrEnum):
    """Proof that a card left the machine."""

    REPLACED = "another card is in its slot"
    UNPLUGGED = "the kernel no longer lists its slot"
    BOOTED_WITHOUT = "the machine was booted without it"


@dataclass(frozen=True, slots=True)
class MachineInventory:
    """record: devices by uuid, seen or not. departed: cards and instances that left, oldest first. free_ids_from: lower
    ids had cards that are no longer listed."""

    record: Mapping[str, Device] = field(default_factory=dict)
    departed: tuple[DepartedDevice, ...] = ()
    free_ids_from: int = 0

    @property
    def ids(self) -> dict[str, int]:
        """Ids that no other card may get, by uuid."""
        return {one.uuid: one.id for one in self.departed} | {uuid: one.id for uuid, one in self.record.items()}


ABSENT_MAX: Final = LINKED_DEVICES_MAX
"""Most devices of a record with absent ones: links are reported for no more, and a machine without links is of little
use."""


def update_inventory(
    previous: GpuNodeStatusReport | None, reading: MachineReading, *, boot_id: str, node_uid: str, now: str
) -> MachineInventory:
    """Return the record after this observation. A record in which two devices share an id, which only a manual edit can
    cause, is discarded: ids come from the Leases again."""
    if previous is None or _is_another_machine(previous, reading, boot_id=boot_id, node_uid=node_uid):
        return MachineInventory()
    record = {device.uuid: _with_boot(device, previous.boot_id) for device in previous.devices}
    if len({device.id for device in record.values()}) < len(record):
        record = {}
    seen = _seen(reading)
    proofs = _departures(record, reading, seen, has_booted=_booted_without(previous, reading, boot_id))
    left = [_departed(record[uuid], proof, now) for uuid, proof in proofs.items()]
    present = {uuid: device for uuid, device in record.items() if uuid not in proofs}
    here = _bounded(present, seen) | {
        one.uuid: _returned(one) for one in previous.departed if one.uuid in seen - set(present)
    }
    taken = {device.id for device in here.values()}
    gone = [*(one for one in previous.departed if one.uuid not in here and one.id not in taken), *left]
    departed = _last_departed(gone)
    unlisted = [one.id for one in gone if one not in departed and not one.mig_profile]
    unlisted += [device.id for uuid, device in present.items() if uuid not in here and not is_instance(device)]
    return MachineInventory(here, departed, max(previous.free_ids_from, *(1 + number for number in unlisted), 0))


def _last_departed(gone: Sequence[DepartedDevice]) -> tuple[DepartedDevice, ...]:
    """Return the last cards and the last instances of them, so that neither push the others out."""
    cards = [one for one in gone if not one.mig_profile][-DEPARTED_MAX:]
    instances = [one for one in gone if one.mig_profile][-DEPARTED_INSTANCES_MAX:]
    return (*cards, *instances)


def _seen(reading: MachineReading) -> set[str]:
    cards = {device.uuid for device in reading.devices if device.uuid is not None}
    return cards | {instance.uuid for device in reading.devices for instance in device.instances}


def _is_complete(reading: MachineReading) -> bool:
    """Return whether the observation names every card of the machine."""
    is_told = not reading.problem and not reading.slots_unseen and all(device.uuid for device in reading.devices)
    return bool(is_told and reading.devices and reading.expected_count in {None, len(reading.devices)})


def _is_another_machine(previous: GpuNodeStatusReport, reading: MachineReading, *, boot_id: str, node_uid: str) -> bool:
    known = {device.uuid for device in previous.devices} | {card.uuid for card in previous.departed}
    changed = all(
        now and was and now != was for now, was in ((boot_id, previous.boot_id), (node_uid, previous.node_uid))
    )
    return changed and _is_complete(reading) and not known & _seen(reading)


def _booted_without(previous: GpuNodeStatusReport, reading: MachineReading, boot_id: str) -> str:
    """Return this boot's id if both an earlier observation of it and this one saw cards; else empty."""
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
        elif has_booted and device.boot_id not in {"", has_booted} and _is_told(device, reading):
            proofs[uuid] = DepartureProof.BOOTED_WITHOUT
    with_card = {uuid: proofs[parent] for uuid, device in record.items() if (parent := parent_of(device)) in proofs}
    return proofs | {uuid: proof for uuid, proof in with_card.items() if uuid not in seen}


def _is_told(device: Device, reading: MachineReading) -> bool:
    """Return whether the reading would show a device: an instance only if its card lists its instances."""
    return not is_instance(device) or parent_of(device) in cards_with_instances(reading)


def _bounded(record: Mapping[str, Device], seen: set[str]) -> dict[str, Device]:
    """Return the record without the longest absent devices, if it has more than a report can use."""
    absent = sorted((uuid for uuid in record if uuid not in seen), key=lambda uuid: record[uuid].health.since or "")
    room = max(0, (ABSENT_MAX if len(seen) <= ABSENT_MAX else DEVICES_MAX) - len(seen))
    evicted = set(absent[: max(0, len(absent) - room)])
    return {uuid: device for uuid, device in record.items() if uuid not in evicted}


def _with_boot(device: Device, boot_id: str) -> Device:
    """Return a card with the boot in which it was last seen; for one recorded by an older agent, `boot_id`."""
    return device if device.boot_id else device.model_copy(update={"boot_id": boot_id})


def _departed(device: Device, proof: DepartureProof, now: str) -> DepartedDevice:
    return DepartedDevice(
        id=device.id,
        uuid=device.uuid,
        model=device.model,
        mig_profile=device.mig.profile if device.mig is not None else "",
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
    """Return a card that is back, with its remembered id and incidents; the observation fills in the rest."""
    return Device(
        id=departed.id,
        uuid=departed.uuid,
        model=departed.model,
        index=0,
        vendor=departed.vendor,
        serial=departed.serial,
        pci_bus_id=departed.pci_bus_id,
        boot_id=departed.boot_id,
        mig=Mig(profile=departed.mig_profile) if departed.mig_profile else None,
        incidents=departed.incidents,
    )
