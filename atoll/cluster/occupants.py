"""Who holds the GPUs of one node, for a pod that may evict others: what is free, what is ending, who could be evicted.

The extender and the controllers ask the same of it; the search for victims knows no ledger.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from atoll.cluster import pods
from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.island_victims import PreemptionCandidate
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeDevices
from atoll.cluster.objects import Pod


@dataclass(frozen=True, slots=True)
class NodeOccupancy:
    """One node for one pod. Masks are over the positions of `devices`.

    `free`: what the pod could have now. `ending`: GPUs of pods that are being deleted. `evictable`: pods of a lower
    priority that keep running and may be preempted. `blocked`: GPUs kept for others, whichever pods end.
    """

    devices: NodeDevices
    free: int
    ending: int
    blocked: int
    evictable: tuple[PreemptionCandidate, ...]

    def without(self, uids: Collection[str]) -> int:
        """Return the mask of what the pod could have once these pods are gone too."""
        mask = self.free | self.ending
        for occupant in self.evictable:
            if occupant.uid in uids:
                mask |= occupant.mask
        return mask & ~self.blocked


def pods_by_node(ledger: Ledger) -> dict[str, list[Pod]]:
    """Return the pods that hold GPUs, by node."""
    found: dict[str, list[Pod]] = {}
    for uid, pod in ledger.pods.items():
        allocation = ledger.allocation_of(uid)
        if allocation is not None:
            found.setdefault(allocation.node, []).append(pod)
    return found


def occupancy(
    ledger: Ledger,
    node: str,
    holders: Iterable[Pod],
    asking: Pod,
    *,
    budgets: DisruptionBudgets,
    now_seconds: float,
    reservation: str = "",
) -> NodeOccupancy | None:
    """Return the occupancy of a node for the pod `asking`; `holders` hold its GPUs. None without a fresh report.

    `reservation`: uid of the GpuReservation that the pod names. Freed GPUs of a reservation return to it.
    """
    devices = ledger.nodes.get(node)
    if devices is None or ledger.is_stale(node, now_seconds):
        return None
    uid, priority = asking.metadata.uid, asking.spec.priority
    free = ledger.free(
        node, now_seconds=now_seconds, asking_uid=uid, asking_priority=priority, asking_reservation=reservation
    )
    ending = 0
    evictable: list[PreemptionCandidate] = []
    for pod in holders:
        mask = sole_mask(ledger, devices, pod.metadata.uid, reservation=reservation)
        if pod.metadata.deletion_timestamp is not None:
            ending |= mask
        elif pod.spec.priority < priority and pods.may_be_preempted(pod) and mask:
            evictable.append(_occupant(pod, mask, budgets))
    return NodeOccupancy(devices, free, ending, ledger.kept_mask(node, uid, priority), tuple(evictable))


def _occupant(pod: Pod, mask: int, budgets: DisruptionBudgets) -> PreemptionCandidate:
    metadata = pod.metadata
    return PreemptionCandidate(
        metadata.uid, mask, pod.spec.priority, metadata.creation_timestamp or "", budgets.promises_of(pod)
    )


def sole_mask(ledger: Ledger, devices: NodeDevices, uid: str, *, reservation: str = "") -> int:
    """Return the devices that only this pod holds: others do not become free when it ends.

    Devices of a GpuReservation return to it, so they count only for pods that use it.
    """
    allocation = ledger.allocation_of(uid)
    if allocation is None:
        return 0
    records = ledger.leases_of(uid)
    if any(record.reservation.rpartition("/")[2] != reservation for record in records):
        return 0
    own = {uid, *(record.lease_name for record in records)}
    mask = 0
    for position, device in enumerate(devices.devices):
        is_named = device.id in allocation.device_ids or device.uuid in allocation.uuids
        if is_named and all(hold.key in own for hold in ledger.holds(devices.node, device.id, device.uuid)):
            mask |= 1 << position
    return mask
