"""Holds that survive a Lease that nobody should have deleted, and then the end of its pod.

Nothing in the API server remembers such devices. The controllers write the Lease again; until it is seen, or a report
proves the pod's end, this is all that keeps the device from being given out twice.

A Lease that goes *before* its pod does was lost; one that goes after it was released on proof. The two watches may show
that in any order, so the resourceVersions decide. A deletion that was only inferred has no version, and tells nothing:
a pod that was seen bound and then seen to leave has lost every Lease that is not there, unless an event told that it
was deleted after the pod's end.

A pod that was terminal already when it was first seen counts as released where no Lease is left: the controllers keep
Leases until they have proof, and its object may stay for weeks. So does one whose deletion was only inferred: after a
gap that is what a release on proof looks like.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.api.node_status import GpuNodeStatusReport
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.leases import LeaseRecord
from atoll.cluster.objects import Pod
from atoll.cluster.release import PodTermination, Proof, has_ended, judge, observe
from atoll.cluster.repairs import names_device

Device = tuple[str, int, str]
"""Node, id, uuid."""

ENDS_MAX = 8192
"""Deletions of Leases that are remembered; of a forgotten one more evidence is needed, never less."""


@dataclass(frozen=True, slots=True)
class Left:
    """A pod's last object and the version at which it was gone or terminal."""

    pod: Pod
    version: int


class LostLeases:
    """Lost Leases by the uid of their holder. One event loop owns it."""

    def __init__(self) -> None:
        self._lost: dict[str, dict[str, tuple[LeaseRecord, int]]] = {}
        self._left: dict[str, Left] = {}
        self._terminations: dict[str, PodTermination] = {}
        self._ends: dict[tuple[str, str], int] = {}
        """When Leases were deleted, by pod uid and Lease name, whether or not their pods are known yet."""

    def note_written(self, uid: str, lease_name: str) -> None:
        """A Lease of this holder exists, perhaps again."""
        lost = self._lost.get(uid, {})
        if lost.pop(lease_name, None) is not None and not lost:
            del self._lost[uid]
            self._terminations.pop(uid, None)

    def note_deleted(self, record: LeaseRecord, version: int, *, is_bound: bool) -> None:
        """A Lease was deleted, or given to another holder, at `version`; `is_bound`: its pod is seen bound now."""
        uid = record.holder.uid
        self._ends[uid, record.lease_name] = version
        while len(self._ends) > ENDS_MAX:
            del self._ends[next(iter(self._ends))]
        left = self._left.get(uid)
        if is_bound if left is None else version < left.version:
            self._lost.setdefault(uid, {})[record.lease_name] = (record, version)

    def note_left(self, pod: Pod, version: int, *, has_leases: bool, lacking: Iterable[LeaseRecord] = ()) -> None:
        """A pod was gone or terminal as of `version`; `has_leases`: one may yet turn out to be lost before that.
        `lacking`: the Leases that it should have had until then, and had not."""
        uid = pod.metadata.uid
        if uid not in self._left:
            kept = {n: row for n, row in self._lost.get(uid, {}).items() if row[1] < version}
            self._lost.pop(uid, None)
            if kept:
                self._lost[uid] = kept
        for record in lacking:
            if self._ends.get((uid, record.lease_name), 0) < version:
                self._lost.setdefault(uid, {}).setdefault(record.lease_name, (record, 0))
        if has_leases or uid in self._lost:
            first = self._left.get(uid)
            self._left[uid] = Left(pod, first.version if first is not None else version)

    def forget(self, uid: str) -> None:
        """Know nothing of a pod any more."""
        self._lost.pop(uid, None)
        self._left.pop(uid, None)
        self._terminations.pop(uid, None)

    def is_known(self, uid: str) -> bool:
        """Tell whether a Lease of the pod was lost, or may turn out to have been."""
        return uid in self._lost or uid in self._left

    def left_version(self, uid: str) -> int:
        """Return since when a pod that had Leases is gone or terminal; 0 where that is not known."""
        left = self._left.get(uid)
        return left.version if left is not None else 0

    def departed(self) -> Iterable[str]:
        """Return the pods that left after they had lost a Lease."""
        return [uid for uid in self._lost if uid in self._left]

    def records(self, uid: str) -> tuple[LeaseRecord, ...]:
        """Return the lost Leases of a pod that left, and whose end kubelet has not told of."""
        left, lost = self._left.get(uid), self._lost.get(uid)
        if left is None or not lost or has_ended(left.pod):
            return ()
        try:
            allocation = bound_allocation(left.pod)
        except MalformedValue:
            return ()
        return tuple(r for r, _ in lost.values() if allocation is not None and names_device(allocation, r))

    def devices(self, uid: str) -> tuple[Device, ...]:
        """Return what stays held for a pod that left."""
        return tuple((record.node, record.device_id, record.device_uuid) for record in self.records(uid))

    def observe(self, node: str, report: GpuNodeStatusReport) -> tuple[str, ...]:
        """Take a node's report; return the pods of which it proves the end."""
        ended = []
        for uid in self.departed():
            records = [record for record in self.records(uid) if record.node == node]
            if records:
                termination = observe(self._terminations.get(uid) or self._begin(uid, records), report)
                self._terminations[uid] = termination
                if isinstance(judge(termination), Proof):
                    ended.append(uid)
        for uid in ended:
            self.forget(uid)
        return tuple(ended)

    def _begin(self, uid: str, records: list[LeaseRecord]) -> PodTermination:
        left = self._left[uid]
        return PodTermination(
            uid=uid,
            node=records[0].node,
            pod=left.pod,
            is_deleted=True,
            deletion_seen=True,
            version=left.version,
            node_uid=records[0].node_uid,
            device_uuids=frozenset(record.device_uuid for record in records),
        )
