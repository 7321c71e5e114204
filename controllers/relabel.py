"""Makes Leases readable again whose annotations disagree with their name: somebody edited them by hand.

In: the name of an unreadable Lease. Out: its annotations written anew from its *name*, and its holder from the bound
pod that names the device, if there is exactly one. A Lease that stays unreadable keeps its GPU from everybody, and its
event says so. Keys are Lease names.
"""

from collections.abc import Iterable
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster.objects import Lease
from atoll.cluster.repairs import MissingLease, device_of_lease_name, owner_of_unreadable, required_leases
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import NotFound
from atoll.kube.events import ObjectReference
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.context import Context
from controllers.lookups import look_up

log = structlog.get_logger(__name__)


class RelabelReconciler:
    """Every GPU Lease can be read."""

    name = "relabel"

    def __init__(self, context: Context) -> None:
        self._context = context

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the Lease that changed, if it cannot be read."""
        if kind is not WatchedKind.LEASE or change.kind is ChangeKind.DELETED:
            return ()
        name = change.object.metadata.name
        return (name,) if name in self._context.mirror.ledger.unreadable_leases else ()

    def all_keys(self) -> Iterable[str]:
        """Return every unreadable Lease."""
        return tuple(self._context.mirror.ledger.unreadable_leases)

    async def reconcile(self, name: str) -> float | None:
        """Write the Lease anew as far as it can be known. Raises KubeError."""
        ledger = self._context.mirror.ledger
        lease = self._context.mirror.leases.store.get((names.SYSTEM_NAMESPACE, name))
        reason = ledger.unreadable_leases.get(name)
        if lease is None or reason is None:
            return None
        self._context.events.record(
            ObjectReference("coordination.k8s.io/v1", "Lease", name, names.SYSTEM_NAMESPACE, lease.metadata.uid),
            reason=names.REASON_UNREADABLE_LEASE,
            note=f"nobody gets the GPU of this Lease until it can be read: {reason}",
            action="Repair",
            type="Warning",
        )
        owner = owner_of_unreadable(name, ledger.pods)
        if owner is not None and await self._is_confirmed(owner):
            annotations = _device(owner.node, owner.device_id, owner.device_uuid)
            await self._write(lease, annotations, {"holderIdentity": str(owner.holder)})
            return None
        device = device_of_lease_name(name, ledger.nodes)
        annotations = _device(*device) if device is not None else {}
        if any(lease.metadata.annotations.get(key) != value for key, value in annotations.items()):
            await self._write(lease, annotations, None)
        return None

    async def _is_confirmed(self, owner: MissingLease) -> bool:
        sighting = await look_up(self._context.api, owner.holder)
        return sighting.pod is not None and owner in required_leases(sighting.pod)

    async def _write(self, lease: Lease, annotations: dict[str, str], spec: dict[str, str] | None) -> None:
        metadata = lease.metadata
        sections = {"spec": spec} if spec is not None else {}
        body = merge_patch(
            uid=metadata.uid, resource_version=metadata.resource_version, annotations=annotations, **sections
        )
        try:
            await self._context.api.patch(paths.leases(names.SYSTEM_NAMESPACE, metadata.name), body)
        except NotFound:
            return
        self._context.metrics.leases_rewritten.inc()
        log.warning("Wrote an unreadable Lease anew", lease=metadata.name, holder=spec)


def _device(node: str, device_id: int, device_uuid: str) -> dict[str, str]:
    return {
        names.LEASE_NODE: node,
        names.LEASE_DEVICE_ID: str(device_id),
        names.LEASE_DEVICE_UUID: device_uuid,
    }
