"""Choice on machines with more devices than a table can hold (17 to 64): a bounded greedy search.

From every free start the set grows by the device with the best link to it; the finished sets are compared by the same
weights as elsewhere, without the fragmentation term. Every answer is bounded: a better set may exist. Complexity:
starts x count x devices, at most 64 x 64 x 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from topology.closeness import Pairs, closeness, crowding
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.islands import island_of
from topology.links import direct_links
from topology.model import Machine, positions_of
from topology.policies import POLICIES
from topology.quality import rate
from topology.rates import link_gbps, pcie_paths_gbps
from topology.tables import DECIMALS

SLACK: Final = 1e-9


@dataclass(frozen=True, slots=True)
class LargeChoice:
    """The best set found."""

    positions: tuple[int, ...]
    cost: float
    ring_gbps: float
    relative_quality: float


def choose_large(machine: Machine, free: int, ask: DeviceRequest, *, required: int = 0) -> LargeChoice | None:
    """Best set by (cost, ring bandwidth, positions) among the greedy sets of all starts; None if none fits.

    Sets grow from the required positions if there are any.
    """
    best_gbps = _best_gbps(machine, ask.count)
    starts = [positions_of(required)] if required else [(start,) for start in positions_of(free)]
    grown = {_grow(machine, start, free=free, ask=ask) for start in starts}
    found = [_found(machine, positions, free=free, ask=ask, best_gbps=best_gbps) for positions in grown if positions]
    meeting = [one for one in found if ask.count < 2 or one.ring_gbps >= ask.min_bandwidth_gbps * (1 - SLACK)]
    return min(meeting, key=lambda one: (one.cost, -one.ring_gbps, one.positions), default=None)


@lru_cache(maxsize=256)
def _best_gbps(machine: Machine, count: int) -> float:
    """Best ring of the greedy sets on the empty machine."""
    if count < 2:
        return 0.0
    ask = DeviceRequest(count=count)
    grown = {_grow(machine, (start,), free=machine.full, ask=ask) for start in range(machine.count)}
    return max(rate(machine, positions).ring_gbps for positions in grown if positions)


def _grow(machine: Machine, start: tuple[int, ...], *, free: int, ask: DeviceRequest) -> tuple[int, ...]:
    """The set from one start, sorted; empty if the conditions leave too few devices."""
    pulls, may_join = _pulls(machine, ask.policy), _may_join(machine, ask)
    members = list(start)
    if not all(may_join[first][second] for first in start for second in start):
        return ()
    others = [other for other in positions_of(free) if all(may_join[member][other] for member in start)]
    others = [other for other in others if other not in start]
    while len(members) < ask.count:
        if not others:
            return ()
        best = max(others, key=lambda other: (*_pull(pulls, members, other), -other))
        members.append(best)
        others = [other for other in others if other != best and may_join[best][other]]
    return tuple(sorted(members))


def _pull(pulls: tuple[Pairs, Pairs], members: list[int], other: int) -> tuple[float, float]:
    """How well a device fits a growing set: by its best step to a member, then by closeness to all."""
    step, near = pulls
    return max(step[member][other] for member in members), sum(near[member][other] for member in members)


@lru_cache(maxsize=64)
def _may_join(machine: Machine, ask: DeviceRequest) -> tuple[tuple[bool, ...], ...]:
    """For each pair, whether it may be in one set."""
    island = island_of(machine)

    def together(first: int, second: int) -> bool:
        if POLICIES[ask.policy].one_island and island[first] != island[second]:
            return False
        if first == second:
            return True
        linked = bool(direct_links(machine.links[first][second]))
        return ask.interconnect is Interconnect.ANY or linked == (ask.interconnect is Interconnect.NVLINK)

    return tuple(tuple(together(first, second) for second in range(machine.count)) for first in range(machine.count))


@lru_cache(maxsize=64)
def _pulls(machine: Machine, policy: Policy) -> tuple[Pairs, Pairs]:
    """Pair weights that a set grows by: GB/s of a step and closeness; closeness alone; or the absence of crowding."""
    devices = range(machine.count)
    none: Pairs = tuple((0.0,) * machine.count for _ in devices)
    if policy is Policy.SPREAD:
        return none, tuple(tuple(-weight for weight in row) for row in crowding(machine))
    if policy is Policy.PACKED:
        return none, closeness(machine)
    steps = tuple(tuple(_step(machine, first, second) for second in devices) for first in devices)
    return steps, closeness(machine)


def _step(machine: Machine, first: int, second: int) -> float:
    links = direct_links(machine.links[first][second]) * link_gbps(machine)
    return max(links, pcie_paths_gbps(machine)[first][second])


def _found(
    machine: Machine, positions: tuple[int, ...], *, free: int, ask: DeviceRequest, best_gbps: float
) -> LargeChoice:
    weights = POLICIES[ask.policy]
    rating = rate(machine, positions)
    relative = min(rating.ring_gbps / best_gbps, 1.0) if ask.count > 1 else 1.0
    rest = [other for other in positions_of(free) if other not in positions]
    several = ask.count > 1
    cost = weights.alpha * (1 - relative) + weights.pack * free.bit_count()
    cost += weights.apart * (several and len({island_of(machine)[position] for position in positions}) > 1)
    cost += weights.unlinked * (several and not rating.linked)
    near = closeness(machine)
    cost += weights.near * sum(near[member][other] for member in positions for other in rest)
    cost -= weights.near * sum(near[one][other] for one in positions for other in positions if one < other)
    if ask.policy is Policy.SPREAD:
        pairs = [(first, second) for first in positions for second in positions if first < second]
        cost += weights.crowd * sum(crowding(machine)[first][second] for first, second in pairs) / max(len(pairs), 1)
    return LargeChoice(positions, round(cost, DECIMALS), rating.ring_gbps, relative)
