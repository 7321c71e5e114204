"""Incidents: the record of a device's faults.

Pure: folds the faults of a look into the incidents of the last report. The record is part of the report, so a restart
of the agent loses nothing. The rules:

* an incident ends by its own cure (atoll.cluster.health), never because another one ends;
* an XID stays open until the card is reset or the machine reboots: no driver reports its end;
* a lasting fault is open while it holds and for a while after: a minute the first time, twice as long each time it
  comes back, at most an hour. A flapping card is therefore not given out in between;
* errors that only a reset clears (ECC counters, pending remaps, a request for a reset) end with it. Their end proves a
  reset, and also ends the card's XIDs. A recovery action that changes into another has not ended. The end of an action
  other than a reset proves no reset, and a request for a reboot ends only with a reboot;
* a kind that could not be read keeps its state;
* a time in the future, because the machine's clock was set back, becomes now;
* a repeating XID counts at most once a minute, because each change writes a report; but the first after an
  administrator's release counts at once, or the release would hide it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent.readings import DeviceFault
from atoll.api.node_status import INCIDENTS_MAX, Incident, IncidentKind
from atoll.api.times import seconds_of
from atoll.cluster.health import IncidentCure, cure_of

QUIET_SECONDS: Final = 60.0
QUIET_DOUBLINGS_MAX: Final = 6
XID_SECONDS_MIN: Final = 60.0
COUNT_MAX: Final = 1 << 40

RECOVERED, RESET, REBOOT = "recovered", "reset", "reboot"
_COUNTED_BY_DEVICE: Final = frozenset({IncidentKind.ECC, IncidentKind.ECC_CORRECTED, IncidentKind.NVLINK})

Key = tuple[IncidentKind, int]


def fold(
    last: Iterable[Incident],
    faults: Sequence[DeviceFault],
    *,
    unread: frozenset[IncidentKind],
    now: str,
    boot_id: str,
    released: str = "",
) -> tuple[Incident, ...]:
    """Add the faults of one look to the record. now: UTC time in the report's format; unread: kinds not read; released:
    time at which an administrator declared the device well, empty if never."""
    before: dict[Key, Incident] = {(one.kind, one.code): _until(one, now, released) for one in last}
    told: dict[Key, DeviceFault] = {(fault.kind, fault.code): fault for fault in faults}
    was_reset = any(_is_cleared(one, {kind for kind, _ in told}, unread) for one in before.values())
    after: dict[Key, Incident] = {}
    for key, incident in before.items():
        if key not in told:
            after[key] = _untold(incident, unread=unread, now=now, boot_id=boot_id, was_reset=was_reset)
    for key, fault in told.items():
        after[key] = _seen_again(before.get(key), fault, now=now, boot_id=boot_id, released=released)
    return _bounded(after, told)


def _until(incident: Incident, now: str, released: str) -> Incident:
    """Move an incident's future times to now. After the clock was set back, it could otherwise neither end nor be
    released until the clock catches up. Nothing moves if the last release is in the future too: an incident after the
    release must stay after it."""
    if released and _seconds(released, now) < 0.0:
        return incident
    names = ("first_time", "last_time", "quiet_since", "ended_time")
    ahead = {name: now for name in names if (told := getattr(incident, name)) and _seconds(told, now) < 0.0}
    return incident.model_copy(update=ahead) if ahead else incident


def _is_cleared(incident: Incident, told: set[IncidentKind], unread: frozenset[IncidentKind]) -> bool:
    """Return whether the card was reset: an error that only a reset clears was read again and is gone."""
    is_open = not incident.ended_time and incident.kind is not IncidentKind.XID
    needs_reset = cure_of(incident.kind, incident.code) is IncidentCure.RESET
    return is_open and needs_reset and incident.kind not in unread and incident.kind not in told


def _untold(
    incident: Incident, *, unread: frozenset[IncidentKind], now: str, boot_id: str, was_reset: bool
) -> Incident:
    """Update an incident that this look did not show."""
    if incident.ended_time or incident.kind in unread:
        return incident
    if incident.boot_id and boot_id and incident.boot_id != boot_id:
        return _ended(incident, REBOOT, now)
    cure = cure_of(incident.kind, incident.code)
    if cure is not IncidentCure.QUIET:
        return _ended(incident, RESET, now) if was_reset and cure is IncidentCure.RESET else incident
    if not incident.quiet_since:
        return incident.model_copy(update={"quiet_since": now})
    if _seconds(incident.quiet_since, now) >= quiet_seconds(incident.count):
        return _ended(incident, RECOVERED, now)
    return incident


def _seen_again(last: Incident | None, fault: DeviceFault, *, now: str, boot_id: str, released: str) -> Incident:
    """Update an incident that this look shows; unchanged ones stay equal, so nothing is written."""
    if last is None:
        return _opened(fault, fault.count, now=now, boot_id=boot_id)
    counted = fault.kind in _COUNTED_BY_DEVICE
    if last.ended_time:
        count = fault.count if counted else last.count + fault.count
        return _opened(fault, min(count, COUNT_MAX), now=now, boot_id=boot_id)
    count = last.count
    if counted:
        count = fault.count
    elif last.quiet_since or not fault.stands:
        count += fault.count
    is_same = count == last.count and fault.message[:128] == last.message and last.boot_id == boot_id
    is_early = last.boot_id == boot_id and _seconds(last.last_time, now) < XID_SECONDS_MIN
    is_repeat = not fault.stands and is_early and last.last_time > released
    if (is_same and not last.quiet_since) or is_repeat:
        return last
    update = {"count": min(count, COUNT_MAX), "message": fault.message[:128], "last_time": now, "boot_id": boot_id}
    return last.model_copy(update={**update, "quiet_since": ""})


def quiet_seconds(count: int) -> float:
    """Seconds without a recurrence after which an incident with this count is over."""
    return QUIET_SECONDS * 2.0 ** min(max(count, 1) - 1, QUIET_DOUBLINGS_MAX)


def _opened(fault: DeviceFault, count: int, *, now: str, boot_id: str) -> Incident:
    return Incident(
        kind=fault.kind,
        code=fault.code,
        count=count,
        message=fault.message[:128],
        first_time=now,
        last_time=now,
        boot_id=boot_id,
    )


def _ended(incident: Incident, ended_by: str, now: str) -> Incident:
    return incident.model_copy(update={"ended_time": now, "ended_by": ended_by, "quiet_since": ""})


def _bounded(incidents: Mapping[Key, Incident], told: Iterable[Key]) -> tuple[Incident, ...]:
    """Limit to what a report holds, in a fixed order: current ones, longest known first, so that a device with too many
    faults does not rewrite its report at each look; then open ones, then the last to end."""
    now_told = sorted(told, key=lambda key: (key[0] is IncidentKind.XID, incidents[key].first_time, key))
    newest = sorted(
        incidents.keys() - set(now_told),
        key=lambda key: (not incidents[key].ended_time, incidents[key].last_time, key),
        reverse=True,
    )
    kept = [*now_told, *newest][:INCIDENTS_MAX]
    return tuple(incidents[key] for key in sorted(kept))


def _seconds(since: str, now: str) -> float:
    """Seconds between two times; an invalid one is very long ago."""
    then, later = seconds_of(since), seconds_of(now)
    return float("inf") if then is None or later is None else later - then
