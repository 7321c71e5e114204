"""Conditions of a report: facts for an administrator that concern more than one device.

Pure; each condition has the time of its last change.
"""

from collections.abc import Iterable, Sequence

from agent.evidence import EvidenceReading
from agent.readings import UNTOLD, FabricReading, MachineReading
from atoll.api import names
from atoll.api.base import Condition
from atoll.api.node_status import Device, HealthState, IncidentKind
from atoll.cluster.health import is_fabric_ready
from topology.model import asymmetric_pairs

PAIRS_SHOWN_MAX = 8

Finding = tuple[str, bool, str, str]
"""Condition type, status, reason, message."""


def conditions(
    reading: MachineReading,
    *,
    devices: Sequence[Device],
    evidence: EvidenceReading,
    last: Iterable[Condition],
    now: str,
) -> tuple[Condition, ...]:
    """Return all conditions in a fixed order. The time changes only with the status."""
    before = {condition.type: condition for condition in last}
    found = [_devices_readable(reading, devices), _links_consistent(reading), _evidence_readable(evidence)]
    found.append(_facts_readable(devices, evidence))
    found += [_fabric_ready(reading.fabric, devices)] if reading.fabric is not None else []
    told = tuple(_condition(*finding, last=before.get(finding[0]), now=now) for finding in found)
    kept = before.get(names.CONDITION_FABRIC_READY) if reading.fabric is None and reading.is_fabric_unknown else None
    return (*told, kept) if kept is not None else told


def _devices_readable(reading: MachineReading, devices: Sequence[Device]) -> Finding:
    unseen = [device for device in devices if device.health.state is not HealthState.HEALTHY]
    nameless = sum(device.uuid is None for device in reading.devices)
    expected = reading.expected_count
    if reading.problem:
        return names.CONDITION_DEVICES_READABLE, False, names.REASON_DEVICES_MISSING, reading.problem
    if not unseen and not nameless and not reading.slots_unseen:
        return names.CONDITION_DEVICES_READABLE, True, names.REASON_ALL_READ, f"{len(devices)} devices"
    told = "; ".join(
        f"device {device.id} {device.health.state}: {device.health.reason}" for device in unseen[:PAIRS_SHOWN_MAX]
    )
    message = f"{expected} counted by the driver, {nameless} of them do not say who they are; {told}".removesuffix("; ")
    if reading.slots_unseen:
        message += f"; the driver misses what sits in PCI slot {', '.join(reading.slots_unseen[:PAIRS_SHOWN_MAX])}"
    return names.CONDITION_DEVICES_READABLE, False, names.REASON_DEVICES_MISSING, message


def _links_consistent(reading: MachineReading) -> Finding:
    if reading.links.links is None:
        return (
            names.CONDITION_LINKS_CONSISTENT,
            False,
            names.REASON_LINKS_UNREAD,
            "links could not be read; the last known stand",
        )
    cells = reading.links.links
    pairs = [
        (one, other)
        for one, other in asymmetric_pairs(cells)
        if not reading.links.unread & {one, other} and UNTOLD not in {cells[one][other], cells[other][one]}
    ]
    if not pairs:
        return names.CONDITION_LINKS_CONSISTENT, True, names.REASON_ALL_READ, "both ends of every pair agree"
    told = ", ".join(f"{first}-{second}" for first, second in pairs[:PAIRS_SHOWN_MAX])
    message = f"{len(pairs)} pairs of indices whose two ends tell different links, the weaker counts: {told}"
    return names.CONDITION_LINKS_CONSISTENT, False, names.REASON_LINKS_ASYMMETRIC, message


def _evidence_readable(evidence: EvidenceReading) -> Finding:
    unread = [
        text
        for text, is_read in (("pod cgroups", evidence.live_read), ("pod list of the kubelet", evidence.kubelet_read))
        if not is_read
    ]
    if not unread:
        return names.CONDITION_EVIDENCE_READABLE, True, names.REASON_ALL_READ, "pod cgroups and the kubelet's pod list"
    message = f"{' and '.join(unread)} cannot be read; GPUs of deleted pods stay in doubt until then"
    return names.CONDITION_EVIDENCE_READABLE, False, names.REASON_EVIDENCE_UNREAD, message


def _facts_readable(devices: Sequence[Device], evidence: EvidenceReading) -> Finding:
    """Facts that are unknown about devices that answer. Without the condition, unknown would look like nothing."""
    sizes = [device.id for device in devices if not device.memory_bytes]
    uses = [device.id for device in devices if device.uuid in evidence.uses_unread]
    unread = [
        f"{what} of {len(ids)} devices ({', '.join(map(str, ids[:PAIRS_SHOWN_MAX]))})"
        for what, ids in (("the memory size", sizes), ("the users", uses))
        if ids
    ]
    if not unread:
        return names.CONDITION_FACTS_READABLE, True, names.REASON_ALL_READ, "memory sizes and users of every device"
    message = f"unknown: {' and '.join(unread)}; check that the agent's container may monitor MIG and see all processes"
    return names.CONDITION_FACTS_READABLE, False, names.REASON_FACTS_UNREAD, message


def _fabric_ready(fabric: FabricReading, devices: Sequence[Device]) -> Finding:
    """True only if the fabric is set up and no card is excluded because of it."""
    out = [device for device in devices if not is_fabric_ready(device)]
    if out and fabric.state == "completed":
        told = "; ".join(f"device {device.id}: {_fabric_fault(device)}" for device in out[:PAIRS_SHOWN_MAX])
        return names.CONDITION_FABRIC_READY, False, names.REASON_FABRIC_NOT_READY, f"{len(out)} excluded; {told}"
    if fabric.state == "completed":
        message = f"degraded: {fabric.health}" if fabric.health else "the NVLink fabric is set up"
        return names.CONDITION_FABRIC_READY, True, names.REASON_FABRIC_READY, message
    message = f"the NVLink fabric is {fabric.state}: is the fabric manager running? Nothing is placed here until it is"
    return names.CONDITION_FABRIC_READY, False, names.REASON_FABRIC_NOT_READY, message


def _fabric_fault(device: Device) -> str:
    return next(one.message for one in device.incidents if one.kind is IncidentKind.FABRIC and not one.ended_time)


def _condition(kind: str, holds: bool, reason: str, message: str, *, last: Condition | None, now: str) -> Condition:  # noqa: FBT001 - a finding, unpacked
    status = "True" if holds else "False"
    since = last.last_transition_time if last is not None and last.status == status else now
    return Condition(type=kind, status=status, reason=reason, message=message[:1024], last_transition_time=since)
