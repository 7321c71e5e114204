"""Raw result of one look at a machine.

Every backend fills these frozen values; the report is built from them. None always means "could not be read", never
zero or absent: one bad call costs one field, and one lost GPU never hides the others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from atoll.api.node_status import IncidentKind

Cells = tuple[tuple[str, ...], ...]
"""A square matrix of link cells ("NV12", "PIX", "SYS", "X" on the diagonal) in the order of the devices."""


UNTOLD = ""
"""Cell of a pair whose relation is unknown."""


class Remote(StrEnum):
    """Far end of an NVLink."""

    GPU = "gpu"
    SWITCH = "switch"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class NvLink:
    """One active NVLink of a device. `remote_pci_bus_id` names the GPU if `remote` is one."""

    remote: Remote
    remote_pci_bus_id: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """One fault of a device.

    kind and code name it (atoll.api.node_status.IncidentKind); count: occurrences, if the device counts itself.
    stands: it lasts until a look no longer shows it; else it is an event whose end nothing reports.
    """

    kind: IncidentKind
    code: int = 0
    count: int = 1
    message: str = ""
    stands: bool = True


@dataclass(frozen=True, slots=True)
class MigReading:
    """One MIG instance of a device. profile: such as 3g.40gb."""

    uuid: str
    profile: str
    product_name: str | None = None
    memory_bytes: int | None = None
    process_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device. `fault`: what is wrong, in few words; empty for a device that works.

    uuid None: the device at this index does not give its uuid. process_ids: pids that use it. nvlinks: its links by
    far end, such as "18 switch". signs: faults to remember; signs_unread: kinds of faults that could not be read.
    processes_unread: there may be more processes than those listed; instances_unread: more instances.
    """

    index: int
    uuid: str | None = None
    product_name: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None
    numa_node: int | None = None
    pci_bus_id: str | None = None
    minor: int | None = None
    mig_enabled: bool | None = None
    process_ids: tuple[int, ...] | None = None
    fault: str = ""
    is_lost: bool = False
    serial: str | None = None
    architecture: str | None = None
    cpu_affinity: str | None = None
    ecc_enabled: bool | None = None
    power_managed: bool | None = None
    nvlinks: tuple[str, ...] | None = None
    instances: tuple[MigReading, ...] = ()
    signs: tuple[DeviceFault, ...] = ()
    signs_unread: frozenset[IncidentKind] = frozenset()
    processes_unread: bool = False
    instances_unread: bool = False


@dataclass(frozen=True, slots=True)
class NicReading:
    """One network adapter and its PCIe relation to each device of the reading; None if unknown."""

    name: str
    cells: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class LinksReading:
    """Links between the devices of a reading; rows and columns in the order of its devices.

    links: NVLink if there is any, else the PCIe relation. pcie: the PCIe relation that NVLink hides. The two ends of a
    pair may disagree; the weaker side counts. unread: positions of devices whose NVLinks could not be read, so that
    their cells may be too weak. nics: network adapters, None if unknown.
    """

    links: Cells | None = None
    pcie: Cells | None = None
    nvlink_generation: int | None = None
    nvswitch: bool = False
    link_gbps: float | None = None
    pcie_generation: int | None = None
    inter_socket_gbps: float | None = None
    unread: frozenset[int] = frozenset()
    nics: tuple[NicReading, ...] | None = None


@dataclass(frozen=True, slots=True)
class FabricReading:
    """The NVLink fabric that the machine belongs to; state is one of notSupported, notStarted, inProgress, completed.
    health: degraded parts, in few words."""

    cluster_uuid: str
    clique_id: str
    state: str
    health: str = ""


@dataclass(frozen=True, slots=True)
class MachineReading:
    """One look at the whole machine. expected_count: devices that the driver counts, readable or not. problem: why
    nothing could be read, empty otherwise. slots_unseen: PCI slots with a GPU that the driver does not count;
    slots_removed: PCI slots where the kernel listed a GPU before and lists nothing now.
    fabric_unread: fabric is None because it could not be read, not because there is none."""

    devices: tuple[DeviceReading, ...]
    links: LinksReading = field(default_factory=LinksReading)
    fabric: FabricReading | None = None
    expected_count: int | None = None
    vendor: str = "nvidia"
    problem: str = ""
    slots_unseen: tuple[str, ...] = ()
    slots_removed: frozenset[str] = frozenset()
    fabric_unread: bool = False

    @property
    def is_fabric_unknown(self) -> bool:
        """True if there may be a fabric that was not reported."""
        return self.fabric_unread or bool(self.problem)

    def pids_by_uuid(self) -> Mapping[str, tuple[int, ...]]:
        """Processes of each device and MIG instance with a uuid. One with unread processes has none here and is in
        `uuids_unread`."""
        return {uuid: pids for uuid, pids in self._users() if pids is not None}

    def uuids_unread(self) -> frozenset[str]:
        """Devices and instances whose processes could not all be read."""
        unlisted = {device.uuid for device in self.devices if device.processes_unread and device.uuid is not None}
        unlisted |= {one.uuid for device in self.devices if device.processes_unread for one in device.instances}
        return frozenset(uuid for uuid, pids in self._users() if pids is None) | unlisted

    def as_remembered(self) -> "MachineReading":
        """This reading in place of a failed one: without its users and events."""
        known = self.without_users()
        nothing_new = frozenset(IncidentKind)
        return replace(known, devices=tuple(replace(one, signs=(), signs_unread=nothing_new) for one in known.devices))

    def without_users(self) -> "MachineReading":
        """This reading without its processes, which are too old."""
        devices = (
            replace(one, process_ids=None, instances=tuple(replace(part, process_ids=None) for part in one.instances))
            for one in self.devices
        )
        return replace(self, devices=tuple(devices))

    def _users(self) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        for device in self.devices:
            if device.uuid is not None:
                yield device.uuid, device.process_ids
            for instance in device.instances:
                yield instance.uuid, instance.process_ids
