"""A gang's requests resolved against a tree: levels, groups of members, leaders.

Gives frozen PlacementUnits in the order of the pod sets, or the PlacementRefusal that no state of the hosts could
change. Search, repair and refusals share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from topology.gangs.counts import GroupShape
from topology.gangs.model import HOST, Cause, Gang, Mode, PlacementRefusal, PodSet, Slice, TopologyRequest
from topology.gangs.tree import DomainTree


@dataclass(frozen=True, slots=True, eq=False)
class PlacementUnit:
    """A pod set placed as one, with its leader if it has one. level: index of the requested level; need: outermost
    slices; group: units that share one domain of a required level."""

    pod_set: PodSet
    leader: PodSet | None
    mode: Mode
    level: int
    shape: GroupShape
    need: int
    balanced: bool
    group: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """A request for all units together; level is an index."""

    mode: Mode
    level: int


def units_of(gang: Gang, tree: DomainTree) -> tuple[PlacementUnit, ...] | PlacementRefusal:
    """One unit per pod set or per pair of leader and workers."""
    units: list[PlacementUnit] = []
    pairs = _paired(gang)
    for workers, leader in pairs:
        request = workers.request
        mates = [other for other, _ in pairs if workers.group and other.group == workers.group]
        if len(mates) > 1:
            request = _group_request(workers, mates)
        if len(pairs) == 1 and request.mode is Mode.UNCONSTRAINED and not request.slices:
            request = gang.whole
        unit = unit_of(workers, leader, request, tree)
        if isinstance(unit, PlacementRefusal):
            return unit
        units.append(replace(unit, group=workers.group if len(mates) > 1 else ""))
    return tuple(units)


def _group_request(pod_set: PodSet, mates: Sequence[PodSet]) -> TopologyRequest:
    """The request of the group's largest pod set, with a pod set's own slices."""
    leading = max(mates, key=lambda one: one.count).request
    return replace(leading, slices=leading.slices if pod_set.request == leading else ())


def unit_of(
    workers: PodSet, leader: PodSet | None, request: TopologyRequest, tree: DomainTree
) -> PlacementUnit | PlacementRefusal:
    """Resolve one request."""
    level = _level(request, tree)
    if level is None:
        return _no_level(workers.name, request.level, tree)
    shape = _shape(workers, request.slices, tree, above=level, has_leader=leader is not None)
    if isinstance(shape, PlacementRefusal):
        return shape
    mode = Mode.PREFERRED if request.mode is Mode.AUTO or _is_slices_only(request) else request.mode
    return PlacementUnit(workers, leader, mode, level, shape, workers.count // shape.size, request.balanced)


def whole_of(gang: Gang, tree: DomainTree) -> Whole | PlacementRefusal:
    """Resolve the request for everything together; its slices are ignored in favour of the pod sets' own."""
    level = _level(gang.whole, tree)
    if level is None:
        return _no_level("", gang.whole.level, tree)
    return Whole(gang.whole.mode, level)


def _paired(gang: Gang) -> list[tuple[PodSet, PodSet | None]]:
    """Workers with their leader, in the order of the first of each; pod sets of any other kind of group by
    themselves."""
    groups: dict[str, list[PodSet]] = {}
    for position, pod_set in enumerate(gang.pod_sets):
        groups.setdefault(pod_set.group or f"\0{position}", []).append(pod_set)
    pairs: list[tuple[PodSet, PodSet | None]] = []
    for members in groups.values():
        if len(members) == 2 and min(member.count for member in members) == 1:
            first, second = members
            pairs.append((second, first) if second.count > first.count else (first, second))
        else:
            pairs += [(member, None) for member in members]
    return pairs


def _is_slices_only(request: TopologyRequest) -> bool:
    return request.mode is Mode.UNCONSTRAINED and bool(request.slices)


def _level(request: TopologyRequest, tree: DomainTree) -> int | None:
    if request.mode in (Mode.REQUIRED, Mode.PREFERRED):
        return tree.level_of(request.level)
    if not request.slices:
        return tree.hosts
    return tree.level_of(request.slices[0].level) if request.mode is Mode.AUTO else 0


def _no_level(pod_set: str, level: str, tree: DomainTree) -> PlacementRefusal:
    known = ", ".join((*tree.levels, HOST))
    return PlacementRefusal(
        Cause.NO_LEVEL, pod_set, level, problem=f"the topology has no level {level!r}, only {known}"
    )


def _shape(
    pod_set: PodSet, slices: tuple[Slice, ...], tree: DomainTree, *, above: int, has_leader: bool
) -> GroupShape | PlacementRefusal:
    """Groups by level index; every level between two slices takes multiples of the inner one."""
    size, outer = 1, tree.hosts
    inner: dict[int, int] = {}
    last_size, last_level = pod_set.count, above - 1
    for position, part in enumerate(slices):
        level = tree.level_of(part.level)
        if level is None:
            return _no_level(pod_set.name, part.level, tree)
        if level <= last_level:
            return _bad(pod_set, f"slices of {part.size} at {part.level} must lie below {tree.name_of(last_level)}")
        if last_size % part.size:
            return _bad(pod_set, f"slices of {part.size} at {part.level} do not divide {last_size} members")
        if position == 0:
            size, outer = part.size, level
        else:
            inner.update(dict.fromkeys(range(last_level + 1, level + 1), part.size))
        last_size, last_level = part.size, level
    return GroupShape(size, outer, tuple(sorted(inner.items())), has_leader)


def _bad(pod_set: PodSet, problem: str) -> PlacementRefusal:
    return PlacementRefusal(Cause.BAD_SLICES, pod_set.name, problem=problem)
