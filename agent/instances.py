"""MIG instances as devices of the report.

Pure: makes one Device per instance, with profile, parent and memory, and adds rows to the link matrix. An instance has
its parent's health. It has no NVLink: the driver allows no peer access between instances, so two of them are as near as
their cards are over PCIe.

An instance that its card no longer lists is gone; while the card does not answer, the instance stays as unknown. So
does one that was seen before the boot, until `agent.inventory` lets it depart: whoever makes the instances again may
not be done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent.readings import Cells, LinksReading, MachineReading, MigReading, NicReading
from atoll.api.node_status import Device, Health, HealthState, Mig
from topology.links import SELF, WORST

SAME_CARD = "PIX"


def is_instance(device: Device) -> bool:
    """True if a device of a report is a MIG instance."""
    return device.mig is not None and bool(device.mig.profile)


def parent_of(device: Device) -> str:
    """Uuid of the card of a MIG instance; empty for a card."""
    return device.mig.parent_uuid if device.mig is not None and device.mig.profile else ""


def cards_with_instances(reading: MachineReading) -> set[str | None]:
    """Uuids of the cards that say which instances they have."""
    return {one.uuid for one in reading.devices if one.mig_enabled is not None and not one.instances_unread}


def instance_devices(
    reading: MachineReading,
    whole: Sequence[Device],
    *,
    ids: Mapping[str, int],
    record: Mapping[str, Device],
    now: str,
    boot_id: str,
) -> list[Device]:
    """Instances of all devices, and those on record whose card does not answer now."""
    parents = {device.uuid: device for device in whole}
    told = cards_with_instances(reading)
    seen = [
        (instance, parents[device.uuid])
        for device in reading.devices
        if device.uuid in parents
        for instance in device.instances
    ]
    devices = [
        _device(instance, parent, device_id=ids[instance.uuid], last=record.get(instance.uuid), now=now)
        for instance, parent in seen
    ]
    shown = {device.uuid for device in devices}
    for uuid, device in record.items():
        parent_uuid, is_of_past = parent_of(device), device.boot_id not in {"", boot_id}
        if uuid not in shown and parent_uuid in parents and (parent_uuid not in told or is_of_past):
            health = parents[parent_uuid].health
            state = HealthState.UNKNOWN if health.state is HealthState.HEALTHY else health.state
            devices.append(_with_health(device, state, health.reason or "instances cannot be read", now=now))
    return devices


def uuids_with_instances(reading: MachineReading) -> list[str | None]:
    """Uuids of the devices, then of their instances, in the order of `links_with_instances`."""
    order = [device.uuid for device in reading.devices]
    return order + [instance.uuid for device in reading.devices for instance in device.instances]


def links_with_instances(reading: MachineReading) -> LinksReading:
    """The links of a reading with rows for instances after those of the devices."""
    links, whole = reading.links, len(reading.devices)
    cards = [*range(whole)]
    cards += [position for position, device in enumerate(reading.devices) for _ in device.instances]
    if len(cards) == whole or links.links is None:
        return links
    return replace(
        links,
        links=_rows(links.links, links.pcie, cards, whole=whole),
        pcie=_rows(links.pcie, links.pcie, cards, whole=whole) if links.pcie is not None else None,
        nics=_nics(links.nics, cards) if links.nics is not None else None,
    )


def _nics(nics: Sequence[NicReading], cards: Sequence[int]) -> tuple[NicReading, ...]:
    return tuple(NicReading(nic.name, tuple(nic.cells[card] for card in cards)) for nic in nics)


def _rows(rows: Cells, pcie: Cells | None, cards: Sequence[int], *, whole: int) -> Cells:
    def cell(first: int, second: int) -> str:
        if first == second:
            return SELF
        if first < whole and second < whole:
            return rows[first][second]
        if cards[first] == cards[second]:
            return SAME_CARD
        return pcie[cards[first]][cards[second]] if pcie is not None else WORST

    order = range(len(cards))
    return tuple(tuple(cell(first, second) for second in order) for first in order)


def _device(instance: MigReading, parent: Device, *, device_id: int, last: Device | None, now: str) -> Device:
    name, model, index = instance.product_name, parent.model, parent.index
    base = last or Device(id=device_id, uuid=instance.uuid, model=model, index=index, vendor=parent.vendor)
    device = base.model_copy(
        update={
            "id": device_id,
            "index": parent.index,
            "model": parent.model,
            "product_name": name[:128] if name is not None else base.product_name,
            "memory_bytes": instance.memory_bytes if instance.memory_bytes is not None else base.memory_bytes,
            "compute_capability": parent.compute_capability,
            "numa_node": parent.numa_node,
            "pci_bus_id": parent.pci_bus_id,
            "minor": parent.minor,
            "boot_id": parent.boot_id,
            "mig": Mig(profile=instance.profile[:24], parent_uuid=parent.uuid),
        }
    )
    return _with_health(device, parent.health.state, parent.health.reason, now=now)


def _with_health(device: Device, state: HealthState, reason: str, *, now: str) -> Device:
    if (device.health.state, device.health.reason) == (state, reason) and device.health.since:
        return device
    return device.model_copy(update={"health": Health(state=state, reason=reason, since=now)})
