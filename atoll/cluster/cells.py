"""What every node can give out now: masks of free devices and cells, renewed for the nodes that changed.

A question about all nodes is answered from the cells; a change of one node renews one of them. Tentative placements and
soft reservations are subtracted here: they hide devices from other pods and hold nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.cluster.fleet import Fleet
from atoll.cluster.holds import DeviceHolds
from atoll.cluster.machines import Cell, cell_of
from atoll.cluster.reports import NodeReports
from atoll.cluster.soft_reservations import SoftReservation, SoftReservations


@dataclass(frozen=True, slots=True)
class TentativePlacement:
    """Where the next bind of a pod will probably land; counted for other pods until `until_seconds`."""

    node: str
    device_ids: tuple[int, ...]
    until_seconds: float


class CellIndex:
    """Free devices and cells of every node, over its reports and its holds."""

    def __init__(self, reports: NodeReports, holds: DeviceHolds) -> None:
        self._reports = reports
        self._holds = holds
        self._tentative: dict[str, TentativePlacement] = {}
        self._tentative_on: dict[str, dict[str, TentativePlacement]] = {}
        self._expires_seconds = math.inf
        self._soft = SoftReservations()
        self._free: dict[str, int] = {}
        self._pods_on: dict[str, int] = {}
        self._cells: dict[str, Cell] = {}
        self._stale: set[str] = set()
        self._changed: set[str] = set()
        self.fleet = Fleet()
        """The same cells as arrays; `own_cells` brings both up to date."""
        self.revision = 0
        """Grows with every change that may change an answer."""

    def note_change(self, *nodes: str) -> None:
        """Note that devices of these nodes changed; of every node where none is named."""
        self.revision += 1
        for node in nodes or self._reports.nodes:
            self._changed.add(node)
            self._free.pop(node, None)
            self._pods_on.pop(node, None)

    def note_heartbeat(self, node: str) -> None:
        """Note that a node's agent was heard; a node that was stale is looked at again."""
        if node in self._stale:
            self.note_change(node)

    def _note_hidden(self, node: str) -> None:
        self.revision += 1
        self._changed.add(node)

    def put_tentative(self, uid: str, placement: TentativePlacement) -> None:
        """Count devices as spoken for until the pod's bind arrives or `until_seconds` passes."""
        self.drop_tentative(uid)
        self._tentative[uid] = placement
        self._tentative_on.setdefault(placement.node, {})[uid] = placement
        self._expires_seconds = min(self._expires_seconds, placement.until_seconds)
        self._note_hidden(placement.node)

    def drop_tentative(self, uid: str) -> None:
        """Drop the tentative placement of a pod."""
        placement = self._tentative.pop(uid, None)
        if placement is not None:
            self._note_hidden(placement.node)
            others = self._tentative_on[placement.node]
            del others[uid]
            if not others:
                del self._tentative_on[placement.node]

    def drop_all_tentative(self) -> None:
        """Drop every tentative placement: whoever made them does not bind any more."""
        for uid in list(self._tentative):
            self.drop_tentative(uid)

    def keep(self, uid: str, kept: SoftReservation | None) -> None:
        """Keep devices for a waiting pod, or nothing any more; see atoll.cluster.soft_reservations."""
        for node in self._soft.put(uid, kept):
            self._note_hidden(node)

    def kept(self, uid: str) -> SoftReservation | None:
        """Return what is kept for a waiting pod."""
        return self._soft.of(uid)

    def kept_mask(self, node: str, asking_uid: str, asking_priority: int | None) -> int:
        """Return the mask of the node's devices that are kept for others, so that the asking pod leaves them alone."""
        devices = self._reports.nodes.get(node)
        if devices is None or not self._soft:
            return 0
        mask = 0
        for device_ids in self._soft.on(node, asking_uid=asking_uid, asking_priority=asking_priority):
            mask |= devices.mask_of(device_ids)
        return mask

    def free(
        self,
        node: str,
        *,
        now_seconds: float,
        asking_uid: str = "",
        asking_priority: int | None = None,
        asking_reservation: str = "",
    ) -> int:
        """Return the mask of devices that nothing holds, less what is expected or kept for other pods.

        What the asking pod itself holds by Leases or by its own bind counts as free for it. What is kept for pods of a
        lower priority than the asking pod does too; without a priority it ranks below all. A pod that asks for GPUs
        of a GpuReservation, given by its uid, gets only the GPUs that the reservation holds by Leases.
        """
        devices = self._reports.nodes.get(node)
        if devices is None:
            return 0
        mask = self._free.get(node)
        if mask is None:
            free = (self._holds.is_free(node, device) for device in devices.devices)
            mask = self._free[node] = sum(1 << position for position, is_free in enumerate(free) if is_free)
        if asking_reservation:
            mask = self._holds.own_mask(devices, asking_reservation)
        if self._holds.has_own(asking_uid):
            mask |= self._holds.own_mask(devices, asking_uid)
        self._drop_expired(now_seconds)
        for uid, placement in self._tentative_on.get(node, {}).items():
            if uid != asking_uid:
                mask &= ~devices.mask_of(placement.device_ids)
        return mask & ~self.kept_mask(node, asking_uid, asking_priority)

    def cells(
        self, *, now_seconds: float, asking_uid: str = "", asking_priority: int | None = None
    ) -> Mapping[str, Cell]:
        """Return the cell of every node with a fresh report: what `free` says of its usable devices, for all nodes."""
        own = self.own_cells(now_seconds=now_seconds, asking_uid=asking_uid, asking_priority=asking_priority)
        return {**self._cells, **own} if own else self._cells

    def own_cells(
        self,
        *,
        now_seconds: float,
        asking_uid: str = "",
        asking_priority: int | None = None,
        asking_reservation: str = "",
    ) -> dict[str, Cell]:
        """Bring `fleet` up to date, and return the cells of the nodes that are another's for the asking pod."""
        self._drop_expired(now_seconds)
        if now_seconds > self._reports.next_silent_seconds:
            self._find_silent(now_seconds)
        self.renew(now_seconds, nodes_max=len(self._changed))
        special = self._own_nodes(asking_uid) | self._soft.opens_for(asking_uid, asking_priority)
        special |= self._holds.own_nodes(asking_reservation) if asking_reservation else set()
        own = [node for node in special if node in self._cells]
        return {node: self._cell(node, now_seconds, asking_uid, asking_priority, asking_reservation) for node in own}

    def renew(self, now_seconds: float, *, nodes_max: int) -> bool:
        """Bring some of the changed nodes up to date in `fleet`; tell whether others are left."""
        for _ in range(min(nodes_max, len(self._changed))):
            self._renew_cell(self._changed.pop(), now_seconds)
        return bool(self._changed)

    def _own_nodes(self, uid: str) -> set[str]:
        """Return the nodes on which something is held for the pod that does not bind the pod itself."""
        tentative = self._tentative.get(uid)
        nodes = self._holds.own_nodes(uid)
        return nodes if tentative is None else nodes | {tentative.node}

    def _cell(
        self,
        node: str,
        now_seconds: float,
        asking_uid: str = "",
        asking_priority: int | None = None,
        asking_reservation: str = "",
    ) -> Cell:
        devices = self._reports.nodes[node]
        free = self.free(
            node,
            now_seconds=now_seconds,
            asking_uid=asking_uid,
            asking_priority=asking_priority,
            asking_reservation=asking_reservation,
        )
        return cell_of(devices.shape, free & devices.usable)

    def _renew_cell(self, node: str, now_seconds: float) -> None:
        self._cells.pop(node, None)
        self._stale.discard(node)
        if node not in self._reports.nodes:
            self.fleet.forget(node)
        elif self._reports.is_stale(node, now_seconds):
            self._stale.add(node)
            self.fleet.silence(node)
        else:
            self._cells[node] = self._cell(node, now_seconds)
            if node not in self._pods_on:
                self._pods_on[node] = self._holds.pod_count(self._reports.nodes[node])
            self.fleet.put(node, self._cells[node], pods=self._pods_on[node])

    def _find_silent(self, now_seconds: float) -> None:
        """Mark nodes that have become stale, and note when the next one may."""
        self._changed.update(node for node in self._cells if self._reports.is_stale(node, now_seconds))
        self._reports.look_ahead(now_seconds)

    def _drop_expired(self, now_seconds: float) -> None:
        if now_seconds < self._expires_seconds:
            return
        for uid in [uid for uid, placement in self._tentative.items() if placement.until_seconds <= now_seconds]:
            self.drop_tentative(uid)
        self._expires_seconds = min((each.until_seconds for each in self._tentative.values()), default=math.inf)
