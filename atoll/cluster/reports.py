"""What nodes report: their devices, when their agents were last heard, and whether a report counts now.

A report is of the past when the Node has another uid (it was deleted and made anew), or when kubelet has told of
another boot than the agent: the machine was started again and the agent has not looked at it since, however fresh its
heartbeat is. Boot ids are compared only where both are the kernel's own, which have the form of a UUID.
"""

import math
from typing import Final

import msgspec

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.api.times import seconds_of, text_of
from atoll.cluster.machines import NodeDevices, node_devices
from atoll.cluster.objects import HeartbeatMetadata, Lease, Metadata, Node
from atoll.cluster.transitions import Availability, HealthSignal, availability_of

BOOT_ID_LENGTH: Final = 36
SILENCE_PERIODS: Final = 3
HEARTBEAT_SECONDS_DEFAULT: Final = 60


def silence_seconds_max(heartbeat: Lease) -> float:
    """Return for how long a report stays fresh after this heartbeat of its agent."""
    return float(heartbeat.spec.lease_duration_seconds or SILENCE_PERIODS * HEARTBEAT_SECONDS_DEFAULT)


def stored_seconds(heartbeat: Lease) -> float | None:
    """Return when the API server stored the last renewal, in seconds since 1970 by its own clock; None if unknown. The
    time that the agent wrote comes from the agent's clock, which may be wrong by minutes."""
    metadata = heartbeat.metadata
    if not isinstance(metadata, HeartbeatMetadata):
        return None
    renewals = (one for one in metadata.managed_fields if "f:renewTime" in (one.fields.get("f:spec") or {}))
    times = (seconds_of(one.time or "") for one in renewals)
    return max((time for time in times if time is not None), default=None)


def age_at_first_sight(heartbeat: Lease, server_seconds: float | None) -> float:
    """Return the age, in seconds, of a heartbeat whose renewal this process did not see; infinity without a time.

    The API server gives the time of the renewal and the current time by one clock. Without them, the agent gets half
    of its time: a live agent renews within a third of it, and a dead one soon counts as silent. One that is older than
    half of its time has missed a renewal, as that of a restored backup has: the agent must be heard first.
    """
    if seconds_of(heartbeat.spec.renew_time or "") is None:
        return math.inf
    stored, half_seconds = stored_seconds(heartbeat), silence_seconds_max(heartbeat) / 2
    if stored is None or server_seconds is None:
        return half_seconds
    age_seconds = max(0.0, server_seconds - stored)
    return age_seconds if age_seconds <= half_seconds else math.inf


def as_stored(heartbeat: Lease) -> Lease:
    """Return the heartbeat with the API server's time of storing it instead of the agent's own, if known."""
    stored = stored_seconds(heartbeat)
    if stored is None or seconds_of(heartbeat.spec.renew_time or "") is None:
        return heartbeat
    metadata = Metadata(heartbeat.metadata.name, heartbeat.metadata.namespace, heartbeat.metadata.uid)
    return Lease(metadata, msgspec.structs.replace(heartbeat.spec, renew_time=text_of(stored)))


def reason_of_the_past(status: GpuNodeStatus, node: Node | None) -> str:
    """Return why the report does not count: it was written under another Node of this name, or before the machine's
    last boot. Empty for a report of now."""
    if node is None or status.status is None:
        return ""
    report = status.status
    if report.node_uid and report.node_uid != node.metadata.uid:
        return names.REJECT_PAST_NODE
    boots = (report.boot_id, node.status.node_info.boot_id)
    return names.REJECT_PAST_BOOT if all(map(_is_kernels, boots)) and boots[0] != boots[1] else ""


def _is_kernels(boot_id: str) -> bool:
    return len(boot_id) == BOOT_ID_LENGTH and boot_id.count("-") == 4


class NodeReports:
    """The devices of every node whose report counts, and the last heartbeat of its agent."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeDevices] = {}
        self.uncounted: dict[str, str] = {}
        """Why a node is not among them although it has a report; empty where it has none."""
        self._heard: dict[str, tuple[float, float]] = {}
        self.next_silent_seconds = math.inf
        """Until then no node becomes stale; on our own monotonic clock."""

    def put(self, status: GpuNodeStatus) -> None:
        """Take a report; one that contradicts itself leaves the node without devices."""
        name = status.metadata.name
        devices = node_devices(status)
        if devices is None:
            self.drop(name, why=names.REJECT_BAD_REPORT if status.status is not None else "")
        else:
            self.nodes[name] = devices
            self.uncounted.pop(name, None)

    def drop(self, node: str, *, why: str = "") -> None:
        """Forget a node's report, or stop counting it for the reason `why`."""
        self.nodes.pop(node, None)
        if why:
            self.uncounted[node] = why
        else:
            self.uncounted.pop(node, None)

    def put_heartbeat(self, node: str, now_seconds: float, silence_seconds_max: float) -> None:
        """Note that the node's agent was heard at `now_seconds`, and for how long its report stays fresh."""
        self._heard[node] = (now_seconds, silence_seconds_max)
        self.next_silent_seconds = min(self.next_silent_seconds, now_seconds + silence_seconds_max)

    def drop_heartbeat(self, node: str) -> None:
        """Forget the node's heartbeat."""
        self._heard.pop(node, None)

    def is_stale(self, node: str, now_seconds: float) -> bool:
        """Tell whether the agent was silent for too long, or was never heard."""
        heard = self._heard.get(node)
        return heard is None or now_seconds - heard[0] > heard[1]

    def look_ahead(self, now_seconds: float) -> None:
        """Find anew when the next node may become stale."""
        ends = (at + silence for at, silence in self._heard.values() if at + silence >= now_seconds)
        self.next_silent_seconds = min(ends, default=math.inf)

    def availability(self, node: str, device_id: int, *, now_seconds: float) -> Availability:
        """Return what the report says of a device; unknown while the agent is silent."""
        devices = self.nodes.get(node)
        position = devices.position_by_id.get(device_id) if devices is not None else None
        if devices is None or position is None or self.is_stale(node, now_seconds):
            return availability_of(HealthSignal.SILENCE)
        return devices.availability[position]
