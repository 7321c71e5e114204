"""Remembers which nodes refuse an owner's pods again and again, so that its next pods try other nodes first.

A machine whose kubelet refuses every pod (a broken device plugin, a resource that only kubelet counts) looks free, and
an owner that replaces each refused pod would fill the cluster with failed ones. A refusal holds no GPU and proves
nothing, so the ledger knows nothing of it.
"""

from collections import OrderedDict, deque
from typing import Any

from atoll.cluster import pods
from atoll.cluster.objects import Pod
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.clock import Clock
from atoll.kube.mirror import WatchedKind

REFUSALS_MAX = 3
WINDOW_SECONDS = 300.0
OWNERS_MAX = 4096


class NodeBackoff:
    """The last refusals by owner and node, measured by our own clock. Bounded; the oldest owner is forgotten first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, dict[str, deque[float]]] = OrderedDict()

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change; only a pod that was seen to live counts, not one that had failed before we came."""
        if kind is not WatchedKind.POD or change.kind is not ChangeKind.MODIFIED:
            return
        pod: Pod = change.object
        is_new = isinstance(change.old, Pod) and not pods.is_terminal(change.old)
        owner = owner_uid(pod)
        if is_new and owner and is_refused(pod):
            nodes = self._seen.setdefault(owner, {})
            self._seen.move_to_end(owner)
            nodes.setdefault(pod.spec.node_name, deque(maxlen=REFUSALS_MAX)).append(self._clock.monotonic_seconds())
            if len(self._seen) > OWNERS_MAX:
                self._seen.popitem(last=False)

    def nodes(self, pod: Pod) -> frozenset[str]:
        """Return the nodes that refused as many pods of this pod's owner as are too many."""
        since = self._clock.monotonic_seconds() - WINDOW_SECONDS
        seen = self._seen.get(owner_uid(pod), {})
        return frozenset(node for node, at in seen.items() if len(at) == REFUSALS_MAX and at[0] > since)


def is_refused(pod: Pod) -> bool:
    """Tell whether kubelet refused a GPU pod: it failed for a reason on its node, and no container was ever begun."""
    states = [status.state for status in pods.container_statuses(pod)]
    begun = any(state.running is not None or state.terminated is not None for state in states)
    has_failed = pod.status.phase == "Failed" and bool(pod.status.reason)
    return has_failed and bool(pod.spec.node_name) and not begun and pods.is_gpu_pod(pod)


def owner_uid(pod: Pod) -> str:
    """Return the uid of the object that makes such pods; empty for a pod of nobody."""
    references = pod.metadata.owner_references
    return next((each.uid for each in references if each.controller), references[0].uid if references else "")
