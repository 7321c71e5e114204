"""Host and GPUs of each member, by rank.

Makes a Placement of the hosts found for each unit. Hosts are filled one after the other in the order of their paths, so
members of consecutive ranks share the lowest common domain, and every slice is a run of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topology.gangs import devices
from topology.gangs.descent import DescentResult, StepBudget
from topology.gangs.errors import GangError
from topology.gangs.model import DomainCount, Gang, PlacedMember, Placement, PodSet, PodSetPlacement
from topology.gangs.occupancy import SearchOccupancy
from topology.gangs.requests import PlacementUnit
from topology.gangs.snapshot import HostSnapshot
from topology.gangs.tree import DomainTree
from topology.model import positions_of

Sets = dict[tuple[int, str], list[tuple[int, ...]]]


def placement_of(
    gang: Gang,
    units: Sequence[PlacementUnit],
    founds: Sequence[DescentResult],
    occupancy: SearchOccupancy,
    budget: StepBudget,
) -> Placement:
    """Assign hosts and GPUs to every rank of every pod set, in the gang's order."""
    counts: dict[str, list[tuple[int, int]]] = {pod_set.name: [] for pod_set in gang.pod_sets}
    for unit, found in zip(units, founds, strict=True):
        for place in sorted(found.hosts, key=lambda one: one.host):
            if place.members:
                counts[unit.pod_set.name].append((place.host, place.members))
            if place.leader and unit.leader is not None:
                counts[unit.leader.name].append((place.host, 1))
    snapshot = occupancy.snapshot
    sets = device_sets(occupancy)
    return Placement(
        levels=snapshot.tree.levels,
        assignments=tuple(_assignment(pod_set, counts[pod_set.name], snapshot, sets) for pod_set in gang.pod_sets),
        steps=budget.steps,
        bounded=budget.bounded,
    )


def device_sets(occupancy: SearchOccupancy) -> Sets:
    """GPUs per host and pod set, one set per member; sets of one host are chosen together.

    Raises GangError if a host's GPUs cannot serve what was promised there, which capacities rule out.
    """
    snapshot = occupancy.snapshot
    sets: Sets = {}
    for host, wants in occupancy.wants.items():
        board, free, kind = snapshot.cells[int(snapshot.cell_of[host])]
        found = devices.sets_for(board, free, wants) if board is not None else None
        if found is None:
            raise GangError("promised more GPUs than the host can give", value=snapshot.hosts[host].name)
        queues = {want: list(masks) for (want, _), masks in zip(wants, found, strict=True)}
        for name, count in occupancy.members[host].items():
            pod_set = occupancy.placed[name]
            if pod_set.ask is not None:
                queue = queues[occupancy.want(pod_set, kind)]
                sets[host, name] = [positions_of(queue.pop(0)) for _ in range(count)]
    return sets


def shared_level(tree: DomainTree, hosts: Sequence[int]) -> str:
    """Name of the lowest level at which one domain holds all these hosts; empty if there is none."""
    index = np.array(hosts, dtype=np.int64)
    for level in range(tree.hosts, -1, -1):
        if len(np.unique(tree.above[level][index])) == 1:
            return tree.name_of(level)
    return ""


def domain_path(snapshot: HostSnapshot, host: int) -> tuple[str, ...]:
    """A host's path, ending in its own name once."""
    path, name = snapshot.hosts[host].path, snapshot.hosts[host].name
    return path if path and path[-1] == name else (*path, name)


def _assignment(
    pod_set: PodSet, counts: Sequence[tuple[int, int]], snapshot: HostSnapshot, sets: Sets
) -> PodSetPlacement:
    members: list[PlacedMember] = []
    for host, count in counts:
        given = sets.get((host, pod_set.name), [()] * count)
        members += [
            PlacedMember(len(members) + position, snapshot.hosts[host].name, given[position])
            for position in range(count)
        ]
    return PodSetPlacement(
        pod_set=pod_set.name,
        level=shared_level(snapshot.tree, [host for host, _ in counts]),
        domains=tuple(DomainCount(domain_path(snapshot, host), count) for host, count in counts),
        members=tuple(members),
    )
