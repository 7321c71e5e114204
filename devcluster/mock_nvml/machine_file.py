"""Machines of known shape as files of the mock library.

The methods of MachineFile change facts by key (see `devcluster.mock_nvml`). Files are written atomically. Uuids follow
from seed and position, like those of the agent's simulated machine.
"""

import uuid as uuids
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from topology.links import direct_links
from topology.profiles import Profile

NAMESPACE: Final = uuids.UUID("6f2f4d0e-58c1-4b06-9a5f-2f3e0d1c7a55")
LINKS_MAX: Final = 18
XID: Final = 8
"""nvmlEventTypeXidCriticalError."""
GPU_IS_LOST: Final = 15

_LEVELS: Final = {"PSB": 0, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
_ARCHITECTURES: Final = {"6": 4, "7.0": 5, "7.5": 6, "8.9": 8, "8": 7, "9": 9, "10": 10}
_NO_FABRIC_BEFORE: Final = 9
_SWITCH_BUS: Final = "00000000:D0:00.0"
_FIELD_NVLINK_MBPS: Final = 90
_FIELD_RECOVERY_ACTION: Final = 230
_EVENT_TYPES: Final = 0x1 | 0x2 | 0x8


class MachineFile:
    """Facts of one machine. `order[i]` is the position in the profile of the GPU with NVML index i."""

    lost_code = GPU_IS_LOST
    """The library's return code for a lost GPU."""

    def __init__(self, profile: Profile, *, seed: str, order: Sequence[int] | None = None) -> None:
        self.profile = profile
        self.seed = seed
        self.order = tuple(order) if order is not None else tuple(range(profile.machine.count))
        self.facts: dict[str, str] = {"driver": "580.159.04", "nvml": "13.580.159.04", "count": str(len(self.order))}
        for index, position in enumerate(self.order):
            self.facts |= {f"gpu.{index}.{name}": value for name, value in self._gpu(position).items()}
            self.facts |= {f"gpu.{index}.link.{n}": end for n, end in enumerate(self._links(position))}
            self.facts |= self._pairs(index, position)

    def uuid_of(self, position: int) -> str:
        """Return the uuid of the GPU at a position of the profile."""
        return f"GPU-{uuids.uuid5(NAMESPACE, f'{self.seed}/{position}')}"

    def write(self, path: Path) -> None:
        """Write the machine's file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f".{path.name}.new")
        made.write_text("".join(f"{key} {value}\n" for key, value in self.facts.items()))
        made.replace(path)

    def set(self, index: int, **facts: object) -> "MachineFile":
        """Change facts of the GPU with an index; None removes a fact."""
        for name, value in facts.items():
            key = f"gpu.{index}.{name}"
            self.facts.pop(key, None)
            if value is not None:
                self.facts[key] = str(value)
        return self

    def fail(self, index: int | str, function: str = "*", *, code: int = 0, each: int = 1) -> "MachineFile":
        """Let a function fail for a GPU with `code` (default: GPU is lost); index or function may be `*`."""
        self.facts[f"fail.{index}.{function}"] = f"{code or self.lost_code}/{each}"
        return self

    def hang(self, index: int | str, function: str = "*", *, seconds: float = 3600.0) -> "MachineFile":
        """Let a function hang for a GPU."""
        self.facts[f"hang.{index}.{function}"] = f"{seconds:g}"
        return self

    def crash(self, index: int | str, function: str = "*") -> "MachineFile":
        """Let a function crash the process that calls it."""
        self.facts[f"crash.{index}.{function}"] = "1"
        return self

    def heal(self, index: int | str | None = None) -> "MachineFile":
        """Remove failures, hangs and crashes of one GPU, or of all."""
        kinds = ("fail.", "hang.", "crash.")
        prefixes = kinds if index is None else tuple(f"{kind}{index}." for kind in kinds)
        self.facts = {key: value for key, value in self.facts.items() if not key.startswith(prefixes)}
        return self

    def event(self, index: int, xid: int, *, kind: int = XID) -> "MachineFile":
        """Send an event to listeners, once."""
        number = 1 + max((int(key[6:]) for key in self.facts if key.startswith("event.")), default=0)
        self.facts[f"event.{number}"] = f"{index} {kind} {xid}"
        return self

    def cut_links(self, index: int, *links: int) -> "MachineFile":
        """Take links of a GPU down (default: all). The other end still reports them as up."""
        count = sum(key.startswith(f"gpu.{index}.link.") for key in self.facts)
        for link in links or range(count):
            self.facts[f"gpu.{index}.link.{link}"] = "down"
        return self

    def split(self, index: int, *instances: tuple[str, int]) -> "MachineFile":
        """Turn MIG on and create instances: (profile such as 3g.40gb, memory in MiB)."""
        self.set(index, mig=1, mig_max=7)
        parent = self.facts[f"gpu.{index}.uuid"]
        name = self.facts[f"gpu.{index}.name"]
        for number, (profile, mebibytes) in enumerate(instances):
            uuid = uuids.uuid5(NAMESPACE, f"{parent}/{number}/{profile}")
            slices = profile.partition("g.")[0].rpartition(".")[2]
            told = {"uuid": f"MIG-{uuid}", "name": f"{name} MIG {profile}", "memory_mib": str(mebibytes)}
            told |= {"slices": f"{slices} {slices}", "gi": str(number + 1), "ci": "0"}
            self.facts |= {f"gpu.{index}.mig.{number}.{key}": value for key, value in told.items()}
        return self

    def _gpu(self, position: int) -> dict[str, str]:
        profile, machine = self.profile, self.profile.machine
        capability = profile.compute_capability
        architecture = next(code for start, code in _ARCHITECTURES.items() if capability.startswith(start))
        facts = {
            "uuid": self.uuid_of(position),
            "name": profile.product_name,
            "serial": f"16500{uuids.uuid5(NAMESPACE, f'{self.seed}/serial/{position}').int % 10**8:08d}",
            "bus": bus_id(position),
            "minor": str(position),
            "architecture": str(architecture),
            "memory_mib": str(profile.memory_bytes >> 20),
            "compute_capability": capability,
            "ecc": "1",
            "power_management": "1",
            "persistence": "1",
            "throttle": "0x0",
            "remapped": "0 0 0 0",
            "ecc_corrected_volatile": "0",
            "ecc_uncorrected_volatile": "0",
            f"field.{_FIELD_RECOVERY_ACTION}": "0",
            "event_types": hex(_EVENT_TYPES),
        }
        numa = machine.numa[position]
        if numa is not None:
            facts |= {"numa_mask": f"{1 << numa:x} 0 0 0", "cpu_mask": f"{0xFF << (8 * (numa % 8)):x}"}
        if machine.pcie_generation:
            facts["pcie_generation"] = str(machine.pcie_generation)
        if machine.link_gbps:
            facts[f"field.{_FIELD_NVLINK_MBPS}"] = str(round(machine.link_gbps * 1000))
        if machine.nvswitch and int(capability.partition(".")[0]) >= _NO_FABRIC_BEFORE:
            facts["fabric"] = f"3 0 0 0x0 {'0' * 32}"
        if int(capability.partition(".")[0]) >= 8:
            facts["mig"] = "0"
        return facts

    def _links(self, position: int) -> list[str]:
        machine = self.profile.machine
        row = [direct_links(cell) for cell in machine.links[position]]
        if machine.nvswitch:
            return [f"switch {_SWITCH_BUS}"] * max(row)
        return [f"gpu {bus_id(peer)}" for peer, count in enumerate(row) for _ in range(count)]

    def _pairs(self, index: int, position: int) -> dict[str, str]:
        machine = self.profile.machine
        rows = machine.pcie or machine.links
        levels = {
            f"pair.{index}.{other}.level": _LEVELS.get(rows[position][peer], 50)
            for other, peer in enumerate(self.order)
            if other != index
        }
        return {key: str(level) for key, level in levels.items()}


def bus_id(position: int) -> str:
    """PCI bus id of the GPU at a position, as the driver prints it."""
    return f"00000000:{position + 1:02X}:00.0"
