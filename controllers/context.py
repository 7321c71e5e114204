"""What every reconciler is given: API client, mirror, clock, events, metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.cluster.leases import Holder
from atoll.cluster.objects import Pod
from atoll.kube.api import Api
from atoll.kube.events import EventType, ObjectReference
from atoll.kube.microtime import format_microtime
from atoll.kube.mirror import ClusterMirror
from atoll.service.clock import Clock
from controllers.metrics import ControllerMetrics


class Events(Protocol):
    """Where events are recorded; EventRecorder fits."""

    def record(
        self,
        regarding: ObjectReference,
        *,
        reason: str,
        note: str,
        action: str,
        type: EventType = ...,  # noqa: A002 - the API's word
        related: ObjectReference | None = ...,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Context:
    """The surroundings of one leadership term. `new_token` gives a text that was never used before."""

    api: Api
    mirror: ClusterMirror
    clock: Clock
    events: Events
    metrics: ControllerMetrics
    new_token: Callable[[], str]

    def now_text(self) -> str:
        """Return the time as Leases carry it."""
        return format_microtime(self.clock.now())


def pod_reference(pod: Pod) -> ObjectReference:
    """Return the reference under which events of a pod are found."""
    metadata = pod.metadata
    return ObjectReference("v1", "Pod", metadata.name, metadata.namespace, metadata.uid)


def holder_reference(holder: Holder) -> ObjectReference:
    """Return the reference of a pod that holds a Lease, as the Lease names it."""
    return ObjectReference("v1", "Pod", holder.name, holder.namespace, holder.uid)


def node_reference(node: str) -> ObjectReference:
    """Return the reference under which events of a node are found: kubelets, too, use the name as uid."""
    return ObjectReference("v1", "Node", node, uid=node)
