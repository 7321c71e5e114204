"""Churn: pods of mixed sizes come and go on nodes of one shape, under several rules (bench/rules.py).

Gives per rule the mean relative quality of the sets given to pods of two or more GPUs, the share of rejected pods of
the largest size, the GPU-weighted share of rejections, and the share of GPUs in use. Loss model: arrivals are Poisson,
life times exponential, a pod that does not fit is dropped. All rules see the same arrivals. The load is the demand
relative to all GPUs: 1 and 1.3 are a demand of 100 % and 130 %.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from bench.rules import Ints, Rule
from topology.demand import PRIOR, Demand
from topology.fragmentation import losses, relative_qualities
from topology.model import Machine

WARM: Final = 5.0
"""Mean life times after which the cluster counts as filled."""

Arrivals = list[tuple[float, float, int]]
"""(time, life time, count) of every pod."""


@dataclass(frozen=True, slots=True)
class Moment:
    """State after an arrival: mean quality of the running pods, and the share of free GPUs lost to fragmentation, both
    0 to 1."""

    time: float
    quality: float
    lost: float


@dataclass(frozen=True, slots=True)
class ChurnResult:
    """One rule's run. Shares are between 0 and 1; in_use: mean over time, once the cluster has filled."""

    rule: str
    mean_quality: float
    rejected_largest: float
    rejected_gpus: float
    in_use: float
    moments: tuple[Moment, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals: sizes with shares, offered load relative to all GPUs, number of arrivals, seed."""

    demand: Demand = PRIOR
    load: float = 0.92
    arrivals: int = 20_000
    seed: int = 1


def run(machine: Machine, *, nodes: int, load: Load, rules: dict[str, Rule], moments: int = 0) -> list[ChurnResult]:
    """Play the same arrivals under every rule; moments: number of samples in between."""
    arrivals = _arrivals(machine, nodes=nodes, load=load)
    every = max(1, len(arrivals) // moments) if moments else len(arrivals) + 1
    return [_play(name, rule, machine, nodes=nodes, arrivals=arrivals, every=every) for name, rule in rules.items()]


def _sizes_by_chance(machine: Machine, demand: Demand, random: np.random.Generator, many: int) -> list[int]:
    sizes = [size for size, _ in demand.shares if size <= machine.count]
    shares = np.array([share for size, share in demand.shares if size <= machine.count])
    chosen: list[int] = random.choice(sizes, size=many, p=shares / shares.sum()).tolist()
    return chosen


def _mean_size(machine: Machine, demand: Demand) -> float:
    pairs = [(size, share) for size, share in demand.shares if size <= machine.count]
    return sum(size * share for size, share in pairs) / sum(share for _, share in pairs)


def _arrivals(machine: Machine, *, nodes: int, load: Load) -> Arrivals:
    """Poisson arrivals of the offered load; mean life time 1."""
    random = np.random.default_rng(load.seed)
    counts = _sizes_by_chance(machine, load.demand, random, load.arrivals)
    rate = load.load * nodes * machine.count / _mean_size(machine, load.demand)
    times = np.cumsum(random.exponential(1 / rate, size=load.arrivals))
    lives = random.exponential(1.0, size=load.arrivals)
    return list(zip(times.tolist(), lives.tolist(), counts, strict=True))


class _Nodes:
    """Free GPUs, and running pods with their end times."""

    def __init__(self, machine: Machine, nodes: int) -> None:
        self.free: Ints = np.full(nodes, machine.full, dtype=np.int64)
        self.pods: Ints = np.zeros(nodes, dtype=np.int64)
        self._ends: list[tuple[float, int, int]] = []

    def release_until(self, time: float) -> None:
        """End the pods whose time is over."""
        while self._ends and self._ends[0][0] <= time:
            _, node, mask = heapq.heappop(self._ends)
            self.free[node] |= mask
            self.pods[node] -= 1

    def take(self, node: int, mask: int, *, until: float) -> None:
        """Place a pod."""
        assert mask & ~int(self.free[node]) == 0
        self.free[node] &= ~mask
        self.pods[node] += 1
        heapq.heappush(self._ends, (until, node, mask))

    def open_gpus(self) -> int:
        """Number of free GPUs."""
        return int(np.bitwise_count(self.free.astype(np.uint64)).sum())

    def running(self) -> list[int]:
        """Masks of the running pods."""
        return [mask for _, _, mask in self._ends]


def _play(name: str, rule: Rule, machine: Machine, *, nodes: int, arrivals: Arrivals, every: int) -> ChurnResult:
    now, relative = _Nodes(machine, nodes), relative_qualities(machine)
    qualities: list[float] = []
    rejected: list[int] = []
    open_gpus: list[int] = []
    moments: list[Moment] = []
    for number, (time, life, count) in enumerate(arrivals, start=1):
        now.release_until(time)
        if time > WARM:
            open_gpus.append(now.open_gpus())
        place = rule(now.free, count, now.pods)
        if place is None:
            rejected.append(count)
        else:
            assert place[1].bit_count() == count
            now.take(*place, until=time + life)
            if count > 1:
                qualities.append(float(relative[place[1]]))
        if number % every == 0:
            moments.append(_moment(machine, now, time))
    asked = [count for _, _, count in arrivals]
    largest = max(asked)
    return ChurnResult(
        rule=name,
        mean_quality=float(np.mean(qualities)),
        rejected_largest=rejected.count(largest) / asked.count(largest),
        rejected_gpus=sum(rejected) / sum(asked),
        in_use=1 - float(np.mean(open_gpus)) / (nodes * machine.count) if open_gpus else 0.0,
        moments=tuple(moments),
    )


def _moment(machine: Machine, now: _Nodes, time: float) -> Moment:
    relative = relative_qualities(machine)
    several = [float(relative[mask]) for mask in now.running() if mask.bit_count() > 1]
    lost = float(losses(machine)[now.free].sum()) / max(now.open_gpus(), 1)
    return Moment(time, float(np.mean(several)) if several else 1.0, lost)
