"""Writes the status of GpuClaims: which pods have which GPUs, how many wait.

One merge patch per claim where the status differs, at most once in `INTERVAL_SECONDS`. Keys are (namespace, name).
"""

from collections.abc import Iterable
from typing import Any

from atoll.cluster import pods
from atoll.cluster.claim_status import claim_status
from atoll.cluster.objects import Pod
from atoll.kube import paths
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.errors import Conflict, NotFound
from atoll.kube.mirror import WatchedKind
from atoll.kube.patches import merge_patch
from controllers.context import Context

INTERVAL_SECONDS = 10.0

Key = tuple[str, str]


class ClaimReconciler:
    """Writes what `claim_status` decides."""

    name = "claims"

    def __init__(self, context: Context, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._context = context
        self._interval_seconds = interval_seconds
        self._written_at: dict[Key, float] = {}
        self._users: dict[Key, set[str]] = {}
        for pod in context.mirror.ledger.pods.values():
            self._index(pod)

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[Key]:
        """Return the claim that changed, or the one that a changed pod names."""
        if kind is WatchedKind.CLAIM:
            key = (change.object.metadata.namespace, change.object.metadata.name)
            if change.kind is ChangeKind.DELETED:
                self._written_at.pop(key, None)
            return (key,)
        if kind is not WatchedKind.POD or not pods.claim_name(change.object):
            return ()
        key = _key(change.object)
        if change.kind is not ChangeKind.DELETED:
            self._index(change.object)
        elif key in self._users:
            self._users[key].discard(change.object.metadata.uid)
            if not self._users[key]:
                del self._users[key]
        return (key,)

    def all_keys(self) -> Iterable[Key]:
        """Return every claim."""
        return tuple(self._context.mirror.claims.store)

    async def reconcile(self, key: Key) -> float | None:
        """Write the status if it changed; too soon after the last write, come back later. Raises KubeError."""
        mirror = self._context.mirror
        claim = mirror.claims.store.get(key)
        if claim is None:
            return None
        now = self._context.clock.monotonic_seconds()
        wait_seconds = self._written_at.get(key, now - self._interval_seconds) + self._interval_seconds - now
        if wait_seconds > 0:
            return wait_seconds
        users = (mirror.ledger.pods.get(uid) for uid in self._users.get(key, ()))
        status = claim_status(claim, (pod for pod in users if pod is not None), self._context.now_text())
        if status == claim.status:
            return None
        self._written_at[key] = now
        body = merge_patch(uid=claim.metadata.uid, status=status.to_json())
        try:
            await self._context.api.patch(paths.gpuclaims(*key, "status"), body)
        except (NotFound, Conflict):
            return None
        self._context.metrics.claim_writes.inc()
        return None

    def _index(self, pod: Pod) -> None:
        if pods.claim_name(pod):
            self._users.setdefault(_key(pod), set()).add(pod.metadata.uid)


def _key(pod: Pod) -> Key:
    return pod.metadata.namespace, pods.claim_name(pod)
