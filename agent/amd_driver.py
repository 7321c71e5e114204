"""AMD's management library, asked step by step, like NVIDIA's in agent.driver.

In: the index of a device and the name of a step. Out: plain facts that JSON can carry; None for what the library
refused. The library is the module amdsmi, which comes with ROCm and not with this package. A card is named as
ROCR_VISIBLE_DEVICES names it: GPU- and the sixteen digits of its serial number.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from agent.driver import Facts

Library = Any
Handle = Any
Answer = Any

PROCESSES_MAX: Final = 1024
_SERIAL: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{1,16})")
_GFX: Final = re.compile(r"gfx(\d+)([0-9a-f])([0-9a-f])")


class AmdDriver:
    """The library, open. Raises the library's own errors from `open` only."""

    def __init__(self, library: Library) -> None:
        self._smi = library
        self._is_open = False
        self._handles: Sequence[Handle] = ()

    def open(self) -> Facts:
        """Open the library where it is not, and count devices."""
        if not self._is_open:
            self._smi.amdsmi_init()
            self._is_open = True
        self._handles = self._smi.amdsmi_get_processor_handles()
        return {"count": len(self._handles)}

    def close(self) -> None:
        """Let go of the driver; the next `open` opens it again."""
        if self._is_open:
            self._is_open = False
            self._ask(self._smi.amdsmi_shut_down)

    def step(self, name: str, index: int, others: Sequence[int] = ()) -> Facts:
        """One step for one device. others: the devices that it is compared with, for `pairs`."""
        if index >= len(self._handles):
            return {"lost": "the driver counts fewer devices", "fault": ""}
        facts = _STEPS[name](self, self._handles[index], others) if name in _STEPS else {}
        return facts | {"lost": "", "fault": ""}

    def events(self, _indices: Sequence[int]) -> list[list[Any]]:
        """Nothing: AMD's library tells no XIDs; memory errors are counted."""
        return []

    def _ask(self, call: Callable[..., Any], *arguments: Handle) -> Answer:
        try:
            return call(*arguments)
        except self._smi.AmdSmiException:
            return None

    def _identity(self, handle: Handle, _others: Sequence[int]) -> Facts:
        smi = self._smi
        asic = self._ask(smi.amdsmi_get_gpu_asic_info, handle) or {}
        serial = _SERIAL.fullmatch(str(asic.get("asic_serial", "")))
        version = _GFX.match(str(asic.get("target_graphics_version", "")))
        return {
            "uuid": f"GPU-{serial[1].lower():0>16}" if serial else self._ask(smi.amdsmi_get_gpu_device_uuid, handle),
            "product_name": asic.get("market_name"),
            "serial": serial[1].lower() if serial else None,
            "memory_bytes": self._ask(smi.amdsmi_get_gpu_memory_total, handle, smi.AmdSmiMemoryType.VRAM),
            "compute_capability": [int(version[1]), int(version[2], 16)] if version else None,
            "bus_id": self._ask(smi.amdsmi_get_gpu_device_bdf, handle),
            "numa_node": self._ask(smi.amdsmi_topo_get_numa_node_number, handle),
        }

    def _health(self, handle: Handle, _others: Sequence[int]) -> Facts:
        counts = self._ask(self._smi.amdsmi_get_gpu_total_ecc_count, handle) or {}
        return {
            "ecc_uncorrected": counts.get("uncorrectable_count"),
            "ecc_corrected": counts.get("correctable_count"),
        }

    def _processes(self, handle: Handle, _others: Sequence[int]) -> Facts:
        found = self._ask(self._smi.amdsmi_get_gpu_process_list, handle)
        if found is None:
            return {"processes": None}
        return {"processes": sorted([int(one["pid"]), None, None] for one in found[:PROCESSES_MAX])}

    def _pairs(self, handle: Handle, others: Sequence[int]) -> Facts:
        """[device, links] for every other one: how many xGMI links join them, 0 for none, None where it is not told.
        A pair's greatest bandwidth is that of all of its links, the smallest that of one."""
        return {"pairs": [[other, self._xgmi_links(handle, self._handles[other])] for other in others]}

    def _xgmi_links(self, handle: Handle, other: Handle) -> int | None:
        smi = self._smi
        told = self._ask(smi.amdsmi_topo_get_link_type, handle, other)
        if told is None:
            return None
        if "XGMI" not in str(getattr(told["type"], "name", told["type"])):
            return 0
        rates = self._ask(smi.amdsmi_get_minmax_bandwidth_between_processors, handle, other) or {}
        least, most = rates.get("min_bandwidth") or 0, rates.get("max_bandwidth") or 0
        return max(1, round(most / least)) if least else 1


AMD_STEPS: Final = ("identity", "health", "processes")
_STEPS: Final = {
    "identity": AmdDriver._identity,
    "health": AmdDriver._health,
    "processes": AmdDriver._processes,
    "pairs": AmdDriver._pairs,
}
