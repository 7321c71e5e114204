"""The machine's PCI tree: network adapters near each GPU, and GPUs that the driver misses.

Gives one NicReading per adapter, in the words of `nvidia-smi topo`, and the PCI slots of missed GPUs. No GPU vendor's
library has this. Nothing here touches a device: the kernel answers from memory. Virtual functions are left out: they
are where their adapter is. If some adapters do RDMA, the others are left out: they are for management.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.links import plain_bus_id
from agent.readings import NicReading
from topology.links import WORST
from topology.model import NICS_MAX

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
LOOKED_FOR_EVERY: Final = 20
"""Looks between two readings of the tree, which changes only by hand."""
PCI_DEVICES_MAX: Final = 8192
NAME_LENGTH_MAX: Final = 63
_NETWORK: Final = "0x02"
_GPUS: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Classes of PCI devices: VGA, 3D and other display controllers, and processing accelerators, as AMD's are."""
_PORTS_OF_ONE_SWITCH: Final = 2
"""Depth below the bridge that two devices share: the switch's port and the device."""


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Place of a device: the host bridge, the bridges below it, the device itself. numa_node: None if unknown."""

    path: tuple[str, ...]
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class NetworkAdapter:
    """A network adapter by its name in programs, such as mlx5_0."""

    name: str
    place: PciPlace
    does_rdma: bool


class PciTree:
    """The machine's PCI devices, read now and then."""

    def __init__(self, pci_devices: Path = PCI_DEVICES) -> None:
        self._folder = pci_devices
        self._looks = 0
        self._places: Mapping[str, PciPlace] = {}
        self._adapters: tuple[NetworkAdapter, ...] = ()
        self._gpu_slots: Mapping[str, str] = {}
        self.slots_removed: frozenset[str] = frozenset()
        """Slots that listed a GPU before and list nothing now: it was taken out, or removed from the bus."""
        self._is_read = False

    def refresh(self) -> None:
        """Read the tree again if due; keep the last one on failure."""
        if self._looks % LOOKED_FOR_EVERY == 0:
            try:
                self._read()
            except OSError:
                self._looks -= 1
        self._looks += 1

    def nics(self, bus_ids: Sequence[str | None]) -> tuple[NicReading, ...] | None:
        """Adapters with their relations to these devices, in their order; None if the tree is unknown. A relation is
        None for a device that the kernel does not list."""
        places = [self._places.get(bus_id or "") for bus_id in bus_ids]
        if not self._is_read or not any(places):
            return None
        return tuple(
            NicReading(adapter.name, tuple(relation(adapter.place, place) if place else None for place in places))
            for adapter in self._adapters
        )

    def slots_unseen(self, bus_ids: Sequence[str | None], *, kernel_driver: str) -> tuple[str, ...]:
        """Slots of further GPUs bound to this kernel driver; none if no device given is in the tree. A GPU without a
        driver, or passed through to a virtual machine, is not missed."""
        if not any(bus_id in self._gpu_slots for bus_id in bus_ids):
            return ()
        return tuple(
            slot for slot, driver in self._gpu_slots.items() if driver == kernel_driver and slot not in bus_ids
        )

    def _read(self) -> None:
        folders = {plain_bus_id(folder.name): folder for folder in sorted(self._folder.iterdir())[:PCI_DEVICES_MAX]}
        kinds = {slot: _text(folder / "class") for slot, folder in folders.items()}
        self._places = {slot: _place(folder) for slot, folder in folders.items()}
        found = [
            _adapter(folder, self._places[slot])
            for slot, folder in folders.items()
            if kinds[slot].startswith(_NETWORK) and not (folder / "physfn").exists()
        ]
        self._adapters = tuple(([one for one in found if one.does_rdma] or found)[:NICS_MAX])
        before = self.slots_removed | self._gpu_slots.keys()
        self.slots_removed = frozenset(before - folders.keys()) if folders else self.slots_removed
        self._gpu_slots = {
            slot: (folder / "driver").resolve().name
            for slot, folder in folders.items()
            if kinds[slot].startswith(_GPUS) and not (folder / "physfn").exists()
        }
        self._is_read = True


def relation(first: PciPlace, second: PciPlace) -> str:
    """PIX below one switch, PXB below several, PHB below one host bridge, NODE on one NUMA node, SYS else."""
    shared = 0
    for one, other in zip(first.path[:-1], second.path[:-1], strict=False):
        if one != other:
            break
        shared += 1
    if shared == 0:
        is_same = first.numa_node is not None and first.numa_node == second.numa_node
        return "NODE" if is_same else WORST
    if shared == 1:
        return "PHB"
    below = max(len(first.path), len(second.path)) - shared
    return "PIX" if below <= _PORTS_OF_ONE_SWITCH else "PXB"


def _place(folder: Path) -> PciPlace:
    parts = folder.resolve().parts
    roots = [number for number, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    node = _text(folder / "numa_node")
    return PciPlace(parts[roots[-1] :] if roots else (folder.name,), int(node) if node.isdecimal() else None)


def _adapter(folder: Path, place: PciPlace) -> NetworkAdapter:
    rdma, network = _first_name(folder / "infiniband"), _first_name(folder / "net")
    return NetworkAdapter((rdma or network or folder.name)[:NAME_LENGTH_MAX], place, bool(rdma))


def _first_name(folder: Path) -> str:
    try:
        return min((one.name for one in folder.iterdir()), default="")
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
