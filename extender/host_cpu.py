"""Tells the fleet how much CPU each node has left, and what pods with GPUs ask for.

It watches nodes and all pods, because pods without GPUs take CPU too, and calls `Fleet.put_cpu` for every node that
changes and `Fleet.count_ask` for every new pod with GPUs. Assumed pods are not counted: kube-scheduler counts them
itself, and here CPU only breaks ties.
"""

from typing import Any

from atoll.cluster import pods
from atoll.cluster.fleet import Fleet
from atoll.cluster.host_fit import needs
from atoll.cluster.objects import Node, Pod
from atoll.cluster.quantities import parse_amount
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.mirror import WatchedKind


class HostCpu:
    """Allocatable CPU by node, and by pod where it takes how much; all in thousandths."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._allocatable: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._pods: dict[str, tuple[str, int]] = {}

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change that the ledger has taken before."""
        if kind is WatchedKind.POD:
            self._take_pod(change)
        elif kind is WatchedKind.NODE:
            self._take_node(change)

    def _take_node(self, change: Change[Node]) -> None:
        name = change.object.metadata.name
        if change.kind is ChangeKind.DELETED:
            self._allocatable.pop(name, None)
            self._fleet.forget_cpu(name)
            return
        cpu_milli = parse_amount("cpu", change.object.status.allocatable.get("cpu", ""))
        if cpu_milli and self._allocatable.get(name) != cpu_milli:
            self._allocatable[name] = cpu_milli
            self._tell(name)

    def _take_pod(self, change: Change[Pod]) -> None:
        pod, uid = change.object, change.object.metadata.uid
        if change.kind is ChangeKind.ADDED:
            self._count(pod)
        ends = change.kind is ChangeKind.DELETED or pods.is_terminal(pod) or not pod.spec.node_name
        place = None if ends else (pod.spec.node_name, needs(pod).get("cpu", 0))
        if place is not None and self._pods.get(uid) == place:
            return
        before = self._pods.pop(uid, None)
        if place is not None:
            self._pods[uid] = place
        for place, sign in ((before, -1), (self._pods.get(uid), 1)):
            if place is not None:
                self._taken[place[0]] = self._taken.get(place[0], 0) + sign * place[1]
                self._tell(place[0])

    def _count(self, pod: Pod) -> None:
        gpus = pods.device_count(pod)
        if gpus > 0:
            self._fleet.count_ask(gpus, needs(pod).get("cpu", 0))

    def _tell(self, node: str) -> None:
        allocatable = self._allocatable.get(node)
        if allocatable is not None:
            free = allocatable - self._taken.get(node, 0)
            self._fleet.put_cpu(node, free_milli=free, allocatable_milli=allocatable)
        elif not self._taken.get(node):
            self._taken.pop(node, None)
