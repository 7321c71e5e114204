"""The real machine, read through NVIDIA's management library.

In: the answers of the driver's steps (agent.driver), asked one by one with a deadline each. Out: a MachineReading.
A device whose step hangs, or takes the library down, loses what it had not told by then, and nobody else does; it is
asked again ever more rarely while it stays silent, so that one dead card does not cost every look its deadline.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from agent.backends import BOOT_ID_PATH, kernel_boot_id
from agent.driver import EVENTS_MAX, STEPS, Driver, Facts, Library
from agent.driver_client import DriverRefused, DriverSilent, DriverWorker, OwnDriver, Steps
from agent.errors import ReadingFailed
from agent.links import link_matrix, plain_bus_id
from agent.pci import PCI_DEVICES, PciTree
from agent.readings import (
    UNTOLD,
    Cells,
    DeviceReading,
    FabricReading,
    LinksReading,
    MachineReading,
    MigReading,
    NvLink,
    Remote,
    Sign,
)
from agent.signs import event_signs, fabric_health, signs, unread_kinds
from atoll.api.node_status import IncidentKind
from topology.links import SELF, WORST

STEP_SECONDS: Final = 3.0
SKIPPED_LOOKS_MAX: Final = 16
"""A silent device is asked at least every so many looks."""
LISTEN: Final = "listen"
HANGS_OF_ONE: Final = 2
"""A device that hangs with so many others is to blame for it, not they."""

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
"""nvmlGpuP2PStatus_t: chipset or host bridge cannot, or switched off. A model that never can (2) says nothing of a
pair."""
_REMOTES: Final = {0: Remote.GPU, 1: Remote.OTHER, 2: Remote.SWITCH}


class NvmlBackend:
    """NVML of this machine. `library` stands in for the module pynvml in tests, and is asked in this process."""

    driver = "NVML"
    kernel_driver = "nvidia"
    device_steps: tuple[str, ...] = STEPS

    def __init__(
        self,
        library: Library = None,
        *,
        step_seconds: float = STEP_SECONDS,
        boot_id_path: Path = BOOT_ID_PATH,
        pci_devices: Path = PCI_DEVICES,
    ) -> None:
        own = OwnDriver(Driver(library)) if library is not None else None
        self.steps: Steps = own or DriverWorker(step_seconds=step_seconds)
        self._silent: dict[int, _Silence] = {}
        self._incomparable: dict[int, _Silence] = {}
        self._known: dict[int, Facts] = {}
        self._untold: list[list[Any]] = []
        self._look = 0
        self._boot_id_path = boot_id_path
        self._pci = PciTree(pci_devices)

    def read(self) -> MachineReading:
        """Look at every device once. Raises ReadingFailed when the driver does not answer at all."""
        self._look += 1
        count = self._count()
        self._untold += self._events()
        worker = self._worker()
        facts = recognized([self._asked_facts(index) for index in range(count)], self._known)
        self._known |= {one["index"]: {key: one.get(key) for key in FACE} for one in facts if one.get("uuid")}
        self._compare(facts)
        if worker != self._worker():
            self._listen_again(facts)
        events = self._untold + self._events()
        self._untold = []
        reading = self.assemble(facts, events)
        self._pci.look()
        slots = [device.pci_bus_id for device in reading.devices]
        unseen = self._pci.slots_unseen(slots, kernel_driver=self.kernel_driver)
        return replace(reading, links=replace(reading.links, nics=self._pci.nics(slots)), slots_unseen=unseen)

    def assemble(self, facts: Sequence[Facts], events: Sequence[Sequence[Any]]) -> MachineReading:
        """A reading of all facts and of what happened since the last look."""
        return machine_reading(facts, events=events)

    def boot_id(self) -> str:
        """Boot id of the kernel. Raises ReadingFailed."""
        return kernel_boot_id(self._boot_id_path)

    def close(self) -> None:
        """Let go of the driver; the next reading opens it again."""
        self.steps.close()

    def _count(self) -> int:
        try:
            return int(self.steps.ask("open")["count"])
        except (DriverSilent, DriverRefused) as error:
            raise ReadingFailed(self.driver, f"{error}; is the driver loaded, and its library visible here?") from error

    def _asked_facts(self, index: int) -> Facts:
        """Every step of one device, until one of them is its last."""
        silence = self._silent.get(index)
        if silence is not None and self._look < silence.ask_again_at:
            return {"index": index, "silent": silence.message}
        facts: Facts = {"index": index}
        for step in self.device_steps:
            answer = self._ask(step, index)
            facts |= {key: value for key, value in answer.items() if value or key not in facts}
            if facts.get("silent") or facts.get("lost"):
                return facts
        self._silent.pop(index, None)
        return facts

    def _worker(self) -> int | None:
        return self.steps.pid if isinstance(self.steps, DriverWorker) else None

    def _listen_again(self, facts: Sequence[Facts]) -> None:
        """Listen to every device that answers: a worker that was lost in this look took along whom it listened to."""
        for one in facts:
            if LISTEN in self.device_steps and not (one.get("silent") or one.get("lost")):
                self._ask(LISTEN, one["index"])

    def _ask(self, step: str, index: int, others: Sequence[int] = ()) -> Facts:
        try:
            self._reopened()
            return self.steps.ask(step, index, others)
        except (DriverSilent, DriverRefused) as error:
            self._silent[index] = _Silence.after(self._silent.get(index), str(error), look=self._look)
            return {"silent": str(error)}

    def _reopened(self) -> None:
        """Open the driver again after a worker was lost; a device is not to blame if that fails."""
        if isinstance(self.steps, DriverWorker) and self.steps.pid is None:
            self._count()

    def _compare(self, facts: Sequence[Facts]) -> None:
        """Ask each device for its relation to the others, as far as they answer. A hang is one card's of two, and not a
        reason to take either for ill: who hangs is left out of comparisons, ever longer."""
        able = {one["index"]: one for one in facts if one.get("uuid") and not (one.get("silent") or one.get("lost"))}
        for index, awaited in self._incomparable.items():
            if self._look < awaited.ask_again_at:
                able.pop(index, None)
        for index in tuple(able):
            if index in able:
                answer, hanging = self._pairs(index, [other for other in able if other != index])
                able[index] |= {key: value for key, value in answer.items() if value or key not in able[index]}
                for one in hanging:
                    del able[one]

    def _pairs(self, index: int, others: Sequence[int]) -> tuple[Facts, frozenset[int]]:
        """The relations of one device to the others, and who of all of them hangs: the one of two that does so with
        a third as well."""
        answer = self._relations(index, others)
        if answer is not None:
            self._incomparable.pop(index, None)
            return answer, frozenset()
        found: list[Any] = []
        hanging: list[int] = []
        for other in others:
            answer = self._relations(index, [other]) if len(hanging) < HANGS_OF_ONE else {}
            if answer is None:
                hanging.append(other)
            else:
                found += answer.get("pairs", ())
        culprits = frozenset({index} if len(hanging) == HANGS_OF_ONE else hanging)
        for one in culprits:
            self._incomparable[one] = _Silence.after(self._incomparable.get(one), "pairs", look=self._look)
        return {"pairs": found}, culprits

    def _relations(self, index: int, others: Sequence[int]) -> Facts | None:
        try:
            self._reopened()
            return self.steps.ask("pairs", index, others)
        except (DriverSilent, DriverRefused):
            return None

    def _events(self) -> list[list[Any]]:
        """What happened since they were asked for last. Asked before a look, because what is not told yet is lost with
        a worker that hangs, and after it: a card that is lost has its last word there."""
        try:
            self._reopened()
            return list(self.steps.ask("events")["events"])[: EVENTS_MAX - len(self._untold)]
        except (DriverSilent, DriverRefused, ReadingFailed):
            return []


FACE: Final = ("uuid", "bus_id")


def recognized(facts: Sequence[Facts], known: Mapping[int, Facts]) -> list[Facts]:
    """Devices with at most one to each uuid. A sick one that does not say who it is, is who was known at its index,
    unless another says that of itself; of two that say the same, the second is nobody. Pure."""
    told = {one["uuid"] for one in facts if one.get("uuid")}
    taken: set[str] = set()
    found = []
    for one in facts:
        uuid = one.get("uuid")
        if uuid in taken:
            found.append({**one, "uuid": None, "fault": f"tells the uuid of another device: {uuid}"})
            continue
        face = known.get(one["index"], {}) if one.get("lost") or one.get("silent") else {}
        if uuid is None and face and face["uuid"] not in told:
            uuid = face["uuid"]
            found.append({**one, **face})
        else:
            found.append(one)
        taken |= {uuid} if uuid else set()
    return found


class _Silence:
    """A device that did not answer: what it was asked, and at which look it is asked again."""

    @classmethod
    def after(cls, last: "_Silence | None", message: str, *, look: int) -> "_Silence":
        """The silence of a device at a look: it is asked again ever later."""
        looks = min(SKIPPED_LOOKS_MAX, 2 * last.looks if last is not None else 1)
        return cls(message, looks, look + looks)

    def __init__(self, message: str, looks: int, ask_again_at: int) -> None:
        self.message = message
        self.looks = looks
        self.ask_again_at = ask_again_at


def machine_reading(facts: Sequence[Facts], *, events: Sequence[Sequence[Any]] = ()) -> MachineReading:
    """A reading of all facts. Pure."""
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
    uuid, processes = facts.get("uuid"), facts.get("processes")
    mig = facts.get("mig")
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
        process_ids=tuple(sorted({one[0] for one in processes})) if processes is not None else None,
        processes_unread=bool(facts.get("unlisted")),
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
        signs=signs(facts) + (event_signs(events, uuid) if uuid else ()),
        signs_unread=unread_kinds(facts),
    )


def _instances(facts: Facts) -> tuple[MigReading, ...]:
    """Instances that say who they are and what they are; processes are told by the numbers of the instances."""
    processes = facts.get("processes")
    found = []
    for one in facts.get("instances") or ():
        profile = (one["product_name"] or "").rpartition(" MIG ")[2].strip()
        if not one["uuid"] or not profile or not profile[0].isdigit():
            continue
        number = [one["gpu_instance"], one["compute_instance"]]
        pids = {process[0] for process in processes or () if process[1:] == number}
        found.append(
            MigReading(
                uuid=one["uuid"],
                profile=profile,
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
    """Active links of a device; None where they could not be read."""
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
    """Note links that are down where another card's of the same kind are up. On bridged cards a link may lead nowhere
    by design; on switch machines every card has all."""
    own = facts[device.index].get("links")
    if not links.nvswitch or own is None:
        return device
    up = [sum(bool(link[0]) for link in one["links"]) for one in facts if one.get("links")]
    missing = max(up, default=0) - sum(bool(link[0]) for link in own)
    if missing <= 0:
        return device
    sign = Sign(IncidentKind.NVLINK, count=missing, message=f"{missing} NVLinks are down")
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
    """The fabric as the card tells it that is furthest from being ready."""
    told = [one["fabric"] for one in facts if one.get("fabric") and one["fabric"]["state"]]
    if not told:
        return None
    worst: Mapping[str, Any] = min(told, key=lambda fabric: fabric["state"])
    state = _FABRIC_STATES.get(worst["state"], "unknown")
    health = next((text for fabric in told if (text := fabric_health(fabric["mask"]))), "")
    return FabricReading(_uuid_text(worst["cluster"]), str(worst["clique"]), state, health)


def _numa_node(mask: int | None) -> int | None:
    """The one NUMA node whose memory is near; several (a VM that hides them) are as good as unknown."""
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
