"""Oracle of placement: simple, slow brute force for the results of topology.

It computes ring bandwidths, fragmentation losses, costs and best sets of a machine by trying all possibilities. It
shares data types and the policies' weights with the fast path, but no code: cells, rates, rings and islands are defined
a second time. Complexity: exponential in the number of devices; for machines of up to eight devices, and rings of up to
six members on dense meshes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache

from topology.demand import Demand
from topology.device_requests import DeviceRequest, Interconnect
from topology.model import Machine
from topology.policies import POLICIES, QUALITY_FIRST

CLOSE = ("NS", "SYS", "NODE", "PHB", "PXB", "PIX", "PSB")
Set = tuple[int, ...]
Arcs = tuple[tuple[int, int], ...]


def forget() -> None:
    """Clear all caches."""
    for kept in (ring_gbps, link_rings, loss, relative_quality, _one_island, _full_sets, _near):
        kept.cache_clear()


def links_between(machine: Machine, first: int, second: int) -> int:
    """Number of direct links in a cell."""
    digits = machine.links[first][second].removeprefix("NV").removeprefix("XGMI")
    return int(digits) if digits.isdigit() else 0


def link_rate(machine: Machine) -> float:
    """GB/s of one direct link."""
    told = machine.link_gbps or 0.0
    if machine.vendor == "amd":
        return 48.0 if told > 57 else 36.0 if told > 48 else 24.0
    if machine.nvlink_generation == 1:
        return 18.0
    if machine.nvlink_generation == 4:
        return 20.6
    if machine.nvlink_generation == 5:
        return 40.1
    if machine.link_gbps is None:
        return 20.0 if machine.nvlink_generation in (2, 3) else 12.0
    return 12.0 if told < 18 else 20.0


def relation(machine: Machine, first: int, second: int) -> str:
    """PCIe relation, reported or guessed from NUMA nodes."""
    if machine.pcie is not None:
        return machine.pcie[first][second]
    if links_between(machine, first, second) == 0:
        return machine.links[first][second]
    near = machine.numa[first] is not None and machine.numa[first] == machine.numa[second]
    return "NODE" if near else "SYS"


def path_rate(machine: Machine, first: int, second: int) -> float:
    """GB/s of the PCIe path of a pair."""
    slot = {3: 12.0, 4: 24.0, 5: 48.0}.get(machine.pcie_generation or 3, 12.0)
    near = relation(machine, first, second)
    if near in ("PSB", "PIX", "PXB"):
        return slot
    if near in ("PHB", "NODE"):
        return slot / 1.2
    across = min(slot / 1.2, machine.inter_socket_gbps or 6.0)
    return across / 2 if near == "NS" else across


@cache
def ring_gbps(machine: Machine, members: Set) -> float:
    """Ring bandwidth of a set in GB/s: rings of links, otherwise the slowest step of the best round trip."""
    if len(members) < 2:
        return 0.0
    trips = [min(_step(machine, *step) for step in _steps(order)) for order in _round_trips(members)]
    rings = link_rings(machine, members)
    return max(max(trips), rings * link_rate(machine))


@cache
def link_rings(machine: Machine, members: Set) -> int:
    """Number of one-way rings of links that fit at the same time."""
    pairs = [(first, second) for first in members for second in members if first != second]
    if machine.nvswitch or len(members) == 2:
        return min(links_between(machine, *pair) for pair in pairs)
    relay = machine.vendor != "amd"
    left = {pair: links_between(machine, *pair) for pair in pairs}
    if relay:
        return _most_rings(left, sorted(set(_one_way_rings(machine, members))))
    cycles = {tuple(sorted((min(step), max(step)) for step in _steps(order))) for order in _round_trips(members)}
    undirected = {pair: links for pair, links in left.items() if pair[0] < pair[1]}
    return 2 * _most_rings(undirected, sorted(cycles))


def islands(machine: Machine) -> list[set[int]]:
    """Sets joined by direct links; devices without links by NUMA node, or by any PCIe path within a socket."""
    count = machine.count
    linked = {
        device: any(links_between(machine, device, other) for other in range(count) if other != device)
        for device in range(count)
    }

    def together(first: int, second: int) -> bool:
        if linked[first] or linked[second]:
            return first != second and links_between(machine, first, second) > 0
        if machine.numa[first] is None or machine.numa[second] is None:
            return machine.numa[first] == machine.numa[second] and machine.links[first][second] not in ("SYS", "NS")
        return machine.numa[first] == machine.numa[second]

    parts = [{device} for device in range(count)]
    for first, second in itertools.combinations(range(count), 2):
        if together(first, second):
            one = next(part for part in parts if first in part)
            other = next(part for part in parts if second in part)
            if one is not other:
                one |= other
                parts.remove(other)
    return parts


@cache
def loss(machine: Machine, free: Set, demand: Demand) -> float:
    """Expected GPUs of a free set that requests of the usual sizes cannot use at full quality."""
    total = sum(count * share for count, share in demand.shares if count <= machine.count)
    lost = 0.0
    for count, share in demand.shares:
        if count <= machine.count:
            weight = count * share / total * (1.5 if count == machine.count else 1)
            lost += weight * (len(free) - count * _disjoint(free, _full_sets(machine, count)))
    return lost


def admits(machine: Machine, members: Set, ask: DeviceRequest) -> bool:
    """True if a set meets every hard condition of the request."""
    if len(members) != ask.count:
        return False
    pairs = list(itertools.combinations(members, 2))
    if ask.interconnect is Interconnect.NVLINK and not all(links_between(machine, *pair) for pair in pairs):
        return False
    if ask.interconnect is Interconnect.PCIE and any(links_between(machine, *pair) for pair in pairs):
        return False
    if POLICIES[ask.policy].one_island and not _one_island(machine, members):
        return False
    return not pairs or ring_gbps(machine, members) >= ask.min_bandwidth_gbps - 1e-6


def cost(machine: Machine, free: Set, members: Set, ask: DeviceRequest, demand: Demand) -> float:
    """Cost of taking `members` out of `free`, as defined in topology.policies."""
    weights = POLICIES[ask.policy]
    rest = tuple(device for device in free if device not in members)
    pairs = list(itertools.combinations(members, 2))
    total = weights.alpha * (1 - relative_quality(machine, members)) + weights.pack * len(free)
    if pairs and not _one_island(machine, members):
        total += weights.apart
    if pairs and link_rings(machine, members) * link_rate(machine) < ring_gbps(machine, members):
        total += weights.unlinked
    if weights.crowd:
        total += weights.crowd * sum(_crowd(machine, *pair) for pair in pairs) / max(len(pairs), 1)
        total -= weights.near * (_sum(_crowd, machine, free) - _sum(_crowd, machine, rest))
    else:
        total += weights.near * sum(_near(machine, member, other) for member in members for other in rest)
        total -= weights.near * _sum(_near, machine, members)
    if weights.loss:
        total += weights.loss * (loss(machine, rest, demand) - loss(machine, free, demand))
    return total


def best(machine: Machine, free: Set, ask: DeviceRequest, demand: Demand) -> tuple[Set, float] | None:
    """First set in the documented order, with its cost; None if no set is admitted."""
    found = [members for members in itertools.combinations(sorted(free), ask.count) if admits(machine, members, ask)]
    if not found:
        return None

    def order(members: Set) -> tuple[float, float, Set]:
        total = cost(machine, free, members, ask, demand)
        if POLICIES[ask.policy].ranks_quality and ask.count > 1:
            apart = 0 if _one_island(machine, members) else 10
            total += QUALITY_FIRST * (1 - relative_quality(machine, members) + apart)
        return round(total, 6), round(1 - relative_quality(machine, members), 6), members

    first = min(found, key=order)
    return first, cost(machine, free, first, ask, demand)


@cache
def relative_quality(machine: Machine, members: Set) -> float:
    """Ring bandwidth relative to the best set of that size on the empty machine."""
    if len(members) < 2:
        return 1.0
    sets = itertools.combinations(range(machine.count), len(members))
    return ring_gbps(machine, members) / max(ring_gbps(machine, one) for one in sets)


def _steps(order: Set) -> Arcs:
    return tuple(zip(order, (*order[1:], order[0]), strict=True))


def _round_trips(members: Set) -> Iterable[Set]:
    return ((members[0], *others) for others in itertools.permutations(members[1:]))


def _step(machine: Machine, first: int, second: int) -> float:
    links = links_between(machine, first, second) * link_rate(machine)
    return max(links, path_rate(machine, first, second))


def _one_way_rings(machine: Machine, members: Set) -> Iterable[Arcs]:
    """Yield every ring with every choice of relays, as its sorted links."""
    for order in _round_trips(members):
        ways = [_ways(machine, members, *step) for step in _steps(order)]
        for chosen in itertools.product(*ways):
            yield tuple(sorted(itertools.chain.from_iterable(chosen)))


def _ways(machine: Machine, members: Set, start: int, end: int) -> list[Arcs]:
    if links_between(machine, start, end):
        return [((start, end),)]
    others = [via for via in members if via not in (start, end)]
    return [
        ((start, via), (via, end))
        for via in others
        if links_between(machine, start, via) and links_between(machine, via, end)
    ]


def _most_rings(left: dict[tuple[int, int], int], rings: list[Arcs]) -> int:
    """Maximum number of rings: take each ring as often as possible or fewer, in order."""
    fitting = [ring for ring in rings if all(ring.count(arc) <= left[arc] for arc in ring)]
    if not fitting:
        return 0
    most = 0
    for index, ring in enumerate(fitting):
        after = {arc: links - ring.count(arc) for arc, links in left.items()}
        most = max(most, 1 + _most_rings(after, fitting[index:]))
    return most


@cache
def _one_island(machine: Machine, members: Set) -> bool:
    return any(set(members) <= part for part in islands(machine))


@cache
def _full_sets(machine: Machine, count: int) -> list[Set]:
    sets = list(itertools.combinations(range(machine.count), count))
    return [members for members in sets if relative_quality(machine, members) > 1 - 1e-6]


def _disjoint(free: Set, sets: list[Set]) -> int:
    inside = [members for members in sets if set(members) <= set(free)]
    counts = [
        1 + _disjoint(tuple(device for device in free if device not in members), inside[index:])
        for index, members in enumerate(inside)
    ]
    return max(counts, default=0)


@cache
def _near(machine: Machine, first: int, second: int) -> float:
    devices = range(machine.count)
    most = max(links_between(machine, one, other) for one in devices for other in devices if one != other)
    links = links_between(machine, first, second) / most if most else 0.0
    path = CLOSE.index(relation(machine, first, second)) - 1 + _same_numa(machine, first, second)
    if machine.nics is None:
        return (links + path / 6) / 2
    return (links + (path + _same_nic(machine, first, second)) / 7) / 2


def _same_nic(machine: Machine, first: int, second: int) -> bool:
    """True if an adapter below the host bridge is a nearest adapter of both devices."""

    def ranks(device: int) -> list[int]:
        return [CLOSE.index(cell) for cell in machine.nics[device]] if machine.nics else []

    nodes = CLOSE.index("NODE")
    return any(
        one == max(ranks(first)) and other == max(ranks(second)) and one > nodes and other > nodes
        for one, other in zip(ranks(first), ranks(second), strict=True)
    )


def _crowd(machine: Machine, first: int, second: int) -> float:
    return (_one_island(machine, (first, second)) + _same_numa(machine, first, second)) / 2


def _same_numa(machine: Machine, first: int, second: int) -> bool:
    return machine.numa[first] is not None and machine.numa[first] == machine.numa[second]


def _sum(weight: Callable[[Machine, int, int], float], machine: Machine, devices: Set) -> float:
    return sum(weight(machine, first, second) for first, second in itertools.combinations(devices, 2))
