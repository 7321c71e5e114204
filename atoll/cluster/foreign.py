"""GPUs that are used without being held: by pods of other schedulers or device plugins, by processes on the machine.

A GPU with a foreign use is occupied, whoever else holds it. A use is evidence of a machine, never a promise.

* A pod holds a GPU by its annotation, a Lease, or a bind of ours under way. Any other use is foreign, also where the
  pod holds other GPUs.
* A pod that held the GPU until a moment ago is not foreign as long as the report is the same that stood there when its
  hold ended: the report is older than the end. If the next one shows the pod still, it is; and so it is at once where
  the report is newer than the pod's end, because then it is no older than that.
* A pod of ours that kubelet has ended is no user. One whose phase somebody else made terminal is, unless it holds.
* Processes outside of any pod are foreign.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.api.node_status import GpuNodeStatusReport
from atoll.cluster.objects import Pod
from atoll.cluster.release import has_ended, version_number

FORMER_MAX = 8192


@dataclass(frozen=True, slots=True, order=True)
class ForeignUse:
    """One GPU and who uses it without holding it. `pod_uid` is empty for processes outside of pods."""

    uuid: str
    pod_uid: str = ""
    pids: tuple[int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        if self.pod_uid:
            return f"pod {self.pod_uid} uses {self.uuid}"
        return f"processes outside of pods ({', '.join(map(str, self.pids)) or 'unknown'}) use {self.uuid}"


@dataclass(frozen=True, slots=True)
class NodeForeignUses:
    """What one report shows: users of each GPU, the number of the report, its position in the watch of pods."""

    sequence: int
    position: int
    pods: Mapping[str, tuple[str, ...]]
    hosts: Mapping[str, tuple[int, ...]]


def uses_of(report: GpuNodeStatusReport) -> NodeForeignUses | None:
    """Read who uses which GPU of the machine; None where nobody does."""
    pods: dict[str, list[str]] = {}
    for entry in report.pods:
        for uuid in entry.uuids:
            pods.setdefault(uuid, []).append(entry.uid)
    hosts = {use.uuid: use.pids for use in report.host_uses}
    if not pods and not hosts:
        return None
    evidence = report.evidence
    users = {uuid: tuple(sorted(uids)) for uuid, uids in pods.items()}
    return NodeForeignUses(evidence.sequence, version_number(evidence.pod_resource_version), users, hosts)


class ForeignUseCache:
    """The uses on all nodes, and which pods held what until a moment ago."""

    def __init__(self) -> None:
        self._uses: dict[str, NodeForeignUses] = {}
        self._former: dict[tuple[str, str], int] = {}
        self._unread: dict[str, frozenset[str]] = {}

    def put(self, node: str, report: GpuNodeStatusReport | None) -> None:
        """Take what a node's report shows; None where there is none any more."""
        uses = uses_of(report) if report is not None else None
        unread = frozenset(report.evidence.uses_unread) if report is not None else frozenset()
        self._unread.pop(node, None)
        if unread:
            self._unread[node] = unread
        if uses is None:
            self._uses.pop(node, None)
        else:
            self._uses[node] = uses

    def note_end(self, node: str, uid: str, uuids: Iterable[str], *, left_version: int = 0) -> None:
        """A pod's hold on these GPUs has ended: what the report of now says of them is older than that.

        `left_version`: since when the pod is gone or terminal, 0 where that is not known. A report past it is no older.
        """
        uses = self._uses.get(node)
        if uses is None:
            return
        is_past = 0 < left_version <= uses.position
        for uuid in uuids:
            if is_past:
                self._former.pop((uid, uuid), None)
            else:
                self._former[uid, uuid] = uses.sequence
        while len(self._former) > FORMER_MAX:
            del self._former[next(iter(self._former))]

    def forget_former(self) -> None:
        """Forget who held what: the numbers of reports have gone back."""
        self._former.clear()

    def users(self, node: str, uuid: str) -> tuple[ForeignUse, ...]:
        """Return everybody seen on a GPU who did not just cease to hold it; whether they hold it the caller knows."""
        uses = self._uses.get(node)
        if uses is None:
            return ()
        found = [
            ForeignUse(uuid, uid) for uid in uses.pods.get(uuid, ()) if self._former.get((uid, uuid)) != uses.sequence
        ]
        if uuid in uses.hosts:
            found.append(ForeignUse(uuid, pids=uses.hosts[uuid]))
        return tuple(found)

    def is_unknown(self, node: str, uuid: str) -> bool:
        """Return whether the users of a GPU are unknown: then an empty list of users means nothing."""
        return uuid in self._unread.get(node, frozenset())

    def is_old_news(self, node: str, pod: Pod) -> bool:
        """Tell whether what a node's report shows of a terminal pod counts no more: kubelet has ended it, or the report
        is older than its last object."""
        uses = self._uses.get(node)
        return has_ended(pod) or uses is None or uses.position < version_number(pod.metadata.resource_version)

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes on which anybody was seen on a GPU."""
        return tuple(sorted(self._uses))
