"""Finds the pods that block a node, and the smallest sets of them that would make room if they ended.

Searches sets of the GPU holders of each node, on bit masks and with the tables that bind uses, which is fast;
`atoll.explain.proposals` decides each result again on the changed cluster. Bounded: a search that was cut says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from atoll.cluster import host_fit, pod_fit, pods
from atoll.cluster.holds import HoldSource
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeDevices, NodeShape, cell_of
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import offer, plain
from atoll.cluster.soft_reservations import SoftReservation
from atoll.explain.decision import IndexedSnapshot
from atoll.explain.snapshot import NOW_SECONDS

SETS_MAX: Final = 20_000
"""Limit of sets of holders tried on one node."""
ALTERNATIVES_MAX: Final = 3
"""Limit of sets proposed for one node."""
UNENDING: Final = "\0"
"""Holder of GPUs that no pod's end would free: processes outside pods, an unreadable Lease."""


@dataclass(frozen=True, slots=True)
class NodeHolders:
    """One node. `free`: mask that the pod could have now; `held[i]`: uids of all holders of position i; `uids`: all of
    them."""

    node: str
    devices: NodeDevices
    free: int
    held: tuple[frozenset[str], ...]
    uids: tuple[str, ...]

    def mask_of(self, uid: str) -> int:
        """Return the mask of the positions that a pod holds, alone or with others."""
        return sum(1 << position for position, holders in enumerate(self.held) if uid in holders)


def holders_of(
    scene: IndexedSnapshot, node: str, pod: Pod, kept: Sequence[tuple[str, SoftReservation]]
) -> NodeHolders | None:
    """Find the holders of one node, of which `kept` is for others; None without a fresh report."""
    ledger = scene.ledger
    devices = ledger.nodes.get(node)
    if devices is None or ledger.is_stale(node, NOW_SECONDS):
        return None
    uid, priority = pod.metadata.uid, pod.spec.priority
    free = ledger.free(node, now_seconds=NOW_SECONDS, asking_uid=uid, asking_priority=priority)
    held = tuple(
        frozenset()
        if free >> position & 1
        else _holders(ledger, node, device.id, device.uuid, kept) - {uid} or frozenset((UNENDING,))
        for position, device in enumerate(devices.devices)
    )
    return NodeHolders(node, devices, free, held, tuple(sorted({one for group in held for one in group} - {UNENDING})))


def smallest_sets(scene: IndexedSnapshot, found: Sequence[NodeHolders], pod: Pod, request: Request) -> "Ends":
    """Return the smallest sets whose end makes room on some node, in both GPUs and counted resources: for each node
    those whose most expensive pod is the cheapest.

    Nodes in the same situation, whose holders differ only by name, are searched once.
    """
    alike: dict[_EndsInput, list[_NodeEnds]] = {}
    against = opponents_of(scene, pod)
    for one in found:
        room = _NodeEnds.of(scene, one, pod, request, against.get(one.node, frozenset()))
        if room is not None:
            alike.setdefault(room.question, []).append(room)
    questions = list(alike.items())
    tried = [0] * len(questions)
    for size in range(1, max((len(question.held) for question in alike), default=0) + 1):
        sets: list[tuple[str, tuple[str, ...]]] = []
        for number, (question, rooms) in enumerate(questions):
            fitting = 0
            for gone in question.sets_of(size):
                tried[number] += 1
                if tried[number] > SETS_MAX or fitting == ALTERNATIVES_MAX:
                    break
                if question.fits(gone):
                    fitting += 1
                    sets += ((room.node, tuple(room.candidates[index] for index in gone)) for room in rooms)
        if sets:
            return Ends(tuple(sets), is_cut=False)
    return Ends((), is_cut=any(count > SETS_MAX for count in tried))


def _cheapest_first(count: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield the sets of `size` of the first `count` numbers, smallest maximum first."""
    for top in range(size - 1, count):
        for others in combinations(range(top), size - 1):
            yield (*others, top)


@dataclass(frozen=True, slots=True)
class Ends:
    """(node, uids) of the sets found. is_cut: larger sets were not tried on some node."""

    sets: tuple[tuple[str, tuple[str, ...]], ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class _EndsInput:
    """One node without names. `held[i]`: mask of the positions that candidate i holds; `unending`: mask of positions
    that no pod's end frees; `must`: candidates that must end in any case; `short`: how much of each resource is
    missing; `gives[i]`: how much of it candidate i frees."""

    shape: NodeShape
    request: Request
    free: int
    usable: int
    unending: int
    held: tuple[int, ...]
    must: tuple[int, ...]
    short: tuple[int, ...]
    gives: tuple[tuple[int, ...], ...]

    def sets_of(self, size: int) -> Iterator[tuple[int, ...]]:
        """Yield the sets of `size` candidates that include all that must end, cheapest first."""
        others = [index for index in range(len(self.held)) if index not in self.must]
        if size == len(self.must):
            yield self.must
        elif size > len(self.must):
            for chosen in _cheapest_first(len(others), size - len(self.must)):
                yield (*self.must, *(others[index] for index in chosen))

    def fits(self, gone: Sequence[int]) -> bool:
        """True if the pod fits after the end of these candidates."""
        left = self.unending
        for index, mask in enumerate(self.held):
            if index not in gone:
                left |= mask
        freed = ~left
        mask = (self.free | freed) & self.usable
        if mask.bit_count() < self.request.ask.count:
            return False
        if any(sum(self.gives[index][row] for index in gone) < missing for row, missing in enumerate(self.short)):
            return False
        return not isinstance(offer(cell_of(self.shape, mask), self.request), Rejection)


@dataclass(frozen=True, slots=True)
class _NodeEnds:
    """One node where enough ends would make room, and the uids of its candidates."""

    node: str
    candidates: tuple[str, ...]
    question: _EndsInput

    @classmethod
    def of(
        cls, scene: IndexedSnapshot, holders: NodeHolders, pod: Pod, request: Request, against: frozenset[str]
    ) -> "_NodeEnds | None":
        """None if not even the end of all pods helps. `against`: uids of pods that keep the pod off the node."""
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
        has_ports = bool(host_fit.host_ports(pod))
        must = against.union(uid for uid, one in running.items() if has_ports and host_fit.ports_clash(pod, (one,)))
        others = (uid for uid, one in running.items() if uid not in holders.uids and _gives(scene, one, short))
        candidates = tuple(sorted({*holders.uids, *others, *must}, key=lambda uid: price(scene, uid)))
        question = _EndsInput(
            shape=holders.devices.shape,
            request=plain(request),
            free=holders.free,
            usable=holders.devices.usable,
            unending=holders.mask_of(UNENDING),
            held=tuple(holders.mask_of(uid) for uid in candidates),
            must=tuple(index for index, uid in enumerate(candidates) if uid in must),
            short=tuple(short.values()),
            gives=tuple(_given(scene, running.get(uid), tuple(short)) for uid in candidates),
        )
        return cls(holders.node, candidates, question) if question.fits(range(len(candidates))) else None


def opponents_of(scene: IndexedSnapshot, pod: Pod) -> dict[str, frozenset[str]]:
    """Return by node the uids of running pods whose anti-affinity, or the pod's own, keeps it off that node."""
    if not scene.minds_neighbours(pod):
        return {}
    nodes = list(scene.nodes.values())
    by_domain = pod_fit.opponents(pod, nodes, scene.pods_by_node, {})
    found = {
        node.metadata.name: frozenset().union(*(by_domain.get(row, ()) for row in node.metadata.labels.items()))
        for node in nodes
    }
    return {name: uids for name, uids in found.items() if uids}


Price = tuple[int, int, str]


def price(scene: IndexedSnapshot, uid: str) -> Price:
    """Return the cost of a pod's end: its priority, requested GPUs and name."""
    known = scene.prices.get(uid)
    if known is not None:
        return known
    gone = scene.by_uid.get(uid)
    if gone is None:
        return 0, 0, uid
    gpus = pods.device_count(gone)
    found = gone.spec.priority, gpus, f"{gone.metadata.namespace}/{gone.metadata.name}"
    scene.prices[uid] = found
    return found


def _given(scene: IndexedSnapshot, pod: Pod | None, resources: tuple[str, ...]) -> tuple[int, ...]:
    """Return how much of each resource the end of a pod frees; a pod that has ended frees nothing more."""
    if not resources or pod is None or pods.is_terminal(pod):
        return (0,) * len(resources)
    needed = scene.needs(pod)
    return tuple(needed.get(resource, 0) for resource in resources)


def _gives(scene: IndexedSnapshot, pod: Pod, short: Mapping[str, int]) -> bool:
    needed = scene.needs(pod)
    return any(needed.get(resource, 0) > 0 for resource in short)


def kept_for_others(ledger: Ledger, pod: Pod) -> dict[str, list[tuple[str, SoftReservation]]]:
    """Return by node the soft reservations of others that this pod must leave alone."""
    found: dict[str, list[tuple[str, SoftReservation]]] = {}
    for uid in ledger.pods:
        kept = ledger.kept(uid)
        if kept is not None and uid != pod.metadata.uid and kept.binds(pod.spec.priority):
            found.setdefault(kept.node, []).append((uid, kept))
    return found


def _holders(
    ledger: Ledger, node: str, device_id: int, uuid: str, kept: Sequence[tuple[str, SoftReservation]]
) -> frozenset[str]:
    """Return the uids of all who keep a device from being free."""
    found = {uid for uid, one in kept if device_id in one.device_ids}
    for hold in ledger.holds(node, device_id, uuid):
        if hold.source is HoldSource.LEASE:
            record = ledger.leases[hold.key]
            found.add(UNENDING if record.reservation else record.holder.uid)
        elif hold.source is HoldSource.FOREIGN:
            found |= {use.pod_uid or UNENDING for use in ledger.foreign_uses(node, uuid)}
        else:
            found.add(hold.key)
    if ledger.is_blocked(node, device_id):
        found.add(UNENDING)
    return frozenset(found)
