"""All victims of one node: those that kube-scheduler chose, and those that the claim's links need besides.

`all_victims` returns None where more victims would not help. The extender and `atoll simulate` use it.

The most important victim comes first: kube-scheduler takes the priority of the first for the highest of the node when
it chooses between nodes. Its own victims keep their order; a pod without GPUs has no priority here and keeps its place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.island_victims import find_victims
from atoll.cluster.ledger import Ledger
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
    request: Request,
    ledger: Ledger,
    budgets: DisruptionBudgets,
) -> NodeVictims | None:
    """Return all victims of a node, of which kube-scheduler chose the `given`, breaking so many budgets."""
    room = occupied.without(given)
    known = (ledger.pods.get(uid) for uid in given)
    broken = violations + sum(bool(budgets.gangs.of(pod)) for pod in known if pod is not None)
    if not isinstance(select(occupied.devices, room, request), Rejection):
        return NodeVictims(tuple(given), broken)
    others = (occupant for occupant in occupied.evictable if occupant.uid not in given)
    found = find_victims(occupied.devices, room, request, others, allowed=_left(budgets, ledger, given))
    if found is None:
        return None
    uids = list(given)
    for added in sorted(found.victims, key=lambda victim: (-victim.priority, victim.since, victim.uid)):
        uids.insert(_place(uids, added.priority, ledger), added.uid)
    return NodeVictims(tuple(uids), broken + found.violations)


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
