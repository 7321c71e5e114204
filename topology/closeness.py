"""Closeness over PCIe and NUMA: the last tie-break, and the heart of spreading.

Where link quality and fragmentation leave a tie (every NVSwitch machine), sets should share PCIe switches, NICs and
NUMA nodes, and should leave such groups whole. In: a Machine. Out: pair weights and, per mask, sums over its pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from topology.islands import island_of
from topology.links import PCIE_CLOSENESS
from topology.model import Machine
from topology.quality import Floats
from topology.rates import pcie_cell

Pairs = tuple[tuple[float, ...], ...]


@lru_cache(maxsize=256)
def closeness(machine: Machine) -> Pairs:
    """Weight per pair, 0 (far) to 1 (one board, one NUMA node)."""
    nearest = max(PCIE_CLOSENESS.values()) + 1

    def weight(first: int, second: int) -> float:
        return (PCIE_CLOSENESS[pcie_cell(machine, first, second)] + _same_numa(machine, first, second)) / nearest

    return _pairs(machine.count, weight)


@lru_cache(maxsize=256)
def crowding(machine: Machine) -> Pairs:
    """Weight per pair, 0 to 1: half for a shared island, half for a shared NUMA node."""
    island = island_of(machine)

    def weight(first: int, second: int) -> float:
        return (float(island[first] == island[second]) + _same_numa(machine, first, second)) / 2

    return _pairs(machine.count, weight)


def pair_sums(pairs: Pairs) -> Floats:
    """Sum of the pair weights inside every mask."""
    count = len(pairs)
    sums = np.zeros(1 << count)
    for position in range(count):
        bit = 1 << position
        below = np.arange(bit)
        to_position = np.zeros(bit)
        for other in range(position):
            to_position += pairs[position][other] * (below >> other & 1)
        sums[bit : 2 * bit] = sums[:bit] + to_position
    return sums


def _same_numa(machine: Machine, first: int, second: int) -> float:
    return float(machine.numa[first] is not None and machine.numa[first] == machine.numa[second])


def _pairs(count: int, weight: Callable[[int, int], float]) -> Pairs:
    return tuple(
        tuple(0.0 if first == second else weight(first, second) for second in range(count)) for first in range(count)
    )
