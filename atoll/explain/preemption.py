"""Whom a pod that fits nowhere would push out: kube-scheduler's preemption with the extender's, or that for islands.

In: a scene, a pod, its decision. Out: a Preemption, the node and the victims, or None. Pure. Where counts are short
kube-scheduler looks for victims itself and the extender adds those whose GPUs the claim's links take
(`atoll.cluster.island_victims`); where only the links do not suit, the controllers plan (`atoll.cluster.
island_preemption`). kube-scheduler's own steps are followed here: on each node all pods of a lower priority are taken
away, then spared again one by one, those that a disruption budget protects first, the most important first; of the
nodes the one with the fewest broken budgets, the lowest highest priority, the lowest sum, the fewest and the youngest
victims. Rules about neighbours are weighed as they stand before anybody leaves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll.cluster import host_fit, pods
from atoll.cluster.budgets import Budgets, violations
from atoll.cluster.island_preemption import Situation, plan_island
from atoll.cluster.island_victims import demands_links, find_victims
from atoll.cluster.objects import Node, Pod
from atoll.cluster.occupants import Occupancy, occupancy, pods_by_node
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select
from atoll.explain.decision import Decision, Scene
from atoll.explain.snapshot import NOW_SECONDS

PRIORITY_SHIFT = 2**31


@dataclass(frozen=True, slots=True)
class Preemption:
    """Evict `victims` from `node`; `violations`: how many evictions break a disruption budget."""

    node: str
    victims: tuple[Pod, ...]
    violations: int = 0


def preemption_for(scene: Scene, pod: Pod, decision: Decision) -> Preemption | None:
    """Return whom the pod would push out; None where it may not, or where that would not help."""
    request = decision.request
    if isinstance(request, Rejection) or pod.spec.preemption_policy == "Never" or decision.fits:
        return None
    budgets = Budgets(scene.snapshot.budgets)
    by_count = _by_count(scene, pod, request, budgets)
    if by_count is not None:
        return by_count
    if not demands_links(request):
        return None
    plans = plan_island(pod, request, Situation(scene.ledger, scene.nodes, budgets, NOW_SECONDS))
    return Preemption(plans[0].node, plans[0].victims) if plans else None


def _by_count(scene: Scene, pod: Pod, request: Request, budgets: Budgets) -> Preemption | None:
    """Nodes that kube-scheduler refuses for what others hold there; those that only the extender refuses are none."""
    holders = pods_by_node(scene.ledger)
    found: list[Preemption] = []
    for name, node in sorted(scene.nodes.items()):
        there = scene.pods_by_node.get(name, ())
        if host_fit.node_reason(pod, node) or _fits(pod, node, there):
            continue
        victims, broken = _reprieved(pod, node, there, budgets)
        if not victims:
            continue
        occupied = occupancy(scene.ledger, name, holders.get(name, ()), pod, budgets=budgets, now_seconds=NOW_SECONDS)
        plan = _with_links(scene, occupied, request, victims, budgets) if occupied is not None else None
        if plan is not None:
            found.append(Preemption(name, plan[0], broken + plan[1]))
    return min(found, key=_order, default=None)


def _order(one: Preemption) -> tuple[int, int, int, int, tuple[int, ...], str]:
    """Order over nodes as kube-scheduler's, smaller is better: last, the younger the oldest of the most important."""
    priorities = [victim.spec.priority for victim in one.victims]
    highest = max(priorities)
    since = min(v.metadata.creation_timestamp or "" for v in one.victims if v.spec.priority == highest)
    young = tuple(-ord(character) for character in since)
    total = sum(priority + PRIORITY_SHIFT for priority in priorities)
    return one.violations, highest, total, len(priorities), young, one.node


def _reprieved(pod: Pod, node: Node, there: Sequence[Pod], budgets: Budgets) -> tuple[tuple[Pod, ...], int]:
    """Return the victims of one node by count, cpu, memory and ports, and how many of them break a budget."""
    running = [one for one in there if not pods.is_terminal(one)]
    low = [one for one in running if one.spec.priority < pod.spec.priority]
    kept = [one for one in running if one.spec.priority >= pod.spec.priority]
    if not low or not _fits(pod, node, kept):
        return (), 0
    important = sorted(low, key=lambda one: (-one.spec.priority, one.metadata.creation_timestamp or ""))
    left = budgets.allowed()
    protected: list[Pod] = []
    others: list[Pod] = []
    for one in important:
        keys = budgets.of(one)
        is_broken = violations([keys], left) > 0
        for key in keys:
            left[key] = left.get(key, 0) - 1
        (protected if is_broken else others).append(one)
    victims: list[Pod] = []
    broken = 0
    for number, one in enumerate((*protected, *others)):
        if _fits(pod, node, [*kept, one]):
            kept.append(one)
        else:
            victims.append(one)
            broken += number < len(protected)
    return tuple(victims), broken


def _fits(pod: Pod, node: Node, there: Iterable[Pod]) -> bool:
    others = [one for one in there if not pods.is_terminal(one)]
    left = host_fit.free(node, others)
    is_enough = all(amount <= left.get(resource, 0) for resource, amount in host_fit.needs(pod).items() if amount)
    return is_enough and not host_fit.ports_clash(pod, others)


def _with_links(
    scene: Scene, occupied: Occupancy, request: Request, victims: tuple[Pod, ...], budgets: Budgets
) -> tuple[tuple[Pod, ...], int] | None:
    """Return all victims of a node, with those that the claim's links take besides; None where nothing helps."""
    chosen = {victim.metadata.uid for victim in victims}
    room = occupied.without(chosen)
    if not isinstance(select(occupied.devices, room, request), Rejection):
        return victims, 0
    allowed: Mapping[str, int] = _left(budgets, victims)
    others = (occupant for occupant in occupied.evictable if occupant.uid not in chosen)
    found = find_victims(occupied.devices, room, request, others, allowed=allowed)
    if found is None:
        return None
    added = tuple(scene.ledger.pods[victim.uid] for victim in found.victims)
    return (*victims, *added), found.violations


def _left(budgets: Budgets, gone: Iterable[Pod]) -> dict[str, int]:
    left = budgets.allowed()
    for pod in gone:
        for key in budgets.of(pod):
            left[key] = left.get(key, 0) - 1
    return left
