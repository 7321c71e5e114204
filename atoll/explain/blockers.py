"""Who stands in the way on one node, and the smallest sets of them whose end makes room.

In: a scene, a pod, its request. Out: per node the holders of its GPUs with the masks that only they hold, and searches
over sets of them. Fast, because it works on bit masks with the tables that bind chooses by; what it finds is decided
again on the changed cluster by `atoll.explain.proposals`. Bounded: a search that was cut says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from atoll.cluster import host_fit
from atoll.cluster.keeping import Kept
from atoll.cluster.ledger import Ledger, Source
from atoll.cluster.machines import NodeDevices, cell_of
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import offer, plain
from atoll.explain.decision import Scene
from atoll.explain.snapshot import NOW_SECONDS

SETS_MAX: Final = 20_000
"""Sets of holders that are tried on one node."""
UNENDING: Final = "\0"
"""Stands for what no pod's end would free: processes outside of pods, a Lease that cannot be read."""


@dataclass(frozen=True, slots=True)
class NodeHolders:
    """One node. `free`: mask that the pod could have now; `held[i]`: uids of all who hold position i; `uids`: all of
    them."""

    node: str
    devices: NodeDevices
    free: int
    held: tuple[frozenset[str], ...]
    uids: tuple[str, ...]

    def without(self, gone: frozenset[str]) -> int:
        """Return the mask that the pod could have after the end of these."""
        mask = self.free
        for position, holders in enumerate(self.held):
            if holders and holders <= gone:
                mask |= 1 << position
        return mask


def holders_of(scene: Scene, node: str, pod: Pod) -> NodeHolders | None:
    """Look at one node; None without a fresh report."""
    ledger = scene.ledger
    devices = ledger.nodes.get(node)
    if devices is None or ledger.is_stale(node, NOW_SECONDS):
        return None
    uid, priority = pod.metadata.uid, pod.spec.priority
    free = ledger.free(node, now_seconds=NOW_SECONDS, asking_uid=uid, asking_priority=priority)
    kept = _kept_by(ledger, node, pod)
    held = tuple(
        frozenset() if free >> position & 1 else _holders(ledger, node, device.id, device.uuid, kept) - {uid}
        for position, device in enumerate(devices.devices)
    )
    return NodeHolders(node, devices, free, held, tuple(sorted({one for group in held for one in group} - {UNENDING})))


def smallest_sets(scene: Scene, found: Sequence[NodeHolders], pod: Pod, request: Request) -> "Ends":
    """Return the sets of the smallest size whose end makes room on some node: GPUs and counted resources both."""
    rooms = [room for one in found if (room := _Room.of(scene, one, pod, request)) is not None]
    tried: dict[str, int] = {}
    is_cut = False
    for size in range(1, max((len(room.candidates) for room in rooms), default=0) + 1):
        sets: list[tuple[str, frozenset[str]]] = []
        for room in rooms:
            for gone in room.sets(size):
                tried[room.holders.node] = tried.get(room.holders.node, 0) + 1
                if tried[room.holders.node] > SETS_MAX:
                    is_cut = True
                    break
                if room.fits(gone):
                    sets.append((room.holders.node, gone))
        if sets:
            return Ends(tuple(sets), is_cut)
    return Ends((), is_cut)


@dataclass(frozen=True, slots=True)
class Ends:
    """(node, uids) of the sets that were found. is_cut: larger sets were not tried on some node."""

    sets: tuple[tuple[str, frozenset[str]], ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class _Room:
    """One node where enough ends would make room."""

    holders: NodeHolders
    candidates: tuple[str, ...]
    request: Request
    pods: Mapping[str, Pod]
    short: Mapping[str, int]
    """Per resource of which too little is left: how much is missing."""

    @classmethod
    def of(cls, scene: Scene, holders: NodeHolders, pod: Pod, request: Request) -> "_Room | None":
        """None where not even the end of everybody helps."""
        node = scene.nodes.get(holders.node)
        if node is None or host_fit.node_reason(pod, node):
            return None
        left = scene.left(holders.node)
        short = {
            resource: amount - left.get(resource, 0)
            for resource, amount in host_fit.needs(pod).items()
            if amount > left.get(resource, 0)
        }
        running = {one.metadata.uid: one for one in scene.pods_by_node.get(holders.node, ())}
        others = [
            uid
            for uid, one in running.items()
            if uid not in holders.uids and (_gives(one, short) or host_fit.ports_clash(pod, (one,)))
        ]
        room = cls(holders, (*holders.uids, *sorted(others)), request, running, short)
        return room if room.fits(frozenset(room.candidates)) else None

    def sets(self, size: int) -> Iterator[frozenset[str]]:
        return map(frozenset, combinations(self.candidates, size))

    def fits(self, gone: frozenset[str]) -> bool:
        mask = self.holders.without(gone) & self.holders.devices.usable
        if mask.bit_count() < self.request.ask.count:
            return False
        if self.short and not self._frees_enough(gone):
            return False
        return not isinstance(offer(cell_of(self.holders.devices.shape, mask), plain(self.request)), Rejection)

    def _frees_enough(self, gone: frozenset[str]) -> bool:
        freed: dict[str, int] = {}
        for uid in gone:
            one = self.pods.get(uid)
            if one is not None and one.status.phase not in ("Succeeded", "Failed"):
                for resource, amount in host_fit.needs(one).items():
                    freed[resource] = freed.get(resource, 0) + amount
        return all(freed.get(resource, 0) >= missing for resource, missing in self.short.items())


def _gives(pod: Pod, short: Mapping[str, int]) -> bool:
    needed = host_fit.needs(pod)
    return any(needed.get(resource, 0) > 0 for resource in short)


def _kept_by(ledger: Ledger, node: str, pod: Pod) -> tuple[tuple[str, Kept], ...]:
    """Return who else keeps GPUs of the node that this pod must leave alone."""
    found = ((uid, ledger.kept(uid)) for uid in ledger.pods if uid != pod.metadata.uid)
    return tuple(
        (uid, kept) for uid, kept in found if kept is not None and kept.node == node and kept.binds(pod.spec.priority)
    )


def _holders(ledger: Ledger, node: str, device_id: int, uuid: str, kept: Sequence[tuple[str, Kept]]) -> frozenset[str]:
    """Return the uids of everybody through whom a device is not free."""
    found = {uid for uid, one in kept if device_id in one.device_ids}
    for hold in ledger.holds(node, device_id, uuid):
        if hold.source is Source.LEASE:
            found.add(ledger.leases[hold.key].holder.uid)
        elif hold.source is not Source.FOREIGN:
            found.add(hold.key)
    found |= {use.pod_uid or UNENDING for use in ledger.foreign_uses(node, uuid)}
    if ledger.is_blocked(node, device_id):
        found.add(UNENDING)
    return frozenset(found)
