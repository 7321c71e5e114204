"""Backoff after kubelet refusals: an owner's next pods prefer other nodes, then wait.

A machine whose kubelet refuses every pod (a broken device plugin, a resource that only kubelet counts) looks free, and
an owner that replaces each refused pod would fill the cluster with failed ones. A ReplicaSet does so at once and
without an end, but makes no further pod while one waits: after a few refusals in a row the next pod is kept waiting,
twice as long each time, until a pod of the owner starts. A refusal holds no GPU and proves nothing, so the ledger knows
nothing of it. Gangs have their own pauses.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.objects import Pod
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.clock import Clock
from atoll.kube.mirror import WatchedKind

REFUSALS_MAX = 3
WINDOW_SECONDS = 300.0
OWNERS_MAX = 4096
ROW_MAX = 5
"""Refusals in a row, on any nodes, after which the owner's next pod waits."""
PAUSE_SECONDS_MIN = 5.0
PAUSE_SECONDS_MAX = 300.0
"""kube-scheduler itself retries a pod at least this often."""
ROW_FORGOTTEN_SECONDS = 900.0


@dataclass(slots=True)
class OwnerRefusals:
    """Kubelet refusals of one owner's pods: the last ones by node, the number in a row, the time of the last."""

    by_node: dict[str, deque[float]] = field(default_factory=dict)
    row: int = 0
    last_seconds: float = 0.0

    def add(self, node: str, now_seconds: float) -> None:
        """Count a refusal; start a new row if the last one is long over."""
        self.by_node.setdefault(node, deque(maxlen=REFUSALS_MAX)).append(now_seconds)
        self.row = self.row + 1 if now_seconds - self.last_seconds < ROW_FORGOTTEN_SECONDS else 1
        self.last_seconds = now_seconds

    @property
    def paused_until_seconds(self) -> float:
        """Time at which the next pod may be tried."""
        if self.row < ROW_MAX:
            return 0.0
        return self.last_seconds + min(PAUSE_SECONDS_MIN * (1 << min(self.row - ROW_MAX, 16)), PAUSE_SECONDS_MAX)


class NodeBackoff:
    """The last refusals by owner and node, measured by our own clock. Bounded; the oldest owner is forgotten first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, OwnerRefusals] = OrderedDict()

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change; only a pod that was seen to live counts, not one that had failed before we came."""
        if kind is not WatchedKind.POD or change.kind is not ChangeKind.MODIFIED:
            return
        pod: Pod = change.object
        is_new = isinstance(change.old, Pod) and not pods.is_terminal(change.old)
        owner = owner_uid(pod)
        if is_new and owner and is_refused(pod):
            self._seen.setdefault(owner, OwnerRefusals()).add(pod.spec.node_name, self._clock.monotonic_seconds())
            self._seen.move_to_end(owner)
            if len(self._seen) > OWNERS_MAX:
                self._seen.popitem(last=False)
        elif owner in self._seen and has_begun(pod):
            self._seen[owner].row = 0

    def nodes(self, pod: Pod) -> frozenset[str]:
        """Return the nodes that refused as many pods of this pod's owner as are too many."""
        since = self._clock.monotonic_seconds() - WINDOW_SECONDS
        seen = self._seen.get(owner_uid(pod), NOTHING_REFUSED).by_node
        return frozenset(node for node, at in seen.items() if len(at) == REFUSALS_MAX and at[0] > since)

    def pauses(self, pod: Pod) -> bool:
        """Return whether the pod must wait because kubelets refused its owner's last pods in a row."""
        known = self._seen.get(owner_uid(pod), NOTHING_REFUSED)
        is_single = names.GANG not in pod.metadata.annotations
        return is_single and self._clock.monotonic_seconds() < known.paused_until_seconds


NOTHING_REFUSED = OwnerRefusals()


def has_begun(pod: Pod) -> bool:
    """Return whether any container of the pod was ever started."""
    states = [status.state for status in pods.container_statuses(pod)]
    return any(state.running is not None or state.terminated is not None for state in states)


def is_refused(pod: Pod) -> bool:
    """Tell whether kubelet refused a GPU pod: it failed for a reason on its node, and no container was ever begun."""
    has_failed = pod.status.phase == "Failed" and bool(pod.status.reason)
    return has_failed and bool(pod.spec.node_name) and not has_begun(pod) and pods.is_gpu_pod(pod)


def owner_uid(pod: Pod) -> str:
    """Return the uid of the object that makes such pods; empty for a pod of nobody."""
    references = pod.metadata.owner_references
    return next((each.uid for each in references if each.controller), references[0].uid if references else "")
