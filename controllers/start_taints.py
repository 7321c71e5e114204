"""Removes the startup taint of a new node once its agent has reported GPUs and kube-scheduler counts them.

An autoscaler creates nodes with such a taint, so that neither it nor kube-scheduler treats them as nodes without GPUs.
Off unless a key is set. Keys of the loop are node names.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import structlog

from atoll.api import names
from atoll.cluster.objects import Node
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import Conflict, NotFound
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.context import Context

log = structlog.get_logger(__name__)

BLIND_SECONDS: Final = 5.0


class StartTaintReconciler:
    """Removes one taint from nodes whose GPUs are ready."""

    name = "start-taints"

    def __init__(self, context: Context, key: str) -> None:
        self._context = context
        self._key = key

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the node that changed, or whose report or heartbeat changed."""
        is_about = kind in {WatchedKind.NODE, WatchedKind.REPORT, WatchedKind.HEARTBEAT}
        name = change.object.metadata.name
        node = self._context.mirror.nodes.store.get(("", name))
        return (name,) if is_about and change.kind is not ChangeKind.DELETED and self._waits(node) else ()

    def all_keys(self) -> Iterable[str]:
        """Return every node with the taint."""
        return sorted(node.metadata.name for node in self._context.mirror.nodes.store.values() if self._waits(node))

    async def reconcile(self, key: str) -> float | None:
        """Remove the taint from one node if its GPUs are ready. Raises KubeError."""
        if self._context.mirror.unready_reason():
            return BLIND_SECONDS
        node = self._context.mirror.nodes.store.get(("", key))
        if node is None or not self._waits(node) or not self._is_counted(node):
            return None
        try:
            live = msgspec.json.decode(await self._context.api.get(paths.nodes(key)))
            metadata, taints = live["metadata"], live["spec"].get("taints", [])
            if metadata["uid"] != node.metadata.uid:
                return None
            kept = [taint for taint in taints if taint.get("key") != self._key]
            body = merge_patch(
                uid=metadata["uid"], resource_version=metadata["resourceVersion"], spec={"taints": kept or None}
            )
            await self._context.api.patch(paths.nodes(key), body)
        except NotFound:
            return None
        except Conflict:
            return 0.5
        log.info("Removed the startup taint of a node", node=key, taint=self._key)
        return None

    def _waits(self, node: Node | None) -> bool:
        return node is not None and any(taint.key == self._key for taint in node.spec.taints)

    def _is_counted(self, node: Node) -> bool:
        """Return whether this machine's report counts, a GPU can be given out, and the Node's capacity is set."""
        ledger, name = self._context.mirror.ledger, node.metadata.name
        devices = ledger.nodes.get(name)
        if devices is None or not devices.usable:
            return False
        if ledger.is_stale(name, self._context.clock.monotonic_seconds()):
            return False
        return any(
            quantity not in ("0", "")
            for resource, quantity in node.status.allocatable.items()
            if resource == names.GPU_RESOURCE or resource.startswith(names.MIG_RESOURCE_PREFIX)
        )
