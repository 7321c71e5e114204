"""A node's report as the ledger uses it: devices by dense position, masks of what may be given out, geometry.

Bit i of a mask is position i of `devices`, never a device id. Ids, uuids and positions are translated here alone.

Nodes with equal geometry and equal cards share one Shape, and those of one shape with the same free devices one Cell:
thousands of nodes are a few hundred cells, and whatever does not depend on a node's name is answered once per cell.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from atoll.api.node_status import Device, GpuNodeStatus, GpuNodeStatusReport, Links
from atoll.cluster.health import is_fabric_ready, judge
from atoll.cluster.transitions import Availability
from topology.errors import TopologyError
from topology.links import SAME_BOARD, WORST, clean_cell, direct_links
from topology.model import Machine, machine

_GIB = 2**30
_NOMINAL_GIB = (4, 6, 8, 10, 11, 12, 16, 20, 22, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 144, 180, 192, 256, 288)
_NOMINAL_GIB_BY_MODEL = {"nvidia-gb10": 128, "nvidia-thor": 128, "nvidia-jetson-agx-thor": 128}
"""Machines with unified memory, for which the driver reports no GPU memory size."""
_SIZE_IN_MODEL = re.compile(r"-(\d{1,4})gb(?:-|$)")
_REPORTED_SHARE_MIN = 0.9
"""ECC in GDDR takes a sixteenth of the memory and drivers keep some more, so a 48 GB card may report 44.99 GiB."""


SPLIT = "split into instances"
"""Stands as the profile of a card whose MIG instances are given out instead: nobody can ask for it."""
SHAPES_MAX = 1024
CELLS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """What a claim may require of one device. `memory_bytes` is the nominal size; see health.is_fabric_ready."""

    model: str
    vendor: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    mig_profile: str
    fabric_ready: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class NodeShape:
    """What nodes of one kind have in common: geometry, and the card at each position."""

    machine: Machine
    cards: tuple[DeviceAttributes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """What all nodes of one shape have in common that can give out the same positions now."""

    shape: NodeShape
    free: int


@dataclass(frozen=True, slots=True, eq=False)
class NodeDevices:
    """The devices of one node, in the order of the report; `usable` leaves out sick, cordoned and MIG parent ones."""

    node: str
    node_uid: str
    boot_id: str
    shape: NodeShape
    devices: tuple[Device, ...]
    usable: int
    position_by_id: dict[int, int]
    position_by_uuid: dict[str, int]
    availability: tuple[Availability, ...] = ()
    """Of each position, by the second state machine of `atoll.cluster.transitions`."""

    @property
    def machine(self) -> Machine:
        """Geometry over the positions."""
        return self.shape.machine

    @property
    def all(self) -> int:
        """Mask of every device."""
        return (1 << len(self.devices)) - 1

    def mask_of(self, ids: tuple[int, ...] | frozenset[int], uuids: tuple[str, ...] | frozenset[str] = ()) -> int:
        """Return the mask of the devices that have one of the ids or one of the uuids; unknown ones add nothing."""
        positions = {self.position_by_id[device_id] for device_id in ids if device_id in self.position_by_id}
        positions |= {self.position_by_uuid[uuid] for uuid in uuids if uuid in self.position_by_uuid}
        return sum(1 << position for position in positions)


@lru_cache(maxsize=SHAPES_MAX)
def shape_of(geometry: Machine, cards: tuple[DeviceAttributes, ...]) -> NodeShape:
    """Return the one Shape of these facts."""
    return NodeShape(geometry, cards)


@lru_cache(maxsize=CELLS_MAX)
def cell_of(shape: NodeShape, free: int) -> Cell:
    """Return the one Cell of a shape and a mask of usable free positions."""
    return Cell(shape, free)


def node_devices(status: GpuNodeStatus) -> NodeDevices | None:
    """Return the devices of a report; None when there is no report yet or its parts contradict each other."""
    report = status.status
    if report is None:
        return None
    devices = report.devices
    position_by_id = {device.id: position for position, device in enumerate(devices)}
    position_by_uuid = {device.uuid: position for position, device in enumerate(devices)}
    if len(position_by_id) != len(devices) or len(position_by_uuid) != len(devices):
        return None
    try:
        geometry = _geometry(report)
    except TopologyError:
        return None
    standings = judge(status).standings
    availability = tuple(standings[device.uuid].state for device in devices)
    usable = sum(
        1 << i
        for i, device in enumerate(devices)
        if availability[i] is Availability.HEALTHY and not is_mig_parent(device)
    )
    return NodeDevices(
        node=status.metadata.name,
        node_uid=report.node_uid,
        boot_id=report.boot_id,
        shape=shape_of(geometry, tuple(_attributes(device) for device in devices)),
        devices=devices,
        usable=usable,
        position_by_id=position_by_id,
        position_by_uuid=position_by_uuid,
        availability=availability,
    )


def _attributes(device: Device) -> DeviceAttributes:
    return _attributes_of(
        device.model,
        device.vendor,
        nominal_memory_bytes(device),
        device.compute_capability,
        SPLIT if is_mig_parent(device) else device.mig.profile if device.mig is not None else "",
        is_ready=is_fabric_ready(device),
    )


@lru_cache(maxsize=SHAPES_MAX)
def _attributes_of(
    model: str, vendor: str, memory_bytes: int, compute_capability: str, mig_profile: str, *, is_ready: bool
) -> DeviceAttributes:
    """Return the one Card of these facts; thousands of devices have one of a few."""
    return DeviceAttributes(model, vendor, memory_bytes, parse_capability(compute_capability), mig_profile, is_ready)


def parse_capability(text: str) -> tuple[int, int]:
    """Return (major, minor) of a compute capability such as 8.0; (0, 0) for text that is none."""
    major, _, minor = text.partition(".")
    return (
        int(major) if major.isascii() and major.isdigit() else 0,
        int(minor) if minor.isascii() and minor.isdigit() else 0,
    )


def parent_uuid_of(device: Device) -> str:
    """Uuid of the card that a MIG instance is part of; empty for a whole card."""
    return device.mig.parent_uuid if device.mig is not None and device.mig.profile else ""


def is_mig_parent(device: Device) -> bool:
    """Tell whether the device is only the card of MIG instances, which are given out instead of it."""
    return device.mig is not None and device.mig.enabled and not device.mig.profile


def _geometry(report: GpuNodeStatusReport) -> Machine:
    parents = tuple(map(parent_uuid_of, report.devices))
    numa = tuple(
        device.numa_node if device.numa_node is not None and device.numa_node >= 0 else None
        for device in report.devices
    )
    return _machine(report.links, parents, numa, report.devices[0].vendor if report.devices else "nvidia")


@lru_cache(maxsize=SHAPES_MAX)
def _machine(links: Links, parents: tuple[str, ...], numa: tuple[int | None, ...], vendor: str) -> Machine:
    """Return the geometry of a report; thousands of nodes have one of a few. `parents`: by device, of MIG instances."""
    count = len(parents)
    rows = links.nvlink if len(links.nvlink) == count else links.pcie
    if len(rows) != count:
        rows = tuple(tuple("X" if column == row else "SYS" for column in range(count)) for row in range(count))
    return machine(
        links=_with_instances(rows, parents),
        pcie=_with_instances(links.pcie, parents) if len(links.pcie) == count else None,
        numa=numa,
        nvlink_generation=links.nvlink_generation,
        nvswitch=links.nvswitch,
        link_gbps=links.link_gbps,
        pcie_generation=links.pcie_generation,
        inter_socket_gbps=links.inter_socket_gbps,
        vendor=vendor,
        nics=_nic_rows(links, count=count),
    )


def _nic_rows(links: Links, *, count: int) -> tuple[tuple[str, ...], ...] | None:
    """Return one row of adapter cells per device; None where no adapter is told of."""
    columns = [nic.cells for nic in links.nics if len(nic.cells) == count]
    return tuple(zip(*columns, strict=True)) if columns else None


def _with_instances(rows: tuple[tuple[str, ...], ...], parents: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the cells as MIG instances see them: those of one card share a board, and none of them has NVLink."""
    if not any(parents):
        return rows

    def cell(row: int, column: int, told: str) -> str:
        if row == column or not (parents[row] or parents[column]):
            return told
        if parents[row] == parents[column]:
            return SAME_BOARD
        return WORST if direct_links(clean_cell(told)) else told

    return tuple(
        tuple(cell(row, column, told) for column, told in enumerate(cells[: len(parents)]))
        for row, cells in enumerate(rows)
    )


def nominal_memory_bytes(device: Device) -> int:
    """Return the memory that the card is sold with: a claim of 80Gi means an 80 GB card, though it reports less.

    The smallest nominal size that the reported one reaches to nine tenths or more; the reported size where none is. A
    MIG instance has the size that its profile names, such as 3g.40gb. If the driver reports none, it is that of the
    model, by table or by its name; 0 if that is unknown too.
    """
    return _nominal(device.memory_bytes, device.mig.profile if device.mig is not None else "", device.model)


@lru_cache(maxsize=SHAPES_MAX)
def _nominal(memory_bytes: int, profile: str, model: str) -> int:
    profile_gib = profile.partition(".")[2].partition("gb")[0]
    if profile_gib.isascii() and profile_gib.isdigit():
        return int(profile_gib) * _GIB
    if not memory_bytes:
        named = _SIZE_IN_MODEL.search(model)
        known = (size for name, size in _NOMINAL_GIB_BY_MODEL.items() if f"{model}-".startswith(f"{name}-"))
        return int(named[1]) * _GIB if named else next(known, 0) * _GIB
    for size_gib in _NOMINAL_GIB:
        nominal = size_gib * _GIB
        if memory_bytes <= nominal:
            return nominal if memory_bytes >= nominal * _REPORTED_SHARE_MIN else memory_bytes
    return memory_bytes
