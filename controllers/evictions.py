"""Asks the eviction API to end a pod: the one way by which Atoll ends pods of others, so that their budgets hold.

In: a pod as seen. Out: an eviction of that uid, or `EvictionRefused`. A pod that is gone, or whose name another bears, is fine.
"""

from atoll.cluster.objects import Pod
from atoll.kube import paths
from atoll.kube.errors import Conflict, NotFound, TooManyRequests
from atoll.kube.patches import eviction
from controllers.api import Api

BUDGET_SECONDS = 10.0
"""When to ask again where a disruption budget, or a busy API server, does not say."""


class EvictionRefused(Exception):
    """A disruption budget allows no eviction now; ask again after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


async def evict(api: Api, pod: Pod, *, dry_run: bool = False) -> bool:
    """Evict the pod with this uid, False when it is gone; with `dry_run` only ask. Raises Refused, KubeError."""
    metadata = pod.metadata
    body = eviction(metadata.namespace, metadata.name, uid=metadata.uid, dry_run=dry_run)
    try:
        await api.create(paths.eviction(metadata.namespace, metadata.name), body)
    except TooManyRequests as error:
        raise EvictionRefused(str(error), retry_after_seconds=error.retry_after_seconds or BUDGET_SECONDS) from error
    except (NotFound, Conflict):
        return False
    return True
