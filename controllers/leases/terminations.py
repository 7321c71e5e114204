"""How each deleted or terminal pod ended, and what its node's reports have said since.

Follows pods and reports from the start of the process, so that a standby that becomes leader knows what it saw.
Bounded: a forgotten pod is looked up again, which needs more evidence, never less.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import pods
from atoll.cluster.leases import LeaseRecord
from atoll.cluster.objects import Pod
from atoll.cluster.release import PodTermination, observe, version_number
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import ClusterMirror, WatchedKind

GONE_MAX = 16_384
SEEN_LIVE_MAX = 65_536


@dataclass(frozen=True, slots=True)
class DeletedPod:
    """A pod that no longer exists: its last known object, and as of which version it was gone at the latest.

    `is_seen`: the watch itself showed the deletion, so that `pod` is the final object.
    """

    pod: Pod | None
    version: int
    is_seen: bool


class PodTerminations:
    """Departures by pod uid and node. Listens to the mirror; one event loop owns it."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self._mirror = mirror
        self._gone: OrderedDict[str, DeletedPod] = OrderedDict()
        self._last: OrderedDict[str, Pod] = OrderedDict()
        self._seen_live: OrderedDict[str, str] = OrderedDict()
        self._open: dict[tuple[str, str], PodTermination] = {}
        self._nodes: dict[str, set[str]] = {}
        mirror.on_rewind(self.forget_all)

    def forget_all(self) -> None:
        """Forget all terminations: they were seen at versions that are no longer valid. They are looked up again."""
        for memory in (self._gone, self._last, self._seen_live, self._open, self._nodes):
            memory.clear()

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change of the mirror."""
        if kind is WatchedKind.POD:
            self._observe_pod(change)
        elif kind is WatchedKind.REPORT and change.kind is not ChangeKind.DELETED:
            self._observe_report(change.object)

    def gone(self, uid: str) -> DeletedPod | None:
        """Return how the pod went, if that was seen or looked up."""
        return self._gone.get(uid)

    def note_absence(self, uid: str, version: int) -> DeletedPod:
        """Remember that a look-up did not find the pod as of `version`; what was seen of its end counts for more."""
        known = self._gone.get(uid)
        if known is not None:
            return known
        gone = DeletedPod(self._last.get(uid), version, is_seen=False)
        _put(self._gone, uid, gone, GONE_MAX)
        return gone

    def open_on(self, node: str) -> tuple[str, ...]:
        """Return the uids whose termination waits for reports of a node."""
        return tuple(self._nodes.get(node, ()))

    def count_open(self) -> int:
        """Return how many pods have left without proof."""
        return len({uid for uid, _ in self._open})

    def departed(self, uid: str, gone: DeletedPod, leases: Sequence[LeaseRecord]) -> PodTermination:
        """Return the termination of a deleted pod on the node of its `leases`, with every report folded in."""
        known = self._open.get((uid, leases[0].node))
        if known is not None and known.is_deleted and known.deletion_seen == gone.is_seen:
            return known
        return self._begin(uid, gone.pod, leases, version=gone.version, is_deleted=True, deletion_seen=gone.is_seen)

    def ended(self, pod: Pod, leases: Sequence[LeaseRecord]) -> PodTermination:
        """Return the termination of a terminal pod that still exists; reports count from when it was first so."""
        known = self._open.get((pod.metadata.uid, leases[0].node))
        if known is not None:
            termination = replace(known, pod=pod)
            self._open[termination.uid, termination.node] = termination
            return termination
        version = version_number(pod.metadata.resource_version)
        return self._begin(pod.metadata.uid, pod, leases, version=version, is_deleted=False, deletion_seen=False)

    def close(self, uid: str) -> None:
        """Stop following a pod: its Leases are gone, or it turned out to live."""
        for node in [node for held_uid, node in self._open if held_uid == uid]:
            del self._open[uid, node]
            self._nodes[node].discard(uid)
            if not self._nodes[node]:
                del self._nodes[node]

    def _begin(
        self,
        uid: str,
        pod: Pod | None,
        leases: Sequence[LeaseRecord],
        *,
        version: int,
        is_deleted: bool,
        deletion_seen: bool,
    ) -> PodTermination:
        node = leases[0].node
        termination = PodTermination(
            uid=uid,
            node=node,
            pod=pod,
            is_deleted=is_deleted,
            deletion_seen=deletion_seen,
            version=version,
            boot_id=self._seen_live.get(uid, ""),
            seen_live=uid in self._seen_live,
            node_uid=leases[0].node_uid,
            device_uuids=frozenset(record.device_uuid for record in leases if record.device_uuid),
        )
        status = self._mirror.reports.get(node)
        if status is not None and status.status is not None:
            termination = observe(termination, status.status)
        self._open[uid, node] = termination
        self._nodes.setdefault(node, set()).add(uid)
        return termination

    def _observe_pod(self, change: Change[Any]) -> None:
        pod: Pod = change.object
        uid = pod.metadata.uid
        if change.kind is not ChangeKind.DELETED:
            return
        last = change.old if isinstance(change.old, Pod) else None
        if not pods.is_gpu_pod(pod) and (last is None or not pods.is_gpu_pod(last)):
            return
        if change.synthetic:
            _put(self._last, uid, pod, GONE_MAX)
        else:
            _put(
                self._gone, uid, DeletedPod(pod, version_number(pod.metadata.resource_version), is_seen=True), GONE_MAX
            )

    def _observe_report(self, status: GpuNodeStatus) -> None:
        report = status.status
        if report is None:
            return
        ledger = self._mirror.ledger
        for entry in report.pods:
            if entry.live and (entry.uid in ledger.pods or ledger.leases_of(entry.uid)):
                _put(self._seen_live, entry.uid, report.boot_id, SEEN_LIVE_MAX)
        for uid in self.open_on(status.metadata.name):
            key = (uid, status.metadata.name)
            self._open[key] = observe(self._open[key], report)


def _put(memory: OrderedDict[str, Any], uid: str, value: object, count_max: int) -> None:
    memory[uid] = value
    memory.move_to_end(uid)
    while len(memory) > count_max:
        memory.popitem(last=False)
