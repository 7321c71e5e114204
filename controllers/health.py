"""Records events when a GPU becomes unhealthy or recovers: on its node and on the pods that hold it.

One event per change, not per report. What makes a GPU unhealthy is decided in atoll.cluster.health; the ledger keeps
new pods away by itself, and the pod that holds the GPU keeps it. Keys are node names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster.health import DeviceHealth, NodeHealth, judge
from atoll.cluster.objects import Pod
from atoll.cluster.transitions import Availability
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.events import EventType
from atoll.kube.mirror import WatchedKind
from controllers.context import Context, node_reference, pod_reference

log = structlog.get_logger(__name__)

UNHEALTHY = frozenset({Availability.QUARANTINED, Availability.UNKNOWN})


@dataclass(frozen=True, slots=True)
class HealthChanges:
    """What changed on one node. unhealthy: health by device uuid; recovered: uuids; drain: a new reason; gone: uuids
    that the report no longer names."""

    unhealthy: Mapping[str, DeviceHealth] = field(default_factory=dict)
    recovered: tuple[str, ...] = ()
    drain: str = ""
    gone: tuple[str, ...] = ()


def health_changes(before: NodeHealth | None, now: NodeHealth) -> HealthChanges:
    """Return the changes to record for a node after it was judged anew. Pure.

    before: None for a node that was not judged yet; then only unhealthy devices are recorded.
    """
    old = before.standings if before is not None else {}
    unhealthy = {
        uuid: health
        for uuid, health in now.standings.items()
        if health.state in UNHEALTHY and not _is_reported(old.get(uuid), health)
    }
    recovered = tuple(
        uuid
        for uuid, health in now.standings.items()
        if health.may_be_given_out and uuid in old and old[uuid].state in UNHEALTHY
    )
    gone = tuple(uuid for uuid in old if uuid not in now.standings)
    return HealthChanges(unhealthy, recovered, now.drain if before is None or before.drain != now.drain else "", gone)


def _is_reported(before: DeviceHealth | None, now: DeviceHealth) -> bool:
    """Whether state and cause are the same: a reason in which only a number grows is not recorded again."""
    return before is not None and before.state is now.state and before.reason.split(":")[0] == now.reason.split(":")[0]


class HealthReconciler:
    """Records events when a GPU becomes unhealthy or recovers."""

    name = "health"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._judged: dict[str, NodeHealth] = {}

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the node of a report whose devices or cordons changed."""
        if kind is not WatchedKind.REPORT:
            return ()
        node = change.object.metadata.name
        if change.kind is ChangeKind.DELETED:
            self._judged.pop(node, None)
            return ()
        return (node,)

    def all_keys(self) -> Iterable[str]:
        """Return every node with a report."""
        return tuple(self._context.mirror.reports)

    async def reconcile(self, node: str) -> float | None:
        """Record what changed since the node was judged last."""
        status = self._context.mirror.reports.get(node)
        if status is None or status.status is None:
            return None
        judgement = judge(status)
        found = health_changes(self._judged.get(node), judgement)
        self._judged[node] = judgement
        ids = {device.uuid: device.id for device in status.status.devices}
        for uuid, health in found.unhealthy.items():
            note = f"GPU {ids[uuid]} ({uuid}) of node {node} is {health.state}: {health.reason}"
            self._record_event(node, uuid, names.REASON_GPU_ILL, note)
        for uuid in found.gone:
            if any(self._holders(node, uuid)):
                note = f"GPU {uuid} of node {node} is gone: the card was replaced, or the MIG instance deleted"
                self._record_event(node, uuid, names.REASON_GPU_ILL, note)
        for uuid in found.recovered:
            self._record_event(
                node, uuid, names.REASON_GPU_WELL, f"GPU {ids[uuid]} ({uuid}) of node {node} is healthy again"
            )
        if found.drain:
            self._record_on_node(node, names.REASON_NODE_NEEDS_DRAIN, f"drain node {node}: {found.drain}")
        return None

    def _record_event(self, node: str, uuid: str, reason: str, note: str) -> None:
        log.warning("The health of a GPU changed", node=node, uuid=uuid, reason=reason, note=note)
        self._record_on_node(node, reason, note)
        kind: EventType = "Normal" if reason == names.REASON_GPU_WELL else "Warning"
        for pod in self._holders(node, uuid):
            self._context.events.record(pod_reference(pod), reason=reason, note=note, action="Watch", type=kind)

    def _record_on_node(self, node: str, reason: str, note: str) -> None:
        kind: EventType = "Normal" if reason == names.REASON_GPU_WELL else "Warning"
        self._context.events.record(node_reference(node), reason=reason, note=note, action="Watch", type=kind)

    def _holders(self, node: str, uuid: str) -> Iterable[Pod]:
        ledger = self._context.mirror.ledger
        for uid, pod in ledger.pods.items():
            held = ledger.allocation_of(uid)
            if held is not None and held.node == node and uuid in held.uuids:
                yield pod
