"""Replacement hosts for members whose hosts were lost, so that the gang's request still holds with the rest.

The snapshot must already exclude what the remaining members use; they count in `Limit.present` and `PodSet.excluded` as
others do. The Replacement has new places for as many lost
members as possible, and a PlacementRefusal for each part without one; one part without a spare host does not block the
others.

A part is a set that must stay together: the lost members of one broken slice, innermost first, stay in the domain of
the slice's rest; slices that were lost whole move as whole slices. A required level means the domain of most remaining
members; a preferred one is tried there first, then in the gang's other domains, in the next higher domain, and so on;
without a constraint the hosts in use come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from topology.gangs.descent import DescentResult, StepBudget
from topology.gangs.members import device_sets
from topology.gangs.model import Mode, PlacedMember, PlacementRefusal, PodSet, Slice, TopologyRequest
from topology.gangs.occupancy import SearchOccupancy
from topology.gangs.placing import Rules, place_unit, put
from topology.gangs.requests import PlacementUnit, unit_of
from topology.gangs.snapshot import HostSnapshot
from topology.quality import Bools

Anchors = Iterable[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Replacement:
    """members: replaced members with their new places, by rank; refusals: one per part without a place."""

    members: tuple[PlacedMember, ...]
    refusals: tuple[PlacementRefusal, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Ranks that move together. request: holds among them; within: hosts that they may use, nearest first."""

    ranks: tuple[int, ...]
    request: TopologyRequest
    within: tuple[Bools, ...]

    def split(self) -> list[_Part]:
        """Single slices, or single ranks without slices; empty if this is one already."""
        size = self.request.slices[0].size if self.request.slices else 1
        groups: dict[int, list[int]] = {}
        for rank in self.ranks:
            groups.setdefault(rank // size, []).append(rank)
        return [replace(self, ranks=tuple(ranks)) for ranks in groups.values()] if len(groups) > 1 else []


def replace_lost(
    pod_set: PodSet,
    snapshot: HostSnapshot,
    members: Sequence[PlacedMember],
    lost: Collection[str],
    *,
    anchors: Anchors = (),
) -> Replacement:
    """New places for the members on lost hosts. anchors: (level, hosts) of other members whose domain these must
    share."""
    remaining = [member for member in members if member.host not in lost and member.host in snapshot.index]
    gone = sorted(set(members) - set(remaining), key=lambda member: member.rank)
    unit = unit_of(replace(pod_set, count=0, min_count=None), None, pod_set.request, snapshot.tree)
    if isinstance(unit, PlacementRefusal):
        return Replacement((), (unit,))
    usable = np.array([host.name not in lost for host in snapshot.hosts], dtype=np.bool_)
    for level, hosts in anchors:
        usable &= _domain(snapshot, level, hosts)
    parts = _parts(pod_set, unit, snapshot, remaining, [member.rank for member in gone], usable)
    return _placed(pod_set, SearchOccupancy(snapshot), list(parts))


def _parts(
    pod_set: PodSet,
    unit: PlacementUnit,
    snapshot: HostSnapshot,
    remaining: Sequence[PlacedMember],
    gone: Sequence[int],
    usable: Bools,
) -> Iterator[_Part]:
    """Broken slices, then parts that move as a whole."""
    tree, request = snapshot.tree, pod_set.request
    hosts = [member.host for member in remaining]
    name = tree.name_of(unit.level)
    if not remaining:
        within: tuple[Bools, ...] = (usable,)
    elif unit.mode is Mode.UNCONSTRAINED:
        within = (usable & _in_use(snapshot, name, hosts), usable)
    elif unit.mode is Mode.REQUIRED:
        within = (usable & _domain(snapshot, name, hosts),)
    else:
        near, *wider = [usable & _domain(snapshot, tree.name_of(level), hosts) for level in range(unit.level, -1, -1)]
        within = (near, usable & _in_use(snapshot, name, hosts), *wider, usable)
    mode = Mode.PREFERRED if remaining and unit.mode is Mode.REQUIRED else unit.mode
    yield from _split(request.slices, snapshot, remaining, tuple(gone), within, TopologyRequest(mode, name))


def _split(
    slices: tuple[Slice, ...],
    snapshot: HostSnapshot,
    remaining: Sequence[PlacedMember],
    gone: tuple[int, ...],
    within: tuple[Bools, ...],
    request: TopologyRequest,
) -> Iterator[_Part]:
    """Parts among ranks that share a domain: each broken slice by itself, all whole ones together."""
    if not gone:
        return
    if not slices:
        yield _Part(gone, request, within)
        return
    outer, size = slices[0], slices[0].size
    left: dict[int, list[PlacedMember]] = {member.rank // size: [] for member in remaining}
    for member in remaining:
        left[member.rank // size].append(member)
    broken = sorted({rank // size for rank in gone} & left.keys())
    for number in broken:
        ranks = tuple(rank for rank in gone if rank // size == number)
        domain = _domain(snapshot, outer.level, [member.host for member in left[number]])
        inside = tuple(hosts & domain for hosts in within)
        yield from _split(
            slices[1:], snapshot, left[number], ranks, inside, TopologyRequest(Mode.PREFERRED, outer.level)
        )
    whole = tuple(rank for rank in gone if rank // size not in left)
    if whole:
        yield _Part(whole, replace(request, slices=slices if len(whole) % size == 0 else ()), within)


def _domain(snapshot: HostSnapshot, level: str, hosts: Sequence[str]) -> Bools:
    """Hosts of the domain with most of the given hosts; of equals, the one given first."""
    index = snapshot.tree.level_of(level)
    known = [snapshot.index[name] for name in hosts if name in snapshot.index]
    if index is None or not known:
        return np.ones(len(snapshot.hosts), dtype=np.bool_)
    above = snapshot.tree.above[index]
    most = Counter(above[known].tolist()).most_common(1)[0][0]
    inside: Bools = above == most
    return inside


def _in_use(snapshot: HostSnapshot, level: str, hosts: Sequence[str]) -> Bools:
    """Hosts of all domains that contain the given hosts."""
    index = snapshot.tree.level_of(level)
    assert index is not None, "the request was resolved before"
    above = snapshot.tree.above[index]
    inside: Bools = np.isin(above, above[[snapshot.index[name] for name in hosts if name in snapshot.index]])
    return inside


def _placed(pod_set: PodSet, occupancy: SearchOccupancy, parts: Sequence[_Part]) -> Replacement:
    budget = StepBudget()
    refusals: list[PlacementRefusal] = []
    places: dict[int, int] = {}
    left = list(reversed(parts))
    while left:
        part = left.pop()
        wanted = replace(pod_set, count=len(part.ranks), min_count=None, request=part.request)
        unit = unit_of(wanted, None, part.request, occupancy.snapshot.tree)
        found = unit if isinstance(unit, PlacementRefusal) else _first(unit, occupancy, part.within, budget)
        if isinstance(found, PlacementRefusal) or isinstance(unit, PlacementRefusal):
            smaller = part.split()
            left += reversed(smaller)
            refusals += [found] if isinstance(found, PlacementRefusal) and not smaller else []
            continue
        put(unit, found, occupancy)
        hosts = [place.host for place in sorted(found.hosts, key=lambda one: one.host) for _ in range(place.members)]
        places.update(zip(part.ranks, hosts, strict=True))
    return Replacement(_members(pod_set, occupancy, places), tuple(refusals))


def _first(
    unit: PlacementUnit, occupancy: SearchOccupancy, within: Iterable[Bools], budget: StepBudget
) -> DescentResult | PlacementRefusal:
    """The nearest hosts that serve; spare hosts are allowed, because they exist for repairs."""
    refused: PlacementRefusal | None = None
    for allowed in within:
        found = place_unit(unit, occupancy, rules=Rules(), budget=budget, allowed=allowed)
        if isinstance(found, DescentResult):
            return found
        refused = found
    assert refused is not None, "a part names at least one set of hosts"
    return refused


def _members(pod_set: PodSet, occupancy: SearchOccupancy, places: dict[int, int]) -> tuple[PlacedMember, ...]:
    """Members by rank."""
    sets = device_sets(occupancy)
    found: list[PlacedMember] = []
    for rank, host in sorted(places.items()):
        queue = sets.get((host, pod_set.name), [])
        found.append(PlacedMember(rank, occupancy.snapshot.hosts[host].name, queue.pop(0) if queue else ()))
    return tuple(found)
