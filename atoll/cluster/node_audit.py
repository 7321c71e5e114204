"""Which reports may be trusted to show every pod that uses GPUs of a node. Pure: no I/O, no clock.

When etcd is restored from a backup, the API server forgets the pods that were bound after it, while their containers
run on until the kubelet ends them. Nothing in the API server tells of their GPUs; the agents' reports do. Therefore:

* A report that shows a live pod which neither the API server nor a Lease knows does not count, in every process at any
  time: a process that starts after a restore needs no memory of what was before. A pod whose deletion the watch itself
  has shown is known, and so is a static pod; one that was only missing in a list is not. A process that hangs, or a
  folder of cgroups that is left behind, would keep its node out for ever: so such a pod counts no more once the agent
  has renewed its heartbeat some times while the kubelet does not list it, and no process of an unknown pod is on a card
  unnoticed. Where the kubelet cannot be asked nothing proves that it starts the pod's containers no more, until the
  pod's cgroup is gone: by its processes' end, or by a reboot.
* A report that says itself that its agent could not read the pods since a restore does not count, in every process at
  any time: an agent notices restores, and its report keeps that until it reads.
* A process that notices a restore trusts a node again when its agent has reported since: under a number past the one
  from before, past the backup's by an agent that began anew, or before two renewals of its heartbeat, since an agent
  reports before it renews. Its agent must also have read the pods.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod
from atoll.cluster.release import version_number
from atoll.cluster.unknown_pods import static_uid, unknown_pods

ENDED_MAX = 65_536
RENEWALS_MIN = 2
"""One may be seen before the report that preceded it: they come by two watches."""
UNLISTED_RENEWALS = 10
"""Longer than the kubelet takes to end a pod that the API server has forgotten, unless its grace is many minutes."""


class NodeAudit:
    """Judges reports. pods: all of the API server, by uid, a live view; the ledger knows the Leases."""

    def __init__(self, pods: Mapping[str, Pod], ledger: Ledger) -> None:
        self._pods = pods
        self._ledger = ledger
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._unknown: dict[str, frozenset[str]] = {}
        """Pods because of which a report does not count, by node."""
        self._waiting: defaultdict[str, set[str]] = defaultdict(set)
        """The same nodes by pod."""
        self._static: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """By node: the kubelet's uids of static pods, by the uids of their mirrors."""
        self._before: dict[str, int] | None = None
        self._passed: set[str] = set()
        self._renewals: Counter[str] = Counter()
        self._unlisted: dict[str, Counter[str]] = {}
        """By node: renewals since an unknown pod is shown that the kubelet does not list, by the pod's uid."""

    def begin(self, reports: Mapping[str, GpuNodeStatus]) -> None:
        """The API server was restored: no report counts until its agent has reported again."""
        self._before = {name: _sequence(status) for name, status in reports.items()}
        self._passed.clear()
        self._renewals.clear()
        self._ended.clear()

    def note_pod(self, pod: Pod) -> None:
        """The API server has this pod, on this node."""
        if uid := static_uid(pod):
            self._static[pod.spec.node_name][pod.metadata.uid] = uid
        else:
            self.note_missing(pod)

    def note_missing(self, pod: Pod) -> None:
        """The API server no longer has this pod."""
        there = self._static.get(pod.spec.node_name)
        if there is not None and there.pop(pod.metadata.uid, None) is not None and not there:
            del self._static[pod.spec.node_name]

    def note_deleted(self, uid: str) -> None:
        """The watch has shown a pod's deletion: a report that still shows the pod is only not yet renewed."""
        self._ended[uid] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def note_renewal(self, node: str) -> None:
        """The watch has shown a renewal of the node's heartbeat."""
        if self._before is not None and node not in self._passed:
            self._renewals[node] += 1
        unlisted = self._unlisted.get(node, Counter())
        unlisted.update(unlisted.keys())

    def forget(self, node: str) -> None:
        """Forget a node whose report was deleted."""
        self._passed.discard(node)
        self._renewals.pop(node, None)
        self._unlisted.pop(node, None)
        self._note_unknown(node, frozenset())

    def waits_for(self, uid: str) -> tuple[str, ...]:
        """Return the nodes to judge again: their reports did not count because they show this pod."""
        return tuple(self._waiting.get(uid, ()))

    def _note_unknown(self, node: str, uids: frozenset[str]) -> None:
        """Remember why a report does not count, and nothing of what it showed before."""
        for uid in self._unknown.pop(node, frozenset()) - uids:
            self._waiting[uid].discard(node)
            if not self._waiting[uid]:
                del self._waiting[uid]
        for uid in uids:
            self._waiting[uid].add(node)
        if uids:
            self._unknown[node] = uids

    def refusal(self, status: GpuNodeStatus, *, pods_version: str) -> str:
        """Return why a report does not count; empty if it does. pods_version: of our copy of the pods; empty while that
        is not complete."""
        name, report = status.metadata.name, status.status
        if report is not None and report.evidence.unread_since_restore:
            return names.REJECT_RESTORED
        if self._before is not None and name not in self._passed:
            is_read = report is not None and report.evidence.live_read
            position = version_number(report.evidence.pod_resource_version) if report is not None else 0
            is_comparable = bool(pods_version) and version_number(pods_version) >= position
            if not self._is_since_restore(status) or not is_read or not is_comparable:
                return names.REJECT_RESTORED
        static = frozenset(self._static.get(name, {}).values())
        unknown = unknown_pods(status, self._pods, self._ledger, static) - self._ended.keys()
        unknown -= self._left_behind(status, unknown)
        self._note_unknown(name, unknown)
        if unknown:
            return names.REJECT_UNKNOWN_POD
        self._passed.add(name)
        return ""

    def _left_behind(self, status: GpuNodeStatus, unknown: frozenset[str]) -> frozenset[str]:
        """Return the unknown pods that the kubelet has long ceased to list; a card with their process is in foreign
        use."""
        name, report = status.metadata.name, status.status
        if not unknown or report is None or not (report.evidence.kubelet_read and report.evidence.processes_read):
            self._unlisted.pop(name, None)
            return frozenset()
        listed = {entry.uid for entry in report.pods if entry.kubelet}
        known = self._unlisted.get(name, Counter())
        self._unlisted[name] = Counter({uid: known[uid] for uid in unknown - listed})
        return frozenset(uid for uid, renewals in self._unlisted[name].items() if renewals >= UNLISTED_RENEWALS)

    def _is_since_restore(self, status: GpuNodeStatus) -> bool:
        assert self._before is not None
        name, sequence = status.metadata.name, _sequence(status)
        before = self._before.get(name, -1)
        self._before[name] = min(before, sequence) if name in self._before else before
        return sequence > before or self._renewals[name] >= RENEWALS_MIN


def _sequence(status: GpuNodeStatus) -> int:
    return status.status.evidence.sequence if status.status is not None else 0
