"""Places one unit on the current hosts: counts up, choice down.

topology.gangs.search decides in which order and where the units go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topology.gangs.balanced import find_balanced
from topology.gangs.compatible import find_compatible
from topology.gangs.counts import count_up
from topology.gangs.descent import DescentInput, DescentResult, StepBudget, find
from topology.gangs.model import Mode, Order, PlacementRefusal, PodSet
from topology.gangs.occupancy import SearchOccupancy
from topology.gangs.refusals import refusal
from topology.gangs.requests import PlacementUnit
from topology.gangs.snapshot import HostSnapshot
from topology.gangs.tree import DomainTree
from topology.quality import Bools, Ints


@dataclass(frozen=True, slots=True)
class Rules:
    """Restrictions of an attempt. one_island: no sets across islands for contiguous members; spare: spare hosts may be
    used; liking: no hosts with a preference below it, None for no bound; order: of valid placements."""

    one_island: bool = False
    spare: bool = True
    liking: int | None = None
    order: Order = Order.NEAREST


def descent_input(
    unit: PlacementUnit, occupancy: SearchOccupancy, rules: Rules, budget: StepBudget, allowed: Bools | None = None
) -> DescentInput:
    """Count how much of a unit every domain could hold."""
    tree = occupancy.snapshot.tree
    budget.count(len(occupancy.snapshot.hosts))
    capacity = _allowed(unit.pod_set, occupancy, rules, allowed, beside=None)
    beside, led = capacity, np.zeros(len(capacity), dtype=np.bool_)
    if unit.leader is not None:
        led = _allowed(unit.leader, occupancy, rules, allowed, beside=None) > 0
        beside = _allowed(unit.pod_set, occupancy, rules, allowed, beside=unit.leader)
    room = occupancy.room(unit.pod_set)
    counts = count_up(tree, capacity, beside=beside, led=led, shape=unit.shape, room=room)
    disliked = -_node_preference(unit.pod_set, occupancy.snapshot)
    return DescentInput(
        tree=tree,
        counts=counts,
        shape=unit.shape,
        need=unit.need,
        mode=unit.mode,
        level=unit.level,
        weights=_rolled(tree, occupancy.snapshot.gpus, np.add),
        likings=_rolled(tree, disliked, np.minimum),
        room={level: left for level, left in room.items() if level < tree.hosts},
        budget=budget,
    )


def place_unit(
    unit: PlacementUnit, occupancy: SearchOccupancy, *, rules: Rules, budget: StepBudget, allowed: Bools | None = None
) -> DescentResult | PlacementRefusal:
    """Best places of one unit; the occupancy does not change. allowed: hosts that may be used, None for all."""
    question = descent_input(unit, occupancy, rules, budget, allowed)
    found = find_balanced(question) if unit.balanced else None
    if found is None and question.tree.size(0):
        found = find_compatible(question) if rules.order is Order.KUEUE else _nearest(question)
    if found is not None:
        return found
    hosts = np.arange(len(occupancy.snapshot.hosts))
    among = hosts if allowed is None else hosts[allowed]
    return refusal(unit, occupancy, question.counts, question.counts.members[question.tree.hosts], among)


def host_capacity(pod_set: PodSet, snapshot: HostSnapshot) -> dict[str, int]:
    """Members of a pod set that each host could hold if nobody else came, hosts without room left out."""
    capacity = _allowed(pod_set, SearchOccupancy(snapshot), Rules(), None, beside=None)
    room = SearchOccupancy(snapshot).room(pod_set).get(snapshot.tree.hosts, capacity)
    rows = zip(snapshot.hosts, np.minimum(capacity, room).tolist(), strict=True)
    return {host.name: count for host, count in rows if count > 0}


def _nearest(question: DescentInput) -> DescentResult | None:
    """The nearest places. If several domains of the requested level are needed, the search is not exhaustive; Kueue's
    order is tried as well, so that Atoll never uses more of them."""
    found = find(question)
    if found is None or question.mode is not Mode.PREFERRED or found.level == question.level:
        return found
    other = find_compatible(question)
    return other if other is not None and other.spread[0] < found.spread[0] else found


def put(unit: PlacementUnit, found: DescentResult, occupancy: SearchOccupancy) -> None:
    """Give every member its place."""
    for place in found.hosts:
        if place.members:
            occupancy.put(unit.pod_set, place.host, place.members)
        if place.leader and unit.leader is not None:
            occupancy.put(unit.leader, place.host, 1)


def _allowed(
    pod_set: PodSet, occupancy: SearchOccupancy, rules: Rules, allowed: Bools | None, *, beside: PodSet | None
) -> Ints:
    snapshot = occupancy.snapshot
    capacity = occupancy.capacity(pod_set, beside=beside)
    out = [snapshot.index[name] for name in pod_set.excluded if name in snapshot.index]
    capacity[out] = 0
    if allowed is not None:
        capacity[~allowed] = 0
    if not rules.spare:
        capacity[snapshot.spare] = 0
    if rules.liking is not None and pod_set.preferences:
        capacity[_node_preference(pod_set, snapshot) < rules.liking] = 0
    return capacity


def _node_preference(pod_set: PodSet, snapshot: HostSnapshot) -> Ints:
    liking = np.zeros(len(snapshot.hosts), dtype=np.int64)
    for name, preference in pod_set.preferences.items():
        if name in snapshot.index:
            liking[snapshot.index[name]] = preference
    return liking


def _rolled(tree: DomainTree, values: Ints, combine: np.ufunc) -> tuple[Ints, ...]:
    rows = [values]
    for level in range(tree.hosts - 1, -1, -1):
        starts = tree.starts[level]
        rows.append(combine.reduceat(rows[-1], starts) if len(starts) else rows[-1][:0])
    return tuple(reversed(rows))
