"""Quality of a set of GPUs: the ring bandwidth available to collective communication.

Gives GB/s for every subset of a Machine (up to 16 devices) or for one set. Source of the model: NCCL runs as many rings
as edge-disjoint ring channels fit into the links (its search in src/graph/search.cc); if no ring of links passes
through all members, one ring runs at the slowest step of the best round trip over links and PCIe. Pairwise sums, the
usual proxy, rank meshes wrongly: a quad plus one has a high sum and no ring.

    two members        links x rate, or the PCIe path
    switch             the weakest member's links x rate
    link rings exist   one-way rings that fit x rate          (topology.rings)
    none               slowest step of the best round trip    (here)

Limits: this is a model, not a measurement; it ignores latency, tree algorithms and traffic of other sets.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from topology.canonical import canonical
from topology.links import LINKS_MAX, direct_links
from topology.model import Machine, mask_of, positions_of
from topology.rates import link_gbps, pcie_paths_gbps
from topology.rings import Packing, complete_rings, pack_rings

TABLE_DEVICES_MAX: Final = 16
"""Up to this many devices every subset has a row; beyond, sets are rated one by one."""
RINGS_DEVICES_MAX: Final = 8
"""Up to this many members rings are packed exactly; beyond, bounds are compared."""
EXACT_SETS_MAX: Final = 400
"""On machines with more than RINGS_DEVICES_MAX devices, sets of one size are packed exactly up to this number of
sets."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Matrix = tuple[tuple[float, ...], ...]
Links = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Rating:
    """Ring bandwidth of one set. linked: the ring runs over NVLink or xGMI alone; exact: no bound was hit."""

    ring_gbps: float
    linked: bool
    exact: bool


@dataclass(frozen=True, slots=True, eq=False)
class Qualities:
    """Ratings of all subsets, indexed by mask. Sets below two members have ring bandwidth 0."""

    ring_gbps: Floats
    linked: Bools
    exact: Bools


@lru_cache(maxsize=256)
def link_counts(machine: Machine) -> Links:
    """Direct links per pair."""
    return tuple(tuple(direct_links(cell) for cell in row) for row in machine.links)


@lru_cache(maxsize=256)
def qualities(machine: Machine) -> Qualities:
    """Ratings of every subset of a machine with at most TABLE_DEVICES_MAX devices.

    Computed once for all machines that differ only in the numbering of their GPUs.
    """
    assert machine.count <= TABLE_DEVICES_MAX
    form = canonical(machine)
    shared = _qualities(form.machine)
    if form.machine == machine:
        return shared
    there = form.there(np.arange(1 << machine.count, dtype=np.int64))
    return _frozen(shared.ring_gbps[there], shared.linked[there], shared.exact[there])


def _frozen(ring_gbps: Floats, linked: Bools, exact: Bools) -> Qualities:
    for array in (ring_gbps, linked, exact):
        array.flags.writeable = False
    return Qualities(ring_gbps=ring_gbps, linked=linked, exact=exact)


@lru_cache(maxsize=256)
def _qualities(machine: Machine) -> Qualities:
    ring = round_trips(_step_gbps(machine))
    linked = np.zeros(len(ring), dtype=np.bool_)
    exact = np.ones(len(ring), dtype=np.bool_)
    for mask, packing in _packings(machine):
        value = packing.count * link_gbps(machine)
        linked[mask] = packing.count > 0 and value >= ring[mask]
        ring[mask] = max(value, ring[mask])
        exact[mask] = packing.exact
    return _frozen(ring, linked, exact)


@lru_cache(maxsize=65536)
def rate(machine: Machine, positions: tuple[int, ...]) -> Rating:
    """Rating of one set of any machine."""
    if machine.count <= TABLE_DEVICES_MAX:
        table, mask = qualities(machine), mask_of(positions)
        return Rating(float(table.ring_gbps[mask]), bool(table.linked[mask]), bool(table.exact[mask]))
    return _rate_alone(machine, positions)


def sizes_of(count: int) -> Ints:
    """Number of members of every mask over `count` positions."""
    masks = np.arange(1 << count, dtype=np.uint64)
    return np.bitwise_count(masks).astype(np.int64)


def round_trips(steps: Matrix) -> Floats:
    """For every mask, the slowest step of the best round trip through all members (0 below two members)."""
    count = len(steps)
    values = sorted({steps[row][column] for row in range(count) for column in range(row)})
    best = np.zeros(1 << count)
    for value in values:
        adjacent = [
            mask_of([other for other in range(count) if other != row and steps[row][other] >= value])
            for row in range(count)
        ]
        best[_hamiltonian(tuple(adjacent))] = value
    return best


def _hamiltonian(adjacent: tuple[int, ...]) -> Bools:
    """Masks that have a round trip; two joined members count. Dynamic program over the ends of paths from the lowest
    member."""
    count = len(adjacent)
    masks = np.arange(1 << count, dtype=np.int64)
    lowest = masks & -masks
    sizes = sizes_of(count)
    ends = np.where(sizes == 1, masks, 0)
    for size in range(2, count + 1):
        layer = masks[sizes == size]
        reached = np.zeros(len(layer), dtype=np.int64)
        for member in range(count):
            bit = 1 << member
            extends = (layer & bit != 0) & (lowest[layer] != bit)
            previous = np.where(extends, ends[layer & ~bit], 0)
            reached |= np.where(previous & adjacent[member], bit, 0)
        ends[layer] = reached
    closing = np.zeros(1 << count, dtype=np.int64)
    for member in range(count):
        closing[lowest == 1 << member] = adjacent[member]
    closed: Bools = (sizes >= 2) & (ends & closing != 0)
    return closed


@lru_cache(maxsize=256)
def _step_gbps(machine: Machine) -> Matrix:
    """GB/s of one step between two members: all links of a linked pair, else the PCIe path."""
    paths, links, each = pcie_paths_gbps(machine), link_counts(machine), link_gbps(machine)
    return tuple(
        tuple(max(paths[row][column], links[row][column] * each) for column in range(machine.count))
        for row in range(machine.count)
    )


def _packings(machine: Machine) -> list[tuple[int, Packing]]:
    """Link rings of every subset that may have one."""
    links = link_counts(machine)
    if machine.nvswitch:
        return _switch_packings(links)
    if not any(map(any, links)):
        return []
    if machine.count > RINGS_DEVICES_MAX:
        return _cycle_packings(links)
    relay = machine.vendor != "amd"
    return [
        (mask_of(members), pack_rings(_inside(links, members), relay=relay))
        for size in range(2, machine.count + 1)
        for members in itertools.combinations(range(machine.count), size)
    ]


def _inside(links: Links, members: tuple[int, ...]) -> Links:
    return tuple(tuple(links[row][column] for column in members) for row in members)


def _switch_packings(links: Links) -> list[tuple[int, Packing]]:
    """Behind a switch all ring orders are equal: the member with the fewest links into the switch decides."""
    count = len(links)
    fewest = np.full(1 << count, max(map(max, links)), dtype=np.int64)
    masks = np.arange(1 << count)
    for first in range(count):
        for second in range(first):
            both = 1 << first | 1 << second
            inside = masks & both == both
            fewest[inside] = np.minimum(fewest[inside], links[first][second])
    return [(int(mask), Packing(int(fewest[mask]), exact=True)) for mask in masks[sizes_of(count) >= 2]]


def _cycle_packings(links: Links) -> list[tuple[int, Packing]]:
    """Machines with more devices: sets with a cycle of links; one method per size, so that ratings are comparable.

    Sizes with at most EXACT_SETS_MAX sets and up to RINGS_DEVICES_MAX members are packed exactly. Otherwise equal links
    have a closed form, and the rest gets a lower bound: the cycle whose weakest pair has the most links, used as often
    as it fits. The bound is exact if some member has no links left for more.
    """
    lower, upper, alike = _cycle_bounds(links)
    sizes = sizes_of(len(links))
    packings: list[tuple[int, Packing]] = []
    for size in range(2, len(links) + 1):
        masks = np.flatnonzero((sizes == size) & (lower > 0)).tolist()
        if size <= RINGS_DEVICES_MAX and len(masks) <= EXACT_SETS_MAX:
            packings += [(mask, pack_rings(_inside(links, positions_of(mask)), relay=False)) for mask in masks]
            continue
        for mask in masks:
            known = Packing(complete_rings(size, links=int(alike[mask]), relay=False), exact=True)
            bounded = Packing(int(lower[mask]), exact=bool(lower[mask] == upper[mask]))
            packings.append((mask, known if alike[mask] else bounded))
    return packings


def _cycle_bounds(links: Links) -> tuple[Ints, Ints, Ints]:
    """For every mask: one-way rings that fit for certain, one-way rings that may fit at most, and the links of a pair
    if all pairs are equal (else 0)."""
    count = len(links)
    masks = np.arange(1 << count, dtype=np.int64)
    lower = np.zeros(1 << count, dtype=np.int64)
    for least in sorted({cell for row in links for cell in row} - {0}):
        rows = range(count)
        adjacent = tuple(mask_of([other for other in rows if links[row][other] >= least]) for row in rows)
        lower[_hamiltonian(adjacent)] = 2 * least
    fewest, most, upper = lower + LINKS_MAX * count, 0 * lower, lower + LINKS_MAX * count
    for first in range(count):
        degree = 0 * lower
        for second in (other for other in range(count) if other != first):
            cell = links[first][second]
            degree += cell * (masks >> second & 1)
            both = masks & (1 << first | 1 << second) == 1 << first | 1 << second
            fewest[both] = np.minimum(fewest[both], cell)
            most[both] = np.maximum(most[both], cell)
        inside = masks >> first & 1 == 1
        upper[inside] = np.minimum(upper[inside], 2 * (degree[inside] // 2))
    return lower, upper, np.where(fewest == most, fewest, 0)


def _rate_alone(machine: Machine, members: tuple[int, ...]) -> Rating:
    """One set of a machine without a table: exact for switches, pairs and small sets, else the slowest needed step."""
    if len(members) < 2:
        return Rating(0.0, linked=False, exact=True)
    inside = _inside(link_counts(machine), members)
    whole = _step_gbps(machine)
    steps = tuple(tuple(whole[row][column] for column in members) for row in members)
    if machine.nvswitch:
        packing = Packing(min(cell for row, cells in enumerate(inside) for cell in cells[:row]), exact=True)
    elif len(members) <= RINGS_DEVICES_MAX:
        packing = pack_rings(inside, relay=machine.vendor != "amd")
    else:
        packing = Packing(0, exact=not any(map(any, inside)))
    value = packing.count * link_gbps(machine)
    trip, trip_exact = _round_trip_alone(steps)
    return Rating(max(value, trip), linked=packing.count > 0 and value >= trip, exact=packing.exact and trip_exact)


def _round_trip_alone(steps: Matrix) -> tuple[float, bool]:
    """Slowest step of the best round trip; above RINGS_DEVICES_MAX members, of the best path tree (marked inexact)."""
    if len(steps) <= RINGS_DEVICES_MAX:
        return float(round_trips(steps)[-1]), True
    joined, slowest = {0}, float("inf")
    while len(joined) < len(steps):
        reach = {
            outside: max(steps[inside][outside] for inside in joined)
            for outside in range(len(steps))
            if outside not in joined
        }
        nearest = max(reach, key=lambda outside: (reach[outside], -outside))
        slowest = min(slowest, reach[nearest])
        joined.add(nearest)
    alike = len({step for row, cells in enumerate(steps) for step in cells[:row]}) == 1
    return slowest, alike
