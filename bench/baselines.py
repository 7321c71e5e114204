"""The rules of other allocators, re-created from their descriptions and checked against their published answers.

Pure functions from the free GPUs of one machine and a size to the positions that the peer would give, or None if it
gives up. The churn (bench/churn.py) caches their answers by free mask and chooses the node. Fragmentation gradient
descent, which is a rule for nodes, is in bench/baselines_fgd.py.

- `lowest`: the lowest free positions, as a plain device plugin gives them.
- `best_effort`: NVIDIA/go-gpuallocator. All free GPUs are divided into sets of the requested size; the best set of the
  division with the largest sum of pair scores is given. Links behind an NVSwitch do not count: their far end is no GPU.
- `worst_card` and `best_combination`: Project-HAMi/HAMi, policy topology-aware. One GPU: the one with the least sum of
  scores to the other free ones; several: the set with the largest sum. Devices are looked at from the highest index.
- `partition`: koordinator-sh/koordinator, GPU partitions. Only sets of a table are given, preferring the free one
  that leaves most for larger sets. Without a set in the table, the tree of node, NUMA nodes and PCIe switches decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from topology.links import direct_links
from topology.model import Machine
from topology.rates import pcie_cell

PAIR_SCORES: Final = {"NS": 0, "SYS": 10, "NODE": 20, "PHB": 30, "PXB": 40, "PIX": 50, "PSB": 60}
"""Score of a PCIe relation in NVIDIA's and HAMi's rules."""
LINK_SCORE: Final = 100
"""Score of each NVLink."""
LEFT_SCORES: Final = {8: 10_000, 4: 100, 2: 1}
"""Score of a set of that size in Koordinator's rule while it stays whole."""
BLANK: Final = -1
"""Pads the list of free devices to a multiple of the requested size."""
SAME_SWITCH: Final = ("PIX", "PXB", "PSB")

Set = tuple[int, ...]
Scores = Sequence[Sequence[int]]
Table = dict[int, tuple[Set, ...]]


def lowest(free: Sequence[int], count: int) -> Set | None:
    """The lowest free positions."""
    return tuple(sorted(free)[:count]) if len(free) >= count else None


def pair_scores(machine: Machine, *, through_switch: bool) -> list[list[int]]:
    """Score of every pair: PCIe relation and LINK_SCORE per link; through_switch: links behind an NVSwitch count."""

    def score(first: int, second: int) -> int:
        if first == second:
            return 0
        links = direct_links(machine.links[first][second]) if through_switch or not machine.nvswitch else 0
        return PAIR_SCORES[pcie_cell(machine, first, second)] + LINK_SCORE * links

    return [[score(first, second) for second in range(machine.count)] for first in range(machine.count)]


def set_score(scores: Scores, members: Sequence[int]) -> int:
    """Sum over the pairs of a set."""
    return sum(scores[first][second] for first, second in itertools.combinations(members, 2))


def best_effort(scores: Scores, free: Sequence[int], count: int, *, required: Sequence[int] = ()) -> Set | None:
    """NVIDIA's choice: the best set of the best division of all free GPUs."""
    if not 1 <= count <= len(free) or len(required) > count:
        return None
    best: tuple[Set, ...] | None = None
    most = 0
    for division in _divisions(tuple(free), count):
        if not any(len(part) == count and set(required) <= set(part) for part in division):
            continue
        total = sum(set_score(scores, part) for part in division)
        if best is None or total > most:
            best, most = division, total
    whole = [part for part in best or () if len(part) == count and set(required) <= set(part)]
    return max(whole, key=lambda part: set_score(scores, part)) if whole else None


def _divisions(free: Set, count: int) -> Iterator[tuple[Set, ...]]:
    """All divisions into sets of one size, in NVIDIA's order; one set is smaller if the size does not divide them
    evenly. One GPU: each alone."""
    if count == 1:
        yield from (((one,),) for one in free)
        return
    blanks = -len(free) % count
    yield from _divided(free + (BLANK,) * blanks, count=count, blanks=blanks)


def _divided(devices: Set, *, count: int, blanks: int) -> Iterator[tuple[Set, ...]]:
    """The first device with every choice of others, then the rest; all blanks go into one set."""
    if not devices:
        yield ()
        return
    for others in itertools.combinations(devices[1:], count - 1):
        taken = others.count(BLANK)
        if taken not in (0, blanks):
            continue
        part = (devices[0], *(one for one in others if one != BLANK))
        left = tuple(one for one in devices if one not in part and not (taken and one == BLANK))
        for further in _divided(left, count=count, blanks=blanks):
            yield (part, *further)


def worst_card(scores: Scores, free: Sequence[int]) -> Set | None:
    """HAMi's choice of one GPU: the least sum of scores to the other free ones, the highest index of several."""
    if not free:
        return None
    return (min(sorted(free, reverse=True), key=lambda one: sum(scores[one][other] for other in free if other != one)),)


def best_combination(scores: Scores, free: Sequence[int], count: int) -> Set | None:
    """HAMi's choice of several: the largest sum of scores, the first of several from the highest index on."""
    if len(free) < count:
        return None
    sets = itertools.combinations(sorted(free, reverse=True), count)
    return tuple(sorted(max(sets, key=lambda members: set_score(scores, members))))


def topology_aware(scores: Scores, free: Sequence[int], count: int) -> Set | None:
    """HAMi's policy as a whole."""
    return worst_card(scores, free) if count == 1 else best_combination(scores, free, count)


def aligned_table(devices: int) -> Table:
    """Koordinator's built-in table of an eight-GPU Hopper machine: aligned sets of 1, 2, 4 and 8."""
    sizes = [size for size in (1, 2, 4, 8) if size <= devices]
    return {size: tuple(tuple(range(at, at + size)) for at in range(0, devices - size + 1, size)) for size in sizes}


@dataclass(frozen=True, slots=True)
class Scope:
    """One node of Koordinator's device tree."""

    members: Set
    parts: tuple[Scope, ...] = ()


def scope_tree(machine: Machine) -> Scope:
    """Node, NUMA nodes, PCIe switches."""
    devices = tuple(range(machine.count))
    by_node = _grouped(devices, lambda first, second: machine.numa[first] == machine.numa[second])

    def one_switch(first: int, second: int) -> bool:
        return pcie_cell(machine, first, second) in SAME_SWITCH

    return Scope(
        devices,
        tuple(Scope(part, tuple(Scope(leaf) for leaf in _grouped(part, one_switch))) for part in by_node),
    )


def _grouped(devices: Set, together: Callable[[int, int], bool]) -> list[Set]:
    groups: list[list[int]] = []
    for device in devices:
        group = next((group for group in groups if together(group[0], device)), None)
        if group is None:
            groups.append([device])
        else:
            group.append(device)
    return [tuple(group) for group in groups]


def partition(table: Table, free: Sequence[int], count: int) -> Set | None:
    """Koordinator's choice from a table: the free set that leaves most for sets at least as large, the first of
    several; None when no set of the table is free."""
    feasible = [members for members in table.get(count, ()) if set(members) <= set(free)]

    def left(members: Set) -> int:
        rest = set(free) - set(members)
        return sum(
            value * sum(set(larger) <= rest for larger in table.get(size, ()))
            for size, value in LEFT_SCORES.items()
            if size >= count
        )

    return max(feasible, key=left, default=None)


def by_scope(tree: Scope, free: Sequence[int], count: int) -> Set | None:
    """Koordinator's choice from the tree: the deepest scope that fits, then the one with most used ancestors, then the
    first; inside it the lowest positions."""
    found = _in_scope(tree, frozenset(free), count, depth=1, used=0)
    return found[2] if found is not None else None


def _in_scope(scope: Scope, free: frozenset[int], count: int, *, depth: int, used: int) -> tuple[int, int, Set] | None:
    used += not set(scope.members) <= free
    found = [_in_scope(part, free, count, depth=depth + 1, used=used) for part in scope.parts]
    best = max((one for one in found if one is not None), key=lambda one: one[:2], default=None)
    if best is not None:
        return best
    open_members = tuple(one for one in scope.members if one in free)
    return (depth, used, open_members[:count]) if len(open_members) >= count else None


def prefer_partition(table: Table, tree: Scope, free: Sequence[int], count: int) -> Set | None:
    """Koordinator's policy Prefer: the table, else the tree."""
    return partition(table, free, count) or by_scope(tree, free, count)
