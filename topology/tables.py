"""Tables: the best set and its cost for every free mask, for one machine and one request.

A `Table` is cached by value, so that filter, prioritize and bind read the same cells and cannot disagree. Up to
EAGER_DEVICES_MAX devices a table is filled at once (256 cells, about a millisecond); up to TABLE_DEVICES_MAX its cells
are filled when a free mask first occurs.

Total order of sets: rank, then link quality, then positions, lexicographically. Costs are rounded to a millionth so
that equal sums tie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from topology.canonical import Canonical, canonical
from topology.closeness import closeness, crowding, pair_sums
from topology.demand import PRIOR, Demand
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.fragmentation import losses, losses_exact, relative_qualities
from topology.islands import islands
from topology.links import direct_links
from topology.model import Machine, mask_of, positions_of
from topology.policies import POLICIES, QUALITY_FIRST, Weights
from topology.quality import Bools, Floats, Ints, qualities, sizes_of

EAGER_DEVICES_MAX: Final = 8
DECIMALS: Final = 6
NONE: Final = -1
CELLS_AT_ONCE: Final = 1 << 18
BANDWIDTH_SLACK: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Sets:
    """All sets of one size that a request admits, by link quality and then positions, with the parts of their cost that
    do not depend on what else is free. lost: link quality lost."""

    masks: Ints
    cost: Floats
    rank: Floats
    lost: Floats
    exact: bool


class Table:
    """Best set and cost per free mask. `costs` is inf if no set fits and nan if not computed yet."""

    def __init__(self, machine: Machine, ask: DeviceRequest, demand: Demand) -> None:
        weights = POLICIES[ask.policy]
        self.sets = admitted_sets(machine, ask)
        self.exact = self.sets.exact and (not weights.loss or losses_exact(machine, demand))
        self.costs = np.full(1 << machine.count, np.nan)
        self._chosen = np.full(1 << machine.count, NONE, dtype=np.int32)
        self._potential = _potential(machine, ask.policy, demand)
        self._pack = weights.pack
        if machine.count <= EAGER_DEVICES_MAX:
            self._fill(np.arange(1 << machine.count))

    @property
    def memory_bytes(self) -> int:
        """Bytes of this table's arrays, without those that tables of one machine share."""
        own = (self.costs, self._chosen, self.sets.masks, self.sets.cost, self.sets.rank, self.sets.lost)
        return sum(array.nbytes for array in own)

    def chosen(self, free: int) -> int | None:
        """Mask of the best set inside `free`; None when no admitted set fits."""
        self.cost(free)
        index = int(self._chosen[free])
        return None if index == NONE else int(self.sets.masks[index])

    def cost(self, free: int) -> float:
        """Cost of that set; inf when there is none."""
        cost = float(self.costs[free])
        return cost if not math.isnan(cost) else float(self.costs_of(np.array([free]))[0])

    def costs_of(self, free_masks: Ints) -> Floats:
        """Costs of many free masks at once; unknown cells are computed and kept."""
        costs = self.costs[free_masks]
        unknown = np.unique(free_masks[np.isnan(costs)])
        if len(unknown):
            self._fill(unknown)
            costs = self.costs[free_masks]
        return costs

    def best_with(self, free: int, required: int) -> tuple[int, float] | None:
        """Mask and cost of the best set inside `free` that contains `required`; computed anew, not kept."""
        masks, cost = self.equals(free, required)
        return (int(masks[0]), cost) if len(masks) else None

    def equals(self, free: int, required: int = 0) -> tuple[Ints, float]:
        """All sets inside `free` that contain `required` and tie for first place, in the order of positions, and their
        cost."""
        fitting = np.flatnonzero((self.sets.masks & ~free == 0) & (self.sets.masks & required == required))
        if not len(fitting):
            return self.sets.masks[:0], math.inf
        rest = self._potential[free & ~self.sets.masks[fitting]]
        ranks = np.round(self.sets.rank[fitting] + rest, DECIMALS)
        least = np.flatnonzero(ranks == ranks.min())
        least = least[self.sets.lost[fitting[least]] == self.sets.lost[fitting[least[0]]]]
        cost = np.round(self.sets.cost[fitting[least[0]]] + rest[least[0]] + self._own(free), DECIMALS)
        return self.sets.masks[fitting[least]], float(cost)

    def _own(self, free: int | Ints) -> Floats:
        """The part of the cost that is the same for every set of a free mask."""
        sizes = np.bitwise_count(np.asarray(free, dtype=np.uint64)).astype(np.int64)
        own: Floats = self._pack * sizes - self._potential[free]
        return own

    def _fill(self, free_masks: Ints) -> None:
        """Compute the cells of these masks, some rows of (mask, set) at a time."""
        self.costs[free_masks] = np.inf
        if not len(self.sets.masks):
            return
        rows = max(1, CELLS_AT_ONCE // len(self.sets.masks))
        for start in range(0, len(free_masks), rows):
            self._fill_rows(free_masks[start : start + rows])

    def _fill_rows(self, free_masks: Ints) -> None:
        fits = self.sets.masks & ~free_masks[:, None] == 0
        rest = self._potential[free_masks[:, None] & ~self.sets.masks]
        ranks = np.where(fits, np.round(self.sets.rank + rest, DECIMALS), np.inf)
        best = np.argmin(ranks, axis=1)
        some = np.flatnonzero(np.take_along_axis(fits, best[:, None], axis=1))
        served, chosen = free_masks[some], best[some]
        self._chosen[served] = chosen
        self.costs[served] = np.round(self.sets.cost[chosen] + rest[some, chosen] + self._own(served), DECIMALS)


class RelabelledTable:
    """The table of an isomorphic machine, read through a renumbering. This machine's own positions break ties, so that
    sharing changes no answer."""

    def __init__(self, shared: Table, form: Canonical) -> None:
        self.shared = shared
        self._form = form
        self._chosen: dict[int, int | None] = {}
        self.exact = shared.exact

    @property
    def memory_bytes(self) -> int:
        """Bytes of the shared table and of the costs in this machine's order."""
        return self.shared.memory_bytes + self.costs.nbytes

    @cached_property
    def costs(self) -> Floats:
        """Cost per free mask, for machines whose tables are filled at once."""
        return self.shared.costs[self._form.there(np.arange(len(self.shared.costs), dtype=np.int64))]

    def chosen(self, free: int) -> int | None:
        """Mask of the best set inside `free`; None when no admitted set fits."""
        if free not in self._chosen:
            found = self.best_with(free, 0)
            self._chosen[free] = found[0] if found is not None else None
        return self._chosen[free]

    def cost(self, free: int) -> float:
        """Cost of that set; inf when there is none."""
        return self.shared.cost(self._there(free))

    def costs_of(self, free_masks: Ints) -> Floats:
        """Costs of many free masks at once."""
        return self.shared.costs_of(self._form.there(free_masks))

    def best_with(self, free: int, required: int) -> tuple[int, float] | None:
        """Mask and cost of the best set inside `free` that contains `required`."""
        masks, cost = self.shared.equals(self._there(free), self._there(required))
        here = self._form.here(masks).tolist()
        return (min(here, key=positions_of), cost) if here else None

    def _there(self, mask: int) -> int:
        return int(self._form.there(np.array([mask]))[0])


def table(machine: Machine, ask: DeviceRequest, demand: Demand = PRIOR) -> Table | RelabelledTable:
    """The table of one request on machines of this geometry, built on first use; isomorphic machines share one."""
    kept = _small_table if machine.count <= EAGER_DEVICES_MAX else _large_table
    return kept(machine, ask, demand)


@lru_cache(maxsize=2048)
def _small_table(machine: Machine, ask: DeviceRequest, demand: Demand) -> Table | RelabelledTable:
    """A cached table of about three kilobytes."""
    return _built(machine, ask, demand, _small_table)


@lru_cache(maxsize=64)
def _large_table(machine: Machine, ask: DeviceRequest, demand: Demand) -> Table | RelabelledTable:
    """A cached table of up to a megabyte."""
    return _built(machine, ask, demand, _large_table)


def _built(
    machine: Machine,
    ask: DeviceRequest,
    demand: Demand,
    kept: Callable[[Machine, DeviceRequest, Demand], Table | RelabelledTable],
) -> Table | RelabelledTable:
    form = canonical(machine)
    if form.machine == machine:
        return Table(machine, ask, demand)
    shared = kept(form.machine, ask, demand)
    return RelabelledTable(shared, form) if isinstance(shared, Table) else Table(machine, ask, demand)


@lru_cache(maxsize=1024)
def subsets(devices: int, count: int) -> Ints:
    """Masks of all sets of `count` of `devices` positions, in lexicographic order of positions."""
    masks = [mask_of(positions) for positions in itertools.combinations(range(devices), count)]
    return np.array(masks, dtype=np.int64)


def admitted_sets(machine: Machine, ask: DeviceRequest) -> Sets:
    """The sets that meet every hard condition of the request, with their own costs."""
    masks = subsets(machine.count, ask.count)
    weights = POLICIES[ask.policy]
    keep = meets_island(machine, masks, one_island=weights.one_island)
    keep &= meets_interconnect(machine, masks, interconnect=ask.interconnect)
    keep &= meets_bandwidth(machine, masks, gbps=ask.min_bandwidth_gbps)
    cost, rank = _own_costs(machine, masks, weights=weights, spread=ask.policy is Policy.SPREAD)
    exact = bool(qualities(machine).exact[masks].all()) if weights.alpha else True
    lost = np.round(1 - relative_qualities(machine)[masks], DECIMALS)
    order = np.argsort(lost, kind="stable")
    order = order[keep[order]]
    return Sets(masks=masks[order], cost=cost[order], rank=rank[order], lost=lost[order], exact=exact)


def in_one_island(machine: Machine, masks: Ints) -> Bools:
    """For each set, whether it is inside one island."""
    inside: Bools = np.any([masks & ~island.mask == 0 for island in islands(machine)], axis=0)
    return inside


def meets_island(machine: Machine, masks: Ints, *, one_island: bool) -> Bools:
    """For each set, whether it is inside one island; all True if that is not a condition."""
    return in_one_island(machine, masks) if one_island else np.ones(len(masks), dtype=np.bool_)


def meets_interconnect(machine: Machine, masks: Ints, *, interconnect: Interconnect) -> Bools:
    """For each set, whether its pairs are joined as requested."""
    meets = np.ones(len(masks), dtype=np.bool_)
    if interconnect is Interconnect.ANY:
        return meets
    for first, second in itertools.combinations(range(machine.count), 2):
        linked = bool(direct_links(machine.links[first][second]))
        if linked != (interconnect is Interconnect.NVLINK):
            both = 1 << first | 1 << second
            meets &= masks & both != both
    return meets


def meets_bandwidth(machine: Machine, masks: Ints, *, gbps: float) -> Bools:
    """For each set, whether its ring reaches the bandwidth; one GPU needs no ring."""
    ring = qualities(machine).ring_gbps[masks]
    reaches: Bools = (ring >= gbps * (1 - BANDWIDTH_SLACK)) | (sizes_of(machine.count)[masks] < 2)
    return reaches


def _own_costs(machine: Machine, masks: Ints, *, weights: Weights, spread: bool) -> tuple[Floats, Floats]:
    lost = 1 - relative_qualities(machine)[masks]
    several = sizes_of(machine.count)[masks] > 1
    apart = several & ~in_one_island(machine, masks)
    unlinked = several & ~qualities(machine).linked[masks]
    cost = weights.alpha * lost + weights.apart * apart + weights.unlinked * unlinked
    if spread:
        pairs = np.maximum(sizes_of(machine.count)[masks] * (sizes_of(machine.count)[masks] - 1) / 2, 1)
        cost = cost + weights.crowd * pair_sums(crowding(machine))[masks] / pairs
    else:
        cost = cost - 2 * weights.near * pair_sums(closeness(machine))[masks]
    rank = cost + QUALITY_FIRST * (lost + 10 * apart) if weights.ranks_quality else cost
    return cost, rank


@lru_cache(maxsize=256)
def _potential(machine: Machine, policy: Policy, demand: Demand) -> Floats:
    """Potential per free mask: the cost of leaving `rest` is potential[rest] - potential[free]."""
    weights = POLICIES[policy]
    if weights.crowd:
        return weights.near * pair_sums(crowding(machine))
    return weights.loss * losses(machine, demand) - weights.near * pair_sums(closeness(machine))
