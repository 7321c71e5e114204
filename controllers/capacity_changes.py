"""Which changes may let a waiting pod in, and how much capacity each node has.

The generation is the resourceVersion of the newest such change.
"""

from collections.abc import Callable
from typing import Any

from atoll.api.reservations import GpuReservation
from atoll.cluster.feasibility import NodeFacts, unseen_nodes
from atoll.cluster.host_fit import is_ready
from atoll.cluster.objects import Node
from atoll.cluster.release import version_number
from atoll.cluster.wakeups import NodeCapacity
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.clock import Clock
from atoll.kube.mirror import ClusterMirror, WatchedKind


class CapacityChanges:
    """Follows the mirror of one leadership term. `generation` is the resourceVersion of the newest change."""

    def __init__(self, mirror: ClusterMirror, clock: Clock) -> None:
        self._mirror = mirror
        self._clock = clock
        self._usable = {node: self._usable_now(node) for node in mirror.ledger.nodes}
        self._stale: set[str] = set()
        self.generation = max(version_number(each.resource_version) for each in mirror.reflectors.values())

    def observe(self, kind: WatchedKind, change: Change[Any]) -> bool:
        """Return whether a change may let a waiting pod in; if so, its version becomes the generation."""
        observers: dict[WatchedKind, Callable[[Change[Any]], bool]] = {
            WatchedKind.LEASE: self._lease_ended,
            WatchedKind.REPORT: self._devices_came,
            WatchedKind.NODE: self._node_opened,
            WatchedKind.HEARTBEAT: self._agent_came_back,
            WatchedKind.CLAIM: lambda change: change.kind is ChangeKind.ADDED,
            WatchedKind.RESERVATION: self._reservation_moved,
        }
        if kind not in observers or not observers[kind](change):
            return False
        self.generation = max(self.generation, version_number(change.object.metadata.resource_version))
        return True

    def capacities(self, reservation: str = "") -> list[NodeCapacity]:
        """Return the free capacity of each node with a fresh heartbeat and a Node object, by name. `reservation`: uid
        of the GpuReservation that the pods use; then it is what the reservation holds there."""
        now = self._clock.monotonic_seconds()
        ledger, nodes = self._mirror.ledger, self._mirror.nodes.store
        self._stale = {name for name in ledger.nodes if ledger.is_stale(name, now)}
        return [
            NodeCapacity(
                nodes["", name],
                ledger.nodes[name],
                ledger.free(name, now_seconds=now, asking_reservation=reservation),
            )
            for name in sorted(ledger.nodes)
            if name not in self._stale and ("", name) in nodes
        ]

    def capacity(self, node: str, reservation: str = "") -> NodeCapacity | None:
        """Return what `capacities` says of one node; None where it leaves the node out."""
        now = self._clock.monotonic_seconds()
        ledger, seen = self._mirror.ledger, self._mirror.nodes.store.get(("", node))
        if seen is None or node not in ledger.nodes or ledger.is_stale(node, now):
            return None
        free = ledger.free(node, now_seconds=now, asking_reservation=reservation)
        return NodeCapacity(seen, ledger.nodes[node], free)

    def _lease_ended(self, change: Change[Any]) -> bool:
        """Handle a changed Lease: one that returns to a GpuReservation makes room for its pods."""
        record = self._mirror.ledger.leases.get(change.object.metadata.name)
        return change.kind is ChangeKind.DELETED or (record is not None and record.holder.is_reservation)

    def _reservation_moved(self, change: Change[Any]) -> bool:
        before, after = change.old, change.object
        return not isinstance(before, GpuReservation) or before.spec != after.spec or _phase(before) != _phase(after)

    def unseen(self) -> tuple[NodeFacts, ...]:
        """Return the nodes that `capacities` omits although they have or may have GPUs."""
        nodes = {name: node for (_, name), node in self._mirror.nodes.store.items()}
        return unseen_nodes(nodes, self._mirror.ledger, self._clock.monotonic_seconds())

    def _devices_came(self, change: Change[Any]) -> bool:
        node = change.object.metadata.name
        before = self._usable.get(node, 0)
        after = self._usable[node] = self._usable_now(node)
        return bool(after & ~before)

    def _usable_now(self, node: str) -> int:
        """Return the healthy devices that nobody uses without holding them, as a mask."""
        ledger = self._mirror.ledger
        devices = ledger.nodes.get(node)
        if devices is None:
            return 0
        foreign = (i for i, device in enumerate(devices.devices) if ledger.foreign_uses(node, device.uuid))
        return devices.usable & ~sum(1 << i for i in foreign)

    def _node_opened(self, change: Change[Any]) -> bool:
        if change.kind is ChangeKind.ADDED:
            self._devices_came(change)  # none, where the report is still that of another Node of this name
            return True
        if change.kind is ChangeKind.DELETED:
            return False
        old, new = change.old, change.object
        return not isinstance(old, Node) or _what_admits(old) != _what_admits(new)

    def _agent_came_back(self, change: Change[Any]) -> bool:
        node = change.object.metadata.name
        if node not in self._stale or self._mirror.ledger.is_stale(node, self._clock.monotonic_seconds()):
            return False
        self._stale.discard(node)
        return True


def _phase(reservation: GpuReservation) -> str:
    return reservation.status.phase if reservation.status is not None else ""


def _what_admits(node: Node) -> tuple[object, ...]:
    """Return all that `node_reason` reads of a Node."""
    return node.spec, node.metadata.labels, is_ready(node)
