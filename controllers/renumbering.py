"""Evicts pods whose containers see wrong GPUs, because their machine numbers its GPUs differently since a reboot.

kubelet would restart the containers with the wrong numbers for ever; after the eviction the pod's owner makes a pod
with right ones. A disruption budget may delay the eviction. The GPUs are released like those of any pod that ends. Keys
are pod uids.
"""

from collections.abc import Iterable
from typing import Any

import structlog

from atoll.api import names
from atoll.api.node_status import Device, GpuNodeStatus
from atoll.cluster import pods
from atoll.cluster.machines import node_devices
from atoll.cluster.objects import Pod
from atoll.cluster.renumbering import StaleContainer, stale_containers
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import NotFound
from atoll.kube.mirror import WatchedKind
from controllers.context import Context, pod_reference
from controllers.pod_calls import EvictionRefused, evict, look_up

log = structlog.get_logger(__name__)


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
        node = change.object.metadata.name
        allocations = ((uid, ledger.allocation_of(uid)) for uid in ledger.pods)
        return tuple(uid for uid, held in allocations if held is not None and held.node == node)

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
        stale = stale_containers(lookup.pod, await self._live_devices(lookup.pod.spec.node_name))
        return await self._evict(lookup.pod, stale) if stale else None

    def _seems_stale(self, pod: Pod) -> bool:
        report = self._context.mirror.ledger.nodes.get(pod.spec.node_name)
        is_ending = pod.metadata.deletion_timestamp is not None
        return report is not None and not is_ending and bool(stale_containers(pod, report.devices))

    async def _live_devices(self, node: str) -> tuple[Device, ...]:
        """Read the report after the pod: a bind may have used a newer one than the mirror has."""
        try:
            answer = await self._context.api.get(paths.gpunodestatuses(node))
        except NotFound:
            return ()
        found = node_devices(GpuNodeStatus.model_validate_json(answer))
        return found.devices if found is not None else ()

    async def _evict(self, pod: Pod, stale: tuple[StaleContainer, ...]) -> float | None:
        self._context.events.record(
            pod_reference(pod),
            reason=names.REASON_GPUS_RENUMBERED,
            note=f"node {pod.spec.node_name} numbers its GPUs anew: {stale[0]}; the pod is evicted",
            action="Evict",
            type="Warning",
        )
        try:
            is_evicted = await evict(self._context.api, pod)
        except EvictionRefused as error:
            log.info("May not evict yet", pod=str(pods.holder_of(pod)), uid=pod.metadata.uid, err=str(error))
            return error.retry_after_seconds
        if not is_evicted:
            return None
        self._context.metrics.pods_evicted.inc()
        log.warning(
            "Evicted a pod with wrong numbers",
            pod=str(pods.holder_of(pod)),
            uid=pod.metadata.uid,
            stale=[str(one) for one in stale],
        )
        return None


def _numbers(status: GpuNodeStatus | None) -> dict[str, int]:
    report = status.status if status is not None else None
    return {device.uuid: device.index for device in report.devices} if report is not None else {}
