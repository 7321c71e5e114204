"""Closeness of pairs: the last tie-break, and the measure for spreading.

If link quality and fragmentation tie (on every NVSwitch machine), sets should share PCIe switches, NICs and NUMA
nodes, leave such groups whole, and leave the better-linked GPUs free. Gives pair weights and their sums per mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from topology.islands import island_of
from topology.links import PCIE_CLOSENESS, SAME_NODE, direct_links
from topology.model import Machine
from topology.quality import Floats
from topology.rates import pcie_cell

Pairs = tuple[tuple[float, ...], ...]


@lru_cache(maxsize=256)
def closeness(machine: Machine) -> Pairs:
    """Weight per pair, 0 to 1: half for its links relative to the best pair's, half for a shared PCIe switch, NUMA
    node and, if adapters are known, a network adapter nearest to both."""
    nearest = max(PCIE_CLOSENESS.values()) + (1 if machine.nics is None else 2)
    most_links = max(max(direct_links(cell) for row in machine.links for cell in row), 1)

    def weight(first: int, second: int) -> float:
        path = PCIE_CLOSENESS[pcie_cell(machine, first, second)] + _same_numa(machine, first, second)
        path += share_nic(machine, first, second)
        return path / nearest / 2 + direct_links(machine.links[first][second]) / most_links / 2

    return _pairs(machine.count, weight)


@lru_cache(maxsize=256)
def crowding(machine: Machine) -> Pairs:
    """Weight per pair, 0 to 1: half for a shared island, half for a shared NUMA node."""
    island = island_of(machine)

    def weight(first: int, second: int) -> float:
        return (float(island[first] == island[second]) + _same_numa(machine, first, second)) / 2

    return _pairs(machine.count, weight)


def share_nic(machine: Machine, first: int, second: int) -> bool:
    """True if an adapter is among the nearest of both devices, at most one host bridge away."""
    return not nearest_nics(machine)[first].isdisjoint(nearest_nics(machine)[second])


@lru_cache(maxsize=256)
def nearest_nics(machine: Machine) -> tuple[frozenset[int], ...]:
    """Nearest adapters of each device, as columns of `nics`; empty if none shares a host bridge with it."""
    far = PCIE_CLOSENESS[SAME_NODE]

    def nearest(cells: tuple[str, ...]) -> frozenset[int]:
        best = max((PCIE_CLOSENESS[cell] for cell in cells), default=far)
        return frozenset(nic for nic, cell in enumerate(cells) if PCIE_CLOSENESS[cell] == best > far)

    return tuple(map(nearest, machine.nics if machine.nics is not None else ((),) * machine.count))


def pair_sums(pairs: Pairs) -> Floats:
    """Sum of pair weights inside every mask."""
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
