"""Which pods of lower priority a waiting pod may evict, where enough GPUs are free and only their links do not suit it.

It returns plans, the best first, each with a node, the GPUs to keep, and the victims. kube-scheduler preempts where the
count is short; it knows no islands, so this part is ours. The controllers ask for every victim's eviction, which may be
refused.

Nothing is planned for a pod that fits somewhere already, or will when a pod ends that is ending; where a budget forbids
it; or for a claim that would take any GPUs. Victims have a strictly lower priority, so that no two pods evict each
other in turn. A gang is a budget for its members, so that those that it needs stay; where nothing else helps, the
shell asks again with gangs that give way whole.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.host_fit import node_reason
from atoll.cluster.island_victims import VictimSet, demands_links, find_victims, lacks_only_links
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Node, Pod
from atoll.cluster.occupants import NodeOccupancy, occupancy, pods_by_node
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select
from atoll.cluster.soft_reservations import SoftReservation, soft_reservation_of
from atoll.cluster.wakeups import is_rejected

PLANS_MAX = 5
SEARCHED_NODES_MAX = 500
"""Nodes on which victims are searched for one pod; nodes whose free GPUs are too few do not count."""


@dataclass(frozen=True, slots=True)
class IslandPlan:
    """Evict `victims` from `node`, and keep these GPUs for the pod meanwhile."""

    kept: SoftReservation
    victims: tuple[Pod, ...]
    order: tuple[object, ...]

    @property
    def node(self) -> str:
        """The node on which room is made."""
        return self.kept.node


@dataclass(frozen=True, slots=True)
class PreemptionInput:
    """What plans are made on. `avoided`: nodes that were tried for this pod and led to nothing."""

    ledger: Ledger
    nodes: Mapping[str, Node]
    budgets: DisruptionBudgets
    now_seconds: float
    avoided: Collection[str] = ()


def may_preempt(pod: Pod, request: Request | Rejection) -> bool:
    """Tell whether pods may be evicted for this one's island: it waits, refused, for GPUs that must be joined, may
    preempt, and nothing is being freed for it yet."""
    return (
        isinstance(request, Request)
        and demands_links(request)
        and not request.reservation
        and pod.spec.preemption_policy != "Never"
        and is_rejected(pod)
        and not pod.status.nominated_node_name
        and soft_reservation_of(pod) is None
    )


def plan_island(pod: Pod, request: Request, situation: PreemptionInput) -> tuple[IslandPlan, ...]:
    """Return up to `PLANS_MAX` plans, the best first; none where the pod fits or soon will."""
    ledger, now = situation.ledger, situation.now_seconds
    uid, priority = pod.metadata.uid, pod.spec.priority
    short: list[str] = []
    for name in sorted(ledger.nodes):
        node = situation.nodes.get(name)
        free = ledger.free(name, now_seconds=now, asking_uid=uid, asking_priority=priority)
        if (free & ledger.nodes[name].usable).bit_count() < request.ask.count:
            continue
        if node is None or node_reason(pod, node) or ledger.is_stale(name, now):
            continue
        if not isinstance(select(ledger.nodes[name], free, request), Rejection):
            return ()
        if lacks_only_links(ledger.nodes[name], free, request):
            short.append(name)
    plans: list[IslandPlan] = []
    holders = pods_by_node(ledger) if short else {}
    for name in short[:SEARCHED_NODES_MAX]:
        occupied = occupancy(ledger, name, holders.get(name, ()), pod, budgets=situation.budgets, now_seconds=now)
        if occupied is None:
            continue
        if not isinstance(select(occupied.devices, occupied.without(()), request), Rejection):
            return ()
        if name not in situation.avoided:
            plans += _plans(pod, request, situation, occupied)
    return tuple(sorted(plans, key=lambda plan: plan.order)[:PLANS_MAX])


def _plans(pod: Pod, request: Request, situation: PreemptionInput, occupied: NodeOccupancy) -> Sequence[IslandPlan]:
    """Return the plan for one node, or none."""
    allowed = situation.budgets.allowed()
    open_occupants = [each for each in occupied.evictable if not each.mask & occupied.blocked]
    found = find_victims(occupied.devices, occupied.without(()), request, open_occupants, allowed=allowed)
    if found is None or found.violations or not found.victims:
        return ()
    return (_plan(pod, found, occupied, situation.ledger),)


def _plan(pod: Pod, found: VictimSet, occupied: NodeOccupancy, ledger: Ledger) -> IslandPlan:
    devices = occupied.devices
    ids = tuple(devices.devices[position].id for position in found.candidate.choice.positions)
    return IslandPlan(
        kept=SoftReservation(devices.node, ids, pod.spec.priority),
        victims=tuple(ledger.pods[victim.uid] for victim in found.victims),
        order=found.order,
    )
