"""Reports pods whose GPUs are gone from their machine, and evicts those that cannot start again.

After the eviction the owner creates a new pod, which gets GPUs that exist. `stranded_pods: tell` leaves that to people.
A pod that is still Ready only gets an event. Both happen once the GPUs have been away for a while, because a driver or
whoever makes MIG instances may need some time after a boot. Disruption budgets may delay the eviction. The GPUs are
released like those of any pod that ends. Keys are pod uids.
"""

from collections.abc import Iterable
from typing import Any

import structlog

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import pods
from atoll.cluster.objects import Pod
from atoll.cluster.occupants import pods_by_node
from atoll.cluster.stranded import gone_gpus, runs_on
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from controllers.context import Context, node_reference, pod_reference
from controllers.pod_calls import look_up, read_report, try_evict

log = structlog.get_logger(__name__)


class StrandedReconciler:
    """Makes sure that no pod waits forever for a GPU that is gone."""

    name = "stranded"

    def __init__(self, context: Context, *, evicts: bool, after_seconds: float) -> None:
        self._context = context
        self._evicts = evicts
        self._after_seconds = after_seconds
        self._since: dict[str, float] = {}
        self._told: dict[str, tuple[str, ...]] = {}

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the pods of a node whose devices changed, and a changed pod if the mirror shows it as stranded."""
        if change.kind is ChangeKind.DELETED:
            self._forget(change.object.metadata.uid)
            return ()
        ledger = self._context.mirror.ledger
        if kind is WatchedKind.POD:
            uid = change.object.metadata.uid
            return (uid,) if ledger.allocation_of(uid) is not None and self._seems_stranded(uid) else ()
        if kind is not WatchedKind.REPORT or _uuids(change.old) == _uuids(change.object):
            return ()
        return tuple(pod.metadata.uid for pod in pods_by_node(ledger).get(change.object.metadata.name, ()))

    def all_keys(self) -> Iterable[str]:
        """Return every pod that the mirror shows as stranded."""
        ledger = self._context.mirror.ledger
        return tuple(uid for uid in ledger.pods if ledger.allocation_of(uid) is not None and self._seems_stranded(uid))

    async def reconcile(self, uid: str) -> float | None:
        """Record the event, and evict, if a live read of pod and report confirms it. Raises KubeError."""
        pod = self._context.mirror.ledger.pods.get(uid)
        if pod is None or not self._seems_stranded(uid):
            self._forget(uid)
            return None
        now = self._context.clock.monotonic_seconds()
        left_seconds = self._since.setdefault(uid, now) + self._after_seconds - now
        if left_seconds > 0:
            return left_seconds
        live = (await look_up(self._context.api, pods.holder_of(pod))).pod
        if live is None or live.metadata.deletion_timestamp is not None:
            return None
        gone = gone_gpus(live, await read_report(self._context.api, live.spec.node_name))
        if not gone:
            return None
        will_evict = self._evicts and not runs_on(live)
        self._tell(live, gone, will_evict=will_evict)
        return await try_evict(self._context, live, "its GPUs are gone") if will_evict else None

    def _seems_stranded(self, uid: str) -> bool:
        mirror = self._context.mirror
        pod = mirror.ledger.pods.get(uid)
        if pod is None or pod.metadata.deletion_timestamp is not None or pod.spec.node_name not in mirror.ledger.nodes:
            return False
        return bool(gone_gpus(pod, mirror.reports.get(pod.spec.node_name)))

    def _forget(self, uid: str) -> None:
        self._since.pop(uid, None)
        if self._told.pop(uid, None) is not None:
            self._context.metrics.stranded_pods.set(len(self._told))

    def _tell(self, pod: Pod, gone: tuple[str, ...], *, will_evict: bool) -> None:
        uid, node = pod.metadata.uid, pod.spec.node_name
        if self._told.get(uid) == gone:
            return
        self._told[uid] = gone
        self._context.metrics.stranded_pods.set(len(self._told))
        end = "the pod is evicted" if will_evict else "recreate the pod"
        note = f"node {node} no longer has GPU {', '.join(gone)}; containers that need it cannot start again: {end}"
        log.warning("A pod's GPUs are gone", pod=str(pods.holder_of(pod)), uid=uid, node=node, uuids=gone)
        for reference in (pod_reference(pod), node_reference(node)):
            self._context.events.record(
                reference, reason=names.REASON_GPUS_GONE, note=note, action="Evict", type="Warning"
            )


def _uuids(status: GpuNodeStatus | None) -> frozenset[str]:
    report = status.status if status is not None else None
    return frozenset(device.uuid for device in report.devices) if report is not None else frozenset()
