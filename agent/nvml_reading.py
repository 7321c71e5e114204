"""A MachineReading from the facts of NVIDIA's library.

Pure: combines the facts of agent.driver's steps, one dict per device, and the events since the last look. What could
not be read stays None. agent.nvml runs the steps and handles devices that do not answer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agent.driver import Facts
from agent.faults import device_faults, event_faults, fabric_health, unread_kinds
from agent.links import link_matrix, plain_bus_id
from agent.readings import (
    UNTOLD,
    Cells,
    DeviceFault,
    DeviceReading,
    FabricReading,
    LinksReading,
    MachineReading,
    MigReading,
    NvLink,
    Remote,
)
from agent.sanitize import profile_of
from atoll.api.node_status import IncidentKind
from topology.links import SELF, WORST

_PCIE_CELLS: Final = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t."""
_NVLINK_GENERATIONS: Final = {4: 1, 5: 2, 6: 2, 7: 3, 9: 4, 10: 5}
"""By nvmlDeviceArchitecture_t (Pascal, Volta, Turing, Ampere, Hopper, Blackwell); the library's own NVLink version is
an enumeration that does not follow the generations."""
_ARCHITECTURES: Final = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}
_FABRIC_STATES: Final = {0: "notSupported", 1: "notStarted", 2: "inProgress", 3: "completed"}
_P2P_BROKEN: Final = frozenset({1, 3, 4})
"""nvmlGpuP2PStatus_t: chipset or host bridge cannot, or switched off. A model that never can (2) says nothing about a
pair."""
_NO_INSTANCE: Final = frozenset({None, 0xFFFF_FFFF})
"""Instance number of a process outside instances."""
_REMOTES: Final = {0: Remote.GPU, 1: Remote.OTHER, 2: Remote.SWITCH}


def machine_reading(facts: Sequence[Facts], *, events: Sequence[Sequence[Any]] = ()) -> MachineReading:
    """Make a reading of all facts. Pure."""
    devices = [_device(one, events) for one in facts]
    links = _links(facts, devices)
    return MachineReading(
        devices=tuple(_with_dead_links(device, facts, links) for device in devices),
        links=links,
        fabric=_fabric(facts),
        expected_count=len(facts),
        fabric_unread=any(one.get("fabric") is None for one in facts),
    )


def _device(facts: Facts, events: Sequence[Sequence[Any]]) -> DeviceReading:
    capability, bus_id = facts.get("compute_capability"), facts.get("bus_id")
    uuid, mig = facts.get("uuid"), facts.get("mig")
    pids, is_unlisted = _own_processes(facts)
    return DeviceReading(
        index=facts["index"],
        uuid=uuid,
        product_name=facts.get("product_name"),
        memory_bytes=facts.get("memory_bytes"),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        numa_node=_numa_node(facts.get("numa_mask")),
        pci_bus_id=plain_bus_id(bus_id) if bus_id is not None else None,
        minor=facts.get("minor"),
        mig_enabled=bool(mig) if mig is not None else None,
        process_ids=pids,
        processes_unread=is_unlisted,
        fault=facts.get("lost") or facts.get("fault") or facts.get("silent") or "",
        is_lost=bool(facts.get("lost")),
        serial=facts.get("serial"),
        architecture=_ARCHITECTURES.get(facts.get("architecture") or 0),
        cpu_affinity=_ranges(facts.get("cpu_mask")),
        ecc_enabled=_flag(facts.get("ecc")),
        power_managed=_flag(facts.get("power_management")),
        nvlinks=_link_summary(facts.get("links")),
        instances=_instances(facts),
        instances_unread=bool(facts.get("uninstanced")),
        signs=device_faults(facts) + (event_faults(events, uuid) if uuid else ()),
        signs_unread=unread_kinds(facts),
    )


def _own_processes(facts: Facts) -> tuple[tuple[int, ...] | None, bool]:
    """Pids on the card itself; True if there may be others. For a card in MIG mode the driver lists the processes of
    all instances too. These use their instance, not the card, or a holder of one instance would appear on the rest. A
    process of an unlisted instance may be anywhere."""
    processes, is_unlisted = facts.get("processes"), bool(facts.get("unlisted"))
    if processes is None:
        return None, is_unlisted
    if not facts.get("mig"):
        return tuple(sorted({one[0] for one in processes})), is_unlisted
    told = [[one["gpu_instance"], one["compute_instance"]] for one in facts.get("instances") or ()]
    own = [one for one in processes if one[1] in _NO_INSTANCE]
    lost = [one for one in processes if one[1] not in _NO_INSTANCE and one[1:] not in told]
    return tuple(sorted({one[0] for one in own})), is_unlisted or bool(lost)


def _instances(facts: Facts) -> tuple[MigReading, ...]:
    """Instances of a device; processes are matched by instance number."""
    processes = facts.get("processes")
    found = []
    for one in facts.get("instances") or ():
        number = [one["gpu_instance"], one["compute_instance"]]
        pids = {process[0] for process in processes or () if process[1:] == number}
        found.append(
            MigReading(
                uuid=one["uuid"],
                profile=profile_of(one["product_name"]),
                product_name=one["product_name"],
                memory_bytes=one["memory_bytes"],
                process_ids=tuple(sorted(pids)) if processes is not None else None,
            )
        )
    return tuple(found)


def _links(facts: Sequence[Facts], devices: Sequence[DeviceReading]) -> LinksReading:
    pcie = _pcie(facts)
    nvlinks = [_nvlinks(one.get("links")) for one in facts]
    matrix = link_matrix(nvlinks, bus_ids=[device.pci_bus_id for device in devices], pcie=pcie)
    has_nvlink = any(cell.startswith("NV") for row in matrix.cells for cell in row)
    generations = [
        _NVLINK_GENERATIONS[one["architecture"]] for one in facts if one.get("architecture") in _NVLINK_GENERATIONS
    ]
    rates = [one["link_mbps"] / 1000 for one in facts if one.get("link_mbps")]
    return LinksReading(
        links=matrix.cells,
        pcie=pcie,
        nvlink_generation=min(generations, default=None) if has_nvlink else None,
        nvswitch=matrix.nvswitch,
        link_gbps=min(rates, default=None) if has_nvlink else None,
        pcie_generation=min((int(one["pcie_generation"]) for one in facts if one.get("pcie_generation")), default=None),
        unread=frozenset(index for index, links in enumerate(nvlinks) if links is None),
    )


def _nvlinks(links: Sequence[Sequence[Any]] | None) -> tuple[NvLink, ...] | None:
    """Active links of a device; None if unread."""
    if links is None:
        return None
    return tuple(_nvlink(kind, bus_id) for active, kind, bus_id in links if active)


def _nvlink(kind: int | None, bus_id: str | None) -> NvLink:
    plain = plain_bus_id(bus_id) if bus_id is not None else None
    if kind is None:
        return NvLink(Remote.GPU if plain else Remote.UNKNOWN, plain)
    return NvLink(_REMOTES.get(kind, Remote.UNKNOWN), plain)


def _link_summary(links: Sequence[Sequence[Any]] | None) -> tuple[str, ...] | None:
    """Links by far end: `18 switch`, `2 00000000:07:00.0`, `1 down`."""
    if links is None:
        return None
    ends = Counter(_far_end(*link) for link in links)
    return tuple(f"{count} {end}" for end, count in sorted(ends.items()))


def _far_end(active: bool, kind: int | None, bus_id: str | None) -> str:  # noqa: FBT001 - a link, unpacked
    if not active:
        return "down"
    link = _nvlink(kind, bus_id)
    return link.remote_pci_bus_id or str(link.remote) if link.remote is Remote.GPU else str(link.remote)


def _with_dead_links(device: DeviceReading, facts: Sequence[Facts], links: LinksReading) -> DeviceReading:
    """Note links that are down while those of another card of the same kind are up. On bridged cards a link may be
    unconnected by design; on switch machines every card has all."""
    own = facts[device.index].get("links")
    if not links.nvswitch or own is None:
        return device
    up = [sum(bool(link[0]) for link in one["links"]) for one in facts if one.get("links")]
    missing = max(up, default=0) - sum(bool(link[0]) for link in own)
    if missing <= 0:
        return device
    sign = DeviceFault(IncidentKind.NVLINK, count=missing, message=f"{missing} NVLinks are down")
    return replace(device, signs=(*device.signs, sign))


def _pcie(facts: Sequence[Facts]) -> Cells:
    told = {
        (one["index"], other): _pcie_cell(level, status)
        for one in facts
        for other, level, status in one.get("pairs") or ()
    }
    order = range(len(facts))
    return tuple(
        tuple(SELF if first == second else told.get((first, second), UNTOLD) for second in order) for first in order
    )


def _pcie_cell(level: int | None, status: int | None) -> str:
    return WORST if status in _P2P_BROKEN else _PCIE_CELLS.get(level if level is not None else -1, WORST)


def _fabric(facts: Sequence[Facts]) -> FabricReading | None:
    """The fabric by the card that is least ready."""
    told = [one["fabric"] for one in facts if one.get("fabric") and one["fabric"]["state"]]
    if not told:
        return None
    worst: Mapping[str, Any] = min(told, key=lambda fabric: fabric["state"])
    state = _FABRIC_STATES.get(worst["state"], "unknown")
    health = next((text for fabric in told if (text := fabric_health(fabric["mask"]))), "")
    return FabricReading(_uuid_text(worst["cluster"]), str(worst["clique"]), state, health)


def _numa_node(mask: int | None) -> int | None:
    """The nearest NUMA node; None for several (a VM that hides them)."""
    return mask.bit_length() - 1 if mask is not None and mask.bit_count() == 1 else None


def _ranges(mask: int | None) -> str | None:
    """CPUs of a bit set as ranges: 0-15,32-47."""
    if mask is None:
        return None
    words = []
    cpu = 0
    while mask >> cpu:
        if mask >> cpu & 1:
            first = cpu
            while mask >> cpu & 1:
                cpu += 1
            words.append(str(first) if first == cpu - 1 else f"{first}-{cpu - 1}")
        cpu += 1
    return ",".join(words)[:256].rpartition(",")[0] if len(",".join(words)) > 256 else ",".join(words)


def _flag(value: int | None) -> bool | None:
    return bool(value) if value is not None else None


def _uuid_text(digits: str) -> str:
    return (
        "" if not digits.strip("0") else "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    )
