"""Replacement for the module amdsmi, which only ROCm ships: the calls that the agent makes, for a known machine.

`broken`: call name to the positions at which it is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from topology.links import direct_links
from topology.profiles import Profile

LINK_MBPS = 50_000


class AmdSmiException(Exception):
    """The library's own error."""


class AmdSmiMemoryType(Enum):
    VRAM = 0


PCIE, XGMI = 1, 2
"""amdsmi_link_type_t; the bindings give bare numbers."""


@dataclass
class FakeAmdSmi:
    """A machine as amdsmi tells it; handles are positions."""

    profile: Profile
    broken: dict[str, set[int]] = field(default_factory=dict)
    pids: dict[int, list[int]] = field(default_factory=dict)
    ecc: dict[int, int] = field(default_factory=dict)
    AmdSmiException = AmdSmiException
    AmdSmiMemoryType = AmdSmiMemoryType

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answer = _ANSWERS[name]

        def call(*arguments: Any) -> Any:
            if arguments and arguments[0] in self.broken.get(name, ()):
                raise AmdSmiException(name)
            return answer(self, *arguments)

        return call


def _asic(smi: FakeAmdSmi, position: int) -> dict[str, Any]:
    gfx = {"9.0": "gfx90a", "9.4": "gfx942"}[smi.profile.compute_capability]
    serial = f"0x{0xA5_0000_0000_0000 + position:016X}"
    return {"market_name": smi.profile.product_name, "asic_serial": serial, "target_graphics_version": gfx}


def _links(smi: FakeAmdSmi, first: int, second: int) -> int:
    return direct_links(smi.profile.machine.links[first][second])


_ANSWERS: dict[str, Callable[..., Any]] = {
    "amdsmi_init": lambda smi: None,
    "amdsmi_shut_down": lambda smi: None,
    "amdsmi_get_processor_handles": lambda smi: list(range(smi.profile.machine.count)),
    "amdsmi_get_gpu_asic_info": _asic,
    "amdsmi_get_gpu_device_uuid": lambda smi, at: f"{at:08x}-0000-1000-8000-000000000000",
    "amdsmi_get_gpu_memory_total": lambda smi, at, kind: smi.profile.memory_bytes,
    "amdsmi_get_gpu_device_bdf": lambda smi, at: f"0000:{at + 1:02x}:00.0",
    "amdsmi_topo_get_numa_node_number": lambda smi, at: smi.profile.machine.numa[at],
    "amdsmi_get_gpu_total_ecc_count": lambda smi, at: {
        "correctable_count": 0,
        "uncorrectable_count": smi.ecc.get(at, 0),
    },
    "amdsmi_get_gpu_process_list": lambda smi, at: [{"pid": pid} for pid in smi.pids.get(at, [])],
    "amdsmi_topo_get_link_type": lambda smi, first, second: {
        "hops": 1,
        "type": XGMI if _links(smi, first, second) else PCIE,
    },
    "amdsmi_get_minmax_bandwidth_between_processors": lambda smi, first, second: {
        "min_bandwidth": LINK_MBPS,
        "max_bandwidth": LINK_MBPS * _links(smi, first, second),
    },
}
