"""Scoring many nodes at once: the cost of one ask on every node, by one gather over the classes' tables.

In: the machines of a cluster as few classes, per node its class and free mask as arrays. Out: an array of costs (inf
where the ask does not fit), and the index of the best node. The tables are those of topology.tables: what is named
here is what `choose` then takes. Allocating GPUs changes one cell of the free-mask array and nothing else.

    classes = Classes(machines)                    one Machine per class, any order, kept by the caller
    costs = classes.costs(class_of_node, free_of_node, ask)
    node = best_node(costs)

Nodes stand in the order of their names, so that the least index breaks ties by name.

Two more costs weigh nodes against each other. They are the same for every set of one node, so that the set is still
that of the tables.

- A machine is whole again when the last of its pods has ended, and with n pods that run equally long that takes
  1 + 1/2 + ... + 1/n of their time. One more pod adds 1/(n + 1) of it, EMPTYING x which it pays: machines with few pods
  are left to become empty, and those that stay broken up for long take what comes.
- The last whole machines of a class are reserved: one in RESERVED_ONE_IN of its nodes is kept for asks of the whole
  machine, and a smaller ask that would break one of them pays RESERVE, more than what links are worth and less than a
  set that spans islands. Few nodes reserve nothing.

Asks that spread pay neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from topology.choice import Choice, choose
from topology.demand import PRIOR, Demand
from topology.device_requests import DeviceRequest, Policy
from topology.model import Machine
from topology.quality import TABLE_DEVICES_MAX, Bools, Floats
from topology.tables import EAGER_DEVICES_MAX, table

EMPTYING: Final = 1.0
RESERVED_ONE_IN: Final = 64
RESERVE: Final = 40.0
ALIKE: Final = 1e-7
"""Costs of sets are rounded to a millionth; sums that should be equal differ by less than this."""
DECIMALS: Final = 6
ASKS_MAX: Final = 512
"""Flat tables kept at a time; the oldest is dropped."""

PODS_MAX: Final = 64
EMPTYING_BY_PODS: Final[Floats] = np.round(EMPTYING / np.arange(1, PODS_MAX + 2), DECIMALS)
"""What one more pod pays on a machine with so many pods; more than PODS_MAX are as many."""

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
        self._whole = np.zeros(sum(sizes), dtype=np.bool_)
        self._whole[(self._offsets + self._full)[self._eager]] = True
        self._cells = np.empty(0, dtype=np.int64)
        self._shares = np.empty(0)
        self._known: dict[DeviceRequest, tuple[Floats, Bools]] = {}

    def costs(
        self, class_of_node: Indices, free_of_node: Indices, ask: DeviceRequest, pods_of_node: Indices | None = None
    ) -> Floats:
        """Cost per node, in GPUs lost and weights of topology.policies; inf where no set fits. pods_of_node: how many
        pods hold GPUs there; without it no machine counts as more or less near to being empty."""
        flat, sparing = self._of_ask(ask)
        if self._eager.all():
            cells = self._cells_of(class_of_node, free_of_node)
            costs: Floats = flat.take(cells)
        else:
            costs = self._mixed_costs(class_of_node, free_of_node, ask, flat)
        if len(costs) >= RESERVED_ONE_IN and sparing.any():
            whole = self._whole.take(cells) if self._eager.all() else free_of_node == self._full[class_of_node]
            costs[reserved(np.flatnonzero(whole), class_of_node, sparing=sparing)] += RESERVE
        if pods_of_node is not None and ask.policy is not Policy.SPREAD:
            costs += self._emptying(pods_of_node)
        return costs

    def _emptying(self, pods_of_node: Indices) -> Floats:
        """What one more pod pays on each node, in an array that is used again, as in `_cells_of`."""
        if len(self._shares) < len(pods_of_node):
            self._shares = np.empty(len(pods_of_node))
        shares = self._shares[: len(pods_of_node)]
        return np.take(EMPTYING_BY_PODS, pods_of_node, out=shares, mode="clip")

    def _cells_of(self, class_of_node: Indices, free_of_node: Indices) -> Indices:
        """Place of each node in the flat tables; the array is used again by the next call, because fetching new memory
        takes longer than the sum."""
        if len(self._cells) < len(class_of_node):
            self._cells = np.empty(len(class_of_node), dtype=np.int64)
        cells = self._cells[: len(class_of_node)]
        np.take(self._offsets, class_of_node, out=cells, mode="clip")
        np.add(cells, free_of_node, out=cells)
        return cells

    def _mixed_costs(self, class_of_node: Indices, free_of_node: Indices, ask: DeviceRequest, flat: Floats) -> Floats:
        """Costs where some classes have no flat table."""
        costs = np.full(len(class_of_node), np.inf)
        eager = np.flatnonzero(self._eager[class_of_node])
        costs[eager] = flat[self._offsets[class_of_node[eager]] + free_of_node[eager]]
        for index in np.flatnonzero(~self._eager):
            nodes = np.flatnonzero(class_of_node == index)
            costs[nodes] = costs_of(self.machines[index], free_of_node[nodes], ask, self._demand)
        return costs

    def _of_ask(self, ask: DeviceRequest) -> tuple[Floats, Bools]:
        """Tables of all small classes behind one another, so that one gather serves nodes of any class; and per class
        whether its last whole machines are reserved from the ask."""
        known = self._known.pop(ask, None)
        if known is None:
            eager = [machine for machine in self.machines if machine.count <= EAGER_DEVICES_MAX]
            tables = [table(machine, ask, self._demand).costs for machine in eager]
            sparing = np.array([reserves(machine, ask, self._demand) for machine in self.machines], dtype=np.bool_)
            known = np.concatenate(tables) if tables else np.empty(0), sparing
            while len(self._known) >= ASKS_MAX:
                del self._known[next(iter(self._known))]
        self._known[ask] = known
        return known


def reserves(machine: Machine, ask: DeviceRequest, demand: Demand = PRIOR) -> bool:
    """Whether an ask must leave the last whole machines alone: it takes less than one, packs, and whole ones are asked
    for."""
    smaller = ask.count < machine.count and ask.policy is not Policy.SPREAD
    return smaller and any(count == machine.count for count, _ in demand.shares)


def reserved(whole_nodes: Indices, class_of_node: Indices, *, sparing: Bools) -> Indices:
    """Those of the whole nodes that are the last of their class.

    whole_nodes: indices of nodes on which everything is free; sparing: per class, whether the ask must leave the last
    ones alone.
    """
    classes = class_of_node[whole_nodes]
    left = np.bincount(classes, minlength=len(sparing))
    few = sparing & (left <= len(class_of_node) // RESERVED_ONE_IN)
    if not few[classes].any():
        return whole_nodes[:0]
    many = np.bincount(class_of_node, minlength=len(sparing))
    return whole_nodes[(few & (left <= many // RESERVED_ONE_IN))[classes]]


def costs_of(machine: Machine, free: Indices, ask: DeviceRequest, demand: Demand = PRIOR) -> Floats:
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
    least = costs.min(initial=np.inf)
    return int(np.argmax(costs <= least + ALIKE)) if np.isfinite(least) else None
