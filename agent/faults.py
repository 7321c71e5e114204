"""Faults of a device by its facts.

A pure table of small rules from facts of the driver's steps to DeviceFaults. atoll.cluster.health decides which ones
keep pods away. Counters are rounded to powers of two, so that many errors do not cause one report each.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agent.readings import DeviceFault
from atoll.api.node_status import IncidentKind

CORRECTED_STORM: Final = 1024
"""Corrected ECC errors since the last reset from which they are reported."""
EVENT_XID: Final = 0x8
EVENT_DOUBLE_BIT: Final = 0x2
XID_DOUBLE_BIT: Final = 48
XIDS_MAX: Final = 32

_SLOWED: Final = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "heat", 0x80: "power brake"}
"""nvmlClocksEventReasons that mean a fault, not power saving."""
_RECOVERY: Final = {
    1: "GPU reset",
    2: "node reboot",
    3: "drain of peers",
    4: "drain and reset",
}
"""nvmlDeviceGpuRecoveryAction_t."""
_FABRIC_WAITING: Final = {1: "notStarted", 2: "inProgress"}
_FABRIC_HEALTH: Final = (
    ("degraded bandwidth", 0, 3, 1),
    ("route recovery", 2, 3, 1),
    ("unhealthy route", 4, 3, 1),
    ("access timeout recovery", 6, 3, 1),
)
"""Name, shift, width and bad value of fields in the fabric's health mask."""
_FABRIC_MISCONFIGURED_SHIFT, _FABRIC_MISCONFIGURED_WIDTH = 8, 15


def device_faults(facts: Mapping[str, Any]) -> tuple[DeviceFault, ...]:
    """Faults that hold now, by the facts of one device."""
    return tuple(sign for rule in _RULES for sign in rule(facts))


def event_faults(events: Sequence[Sequence[Any]], uuid: str | None) -> tuple[DeviceFault, ...]:
    """Faults that happened to a device, one per XID, by the driver's events as [uuid, type, data]."""
    found: dict[int, int] = {}
    for who, kind, data in events:
        code = data if kind == EVENT_XID else XID_DOUBLE_BIT if kind == EVENT_DOUBLE_BIT else None
        if who == uuid and code is not None and 0 <= code <= 65_535:
            found[code] = found.get(code, 0) + 1
    return tuple(
        DeviceFault(IncidentKind.XID, code, count, f"XID {code}", stands=False)
        for code, count in sorted(found.items())[:XIDS_MAX]
    )


def unread_kinds(facts: Mapping[str, Any]) -> frozenset[IncidentKind]:
    """Kinds of faults that these facts leave unknown, because their source could not be read."""
    unread = {kind for kind, name in _READ_FROM.items() if facts.get(name) is None}
    return frozenset(unread | {IncidentKind.FAULT, IncidentKind.LOST} if facts.get("silent") else unread)


def fabric_health(mask: int) -> str:
    """Degraded parts of the fabric by its health mask, in few words; empty if none."""
    words = [name for name, shift, width, bad in _FABRIC_HEALTH if mask >> shift & width == bad]
    if mask >> _FABRIC_MISCONFIGURED_SHIFT & _FABRIC_MISCONFIGURED_WIDTH > 1:
        words.append("wrong configuration")
    return ", ".join(words)[:64]


def _sickness(facts: Mapping[str, Any]) -> Iterable[DeviceFault]:
    if facts.get("silent"):
        yield DeviceFault(IncidentKind.SILENT, message=facts["silent"])
    if facts.get("lost"):
        yield DeviceFault(IncidentKind.LOST, message=facts["lost"])
    elif facts.get("fault"):
        yield DeviceFault(IncidentKind.FAULT, message=facts["fault"])


def _memory(facts: Mapping[str, Any]) -> Iterable[DeviceFault]:
    uncorrected, corrected = facts.get("ecc_uncorrected") or 0, facts.get("ecc_corrected") or 0
    if uncorrected:
        yield DeviceFault(
            IncidentKind.ECC, count=_rounded(uncorrected), message="uncorrectable ECC errors since the last reset"
        )
    if corrected >= CORRECTED_STORM:
        yield DeviceFault(IncidentKind.ECC_CORRECTED, count=_rounded(corrected), message="corrected ECC errors")
    remapped = facts.get("remapped") or (0, 0, 0, 0)
    if remapped[2]:
        yield DeviceFault(IncidentKind.ROW_REMAP, 0, message="row remapping is pending; a reset completes it")
    if remapped[3]:
        yield DeviceFault(IncidentKind.ROW_REMAP, 1, message="row remapping failed")
    if facts.get("retired_pending"):
        yield DeviceFault(IncidentKind.RETIRED_PAGES, message="page retirement is pending; a reset completes it")


def _recovery(facts: Mapping[str, Any]) -> Iterable[DeviceFault]:
    action = facts.get("recovery_action") or 0
    if action:
        yield DeviceFault(
            IncidentKind.RECOVERY, action, message=f"the driver asks for: {_RECOVERY.get(action, action)}"
        )


def _throttle(facts: Mapping[str, Any]) -> Iterable[DeviceFault]:
    mask = facts.get("throttle") or 0
    words = [word for bit, word in _SLOWED.items() if mask & bit]
    if words:
        yield DeviceFault(IncidentKind.THROTTLE, message=", ".join(words))


def _fabric(facts: Mapping[str, Any]) -> Iterable[DeviceFault]:
    fabric = facts.get("fabric")
    if not fabric:
        return
    state = _FABRIC_WAITING.get(fabric["state"])
    if state:
        yield DeviceFault(IncidentKind.FABRIC, fabric["state"], message=f"NVLink fabric is {state}")
    elif fabric["state"] == 3 and fabric["status"]:
        yield DeviceFault(
            IncidentKind.FABRIC, 3, message=f"joining the NVLink fabric failed with code {fabric['status']}"
        )
    if fabric_health(fabric["mask"]):
        yield DeviceFault(IncidentKind.FABRIC_HEALTH, message=f"NVLink fabric: {fabric_health(fabric['mask'])}")


_READ_FROM: Final = {
    IncidentKind.ECC: "ecc_uncorrected",
    IncidentKind.ECC_CORRECTED: "ecc_corrected",
    IncidentKind.ROW_REMAP: "remapped",
    IncidentKind.RETIRED_PAGES: "retired_pending",
    IncidentKind.RECOVERY: "recovery_action",
    IncidentKind.THROTTLE: "throttle",
    IncidentKind.NVLINK: "links",
    IncidentKind.FABRIC: "fabric",
    IncidentKind.FABRIC_HEALTH: "fabric",
}
_RULES = (_sickness, _memory, _recovery, _throttle, _fabric)


def _rounded(count: int) -> int:
    return 1 << (max(1, int(count)).bit_length() - 1)
