"""Oracle of the gang search: tries every count of members on every host.

It checks whether a placement is valid and finds the nearest ones, for a gang on a few hosts. It shares no code with the
search: slices, leaders, limits and capacities are defined a second time. Complexity: exponential in hosts and members;
for up to six hosts, six members of a pod set, machines of up to eight GPUs and two pod sets.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tests.oracles.placement import admits
from topology.device_requests import DeviceRequest
from topology.gangs.model import Gang, Host, Mode, PodSet, TopologyRequest
from topology.model import Machine

Counts = Mapping[str, Mapping[str, int]]
"""Per pod set, members per host."""


@dataclass(frozen=True)
class ReferenceCluster:
    """Names of levels, highest first, and hosts."""

    levels: tuple[str, ...]
    hosts: tuple[Host, ...]

    def domain(self, host: str, level: str) -> tuple[str, ...]:
        """Return a host's domain of a level; below the lowest level, the host itself."""
        found = next(one for one in self.hosts if one.name == host)
        if level in self.levels:
            return found.path[: self.levels.index(level) + 1]
        return (*found.path, found.name)


def nearest(gang: Gang, world: ReferenceCluster) -> tuple[int, int] | None:
    """Return the least distance of any placement, or None without one; for a gang of one pod set, or one with its
    leader. The distance is (steps up from the requested level to a single domain, domains of the requested level)."""
    return min((distance(gang, world, counts) for counts in placements(gang, world)), default=None)


def distance(gang: Gang, world: ReferenceCluster, counts: Counts) -> tuple[int, int]:
    """Return steps up from the requested level, and domains of the requested level that the workers use."""
    request = workers_of(gang).request
    names = [*world.levels, "host"]
    wanted = request.level if request.mode in (Mode.REQUIRED, Mode.PREFERRED) else "host"
    used = {host for there in counts.values() for host, count in there.items() if count}
    asked = names.index(wanted)
    steps = 0
    while steps <= asked and len({world.domain(host, names[asked - steps]) for host in used}) > 1:
        steps += 1
    return steps, len({world.domain(host, wanted) for host in used})


def workers_of(gang: Gang) -> PodSet:
    """Return the pod set whose request counts: the larger one, or the first of equals."""
    return max(gang.pod_sets, key=lambda pod_set: pod_set.count)


def placements(gang: Gang, world: ReferenceCluster) -> Iterator[Counts]:
    """Yield every valid placement."""
    names = [host.name for host in world.hosts]
    choices = [_shares(pod_set.count, len(names)) for pod_set in gang.pod_sets]
    for shares in itertools.product(*choices):
        counts = {
            pod_set.name: {name: count for name, count in zip(names, share, strict=True) if count}
            for pod_set, share in zip(gang.pod_sets, shares, strict=True)
        }
        if not faults(gang, world, counts):
            yield counts


def faults(gang: Gang, world: ReferenceCluster, counts: Counts) -> list[str]:
    """Return the violations of a placement; empty if it is valid."""
    found = [f"{one.name} is not whole" for one in gang.pod_sets if sum(counts[one.name].values()) != one.count]
    for pod_set in gang.pod_sets:
        found += [f"{host} is excluded" for host in counts[pod_set.name] if host in pod_set.excluded]
        for limit in pod_set.limits:
            sums = _sums(world, counts[pod_set.name], limit.level)
            found += [f"{pod_set.name} passes its limit" for count in sums.values() if count > limit.count]
    for host in world.hosts:
        there = {one.name: counts[one.name].get(host.name, 0) for one in gang.pod_sets}
        if any(there.values()) and not holds(host, gang.pod_sets, there):
            found.append(f"{host.name} cannot hold {there}")
    return found + _request_faults(gang, world, counts)


def _request_faults(gang: Gang, world: ReferenceCluster, counts: Counts) -> list[str]:
    together = {host for there in counts.values() for host in there}
    found = _required(gang.whole, world, together, "the gang")
    for pod_set in gang.pod_sets:
        mates = [one for one in gang.pod_sets if pod_set.group and one.group == pod_set.group]
        leading = max(mates, key=lambda one: one.count) if len(mates) == 2 else pod_set
        if leading is not pod_set:
            continue
        used = {host for one in (mates or [pod_set]) for host in counts[one.name]}
        found += _required(pod_set.request, world, used, pod_set.name)
        for part in pod_set.request.slices:
            sums = _sums(world, counts[pod_set.name], part.level)
            found += [f"{pod_set.name} tears a slice" for count in sums.values() if count % part.size]
    return found


def _required(request: TopologyRequest, world: ReferenceCluster, used: set[str], name: str) -> list[str]:
    domains = {world.domain(host, request.level) for host in used}
    return [f"{name} is torn apart"] if request.mode is Mode.REQUIRED and len(domains) > 1 else []


def _sums(world: ReferenceCluster, there: Mapping[str, int], level: str) -> Counter[tuple[str, ...]]:
    sums: Counter[tuple[str, ...]] = Counter()
    for host, count in there.items():
        sums[world.domain(host, level)] += count
    return sums


def _shares(total: int, places: int) -> list[tuple[int, ...]]:
    """Return every way to distribute `total` members over `places`."""
    if places == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in _shares(total - first, places - 1)]


def holds(host: Host, pod_sets: Sequence[PodSet], there: Mapping[str, int]) -> bool:
    """True if a host has room for these members of each pod set, with GPUs in disjoint sets."""
    here = [one for one in pod_sets if there[one.name]]
    resources = {resource for one in here for resource in one.needs}
    for resource in resources:
        if sum(one.needs.get(resource, 0) * there[one.name] for one in here) > host.free.get(resource, 0):
            return False
    if any(other.name in one.apart for one in here for other in here if other is not one):
        return False
    asks = tuple(
        (one.ask, tuple(one.admitted.get(host.kind, ()))) for one in here if one.ask for _ in range(there[one.name])
    )
    free = tuple(position for position in range(64) if host.free_mask >> position & 1)
    return not asks or (host.machine is not None and _sets_exist(host.machine, free, asks))


@cache
def _sets_exist(
    machine: Machine, free: tuple[int, ...], asks: tuple[tuple[DeviceRequest, tuple[int, ...]], ...]
) -> bool:
    """True if the first request has a set that leaves room for the others."""
    if not asks:
        return True
    ask, masks = asks[0]
    for members in itertools.combinations(free, ask.count):
        inside = not masks or any(all(mask >> position & 1 for position in members) for mask in masks)
        if inside and admits(machine, members, ask):
            rest = tuple(position for position in free if position not in members)
            if _sets_exist(machine, rest, asks[1:]):
                return True
    return False
