"""Victims of a pod that fits nowhere: by kube-scheduler's preemption with the extender's, or by preemption for islands.

Returns ForetoldPreemptions in the order in which they would be tried, each a node and its victims. Pure. If counts are
short, kube-scheduler looks for victims itself and the extender adds those whose GPUs the claim's links need
(`atoll.cluster.node_victims`); if only the links do not suit, the controllers plan (`atoll.cluster.
island_preemption`), first with members that their gangs do not need, then with whole gangs.

It follows kube-scheduler's own steps: on each node all pods of a lower priority are removed, then reprieved one by one,
those that a disruption budget protects first, the most important first. The node with the fewest violated budgets wins,
then the lowest priority of the first victim, the lowest sum, the fewest and the youngest victims. Of pods with one
priority the one that started earlier is more important. A rule about neighbours that keeps the pod off the node is
evaluated again without the victims.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.cluster import host_fit, pods
from atoll.cluster.budgets import DisruptionBudgets, violations
from atoll.cluster.gangs.gang_budgets import gang_budgets, needs
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.membership import STARTED
from atoll.cluster.island_preemption import PreemptionInput, plan_island
from atoll.cluster.island_victims import demands_links
from atoll.cluster.node_victims import all_victims
from atoll.cluster.objects import Node, Pod
from atoll.cluster.occupants import occupancy, pods_by_node
from atoll.cluster.pod_fit import PodNeighbours
from atoll.cluster.requests import Rejection, Request
from atoll.explain.decision import IndexedSnapshot, PodDecision
from atoll.explain.gang_decision import index_gangs
from atoll.explain.snapshot import NOW_SECONDS

PRIORITY_SHIFT = 2**31
NOT_STARTED = "~"
"""Later than every time: kube-scheduler counts a pod that has not started as starting now."""


@dataclass(frozen=True, slots=True)
class ForetoldPreemption:
    """Evict `victims` from `node`, the most important first; `violations`: how many of them violate a budget."""

    node: str
    victims: tuple[Pod, ...]
    violations: int = 0


def preemptions_for(scene: IndexedSnapshot, pod: Pod, decision: PodDecision) -> Iterator[ForetoldPreemption]:
    """Yield the preemptions of the pod, of which the first that makes room counts; none if it may not preempt."""
    request = decision.request
    if isinstance(request, Rejection) or pod.spec.preemption_policy == "Never" or decision.fits:
        return
    budgets = DisruptionBudgets(scene.snapshot.budgets)
    by_count = _by_count(scene, pod, request, budgets)
    if by_count is not None:
        yield by_count
    elif demands_links(request):
        yield from _by_links(scene, pod, request, budgets)


def _by_links(
    scene: IndexedSnapshot, pod: Pod, request: Request, budgets: DisruptionBudgets
) -> Iterator[ForetoldPreemption]:
    admitted = tuple(index_gangs(scene).admitted().values()) if scene.snapshot.gangs else ()
    for whole_below in (None, pod.spec.priority) if admitted else (None,):
        gangs = gang_budgets(admitted, whole_below=whole_below)
        situation = PreemptionInput(scene.ledger, scene.nodes, replace(budgets, gangs=gangs), NOW_SECONDS)
        plans = plan_island(pod, request, situation)
        yield from (ForetoldPreemption(plan.node, _with_gangs(plan.victims, admitted)) for plan in plans)
        if plans:
            return


def _with_gangs(victims: tuple[Pod, ...], admitted: Sequence[GangView]) -> tuple[Pod, ...]:
    """Return the victims, with all running members of the gangs that need one of them."""
    found = {victim.metadata.uid: victim for victim in victims}
    for view in admitted:
        if any(member.uid in found and needs(view, [member]) for member in view.members):
            found |= {member.uid: member.pod for member in view.members if member.stage in STARTED}
    return tuple(found.values())


def _by_count(
    scene: IndexedSnapshot, pod: Pod, request: Request, budgets: DisruptionBudgets
) -> ForetoldPreemption | None:
    """The preemption on nodes that kube-scheduler refuses for what others hold, not on those that only the extender
    refuses."""
    holders = pods_by_node(scene.ledger)
    found: list[ForetoldPreemption] = []
    now = _neighbours(scene, pod, scene.pods_by_node) if scene.minds_neighbours(pod) else None
    for name, node in sorted(scene.nodes.items()):
        room = _NodeSimulation(
            scene, pod, host_fit.needs(pod), node, has_neighbours=now is not None and now.refuse(node)
        )
        there = scene.pods_by_node.get(name, ())
        if host_fit.node_reason(pod, node) or room.fits(there):
            continue
        victims, broken = _reprieved(room, there, budgets)
        if not victims:
            continue
        occupied = occupancy(
            scene.ledger,
            name,
            holders.get(name, ()),
            pod,
            budgets=budgets,
            now_seconds=NOW_SECONDS,
            reservation=request.reservation,
        )
        if occupied is None:
            continue
        uids = tuple(victim.metadata.uid for victim in victims)
        whole = all_victims(uids, broken, occupied, pod, request, scene.ledger, budgets)
        if whole is not None:
            found.append(ForetoldPreemption(name, tuple(scene.by_uid[uid] for uid in whole.uids), whole.violations))
    return min(found, key=_order, default=None)


def _order(one: ForetoldPreemption) -> tuple[int, int, int, int, tuple[int, ...], str]:
    """kube-scheduler's order over nodes, smaller is better; the last tie-break prefers younger victims."""
    priorities = [victim.spec.priority for victim in one.victims]
    since = min(_started(v) for v in one.victims if v.spec.priority == max(priorities))
    young = tuple(-ord(character) for character in since)
    total = sum(priority + PRIORITY_SHIFT for priority in priorities)
    return one.violations, priorities[0], total, len(priorities), young, one.node


def _started(pod: Pod) -> str:
    return pod.status.start_time or NOT_STARTED


def _reprieved(
    room: "_NodeSimulation", there: Sequence[Pod], budgets: DisruptionBudgets
) -> tuple[tuple[Pod, ...], int]:
    """Return the victims of one node by kube-scheduler's own filters, and how many of them violate a budget."""
    priority = room.pod.spec.priority
    running = [one for one in there if not pods.is_terminal(one)]
    low = [one for one in running if one.spec.priority < priority]
    kept = [one for one in running if one.spec.priority >= priority]
    if not low or not room.fits(kept):
        return (), 0
    important = sorted(low, key=lambda one: (-one.spec.priority, _started(one)))
    left = {budget.key: budget.status.disruptions_allowed for budget in budgets.all}
    protected: list[Pod] = []
    others: list[Pod] = []
    for one in important:
        keys = _counted_budgets(one, budgets)
        is_broken = violations([keys], left) > 0
        for key in keys:
            left[key] -= 1
        (protected if is_broken else others).append(one)
    victims: list[Pod] = []
    broken = 0
    for number, one in enumerate((*protected, *others)):
        if room.fits([*kept, one]):
            kept.append(one)
        else:
            victims.append(one)
            broken += number < len(protected)
    uids = {one.metadata.uid for one in victims}
    return tuple(one for one in important if one.metadata.uid in uids), broken


def _counted_budgets(pod: Pod, budgets: DisruptionBudgets) -> tuple[str, ...]:
    """Return the budgets that kube-scheduler counts for a pod: unlike the API server, it treats an empty selector as
    matching no pod."""
    return tuple(
        budget.key
        for budget in budgets.all
        if budget.spec.selector is not None
        and (budget.spec.selector.match_labels or budget.spec.selector.match_expressions)
        and pod.metadata.labels
        and budget.protects(pod)
    )


def _neighbours(scene: IndexedSnapshot, pod: Pod, pods_on: Mapping[str, Sequence[Pod]]) -> PodNeighbours:
    return PodNeighbours.of(pod, list(scene.nodes.values()), pods_on, {})


@dataclass(frozen=True, slots=True)
class _NodeSimulation:
    """Checks by kube-scheduler's filters whether the pod fits on one node beside some of its pods. `has_neighbours`: a
    rule about neighbours keeps it off the node now."""

    scene: IndexedSnapshot
    pod: Pod
    needed: Mapping[str, int]
    node: Node
    has_neighbours: bool

    def fits(self, there: Iterable[Pod]) -> bool:
        others = [one for one in there if not pods.is_terminal(one)]
        left = host_fit.free(self.node, others, self.scene.needs)
        if any(amount > left.get(resource, 0) for resource, amount in self.needed.items() if amount):
            return False
        if host_fit.ports_clash(self.pod, others):
            return False
        around = {**self.scene.pods_by_node, self.node.metadata.name: others}
        return not self.has_neighbours or not _neighbours(self.scene, self.pod, around).refuse(self.node)
