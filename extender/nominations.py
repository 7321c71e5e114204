"""Keeps GPUs for pods that kube-scheduler has nominated to a node after a preemption.

kube-scheduler reserves what it can count there. It does not know which GPUs the victims leave, nor that they are joined
as the claim wants: a smaller pod of a lower priority could take one out of the middle. So the nominated pod gets a soft
reservation in the ledger, chosen from what is free and what ends on the node. It lasts as long as the nomination. A
wake-up nominates too, but only pods that fit at once, which need none.
"""

from collections.abc import Callable
from typing import Any

from atoll.cluster import pods
from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod
from atoll.cluster.occupants import occupancy, pods_by_node
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select
from atoll.cluster.soft_reservations import SoftReservation, soft_reservation_of
from atoll.cluster.wakeups import is_nominated_by_us
from atoll.kube.cache import Change, ChangeKind
from atoll.kube.clock import Clock
from atoll.kube.mirror import WatchedKind


class Nominations:
    """The waiting pods that are nominated to a node, and what is kept for them there."""

    def __init__(self, ledger: Ledger, clock: Clock, request_of: Callable[[Pod], Request | Rejection]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._request_of = request_of
        self._nominated: dict[str, Pod] = {}
        self._kept: dict[str, SoftReservation] = {}

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change that the ledger has taken before."""
        if kind is not WatchedKind.POD:
            return
        pod: Pod = change.object
        uid = pod.metadata.uid
        node = _nominated_node(pod) if change.kind is not ChangeKind.DELETED and uid in self._ledger.pods else ""
        if node:
            self._nominated[uid] = pod
            self._keep(pod, node)
        elif self._nominated.pop(uid, None):
            self._kept.pop(uid, None)
        if pod.metadata.deletion_timestamp is not None and self._nominated:
            self._look_again(pod.spec.node_name)

    def _look_again(self, ending_on: str) -> None:
        """A pod of this node ends: what is to be kept there may only show now."""
        for pod in self._nominated.values():
            if pod.status.nominated_node_name == ending_on:
                self._keep(pod, ending_on)

    def _keep(self, pod: Pod, node: str) -> None:
        uid = pod.metadata.uid
        kept = self._kept.get(uid)
        if kept is None or kept.node != node:
            kept = self._find(pod, node)
        if kept is None:
            self._kept.pop(uid, None)
        else:
            self._kept[uid] = kept
        self._ledger.keep(uid, kept)

    def _find(self, pod: Pod, node: str) -> SoftReservation | None:
        """Choose the set that the pod will get there: among what is free and what ends."""
        request = self._request_of(pod)
        if isinstance(request, Rejection):
            return None
        holders = pods_by_node(self._ledger).get(node, ())
        now = self._clock.monotonic_seconds()
        budgets, reservation = DisruptionBudgets(), request.reservation
        occupied = occupancy(
            self._ledger, node, holders, pod, budgets=budgets, now_seconds=now, reservation=reservation
        )
        if occupied is None:
            return None
        answer = select(occupied.devices, occupied.without(()), request)
        if isinstance(answer, Rejection):
            return None
        ids = tuple(occupied.devices.devices[position].id for position in answer.choice.positions)
        return SoftReservation(node, ids, pod.spec.priority)


def _nominated_node(pod: Pod) -> str:
    """Return where kube-scheduler wants to place the waiting pod after a preemption; empty for all others."""
    if not pods.is_waiting(pod) or is_nominated_by_us(pod) or soft_reservation_of(pod) is not None:
        return ""
    return pod.status.nominated_node_name
