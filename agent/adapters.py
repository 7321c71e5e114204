"""Which network adapters are near to which GPUs, as the machine's PCI tree tells.

In: the kernel's list of PCI devices, and the bus ids of the GPUs. Out: one NicReading per adapter, in words of
`nvidia-smi topo`. Neither driver of a GPU knows this, and nothing here touches a device: the kernel answers from its
memory. A virtual function is left out, it is where its adapter is. Where adapters do RDMA, the others are left out:
they are for logging in.
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
"""Looks between two looks for adapters: they are plugged in by hand."""
PCI_DEVICES_MAX: Final = 8192
NAME_LENGTH_MAX: Final = 63
_NETWORK: Final = "0x02"
_PORTS_OF_ONE_SWITCH: Final = 2
"""Places below the bridge that two devices share: the switch's port and the device."""


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Where a device sits: the host bridge, the bridges below it, the device itself. numa_node: None where unknown."""

    path: tuple[str, ...]
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A network adapter by the name that programs use, such as mlx5_0."""

    name: str
    place: PciPlace
    does_rdma: bool


class Adapters:
    """The machine's adapters, looked for now and then."""

    def __init__(self, pci_devices: Path = PCI_DEVICES) -> None:
        self._folder = pci_devices
        self._looks = 0
        self._places: Mapping[str, PciPlace] = {}
        self._adapters: tuple[Adapter, ...] = ()
        self._is_read = False

    def near(self, bus_ids: Sequence[str | None]) -> tuple[NicReading, ...] | None:
        """Each adapter with its relation to these devices, in their order; None where the machine tells nothing of
        them, and a relation None for a device that the kernel does not list."""
        if self._looks % LOOKED_FOR_EVERY == 0:
            self._look()
        self._looks += 1
        places = [self._places.get(bus_id or "") for bus_id in bus_ids]
        if not self._is_read or not any(places):
            return None
        return tuple(
            NicReading(adapter.name, tuple(relation(adapter.place, place) if place else None for place in places))
            for adapter in self._adapters
        )

    def _look(self) -> None:
        try:
            folders = sorted(self._folder.iterdir())[:PCI_DEVICES_MAX]
            self._places = {plain_bus_id(folder.name): _place(folder) for folder in folders}
            found = [_adapter(folder, self._places[plain_bus_id(folder.name)]) for folder in folders if _is_own(folder)]
        except OSError:
            return
        rdma = [adapter for adapter in found if adapter.does_rdma]
        self._adapters = tuple((rdma or found)[:NICS_MAX])
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


def _is_own(folder: Path) -> bool:
    return _text(folder / "class").startswith(_NETWORK) and not (folder / "physfn").exists()


def _adapter(folder: Path, place: PciPlace) -> Adapter:
    rdma, network = _first_name(folder / "infiniband"), _first_name(folder / "net")
    return Adapter((rdma or network or folder.name)[:NAME_LENGTH_MAX], place, bool(rdma))


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
