"""Choice of GPUs on one machine, shared by filter, prioritize and bind.

Gives a frozen Choice, or a ChoiceRefusal with a short constant reason. Pure: the same input gives the same answer.
Total order: least cost (see topology.policies), then least positions, lexicographically; across machines the caller
breaks equal costs by the node's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

import numpy as np

from topology.demand import PRIOR, Demand
from topology.device_requests import DeviceRequest, Interconnect
from topology.fragmentation import relative_qualities
from topology.islands import Island, island_of
from topology.large import choose_large
from topology.model import Machine, check_free, positions_of
from topology.policies import POLICIES
from topology.quality import TABLE_DEVICES_MAX, qualities
from topology.tables import (
    meets_bandwidth,
    meets_interconnect,
    meets_island,
    subsets,
    table,
)

ANSWERS_MAX: Final = 1 << 14
"""Answers cached: many nodes in the same state ask the same."""


class Reason(StrEnum):
    """Reasons why a machine cannot serve a request: constant phrases that aggregate in messages."""

    TOO_FEW_GPUS = "too few GPUs on the machine"
    TOO_FEW_FREE = "too few free GPUs"
    NO_ISLAND = "no island of the requested size"
    NO_NVLINK_ISLAND = "no NVLink island of the requested size"
    NO_PCIE_SET = "no set joined by PCIe alone"
    NO_BANDWIDTH = "no set reaches the asked bandwidth"
    REQUIRED = "required GPUs are not free or too many"


@dataclass(frozen=True, slots=True)
class Choice:
    """The best set. cost: comparable across machines; ring_gbps: GB/s, 0 for one GPU; relative_quality: 0 to 1
    against the best set of this size on the empty machine; bounded: a search limit was hit, so a better set may
    exist."""

    positions: tuple[int, ...]
    cost: float
    ring_gbps: float
    relative_quality: float
    bounded: bool
    islands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChoiceRefusal:
    """Why no set fits."""

    reason: Reason


def choose(
    machine: Machine, free: int, ask: DeviceRequest, *, required: int = 0, demand: Demand = PRIOR
) -> Choice | ChoiceRefusal:
    """The best set of `ask.count` free positions; `free` is a bit mask over positions.

    required: positions that the set must contain. Raises PositionError when a mask names positions that the machine
    does not have.
    """
    check_free(machine, free | required)
    return _choose(machine, free, ask, required=required, demand=demand)


@lru_cache(maxsize=ANSWERS_MAX)
def _choose(
    machine: Machine, free: int, ask: DeviceRequest, *, required: int, demand: Demand
) -> Choice | ChoiceRefusal:
    if free.bit_count() < ask.count:
        return ChoiceRefusal(Reason.TOO_FEW_FREE if ask.count <= machine.count else Reason.TOO_FEW_GPUS)
    if required & ~free or required.bit_count() > ask.count:
        return ChoiceRefusal(Reason.REQUIRED)
    if machine.count > TABLE_DEVICES_MAX:
        return _choose_large(machine, free, ask, required=required)
    answers = table(machine, ask, demand)
    if required:
        found = answers.best_with(free, required)
    else:
        chosen = answers.chosen(free)
        found = None if chosen is None else (chosen, answers.cost(free))
    if found is None:
        return ChoiceRefusal(_refused_by(machine, free, ask, required=required))
    return _described(
        machine,
        positions_of(found[0]),
        cost=found[1],
        ring_gbps=float(qualities(machine).ring_gbps[found[0]]),
        relative=float(relative_qualities(machine)[found[0]]),
        bounded=not answers.exact,
    )


@lru_cache(maxsize=4096)
def would_ever_fit(machine: Machine, ask: DeviceRequest) -> ChoiceRefusal | None:
    """None if the empty machine can serve the request, else why it never can."""
    if ask.count > machine.count:
        return ChoiceRefusal(Reason.TOO_FEW_GPUS)
    answer = choose(machine, machine.full, ask)
    return answer if isinstance(answer, ChoiceRefusal) else None


def island_names(machine: Machine, positions: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the islands that the positions touch, in the machine's order of islands."""
    by_position: tuple[Island, ...] = island_of(machine)
    return tuple(dict.fromkeys(by_position[position].name for position in positions))


def _choose_large(machine: Machine, free: int, ask: DeviceRequest, *, required: int) -> Choice | ChoiceRefusal:
    found = choose_large(machine, free, ask, required=required)
    if found is None:
        return ChoiceRefusal(_condition_reason(ask))
    return _described(
        machine,
        found.positions,
        cost=found.cost,
        ring_gbps=found.ring_gbps,
        relative=found.relative_quality,
        bounded=True,
    )


def _described(
    machine: Machine, positions: tuple[int, ...], *, cost: float, ring_gbps: float, relative: float, bounded: bool
) -> Choice:
    return Choice(
        positions=positions,
        cost=cost,
        ring_gbps=ring_gbps if len(positions) > 1 else 0.0,
        relative_quality=relative,
        bounded=bounded,
        islands=island_names(machine, positions),
    )


def _refused_by(machine: Machine, free: int, ask: DeviceRequest, *, required: int) -> Reason:
    """The condition that rules out the last sets: joined by NVLink or PCIe, then one island, then bandwidth."""
    masks = subsets(machine.count, ask.count)
    masks = masks[(masks & ~free == 0) & (masks & required == required)]
    joined = meets_interconnect(machine, masks, interconnect=ask.interconnect)
    if not np.any(joined):
        return _condition_reason(ask)
    one_island = POLICIES[ask.policy].one_island
    if not np.any(joined & meets_island(machine, masks, one_island=one_island)):
        return Reason.NO_ISLAND
    assert not np.any(
        joined
        & meets_island(machine, masks, one_island=one_island)
        & meets_bandwidth(machine, masks, gbps=ask.min_bandwidth_gbps)
    )
    return Reason.NO_BANDWIDTH


def _condition_reason(ask: DeviceRequest) -> Reason:
    if ask.interconnect is Interconnect.NVLINK:
        return Reason.NO_NVLINK_ISLAND
    if ask.interconnect is Interconnect.PCIE:
        return Reason.NO_PCIE_SET
    if POLICIES[ask.policy].one_island:
        return Reason.NO_ISLAND
    return Reason.NO_BANDWIDTH
