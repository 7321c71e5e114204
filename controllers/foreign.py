"""Reports GPUs that somebody uses without holding them: by events on node and pods, a condition, and a gauge.

The condition `GpusAsPromised` is set on a pod of ours that uses others' GPUs or whose GPU somebody else uses; the
ledger gives such a GPU to nobody. Pods, Leases and reports come by different watches, so that a mismatch is reported
once it has lasted for `CONFIRM_SECONDS`. Keys are nodes.
"""

from collections.abc import Iterable
from typing import Any

import structlog

from atoll.api import names
from atoll.cluster.foreign_mismatches import Mismatch, complaint, mismatches, user_name
from atoll.cluster.objects import Pod
from atoll.kube import paths
from atoll.kube.cache import Change
from atoll.kube.errors import Conflict, Forbidden, Invalid, NotFound
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import STRATEGIC_MERGE_PATCH, merge_patch
from controllers.context import Context, node_reference, pod_reference

log = structlog.get_logger(__name__)

CONFIRM_SECONDS = 3.0


class ForeignReconciler:
    """Compares who uses GPUs with who holds them."""

    name = "foreign"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since: dict[str, dict[Mismatch, float]] = {}
        self._recorded: dict[str, set[Mismatch]] = {}

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[str]:
        """Return the node of a report, and the node of a pod where somebody is seen on GPUs."""
        if kind is WatchedKind.REPORT:
            return (change.object.metadata.name,)
        if kind is WatchedKind.POD and self._since:
            node = change.object.spec.node_name
            return (node,) if node in self._since else ()
        return ()

    def all_keys(self) -> Iterable[str]:
        """Return every node with a report, and those that had one when something was found there."""
        return sorted({*self._context.mirror.ledger.nodes, *self._since})

    async def reconcile(self, node: str) -> float | None:
        """Record new mismatches, and clear the condition of those that are over. Raises KubeError."""
        found = mismatches(self._context.mirror.ledger, node)
        now = self._context.clock.monotonic_seconds()
        since = self._since.get(node, {})
        self._since[node] = {mismatch: since.get(mismatch, now) for mismatch in found}
        if not found:
            del self._since[node]
        confirmed = [mismatch for mismatch in found if now - self._since[node][mismatch] >= CONFIRM_SECONDS]
        self._record_events(node, confirmed)
        self._context.metrics.foreign_gpus.set(
            sum(len({m.use.uuid for m in recorded}) for recorded in self._recorded.values())
        )
        for pod in self._pods_on(node):
            await self._write_condition(pod, complaint(pod.metadata.uid, confirmed, self._context.mirror.pods.by_uid))
        return CONFIRM_SECONDS if len(confirmed) < len(found) else None

    def _pods_on(self, node: str) -> list[Pod]:
        ledger = self._context.mirror.ledger
        return [pod for _, pod in sorted(ledger.pods.items()) if pod.spec.node_name == node]

    def _record_events(self, node: str, confirmed: list[Mismatch]) -> None:
        recorded = self._recorded.pop(node, set())
        if confirmed:
            self._recorded[node] = set(confirmed)
        pods = self._context.mirror.pods.by_uid
        for mismatch in confirmed:
            if mismatch in recorded:
                continue
            user = user_name(mismatch.use, pods)
            held = "held by somebody else" if mismatch.holders else "held by nobody"
            gpu = f"GPU {mismatch.device_id} ({mismatch.use.uuid})"
            note = f"{gpu}, {held}, is used by {user}; it is given to nobody meanwhile"
            log.warning("Found a foreign use", node=node, uuid=mismatch.use.uuid, user=user, holders=mismatch.holders)
            concerned = [pods[uid] for uid in (mismatch.use.pod_uid, *mismatch.holders) if uid in pods]
            for reference in (node_reference(node), *map(pod_reference, concerned)):
                self._context.events.record(
                    reference, reason=names.REASON_FOREIGN_USE, note=note, action="Audit", type="Warning"
                )

    async def _write_condition(self, pod: Pod, text: str) -> None:
        """Set the condition where it differs; a pod without any mismatch so far has none."""
        shown = next((c for c in pod.status.conditions if c.type == names.POD_AS_PROMISED), None)
        status = "False" if text else "True"
        if (shown is None and not text) or (shown is not None and (shown.status, shown.message) == (status, text)):
            return
        condition = {
            "type": names.POD_AS_PROMISED,
            "status": status,
            "reason": names.REASON_FOREIGN_USE if text else "AsPromised",
            "message": text,
            "lastTransitionTime": self._context.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        metadata = pod.metadata
        body = merge_patch(uid=metadata.uid, status={"conditions": [condition]})
        path = paths.pods(metadata.namespace, metadata.name, "status")
        try:
            await self._context.api.patch(path, body, content_type=STRATEGIC_MERGE_PATCH)
        except (NotFound, Conflict):
            return
        except (Forbidden, Invalid) as error:
            log.warning(
                "Could not write the condition of a pod",
                pod=f"{metadata.namespace}/{metadata.name}",
                uid=metadata.uid,
                err=str(error),
            )
