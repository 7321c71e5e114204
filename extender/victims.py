"""Preempt: on which of kube-scheduler's candidate nodes victims would really make room for the pod, and which victims.

In: nodes with the victims that kube-scheduler chose by count, cpu and memory, the ledger, the request. Out: the nodes
that remain. Its victims stay, whatever they are good for; where they leave the pod without the GPUs that its claim
wants, others of a lower priority are added, see atoll.cluster.island_victims. kube-scheduler's dry run knows no GPUs,
so it may also offer nodes without victims: such a node gets some, or goes. Victims stand in its order, the most
important first: when it chooses among the nodes it takes the first one's priority for the highest.

A member of a gang counts as a victim that breaks a budget, because the gang may not run without it: kube-scheduler then
prefers nodes whose pods go alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll.cluster.budgets import Budgets
from atoll.cluster.island_victims import find_victims
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod
from atoll.cluster.occupants import Occupancy, occupancy, pods_by_node
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select
from extender.wire import Victim, Victims


@dataclass(frozen=True, slots=True)
class Preemptor:
    """The pod that wants room, and what it asks for."""

    pod: Pod
    request: Request | Rejection


def choose_victims(
    candidates: Mapping[str, Victims],
    preemptor: Preemptor,
    ledger: Ledger,
    *,
    budgets: Budgets,
    now_seconds: float,
) -> dict[str, Victims]:
    """Return the candidates on which the pod gets its GPUs once the victims are gone, with all victims that takes."""
    if isinstance(preemptor.request, Rejection):
        return {}
    holders = pods_by_node(ledger)
    kept: dict[str, Victims] = {}
    for node, given in candidates.items():
        scene = occupancy(ledger, node, holders.get(node, ()), preemptor.pod, budgets=budgets, now_seconds=now_seconds)
        victims = _victims(given, scene, preemptor.request, ledger, budgets) if scene is not None else None
        if victims is not None and victims.pods:
            kept[node] = victims
    return kept


def _victims(given: Victims, scene: Occupancy, request: Request, ledger: Ledger, budgets: Budgets) -> Victims | None:
    """Return all victims of one node; None where none of them help."""
    chosen = {victim.uid for victim in given.pods or ()}
    room = scene.without(chosen)
    broken = given.pdb_violations + sum(bool(budgets.gangs.of(pod)) for uid in chosen if (pod := ledger.pods.get(uid)))
    if not isinstance(select(scene.devices, room, request), Rejection):
        return Victims(given.pods, broken)
    allowed = _left(budgets, ledger, chosen)
    others = (occupant for occupant in scene.evictable if occupant.uid not in chosen)
    found = find_victims(scene.devices, room, request, others, allowed=allowed)
    if found is None:
        return None
    pods = list(given.pods or ())
    for added in sorted(found.victims, key=lambda victim: (-victim.priority, victim.since, victim.uid)):
        pods.insert(_place(pods, added.priority, ledger), Victim(added.uid))
    return Victims(tuple(pods), broken + found.violations)


def _place(pods: Sequence[Victim], priority: int, ledger: Ledger) -> int:
    """Return before which victim one of that priority goes. Who holds no GPU is unknown, and stays where it stands."""
    known = ((place, ledger.pods.get(victim.uid)) for place, victim in enumerate(pods))
    lower = (place for place, pod in known if pod is not None and pod.spec.priority < priority)
    return next(lower, len(pods))


def _left(budgets: Budgets, ledger: Ledger, chosen: Iterable[str]) -> dict[str, int]:
    """Return what each budget still allows once the chosen victims are gone."""
    left = budgets.allowed()
    for uid in chosen:
        pod = ledger.pods.get(uid)
        for key in budgets.promises_of(pod) if pod is not None else ():
            left[key] = left.get(key, 0) - 1
    return left
