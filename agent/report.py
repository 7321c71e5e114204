"""The report of a machine, comparable over time.

Pure: makes the next GpuNodeStatusReport, except its sequence and time, which agent.publishing adds. Unknown is not
gone: a device on record that cannot be seen stays, as unhealthy or unknown; a field that could not be read keeps its
last value. agent.inventory decides what leaves the record.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.conditions import conditions
from agent.evidence import EvidenceReading
from agent.incidents import fold
from agent.instances import instance_devices, is_instance, links_with_instances, uuids_with_instances
from agent.inventory import MachineInventory, update_inventory
from agent.links import nics_by_uuid, rows_by_uuid
from agent.readings import DeviceFault, DeviceReading, LinksReading, MachineReading
from atoll.api.node_status import (
    DEVICES_MAX,
    GONE_MAX,
    Device,
    Evidence,
    Fabric,
    FormerNode,
    GpuNodeStatusReport,
    Health,
    HealthState,
    Incident,
    IncidentKind,
    Links,
    Mig,
)
from topology.islands import island_of
from topology.links import direct_links
from topology.model import DEVICES_MAX as LINKED_DEVICES_MAX
from topology.model import Machine, machine
from topology.rates import link_gbps, pcie_gbps, pcie_paths_gbps

REASON_NOT_SEEN = "not seen by the driver"
_BRANDS = ("nvidia ", "tesla ", "amd ")
_NOT_SLUG = re.compile(r"[^a-z0-9.]+")


@dataclass(frozen=True, slots=True)
class ReportContext:
    """Parts of a report beside the devices. now: UTC time as text; position: in the watch of this node's pods;
    releases: time at which an administrator declared a device well, by uuid; is_first_since_restore: no report was
    written since the API server was restored, as far as this process knows."""

    agent_version: str
    boot_id: str
    node_uid: str
    position: str
    now: str
    releases: Mapping[str, str] = field(default_factory=dict)
    is_first_since_restore: bool = False


def model_slug(product_name: str, *, vendor: str) -> str:
    """Model name used in claims: `NVIDIA H100 80GB HBM3` is nvidia-h100-80gb-hbm3, `Tesla T4` is nvidia-t4."""
    text = product_name.lower().strip()
    for brand in _BRANDS:
        text = text.removeprefix(brand)
    words = _NOT_SLUG.sub("-", text).strip("-.")
    return f"{vendor}-{words}"[:63].rstrip("-.") if words else ""


def uuids_by_slot(reading: MachineReading) -> list[str]:
    """Uuids of the reading, in the order in which new ones get ids: by PCI slot, then by index."""
    named = [device for device in reading.devices if device.uuid is not None]
    named.sort(key=lambda device: (device.pci_bus_id or "~", device.index))
    instances = [instance.uuid for device in named for instance in device.instances]
    return [device.uuid for device in named if device.uuid is not None] + instances


def build_report(
    reading: MachineReading,
    *,
    ids: Mapping[str, int],
    evidence: EvidenceReading,
    previous: GpuNodeStatusReport | None,
    context: ReportContext,
) -> GpuNodeStatusReport:
    """Build the report. ids: for every uuid of the reading."""
    inventory = inventory_of(previous, reading, context)
    devices = _devices(reading, ids=ids, record=inventory.record, context=context)
    links = _links(reading, devices, previous)
    devices = _with_islands(devices, _geometry(devices, links))
    return GpuNodeStatusReport(
        agent_version=context.agent_version,
        boot_id=context.boot_id,
        node_uid=context.node_uid,
        observed_time=previous.observed_time if previous else None,
        devices=devices,
        departed=inventory.departed,
        free_ids_from=inventory.free_ids_from,
        former_nodes=_former_nodes(previous, context.node_uid),
        links=links,
        fabric=_fabric(reading, previous),
        pods=evidence.pods,
        evidence=Evidence(
            sequence=previous.evidence.sequence if previous else 0,
            pod_resource_version=context.position,
            live_read=evidence.live_read,
            kubelet_read=evidence.kubelet_read,
            unread_since_restore=not evidence.live_read and _is_unread_since_restore(previous, context),
            processes_read=evidence.processes_read,
            uses_unread=evidence.uses_unread,
        ),
        host_uses=evidence.host_uses,
        conditions=conditions(
            reading,
            devices=devices,
            evidence=evidence,
            last=previous.conditions if previous else (),
            now=context.now,
        ),
        device_count=len(devices),
        healthy_count=sum(device.health.state is HealthState.HEALTHY for device in devices),
        models=", ".join(sorted({device.model for device in devices if device.model}))[:256],
    )


def _is_unread_since_restore(previous: GpuNodeStatusReport | None, context: ReportContext) -> bool:
    """Whether no look since the restore could read the pods. The stored report keeps it over restarts of the agent."""
    return context.is_first_since_restore or (previous is not None and previous.evidence.unread_since_restore)


def _former_nodes(previous: GpuNodeStatusReport | None, node_uid: str) -> tuple[FormerNode, ...]:
    """Return the Nodes that had the name before, with the one of the previous report if that was another."""
    if previous is None:
        return ()
    known = [one for one in previous.former_nodes if one.node_uid != node_uid]
    if node_uid and previous.node_uid not in {"", node_uid}:
        known.append(FormerNode(node_uid=previous.node_uid, sequence=previous.evidence.sequence))
    return tuple(known[-GONE_MAX:])


def inventory_of(
    previous: GpuNodeStatusReport | None, reading: MachineReading, context: ReportContext
) -> MachineInventory:
    """Return the record after this observation, and the ids in use."""
    return update_inventory(previous, reading, boot_id=context.boot_id, node_uid=context.node_uid, now=context.now)


def _devices(
    reading: MachineReading, *, ids: Mapping[str, int], record: Mapping[str, Device], context: ReportContext
) -> tuple[Device, ...]:
    now = context.now
    seen = {device.uuid: device for device in reading.devices if device.uuid is not None}
    nameless = [device for device in reading.devices if device.uuid is None]
    whole = [
        _seen_device(device, device_id=ids[uuid], last=record.get(uuid), vendor=reading.vendor, told=context)
        for uuid, device in seen.items()
    ]
    whole += [
        _absent(device, nameless, told=context)
        for uuid, device in record.items()
        if uuid not in seen and not is_instance(device)
    ]
    devices = whole + instance_devices(reading, whole, ids=ids, record=record, now=now, boot_id=context.boot_id)
    return tuple(sorted(devices, key=lambda device: device.id)[:DEVICES_MAX])


def _seen_device(
    reading: DeviceReading, *, device_id: int, last: Device | None, vendor: str, told: ReportContext
) -> Device:
    """One device; last known facts replace those that could not be read."""
    assert reading.uuid is not None
    facts: dict[str, object] = {
        "product_name": reading.product_name[:128] if reading.product_name is not None else None,
        "model": model_slug(reading.product_name, vendor=vendor) if reading.product_name is not None else None,
        "memory_bytes": reading.memory_bytes,
        "compute_capability": reading.compute_capability,
        "numa_node": reading.numa_node,
        "pci_bus_id": reading.pci_bus_id,
        "minor": reading.minor,
        "serial": reading.serial[:32] if reading.serial is not None else None,
        "architecture": reading.architecture,
        "cpu_affinity": reading.cpu_affinity,
        "ecc_enabled": reading.ecc_enabled,
        "power_managed": reading.power_managed,
        "nvlinks": tuple(end[:40] for end in reading.nvlinks[:64]) if reading.nvlinks is not None else None,
        "mig": Mig(enabled=True) if reading.mig_enabled else None,
        "boot_id": told.boot_id or None,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    base = last or Device(id=device_id, uuid=reading.uuid, model="", index=reading.index, vendor=vendor)
    if reading.mig_enabled is False:
        known["mig"] = None
    state = HealthState.UNHEALTHY if reading.fault else HealthState.HEALTHY
    health = _health(last, state, reading.fault, now=told.now)
    incidents = _incidents(last, reading.signs, unread=reading.signs_unread, told=told)
    return base.model_copy(
        update={**known, "id": device_id, "index": reading.index, "health": health, "incidents": incidents}
    )


def _absent(device: Device, nameless: Sequence[DeviceReading], *, told: ReportContext) -> Device:
    """A device on record that the reading does not identify: unhealthy if the driver counts an unreadable device in its
    slot, else unknown."""
    found = _in_place_of(device, nameless)
    state = HealthState.UNHEALTHY if found is not None else HealthState.UNKNOWN
    reason = found.fault or REASON_NOT_SEEN if found is not None else REASON_NOT_SEEN
    signs, unread = (found.signs, found.signs_unread) if found is not None else ((), frozenset(IncidentKind))
    incidents = _incidents(device, signs, unread=unread, told=told)
    return device.model_copy(update={"health": _health(device, state, reason, now=told.now), "incidents": incidents})


def _incidents(
    last: Device | None, signs: Sequence[DeviceFault], *, unread: frozenset[IncidentKind], told: ReportContext
) -> tuple[Incident, ...]:
    released = told.releases.get(last.uuid, "") if last else ""
    before = last.incidents if last else ()
    return fold(before, signs, unread=unread, now=told.now, boot_id=told.boot_id, released=released)


def _in_place_of(device: Device, nameless: Sequence[DeviceReading]) -> DeviceReading | None:
    in_slot = (one for one in nameless if one.pci_bus_id == device.pci_bus_id and one.pci_bus_id)
    at_index = (one for one in nameless if one.pci_bus_id is None and one.index == device.index)
    return next(in_slot, None) or next(at_index, None)


def _health(last: Device | None, state: HealthState, reason: str, *, now: str) -> Health:
    """Health with the time of its last change."""
    reason = reason[:256]
    if last is not None and (last.health.state, last.health.reason) == (state, reason):
        return last.health
    return Health(state=state, reason=reason, since=now)


def _links(reading: MachineReading, devices: Sequence[Device], previous: GpuNodeStatusReport | None) -> Links:
    """Rows in the order of the report; what this reading lacks keeps its last value."""
    if not devices or len(devices) > LINKED_DEVICES_MAX:
        return Links()
    last = previous.links if previous else Links()
    now = links_with_instances(reading)
    uuids = [device.uuid for device in devices]
    order = uuids_with_instances(reading)
    trusted = [None if position in now.unread else uuid for position, uuid in enumerate(order)]
    last_order = [device.uuid for device in previous.devices] if previous else []
    nvlink = rows_by_uuid(uuids, (now.links, trusted), (last.nvlink or None, last_order), (now.links, order))
    pcie = rows_by_uuid(uuids, (now.pcie, trusted), (last.pcie or None, last_order)) if now.pcie or last.pcie else None
    geometry = machine(nvlink, pcie=pcie)
    is_partial = bool(now.unread) or now.links is None
    return Links(
        nvlink=geometry.links,
        pcie=geometry.pcie or (),
        nvlink_generation=_known(now, "nvlink_generation", last.nvlink_generation),
        nvswitch=now.nvswitch or (is_partial and last.nvswitch),
        link_gbps=_known(now, "link_gbps", last.link_gbps),
        pcie_generation=_known(now, "pcie_generation", last.pcie_generation),
        inter_socket_gbps=_known(now, "inter_socket_gbps", last.inter_socket_gbps),
        nics=nics_by_uuid(uuids, (now.nics, order), (last.nics, last_order)),
    )


def _known(now: LinksReading, name: str, last: object) -> object:
    value = getattr(now, name)
    return value if value is not None else last


def _geometry(devices: Sequence[Device], links: Links) -> Machine | None:
    if not links.nvlink:
        return None
    return machine(
        links.nvlink,
        pcie=links.pcie or None,
        numa=[device.numa_node for device in devices],
        nvlink_generation=links.nvlink_generation,
        nvswitch=links.nvswitch,
        link_gbps=links.link_gbps,
        pcie_generation=links.pcie_generation,
        inter_socket_gbps=links.inter_socket_gbps,
        vendor=devices[0].vendor,
    )


def _with_islands(devices: tuple[Device, ...], geometry: Machine | None) -> tuple[Device, ...]:
    if geometry is None:
        return devices
    return tuple(
        device.model_copy(
            update={"island": island.name, "bandwidth_gbps": round(_best_gbps(geometry, position, island.positions), 3)}
        )
        for position, (device, island) in enumerate(zip(devices, island_of(geometry), strict=True))
    )


def _best_gbps(geometry: Machine, position: int, island: Sequence[int]) -> float:
    """Best link of a device inside its island, in one direction; its best PCIe path if it has no link."""
    peers = [peer for peer in island if peer != position]
    links = max((direct_links(geometry.links[position][peer]) for peer in peers), default=0)
    if links:
        return links * link_gbps(geometry)
    paths = pcie_paths_gbps(geometry)
    return max((paths[position][peer] for peer in peers), default=pcie_gbps(geometry))


def _fabric(reading: MachineReading, previous: GpuNodeStatusReport | None) -> Fabric | None:
    found = reading.fabric
    if found is None:
        return previous.fabric if previous is not None and reading.is_fabric_unknown else None
    return Fabric(
        cluster_uuid=found.cluster_uuid[:64],
        clique_id=found.clique_id[:32],
        state=found.state[:32],
        health=found.health[:64],
    )
