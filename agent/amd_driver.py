"""AMD's management library, asked step by step, as agent.driver asks NVIDIA's.

A step of one device gives plain facts that fit in JSON; None for what the library refused. The library is the module
amdsmi, which comes with ROCm and not with this package. A card has the name that ROCR_VISIBLE_DEVICES uses: GPU- and
the sixteen digits of its serial number.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from agent.driver import Facts

Library = Any
Handle = Any
Answer = Any

PROCESSES_MAX: Final = 1024
_SERIAL: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{1,16})")
_GFX: Final = re.compile(r"gfx(\d+)([0-9a-f])([0-9a-f])")
_NOT_TOLD: Final = frozenset({"", "N/A"})
"""What the bindings return for a value that the library left empty."""
_XGMI, _UNKNOWN_LINKS = 2, frozenset({3, 4})
"""amdsmi_link_type_t."""


class AmdDriver:
    """The open library. Only `open` raises the library's own errors."""

    def __init__(self, library: Library) -> None:
        self._smi = library
        self._is_open = False
        self._handles: Sequence[Handle] = ()

    def open(self) -> Facts:
        """Open the library if it is closed, and count devices."""
        if not self._is_open:
            self._smi.amdsmi_init()
            self._is_open = True
        self._handles = self._smi.amdsmi_get_processor_handles()
        return {"count": len(self._handles)}

    def close(self) -> None:
        """Close the driver; the next `open` opens it again."""
        if self._is_open:
            self._is_open = False
            self._ask("amdsmi_shut_down")

    def step(self, name: str, index: int, others: Sequence[int] = ()) -> Facts:
        """Run one step for one device. others: the devices to compare it with, for `pairs`."""
        if index >= len(self._handles):
            return {"lost": "the driver counts fewer devices", "fault": ""}
        facts = _STEPS[name](self, self._handles[index], others) if name in _STEPS else {}
        return facts | {"lost": "", "fault": ""}

    def events(self) -> list[list[Any]]:
        """Return nothing: AMD's library reports no XIDs; it counts memory errors."""
        return []

    def _ask(self, call: str, *arguments: Handle) -> Answer:
        """Call a function of the library; None when it refuses. Releases of the bindings differ in what they have and
        in what they raise for an answer that they do not understand."""
        try:
            return getattr(self._smi, call)(*arguments)
        except Exception:  # noqa: BLE001 - whatever the bindings raise costs one fact
            return None

    def _identity(self, handle: Handle, _others: Sequence[int]) -> Facts:
        asic = self._ask("amdsmi_get_gpu_asic_info", handle)
        serial = _serial(asic) if asic is not None else None
        told = asic or {}
        version = _GFX.match(str(told.get("target_graphics_version", "")))
        return {
            "uuid": self._uuid(handle, serial) if asic is not None else None,
            "product_name": _text(told.get("market_name")),
            "serial": serial,
            "memory_bytes": self._ask("amdsmi_get_gpu_memory_total", handle, self._smi.AmdSmiMemoryType.VRAM),
            "compute_capability": [int(version[1]), int(version[2], 16)] if version else None,
            "bus_id": _text(self._ask("amdsmi_get_gpu_device_bdf", handle)),
            "numa_node": self._ask("amdsmi_topo_get_numa_node_number", handle),
        }

    def _uuid(self, handle: Handle, serial: str | None) -> str | None:
        """Name of a card, with or without a serial number. None if the card does not say which: under the wrong name it
        would be taken for another card."""
        return f"GPU-{serial:0>16}" if serial else _text(self._ask("amdsmi_get_gpu_device_uuid", handle))

    def _health(self, handle: Handle, _others: Sequence[int]) -> Facts:
        counts = self._ask("amdsmi_get_gpu_total_ecc_count", handle) or {}
        return {
            "ecc_uncorrected": counts.get("uncorrectable_count"),
            "ecc_corrected": counts.get("correctable_count"),
        }

    def _processes(self, handle: Handle, _others: Sequence[int]) -> Facts:
        """Pids; the library refuses when there are more than it can list."""
        found = self._ask("amdsmi_get_gpu_process_list", handle)
        if found is None or not all(isinstance(one, dict) and "pid" in one for one in found):
            return {"processes": None}
        pids = sorted({int(one["pid"]) for one in found})
        return {"processes": [[pid, None, None] for pid in pids[:PROCESSES_MAX]], "unlisted": len(pids) > PROCESSES_MAX}

    def _pairs(self, handle: Handle, others: Sequence[int]) -> Facts:
        """[device, links] for every other device: the number of xGMI links between the two; None if unknown.
        A pair's greatest bandwidth is that of all its links, the smallest that of one."""
        return {"pairs": [[other, self._xgmi_links(handle, self._handles[other])] for other in others]}

    def _xgmi_links(self, handle: Handle, other: Handle) -> int | None:
        told = self._ask("amdsmi_topo_get_link_type", handle, other)
        kind = told.get("type") if isinstance(told, dict) else None
        number = getattr(kind, "value", kind)
        if not isinstance(number, int) or number in _UNKNOWN_LINKS:
            return None
        if number != _XGMI:
            return 0
        rates = self._ask("amdsmi_get_minmax_bandwidth_between_processors", handle, other) or {}
        least, most = rates.get("min_bandwidth") or 0, rates.get("max_bandwidth") or 0
        return max(1, round(most / least)) if least else 1


def _serial(asic: Facts) -> str | None:
    """Serial number as hexadecimal digits; None for a card without one, which reports zero."""
    match = _SERIAL.fullmatch(str(asic.get("asic_serial", "")))
    return match[1].lower() if match and match[1].strip("0") else None


def _text(value: Answer) -> str | None:
    return value if isinstance(value, str) and value not in _NOT_TOLD else None


AMD_STEPS: Final = ("identity", "health", "processes")
_STEPS: Final = {
    "identity": AmdDriver._identity,
    "health": AmdDriver._health,
    "processes": AmdDriver._processes,
    "pairs": AmdDriver._pairs,
}
