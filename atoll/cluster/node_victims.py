"""All victims of one node: those that kube-scheduler chose, and those that the claim's links need besides.

`all_victims` returns None where more victims would not help. The extender and `atoll simulate` use it.

The most important victim comes first: kube-scheduler takes the priority of the first for the highest of the node when
it chooses between nodes. Its own victims keep their order; a pod without GPUs has no priority here and keeps its place.

kube-scheduler does not know which pods may not be preempted. Such pods are spared, and others are chosen instead if
that frees as much of what the pod needs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.api import names
from atoll.cluster import host_fit, pods
from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.island_victims import find_victims
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod
from atoll.cluster.occupants import NodeOccupancy
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select


@dataclass(frozen=True, slots=True)
class NodeVictims:
    """Who would go, and how many of them break a budget, or a gang below what it needs."""

    uids: tuple[str, ...]
    violations: int


def all_victims(
    given: Sequence[str],
    violations: int,
    occupied: NodeOccupancy,
    pod: Pod,
    request: Request,
    ledger: Ledger,
    budgets: DisruptionBudgets,
) -> NodeVictims | None:
    """Return all victims of a node for `pod`. kube-scheduler chose `given`, violating this number of budgets."""
    known = {uid: ledger.pods[uid] for uid in given if uid in ledger.pods}
    spared = [victim for victim in known.values() if not pods.may_be_preempted(victim)]
    uids = [uid for uid in given if uid not in known or pods.may_be_preempted(known[uid])]
    room = occupied.without(uids)
    broken = violations + sum(bool(budgets.gangs.of(known[uid])) for uid in uids if uid in known)
    if not spared and not isinstance(select(occupied.devices, room, request), Rejection):
        return NodeVictims(tuple(uids), broken)
    others = (occupant for occupant in occupied.evictable if occupant.uid not in given)
    found = find_victims(occupied.devices, room, request, others, allowed=_left(budgets, ledger, uids))
    if found is None or not _makes_up_for(spared, [ledger.pods[victim.uid] for victim in found.victims], pod):
        return None
    for added in sorted(found.victims, key=lambda victim: (-victim.priority, victim.since, victim.uid)):
        uids.insert(_place(uids, added.priority, ledger), added.uid)
    return NodeVictims(tuple(uids), broken + found.violations)


def _makes_up_for(spared: Sequence[Pod], added: Iterable[Pod], pod: Pod) -> bool:
    """Return whether the added victims free what the spared ones would have freed, or all that the pod needs.

    GPUs were checked before. A pod with affinity rules or host ports may depend on the spared victims themselves.
    """
    if not spared:
        return True
    affinity = pod.spec.affinity
    if affinity is not None and (affinity.pod_affinity or affinity.pod_anti_affinity):
        return False
    if any(port.host_port for container in pod.spec.containers for port in container.ports):
        return False
    lost, freed = (_sum(host_fit.needs(each) for each in group) for group in (spared, added))
    return all(
        freed[resource] >= min(lost[resource], amount)
        for resource, amount in host_fit.needs(pod).items()
        if not resource.startswith(names.GROUP)
    )


def _sum(amounts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in amounts:
        total.update(one)
    return total


def _place(uids: Sequence[str], priority: int, ledger: Ledger) -> int:
    """Return before which victim one of that priority goes."""
    known = ((place, ledger.pods.get(uid)) for place, uid in enumerate(uids))
    lower = (place for place, pod in known if pod is not None and pod.spec.priority < priority)
    return next(lower, len(uids))


def _left(budgets: DisruptionBudgets, ledger: Ledger, gone: Iterable[str]) -> dict[str, int]:
    """Return what each budget still allows once these victims are gone."""
    left = budgets.allowed()
    for uid in gone:
        pod = ledger.pods.get(uid)
        for key in budgets.promises_of(pod) if pod is not None else ():
            left[key] = left.get(key, 0) - 1
    return left
