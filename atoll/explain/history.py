"""Timeline of one GPU: holders, health and events, the oldest entry first.

It has no storage of its own: incidents and cordons come from the node's report, holders from Leases and pods, and the
API server deletes events after an hour by default. The timeline says what it cannot show. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from atoll.api import names
from atoll.api.node_status import DepartedDevice, Device, GpuNodeStatus
from atoll.cluster import pods
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.health import judge as judge_health
from atoll.cluster.leases import parse_lease
from atoll.cluster.objects import ContainerStatus, Metadata, Pod
from atoll.explain.snapshot import ClusterSnapshot


class Regarding(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The object of an event."""

    kind: str = ""
    name: str = ""
    namespace: str = ""
    uid: str = ""


class RecordedEvent(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """An events.k8s.io/v1 Event."""

    metadata: Metadata
    regarding: Regarding = Regarding()
    reason: str = ""
    note: str = ""
    event_time: str | None = None
    deprecated_last_timestamp: str | None = None


decode_event = msgspec.json.Decoder(RecordedEvent).decode


class NoSuchGpu(ValueError):
    """The snapshot has no GPU of that name."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One entry. `time`: from the object, empty if it has none; `source`: the object."""

    time: str
    kind: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class GpuTimeline:
    """One GPU. `state`, `reason`: its current state; `holder`: its current holder, empty for none."""

    gpu: str
    uuid: str
    model: str
    state: str
    reason: str
    holder: str
    entries: tuple[TimelineEntry, ...]


def timeline_of(snapshot: ClusterSnapshot, events: Iterable[RecordedEvent], node: str, device_id: int) -> GpuTimeline:
    """Return the timeline of a GPU, also of one that left its machine. Raises NoSuchGpu."""
    report = next((one for one in snapshot.reports if one.metadata.name == node), None)
    left = _departed(report, device_id)
    device = _device(report, device_id) or (_last_seen(left) if left is not None else None)
    if report is None or device is None:
        known = _known(report) if report is not None else "no agent reports that node"
        raise NoSuchGpu(f"there is no GPU {node}/{device_id}: {known}")
    holders = [pod for pod in snapshot.pods if _names(pod, node, device)]
    standing = judge_health(report).standings.get(device.uuid)
    entries = [
        *_health(report, device),
        *_holders(holders),
        *_leases(snapshot, node, device),
        *_told(events, f"{node}/{device_id}", device.uuid, node, holders),
    ]
    now = next((_named(pod) for pod in holders if not pods.is_terminal(pod)), "")
    state, reason = (str(standing.state), standing.reason) if standing is not None else ("gone", "")
    if left is not None and standing is None:
        reason = left.reason
        entries.append(TimelineEntry(left.left_time, "left", left.reason, f"GpuNodeStatus/{node}"))
    ordered = tuple(sorted(entries, key=lambda entry: (entry.time, entry.kind, entry.text)))
    return GpuTimeline(f"{node}/{device_id}", device.uuid, device.model, state, reason, now, ordered)


def _device(report: GpuNodeStatus | None, device_id: int) -> Device | None:
    devices = report.status.devices if report is not None and report.status is not None else ()
    return next((device for device in devices if device.id == device_id), None)


def _departed(report: GpuNodeStatus | None, device_id: int) -> DepartedDevice | None:
    cards = report.status.departed if report is not None and report.status is not None else ()
    return next((card for card in reversed(cards) if card.id == device_id), None)


def _last_seen(left: DepartedDevice) -> Device:
    return Device(id=left.id, uuid=left.uuid, model=left.model, index=0, incidents=left.incidents)


def _known(report: GpuNodeStatus) -> str:
    ids = ", ".join(str(device.id) for device in (report.status.devices if report.status is not None else ()))
    return f"the node has {ids or 'none'}"


def _names(pod: Pod, node: str, device: Device) -> bool:
    """True if a pod was given the card, by uuid: device ids may have changed since."""
    try:
        allocation = bound_allocation(pod)
    except MalformedValue:
        return False
    return allocation is not None and allocation.node == node and device.uuid in allocation.uuids


def _health(report: GpuNodeStatus, device: Device) -> Iterator[TimelineEntry]:
    source = f"GpuNodeStatus/{report.metadata.name}"
    for one in device.incidents:
        what = f"{one.kind}{f' {one.code}' if one.code else ''}"
        often = f", {one.count} times, last at {one.last_time}" if one.count > 1 else ""
        message = f": {one.message}" if one.message else ""
        yield TimelineEntry(one.first_time, "incident", f"{what}{message}{often}", source)
        if one.ended_time:
            yield TimelineEntry(one.ended_time, "incident over", f"{what}, {one.ended_by or 'over'}", source)
    health = device.health
    if health.since:
        reason = f": {health.reason}" if health.reason else ""
        yield TimelineEntry(health.since, "health", f"{health.state}{reason}", source)
    for cordon in report.spec.cordons:
        if cordon.uuid == device.uuid:
            yield TimelineEntry("", "cordoned", f"{cordon.reason} (by {cordon.by or 'unknown'})", source)
    for release in report.spec.releases:
        if release.uuid == device.uuid:
            yield TimelineEntry(
                release.time, "declared well", f"{release.reason} (by {release.by or 'unknown'})", source
            )


def _holders(found: Iterable[Pod]) -> Iterator[TimelineEntry]:
    for pod in found:
        source = f"Pod/{_named(pod)}"
        bound = next((c.last_transition_time for c in pod.status.conditions if c.type == "PodScheduled"), None)
        yield TimelineEntry(bound or pod.metadata.creation_timestamp or "", "given", f"to pod {_named(pod)}", source)
        if pods.is_terminal(pod):
            ended = max(map(_finished, pods.container_statuses(pod)), default="")
            yield TimelineEntry(ended, "ended", f"pod {_named(pod)} ({pod.status.phase})", source)
        elif pod.metadata.deletion_timestamp:
            yield TimelineEntry(
                pod.metadata.deletion_timestamp, "ending", f"pod {_named(pod)} is being deleted", source
            )


def _finished(status: ContainerStatus) -> str:
    ended = status.state.terminated
    return ended.finished_at or "" if ended is not None else ""


def _leases(snapshot: ClusterSnapshot, node: str, device: Device) -> Iterator[TimelineEntry]:
    for lease in snapshot.leases:
        try:
            record = parse_lease(lease)
        except MalformedValue:
            continue
        if record.node != node or record.device_uuid != device.uuid:
            continue
        source, holder = f"Lease/{lease.metadata.name}", f"{record.holder.namespace}/{record.holder.name}"
        yield TimelineEntry(lease.spec.acquire_time or "", "reserved", f"for pod {holder}", source)
        doubt = lease.metadata.annotations.get(names.LEASE_IN_DOUBT, "")
        if doubt:
            since, _, why = doubt.partition(" ")
            yield TimelineEntry(since, "in doubt", why or f"nothing proves that {holder} has ended", source)


def _told(
    events: Iterable[RecordedEvent], gpu: str, uuid: str, node: str, holders: Iterable[Pod]
) -> Iterator[TimelineEntry]:
    """Yield the events of its pods, and other events whose note names the GPU."""
    own = {pod.metadata.uid for pod in holders}
    for event in events:
        about = event.regarding
        is_named = uuid in event.note or gpu in event.note
        is_here = about.kind in ("Node", "GpuNodeStatus") and about.name == node and event.reason in _OF_NODES
        if about.uid in own or is_named or is_here:
            time = event.event_time or event.deprecated_last_timestamp or event.metadata.creation_timestamp or ""
            name = f"{about.namespace}/{about.name}".lstrip("/")
            yield TimelineEntry(time, event.reason, event.note, f"Event of {about.kind}/{name}")


_OF_NODES = frozenset({names.REASON_GPU_ILL, names.REASON_GPU_WELL, names.REASON_NODE_NEEDS_DRAIN})


def _named(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
