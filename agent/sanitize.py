"""Replace impossible driver values with None.

Pure; one row per fact; vendors share the names of facts. A card that falls off the bus answers with all bits set, and
one number outside the report's bounds would cost the whole node its reports, not just that card.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from agent.driver import Facts

DEVICES_MAX: Final = 256
"""No machine has more cards; a higher count is nonsense."""
PID_MAX: Final = 1 << 22
"""The kernel's own limit."""
MEMORY_BYTES_MAX: Final = 1 << 50
COUNTER_MAX: Final = 1 << 48
CODE_MAX: Final = 65_535
LINK_MBPS_MAX: Final = 10_000_000

_UUID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,95}")
"""Uuids appear in annotations and variables, where commas and blanks separate them."""
_PROFILE: Final = re.compile(r"[0-9][A-Za-z0-9.+_-]{0,22}[A-Za-z0-9]")
"""The profile becomes a resource name."""

Check = Callable[[Any], bool]


def sanitize(facts: Facts) -> Facts:
    """Return the facts of one device; impossible ones are None, as if the library had refused them."""
    found = {name: value if value is None or _is_possible(name, value) else None for name, value in facts.items()}
    uuid, told = found.get("uuid"), facts.get("uuid")
    if told is not None and uuid is None and not (found.get("lost") or found.get("silent")):
        found["fault"] = f"reports an invalid uuid: {str(told)[:96]!r}"
    return found | _processes(found) | _instances(found)


def _is_possible(name: str, value: Any) -> bool:  # noqa: ANN401 - a fact of any kind
    check = _CHECKS.get(name)
    return check is None or check(value)


def _processes(facts: Facts) -> Facts:
    """Drop impossible processes; there may then be others."""
    processes = facts.get("processes")
    if processes is None:
        return {}
    real = [one for one in processes if 0 < one[0] <= PID_MAX]
    return {"processes": real, "unlisted": bool(facts.get("unlisted")) or len(real) < len(processes)}


def _instances(facts: Facts) -> Facts:
    """Instances with unique uuids and a profile; drop the rest."""
    instances = facts.get("instances")
    if instances is None:
        return {}
    real: dict[str, Facts] = {}
    for one in instances:
        if _text(_UUID)(one["uuid"]) and _PROFILE.fullmatch(profile_of(one["product_name"])):
            memory = one["memory_bytes"]
            real.setdefault(
                one["uuid"], {**one, "memory_bytes": memory if memory and _up_to(MEMORY_BYTES_MAX)(memory) else None}
            )
    return {
        "instances": list(real.values()),
        "uninstanced": bool(facts.get("uninstanced")) or len(real) < len(instances),
    }


def profile_of(product_name: str | None) -> str:
    """MIG profile in an instance's product name: 3g.40gb in `NVIDIA H100 80GB HBM3 MIG 3g.40gb`."""
    return (product_name or "").rpartition(" MIG ")[2].strip()


def _up_to(maximum: int) -> Check:
    return lambda value: isinstance(value, int) and 0 <= value <= maximum


def _text(pattern: re.Pattern[str]) -> Check:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _numbers(count: int, maximum: int) -> Check:
    return lambda value: len(value) == count and all(_up_to(maximum)(one) for one in value)


_CHECKS: Final[Mapping[str, Check]] = {
    "uuid": _text(_UUID),
    "product_name": bool,
    "serial": _text(re.compile(r"[!-~]{1,32}")),
    "memory_bytes": _up_to(MEMORY_BYTES_MAX),
    "compute_capability": _numbers(2, 99),
    "bus_id": _text(re.compile(r"[0-9A-Fa-f:.]{1,32}")),
    "minor": _up_to(1 << 20),
    "pcie_generation": _up_to(99),
    "ecc_uncorrected": _up_to(COUNTER_MAX),
    "ecc_corrected": _up_to(COUNTER_MAX),
    "remapped": _numbers(4, (1 << 32) - 1),
    "link_mbps": _up_to(LINK_MBPS_MAX),
    "recovery_action": _up_to(CODE_MAX),
}
