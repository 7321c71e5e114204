"""Whether a device may be given out by the facts about it, and if not, why.

The agent reports facts, administrators cordon and release, these tables decide, the ledger obeys. A device that is held
stays with its pod whatever its health: only new pods are kept away.

    healthy      may be given out
    quarantined  something is wrong with it, or with its node; over when the incident is, or by an administrator's word
    cordoned     an administrator keeps it
    unknown      it cannot be read

The states and what leads to them are the second table of `atoll.cluster.transitions`; this module says which
facts lead to which event. Two tables rate incidents: XIDS for errors that the driver tells by number (classes as
in NVIDIA's catalogue of XID errors), RECOVERIES for actions that the driver asks for, KINDS for everything else. A
number that is not listed counts as the worst of its kind, and is shown as unknown. CURES says what ends an incident.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

from atoll.api.node_status import Device, GpuNodeStatus, HealthState, Incident, IncidentKind
from atoll.cluster.transitions import Availability, HealthSignal, availability_of, health_signal_of


class IncidentCure(StrEnum):
    """What ends an incident. quiet: no error in successful readings for long enough; reset: a reset of the card or a
    reboot; reboot: only a reboot. An administrator's release ends each of them."""

    QUIET = "quiet"
    RESET = "reset"
    REBOOT = "reboot"


class IncidentAction(IntEnum):
    """What an incident is worth. drain: nothing new on the whole node, and its pods should be moved."""

    IGNORE = 0
    WARN = 1
    QUARANTINE = 2
    DRAIN = 3


XIDS: Final[Mapping[int, tuple[IncidentAction, str]]] = {
    **dict.fromkeys((1, 2, 3, 4, 6, 7, 11, 25), (IncidentAction.IGNORE, "the program sent broken commands")),
    8: (IncidentAction.IGNORE, "the program's work took too long"),
    13: (IncidentAction.IGNORE, "error in the program's kernel"),
    31: (IncidentAction.IGNORE, "the program touched memory that is not its own"),
    32: (IncidentAction.IGNORE, "the program sent broken commands"),
    43: (IncidentAction.IGNORE, "the program's work was stopped"),
    45: (IncidentAction.IGNORE, "the program was ended"),
    68: (IncidentAction.IGNORE, "error of the video engine in a program"),
    69: (IncidentAction.IGNORE, "error of the graphics engine in a program"),
    **dict.fromkeys((39, 40, 41, 70, 71, 72), (IncidentAction.IGNORE, "error of a copy engine in a program")),
    37: (IncidentAction.WARN, "the driver's firmware had an error"),
    63: (IncidentAction.WARN, "memory was remapped or retired"),
    92: (IncidentAction.WARN, "many corrected memory errors"),
    94: (IncidentAction.WARN, "a memory error was contained; its program is gone"),
    137: (IncidentAction.WARN, "an NVLink access of the program failed"),
    154: (IncidentAction.WARN, "the driver changed the recovery action that it asks for"),
    38: (IncidentAction.QUARANTINE, "the driver's firmware failed"),
    46: (IncidentAction.QUARANTINE, "the card stopped processing"),
    48: (IncidentAction.QUARANTINE, "uncorrectable memory error"),
    54: (IncidentAction.QUARANTINE, "auxiliary power is not connected"),
    56: (IncidentAction.QUARANTINE, "the display engine failed"),
    57: (IncidentAction.QUARANTINE, "error of the card's memory interface"),
    58: (IncidentAction.QUARANTINE, "unstable memory interface"),
    61: (IncidentAction.QUARANTINE, "breakpoint in the card's microcontroller"),
    62: (IncidentAction.QUARANTINE, "the card's microcontroller halted"),
    64: (IncidentAction.QUARANTINE, "memory could not be remapped or retired"),
    74: (IncidentAction.QUARANTINE, "NVLink error"),
    79: (IncidentAction.QUARANTINE, "the card fell off the bus"),
    95: (IncidentAction.QUARANTINE, "a memory error was not contained"),
    109: (IncidentAction.QUARANTINE, "context switch timed out"),
    110: (IncidentAction.QUARANTINE, "security fault"),
    119: (IncidentAction.QUARANTINE, "the card's system processor does not answer"),
    120: (IncidentAction.QUARANTINE, "the card's system processor failed"),
    121: (IncidentAction.QUARANTINE, "error of the link between CPU and GPU"),
    123: (IncidentAction.QUARANTINE, "power management of the card failed"),
    136: (IncidentAction.QUARANTINE, "training of an NVLink failed"),
    140: (IncidentAction.QUARANTINE, "memory error that the card did not recover from"),
    142: (IncidentAction.QUARANTINE, "NVENC failed"),
    143: (IncidentAction.QUARANTINE, "the card could not be set up"),
    **dict.fromkeys(range(144, 151), (IncidentAction.QUARANTINE, "NVLink error")),
    151: (IncidentAction.QUARANTINE, "key rotation of the card failed"),
    155: (IncidentAction.QUARANTINE, "NVLink went down by software"),
    156: (IncidentAction.QUARANTINE, "a resource of the card was retired"),
    158: (IncidentAction.QUARANTINE, "fatal timeout of the card"),
}
UNLISTED_XID: Final = IncidentAction.QUARANTINE
NOT_KNOWN: Final = "not known to Atoll"

RECOVERIES: Final[Mapping[int, tuple[IncidentAction, IncidentCure, str]]] = {
    1: (IncidentAction.QUARANTINE, IncidentCure.RESET, "GPU reset"),
    2: (IncidentAction.DRAIN, IncidentCure.REBOOT, "node reboot"),
    3: (IncidentAction.QUARANTINE, IncidentCure.QUIET, "drain of peers"),
    4: (IncidentAction.QUARANTINE, IncidentCure.RESET, "drain and reset"),
    5: (IncidentAction.QUARANTINE, IncidentCure.QUIET, "recovery of the fabric domain (IMEX)"),
    6: (IncidentAction.QUARANTINE, IncidentCure.RESET, "reset of the bus"),
    7: (IncidentAction.DRAIN, IncidentCure.REBOOT, "reboot of the whole system"),
}
"""nvmlDeviceGpuRecoveryAction_t: severity, cure, text."""
UNLISTED_RECOVERY: Final = (IncidentAction.DRAIN, IncidentCure.REBOOT)

KINDS: Final[Mapping[IncidentKind, IncidentAction]] = {
    IncidentKind.LOST: IncidentAction.QUARANTINE,
    IncidentKind.FAULT: IncidentAction.QUARANTINE,
    IncidentKind.SILENT: IncidentAction.QUARANTINE,
    IncidentKind.ECC: IncidentAction.WARN,
    IncidentKind.ECC_CORRECTED: IncidentAction.WARN,
    IncidentKind.ROW_REMAP: IncidentAction.WARN,
    IncidentKind.RETIRED_PAGES: IncidentAction.WARN,
    IncidentKind.THROTTLE: IncidentAction.WARN,
    IncidentKind.NVLINK: IncidentAction.WARN,
    IncidentKind.FABRIC: IncidentAction.WARN,
    IncidentKind.FABRIC_HEALTH: IncidentAction.WARN,
}
"""fabric is a warning here because it is no fault of one card; `is_fabric_ready` keeps pods away from all of them."""
ECC_STORM: Final = 16
"""Uncorrectable errors since the last reset from which a card is quarantined."""
ROW_REMAP_FAILED: Final = 1

CURES: Final[Mapping[IncidentKind, IncidentCure]] = {
    IncidentKind.XID: IncidentCure.RESET,
    IncidentKind.ECC: IncidentCure.RESET,
    IncidentKind.ROW_REMAP: IncidentCure.RESET,
    IncidentKind.RETIRED_PAGES: IncidentCure.RESET,
}
"""Cures of kinds whose numbers do not matter; quiet if not listed."""
XIDS_OF_POWER: Final = frozenset({54})
"""Connecting power needs a reboot."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Where one device stands, and why, in words for a human; empty for a healthy one without warnings."""

    state: Availability
    reason: str = ""

    @property
    def may_be_given_out(self) -> bool:
        """Tell whether new pods may get the device."""
        return self.state is Availability.HEALTHY


SOUND: Final = DeviceHealth(Availability.HEALTHY)
"""Where nearly every device stands: nothing is told of it."""


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What follows from one report. drain: why the whole node should be drained, empty if it should not."""

    standings: Mapping[str, DeviceHealth] = field(default_factory=dict)
    drain: str = ""


def judge(status: GpuNodeStatus) -> NodeHealth:
    """Judge every device of a report, by uuid."""
    devices = status.status.devices if status.status is not None else ()
    if not status.spec.cordons and all(map(_is_plain, devices)):
        return NodeHealth({device.uuid: SOUND for device in devices})
    released = {release.uuid: release.time for release in status.spec.releases}
    cordons = {cordon.uuid: cordon.reason for cordon in status.spec.cordons}
    open_by_uuid = {device.uuid: tuple(_open(device, released.get(device.uuid, ""))) for device in devices}
    told = (one for found in open_by_uuid.values() for one in found)
    drain = next((describe(one) for one in told if action_of(one) is IncidentAction.DRAIN), "")
    standings = {device.uuid: _device_health(device, open_by_uuid[device.uuid], cordons, drain) for device in devices}
    for device in devices:
        parent = standings.get(device.mig.parent_uuid) if device.mig is not None else None
        if parent is not None and not parent.may_be_given_out:
            standings[device.uuid] = parent
    return NodeHealth(standings, drain)


def action_of(incident: Incident) -> IncidentAction:
    """What an incident is worth, open or not."""
    if incident.kind is IncidentKind.XID:
        return XIDS[incident.code][0] if incident.code in XIDS else UNLISTED_XID
    if incident.kind is IncidentKind.ECC and incident.count >= ECC_STORM:
        return IncidentAction.QUARANTINE
    if incident.kind is IncidentKind.ROW_REMAP and incident.code == ROW_REMAP_FAILED:
        return IncidentAction.QUARANTINE
    if incident.kind is IncidentKind.RECOVERY:
        return RECOVERIES.get(incident.code, UNLISTED_RECOVERY)[0]
    return KINDS[incident.kind]


def must_be_remembered(status: GpuNodeStatus) -> bool:
    """Return whether a report has what no agent could find out again: a cordon, or an open XID that keeps a GPU from
    being given out. No driver tells an XID twice."""
    devices = status.status.devices if status.status is not None else ()
    released = {release.uuid: release.time for release in status.spec.releases}
    found = (one for device in devices for one in _open(device, released.get(device.uuid, "")))
    xids = (one for one in found if one.kind is IncidentKind.XID)
    return bool(status.spec.cordons) or any(action_of(one) >= IncidentAction.QUARANTINE for one in xids)


def cure_of(kind: IncidentKind, code: int) -> IncidentCure:
    """Return the least that ends such an incident."""
    if kind is IncidentKind.RECOVERY:
        return RECOVERIES.get(code, UNLISTED_RECOVERY)[1]
    if kind is IncidentKind.XID and code in XIDS_OF_POWER:
        return IncidentCure.REBOOT
    return CURES.get(kind, IncidentCure.QUIET)


def recovery_words(code: int) -> str:
    """Return the action that the driver asks for, as text."""
    return RECOVERIES[code][2] if code in RECOVERIES else f"recovery action {code}, {NOT_KNOWN}"


def describe(incident: Incident) -> str:
    """One incident in words."""
    if incident.kind is IncidentKind.XID:
        meaning = XIDS[incident.code][1] if incident.code in XIDS else NOT_KNOWN
        return f"XID {incident.code}: {meaning}"
    if incident.kind is IncidentKind.ECC:
        return f"{incident.count} or more {incident.message}"
    return incident.message or str(incident.kind)


def is_fabric_ready(device: Device) -> bool:
    """Tell whether the NVLink fabric of a whole card is ready, as far as the card says. Until the fabric manager has
    set the fabric up, programs on such a machine find no GPU that they could open. MIG instances do without."""
    is_part = device.mig is not None and bool(device.mig.profile)
    return is_part or not any(one.kind is IncidentKind.FABRIC and not one.ended_time for one in device.incidents)


def _is_plain(device: Device) -> bool:
    return device.health.state is HealthState.HEALTHY and not device.incidents


def _open(device: Device, released: str) -> Iterable[Incident]:
    return (one for one in device.incidents if not one.ended_time and not (released and one.last_time <= released))


def _device_health(
    device: Device, incidents: Iterable[Incident], cordons: Mapping[str, str], drain: str
) -> DeviceHealth:
    """Return where the facts put a device, and the reason of the news that decided."""
    worst = max(incidents, key=action_of, default=None)
    illness = _illness(device, worst, drain)
    news = health_signal_of(
        is_heard=True,
        is_cordoned=device.uuid in cordons,
        is_readable=device.health.state is not HealthState.UNKNOWN,
        is_sound=illness is None,
    )
    warning = describe(worst) if worst is not None and action_of(worst) is IncidentAction.WARN else ""
    reasons = {
        HealthSignal.CORDON: cordons.get(device.uuid, ""),
        HealthSignal.SILENCE: device.health.reason,
        HealthSignal.SICK: illness or "",
        HealthSignal.SOUND: warning,
    }
    return DeviceHealth(availability_of(news), reasons[news])


def _illness(device: Device, worst: Incident | None, drain: str) -> str | None:
    """Return what is wrong with a device, by weight: what the agent says, its incidents, its node; None if nothing."""
    if device.health.state is not HealthState.HEALTHY:
        return device.health.reason
    if worst is not None and action_of(worst) >= IncidentAction.QUARANTINE:
        return describe(worst)
    return f"the node must be drained: {drain}" if drain else None
