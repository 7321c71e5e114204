"""Scoring many nodes at once: the cost of one ask on every node, by one gather over the classes' tables.

In: the machines of a cluster as few classes, per node its class and free mask as arrays. Out: an array of costs (inf
where the ask does not fit), and the index of the best node. The tables are those of topology.tables: what is named
here is what `choose` then takes. Allocating GPUs changes one cell of the free-mask array and nothing else.

    classes = Classes(machines)                    one Machine per class, any order, kept by the caller
    costs = classes.costs(class_of_node, free_of_node, ask)
    node = best_node(costs)

Nodes stand in the order of their names, so that the least index breaks ties by name.

The last whole machines of a class are reserved: one in RESERVED_ONE_IN of its nodes is kept for asks of the whole
machine, and a smaller ask that would break one of them pays RESERVE on top, more than what links are worth and less
than a set that spans islands. This weighs nodes against each other and is the same for every set of one node, so that
the set is still that of the tables. Few nodes reserve nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from topology.asks import Ask, Policy
from topology.choice import Choice, choose
from topology.demand import PRIOR, Demand
from topology.model import Machine
from topology.quality import TABLE_DEVICES_MAX, Bools, Floats
from topology.tables import EAGER_DEVICES_MAX, table

RESERVED_ONE_IN: Final = 32
RESERVE: Final = 40.0
ASKS_MAX: Final = 512
"""Flat tables kept at a time; the oldest is dropped."""

Indices = npt.NDArray[np.integer]


class Classes:
    """The machine shapes of a cluster. Shapes are few; a node with a new shape needs a new Classes."""

    def __init__(self, machines: Sequence[Machine], *, demand: Demand = PRIOR) -> None:
        self.machines = tuple(machines)
        self._demand = demand
        self._eager = np.array([machine.count <= EAGER_DEVICES_MAX for machine in self.machines], dtype=np.bool_)
        sizes = [1 << machine.count if machine.count <= EAGER_DEVICES_MAX else 0 for machine in self.machines]
        self._offsets = np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64)
        self._full = np.array([machine.full for machine in self.machines], dtype=np.int64)
        self._flat: dict[Ask, Floats] = {}

    def costs(self, class_of_node: Indices, free_of_node: Indices, ask: Ask) -> Floats:
        """Cost per node, in GPUs lost and weights of topology.policies; inf where no set fits."""
        costs = self._set_costs(class_of_node, free_of_node, ask)
        sparing = [reserves(machine, ask, self._demand) for machine in self.machines]
        if any(sparing) and len(costs) >= RESERVED_ONE_IN:
            costs += reserve(free_of_node == self._full[class_of_node], class_of_node, sparing=sparing)
        return costs

    def _set_costs(self, class_of_node: Indices, free_of_node: Indices, ask: Ask) -> Floats:
        flat = self._flat_table(ask)
        if self._eager.all():
            gathered: Floats = flat[self._offsets[class_of_node] + free_of_node]
            return gathered
        costs = np.full(len(class_of_node), np.inf)
        eager = np.flatnonzero(self._eager[class_of_node])
        costs[eager] = flat[self._offsets[class_of_node[eager]] + free_of_node[eager]]
        for index in np.flatnonzero(~self._eager):
            nodes = np.flatnonzero(class_of_node == index)
            costs[nodes] = costs_of(self.machines[index], free_of_node[nodes], ask, self._demand)
        return costs

    def _flat_table(self, ask: Ask) -> Floats:
        """Tables of all small classes behind one another, so that one gather serves nodes of any class."""
        flat = self._flat.pop(ask, None)
        if flat is None:
            eager = [machine for machine in self.machines if machine.count <= EAGER_DEVICES_MAX]
            tables = [table(machine, ask, self._demand).costs for machine in eager]
            flat = np.concatenate(tables) if tables else np.empty(0)
            while len(self._flat) >= ASKS_MAX:
                del self._flat[next(iter(self._flat))]
        self._flat[ask] = flat
        return flat


def reserves(machine: Machine, ask: Ask, demand: Demand = PRIOR) -> bool:
    """Whether an ask must leave the last whole machines alone: it takes less than one, packs, and whole ones are asked
    for."""
    smaller = ask.count < machine.count and ask.policy is not Policy.SPREAD
    return smaller and any(count == machine.count for count, _ in demand.shares)


def reserve(whole: Bools, class_of_node: Indices, *, sparing: Sequence[bool]) -> Floats:
    """RESERVE where a node is one of the last whole ones of its class, else 0.

    whole: per node, whether everything on it is free; sparing: per class, whether the ask must leave the last alone.
    """
    price = np.zeros(len(whole))
    nodes = np.flatnonzero(whole)
    many = np.bincount(class_of_node, minlength=len(sparing))
    left = np.bincount(class_of_node[nodes], minlength=len(sparing))
    last = np.array(sparing) & (left <= many // RESERVED_ONE_IN)
    price[nodes[last[class_of_node[nodes]]]] = RESERVE
    return price


def costs_of(machine: Machine, free: Indices, ask: Ask, demand: Demand = PRIOR) -> Floats:
    """Cost of the ask for many free masks of one machine, as `choose` tells it; inf where no set fits."""
    if ask.count > machine.count:
        return np.full(len(free), np.inf)
    if machine.count <= TABLE_DEVICES_MAX:
        return table(machine, ask, demand).costs_of(free.astype(np.int64))
    answers = {mask: choose(machine, mask, ask, demand=demand) for mask in {int(mask) for mask in free}}
    costs = {mask: answer.cost if isinstance(answer, Choice) else np.inf for mask, answer in answers.items()}
    return np.array([costs[int(mask)] for mask in free])


def best_node(costs: Floats) -> int | None:
    """Index of the node with the least cost, the first of several; None when no node serves the ask."""
    if not len(costs):
        return None
    index = int(np.argmin(costs))
    return index if np.isfinite(costs[index]) else None
