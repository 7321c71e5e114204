"""Evicts pods whose containers see wrong GPUs, because their machine numbers its GPUs differently since a reboot.

kubelet would restart the containers with the wrong numbers for ever; after the eviction the pod's owner makes a pod
with right ones. A disruption budget may delay the eviction. The GPUs are released like those of any pod that ends. Keys
are pod uids.
"""

from collections.abc import Iterable
from typing import Any

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import pods
from atoll.cluster.machines import node_devices
from atoll.cluster.objects import Pod
from atoll.cluster.occupants import pods_by_node
from atoll.cluster.renumbering import StaleContainer, stale_containers
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind
from controllers.context import Context, pod_reference
from controllers.pod_calls import look_up, read_report, try_evict


class RenumberingReconciler:
    """No container keeps numbers of GPUs that are not its pod's."""

    name = "renumbering"

    def __init__(self, context: Context) -> None:
        self._context = context

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the pods of a node whose numbers changed, and a pod that was bound, perhaps by an older report."""
        if change.kind is ChangeKind.DELETED:
            return ()
        ledger = self._context.mirror.ledger
        if kind is WatchedKind.POD:
            was_bound = change.old is not None and change.old.spec.node_name
            uid = change.object.metadata.uid
            return () if was_bound or ledger.allocation_of(uid) is None else (uid,)
        if kind is not WatchedKind.REPORT or _numbers(change.old) == _numbers(change.object):
            return ()
        return tuple(pod.metadata.uid for pod in pods_by_node(ledger).get(change.object.metadata.name, ()))

    def all_keys(self) -> Iterable[str]:
        """Return every pod whose numbers are wrong by what the mirror holds."""
        return tuple(uid for uid, pod in self._context.mirror.ledger.pods.items() if self._seems_stale(pod))

    async def reconcile(self, uid: str) -> float | None:
        """Evict the pod if its live state and the live report of its node agree. Raises KubeError."""
        pod = self._context.mirror.ledger.pods.get(uid)
        if pod is None or not self._seems_stale(pod):
            return None
        lookup = await look_up(self._context.api, pods.holder_of(pod))
        if lookup.pod is None or lookup.pod.metadata.deletion_timestamp is not None:
            return None
        report = await read_report(self._context.api, lookup.pod.spec.node_name)
        found = node_devices(report) if report is not None else None
        stale = stale_containers(lookup.pod, found.devices if found is not None else ())
        return await self._evict(lookup.pod, stale) if stale else None

    def _seems_stale(self, pod: Pod) -> bool:
        report = self._context.mirror.ledger.nodes.get(pod.spec.node_name)
        is_ending = pod.metadata.deletion_timestamp is not None
        return report is not None and not is_ending and bool(stale_containers(pod, report.devices))

    async def _evict(self, pod: Pod, stale: tuple[StaleContainer, ...]) -> float | None:
        self._context.events.record(
            pod_reference(pod),
            reason=names.REASON_GPUS_RENUMBERED,
            note=f"node {pod.spec.node_name} numbers its GPUs anew: {stale[0]}; the pod is evicted",
            action="Evict",
            type="Warning",
        )
        return await try_evict(self._context, pod, "its GPUs have other numbers", stale=[str(one) for one in stale])


def _numbers(status: GpuNodeStatus | None) -> dict[str, int]:
    report = status.status if status is not None else None
    return {device.uuid: device.index for device in report.devices} if report is not None else {}
