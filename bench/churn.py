"""Churn: pods of mixed sizes come and go on machines of one shape, under several placement rules.

In: a known machine, a number of nodes, a size mix, a load and a seed. Out: per rule the mean relative quality of the
sets given to pods of two or more GPUs, the share of rejected pods of the largest size, and the GPU-weighted share of
rejections. Loss model: arrivals are Poisson, life times exponential, a pod that does not fit is gone. All rules see
the same arrivals.

Rules: `first-fit` (first node that fits, lowest positions), `best-fit` (fullest node that fits, lowest positions),
`pair-sum` (best fit; the set with the largest sum of pair scores, as NVIDIA's and HAMi's allocators score links),
`worst-card` (pair-sum, but a single GPU is the one joined worst to the other free ones, as HAMi does), `atoll` (node
and set by topology's tables).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from topology.asks import Ask
from topology.choice import Choice, choose
from topology.demand import PRIOR, Demand
from topology.fragmentation import relative_qualities
from topology.links import direct_links
from topology.model import Machine, mask_of, positions_of
from topology.rates import pcie_cell
from topology.scores import Classes, best_node

PAIR_SCORES: Final = {"SYS": 10, "NODE": 20, "PHB": 30, "PXB": 40, "PIX": 50, "PSB": 60}
LINK_SCORE: Final = 100

Place = tuple[int, tuple[int, ...]]
Rule = Callable[[np.ndarray, int], Place | None]


@dataclass(frozen=True, slots=True)
class Result:
    """One rule's run. Shares are between 0 and 1."""

    rule: str
    mean_quality: float
    rejected_largest: float
    rejected_gpus: float


@dataclass(frozen=True, slots=True)
class Load:
    """What comes: sizes with shares, offered load relative to all GPUs, number of arrivals, seed."""

    demand: Demand
    load: float
    arrivals: int
    seed: int


def run(machine: Machine, *, nodes: int, load: Load, rules: dict[str, Rule]) -> list[Result]:
    """Play the same arrivals under every rule."""
    arrivals = _arrivals(machine, nodes=nodes, load=load)
    return [_play(name, rule, machine, nodes=nodes, arrivals=arrivals) for name, rule in rules.items()]


def rules_for(machine: Machine) -> dict[str, Rule]:
    """All rules, for one shape of machine."""
    sums = _pair_sums(machine)
    return {
        "first-fit": lambda free, count: _first(free, count, by_fullness=False),
        "best-fit": lambda free, count: _first(free, count, by_fullness=True),
        "pair-sum": lambda free, count: _by_pairs(free, count, sums, worst_single=False),
        "worst-card": lambda free, count: _by_pairs(free, count, sums, worst_single=True),
        "atoll": _atoll(machine),
    }


def _arrivals(machine: Machine, *, nodes: int, load: Load) -> list[tuple[float, float, int]]:
    """(time, life time, count) of every pod; mean life time 1."""
    random = np.random.default_rng(load.seed)
    sizes = [size for size, _ in load.demand.shares if size <= machine.count]
    shares = np.array([share for size, share in load.demand.shares if size <= machine.count])
    counts = random.choice(sizes, size=load.arrivals, p=shares / shares.sum())
    rate = load.load * nodes * machine.count / float(np.dot(sizes, shares / shares.sum()))
    times = np.cumsum(random.exponential(1 / rate, size=load.arrivals))
    lives = random.exponential(1.0, size=load.arrivals)
    return list(zip(times.tolist(), lives.tolist(), counts.tolist(), strict=True))


def _play(name: str, rule: Rule, machine: Machine, *, nodes: int, arrivals: list[tuple[float, float, int]]) -> Result:
    free = np.full(nodes, machine.full, dtype=np.int64)
    relative = relative_qualities(machine)
    ends: list[tuple[float, int, int]] = []
    qualities: list[float] = []
    rejected: list[int] = []
    largest = max(count for _, _, count in arrivals)
    for time, life, count in arrivals:
        while ends and ends[0][0] <= time:
            _, node, mask = heapq.heappop(ends)
            free[node] |= mask
        place = rule(free, count)
        if place is None:
            rejected.append(count)
            continue
        node, mask = place[0], mask_of(place[1])
        assert mask & ~int(free[node]) == 0
        assert mask.bit_count() == count
        free[node] &= ~mask
        heapq.heappush(ends, (time + life, node, mask))
        if count > 1:
            qualities.append(float(relative[mask]))
    asked = [count for _, _, count in arrivals]
    return Result(
        rule=name,
        mean_quality=float(np.mean(qualities)),
        rejected_largest=rejected.count(largest) / asked.count(largest),
        rejected_gpus=sum(rejected) / sum(asked),
    )


def _fitting(free: np.ndarray, count: int, *, by_fullness: bool) -> int | None:
    sizes = np.bitwise_count(free.astype(np.uint64)).astype(np.int64)
    fits = np.flatnonzero(sizes >= count)
    if not len(fits):
        return None
    return int(fits[np.argmin(sizes[fits])]) if by_fullness else int(fits[0])


def _first(free: np.ndarray, count: int, *, by_fullness: bool) -> Place | None:
    node = _fitting(free, count, by_fullness=by_fullness)
    return None if node is None else (node, positions_of(int(free[node]))[:count])


def _by_pairs(free: np.ndarray, count: int, sums: np.ndarray, *, worst_single: bool) -> Place | None:
    node = _fitting(free, count, by_fullness=True)
    if node is None:
        return None
    open_positions = positions_of(int(free[node]))
    if count == 1 and worst_single:
        everyone = mask_of(open_positions)
        return node, (min(open_positions, key=lambda one: (sums[everyone] - sums[everyone & ~(1 << one)], one)),)
    sets = itertools.combinations(open_positions, count)
    return node, min(sets, key=lambda members: (-sums[mask_of(members)], members))


def _pair_sums(machine: Machine) -> np.ndarray:
    """Sum of pair scores inside every mask: PCIe score plus LINK_SCORE per link."""
    sums = np.zeros(1 << machine.count, dtype=np.int64)
    masks = np.arange(1 << machine.count)
    for first, second in itertools.combinations(range(machine.count), 2):
        both = 1 << first | 1 << second
        links = direct_links(machine.links[first][second])
        sums[masks & both == both] += PAIR_SCORES[pcie_cell(machine, first, second)] + LINK_SCORE * links
    return sums


def _atoll(machine: Machine, *, demand: Demand = PRIOR) -> Rule:
    classes = Classes([machine], demand=demand)

    def place(free: np.ndarray, count: int) -> Place | None:
        ask = Ask(count)
        node = best_node(classes.costs(np.zeros(len(free), dtype=np.int64), free, ask))
        if node is None:
            return None
        answer = choose(machine, int(free[node]), ask, demand=demand)
        assert isinstance(answer, Choice)
        return node, answer.positions

    return place
