"""The rules that a churn compares: each chooses a node and a set, on nodes of one shape.

A `Rule` takes (free masks of all nodes, size, number of pods on all nodes) and gives a node and a mask, or None. Peers
choose GPUs by bench/baselines.py; the node is the fullest one that fits, unless the rule is one for nodes. Results that
depend on one node only are cached by (size, free mask).

- `first-fit`: first node that fits, lowest positions.
- `best-fit`: fullest node that fits, lowest positions.
- `pair-sum`: fullest node; NVIDIA's best division into sets.
- `worst-card`: fullest node; HAMi's topology-aware policy.
- `partition`: fullest node; Koordinator's table of aligned sets, else its tree.
- `fgd`: the node by fragmentation gradient descent, equal scores to the fullest; lowest positions.
- `atoll`: node and set of the extender (`atoll.cluster.fleet`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np

from bench.baselines import (
    aligned_table,
    best_effort,
    lowest,
    pair_scores,
    prefer_partition,
    scope_tree,
    topology_aware,
)
from bench.baselines_fgd import MILLI, FgdPodKind, Floats, Ints, lost, scores, typical
from bench.fleets import FilledFleet
from topology.demand import Demand
from topology.device_requests import DeviceRequest
from topology.model import Machine, mask_of, positions_of

NAMES: Final = ("first-fit", "best-fit", "pair-sum", "worst-card", "partition", "fgd", "atoll")

Place = tuple[int, int]
Rule = Callable[[Ints, int, Ints], Place | None]
Sets = Callable[[int, int], int]
Orders = Callable[[int], Floats]


def rules_for(machine: Machine, demand: Demand) -> dict[str, Rule]:
    """All rules, for one shape of machine."""
    nvidia = pair_scores(machine, through_switch=False)
    hami = pair_scores(machine, through_switch=True)
    table, tree = aligned_table(machine.count), scope_tree(machine)
    first = _kept(lowest)
    fullest = _fullest(machine)
    return {
        "first-fit": _by_order(lambda count: np.where(np.isfinite(fullest(count)), 0.0, np.inf), first),
        "best-fit": _by_order(fullest, first),
        "pair-sum": _by_order(fullest, _kept(lambda free, count: best_effort(nvidia, free, count))),
        "worst-card": _by_order(fullest, _kept(lambda free, count: topology_aware(hami, free, count))),
        "partition": _by_order(fullest, _kept(lambda free, count: prefer_partition(table, tree, free, count))),
        "fgd": _by_order(_descending(machine, demand), first),
        "atoll": _atoll(machine, demand),
    }


def _by_order(order: Orders, sets: Sets) -> Rule:
    """Choose the first node whose free mask has the least order for the size; the set by mask and size."""

    def place(free: Ints, count: int, _pods: Ints) -> Place | None:
        of_nodes = order(count)[free]
        node = int(np.argmin(of_nodes))
        return (node, sets(int(free[node]), count)) if np.isfinite(of_nodes[node]) else None

    return place


def _kept(choice: Callable[[tuple[int, ...], int], tuple[int, ...] | None]) -> Sets:
    """Turn a choice of positions into a cached choice of masks."""

    @cache
    def chosen(free: int, count: int) -> int:
        members = choice(positions_of(free), count)
        assert members is not None
        return mask_of(members)

    return chosen


def _sizes(machine: Machine) -> Ints:
    return np.bitwise_count(np.arange(machine.full + 1, dtype=np.uint64)).astype(np.int64)


def _fullest(machine: Machine) -> Orders:
    sizes = _sizes(machine)

    @cache
    def order(count: int) -> Floats:
        fitting: Floats = np.where(sizes >= count, sizes, np.inf)
        return fitting

    return order


def _descending(machine: Machine, demand: Demand) -> Orders:
    """Fragmentation gradient descent if only GPUs are scarce: the order depends on the number of free ones."""
    pods = typical((FgdPodKind(0, size), share) for size, share in demand.shares if size <= machine.count)
    rows = np.array([[MILLI * (at < free) for at in range(machine.count)] for free in range(machine.count + 1)])
    fragments = lost(
        pods, np.zeros(len(rows), dtype=np.int64), rows, np.ones((len(rows), len(pods.kinds)), dtype=np.bool_)
    )
    sizes = _sizes(machine)

    @cache
    def order(count: int) -> Floats:
        able = sizes >= count
        score = scores(fragments[sizes], fragments[np.where(able, sizes - count, 0)])
        ordered: Floats = np.where(able, -score.astype(np.float64) * (machine.count + 1) + sizes, np.inf)
        return ordered

    return order


def _atoll(machine: Machine, demand: Demand) -> Rule:
    fleets: dict[int, FilledFleet] = {}

    def place(free: Ints, count: int, pods: Ints) -> Place | None:
        if len(free) not in fleets:
            fleets[len(free)] = FilledFleet([machine], np.zeros(len(free), dtype=np.int64), demand=demand)
        fleet, ask = fleets[len(free)], DeviceRequest(count)
        fleet.update(free, pods)
        node = fleet.best(ask)
        return None if node is None else (node, mask_of(fleet.positions(node, ask)))

    return place
