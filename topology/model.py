"""One machine's geometry, as frozen facts over dense positions 0..n-1.

A `Machine` holds link cells, NUMA nodes and bandwidth facts from an agent, a saved matrix or a profile, and is the only
input of every choice. Machines with equal facts are equal, have one hash and share all tables. The caller maps
positions to device ids, uuids and NVML indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from topology.errors import MachineError, PositionError
from topology.links import PCIE_CLOSENESS, SAME_NODE, SELF, WORST, clean_cell, direct_links, weaker

DEVICES_MAX: Final = 64
"""Fits a free mask in one machine word; no known machine has more GPUs or MIG devices to choose from together."""

LINK_GBPS_MAX: Final = 200.0
"""Twice the fastest announced link, per link and direction; a higher value from a driver is nonsense."""

NICS_MAX: Final = 64
"""Limit of adapters considered; the rest is left out."""

Rows = tuple[tuple[str, ...], ...]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Machine:
    """Geometry of one machine. Build it with `machine()`, which makes the cells symmetric and known.

    links: cells such as "NV12", "PIX", "SYS"; "X" on the diagonal. pcie: the relation that NVLink hides, if known.
    link_gbps: GB/s per link and direction as specified or read; inter_socket_gbps: GB/s between sockets.
    nics: per device its PCIe relation to each network adapter near some device, if known.
    """

    links: Rows
    pcie: Rows | None
    numa: tuple[int | None, ...]
    nvlink_generation: int | None
    nvswitch: bool
    link_gbps: float | None
    pcie_generation: int | None
    inter_socket_gbps: float | None
    vendor: str
    nics: Rows | None = None

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.links)

    @property
    def full(self) -> int:
        """Mask of all positions."""
        return (1 << len(self.links)) - 1


def machine(
    links: Sequence[Sequence[object]],
    *,
    pcie: Sequence[Sequence[object]] | None = None,
    numa: Sequence[int | None] | None = None,
    nvlink_generation: int | None = None,
    nvswitch: bool = False,
    link_gbps: float | None = None,
    pcie_generation: int | None = None,
    inter_socket_gbps: float | None = None,
    vendor: str = "nvidia",
    nics: Sequence[Sequence[object]] | None = None,
) -> Machine:
    """Build a machine; a cell that is missing, unknown or different at its two ends becomes the weaker side.

    nics: one row of cells per device, one column per adapter, in any order.
    Raises MachineError for no device, more than DEVICES_MAX, or a row longer than the number of rows.
    An impossible number (negative, not finite, more than LINK_GBPS_MAX for a link) counts as unknown.
    """
    count = len(links)
    if not 1 <= count <= DEVICES_MAX:
        raise MachineError(f"needs 1 to {DEVICES_MAX} devices", value=count)
    numa_nodes = tuple(numa) if numa is not None else (None,) * count
    if len(numa_nodes) != count:
        raise MachineError(f"needs one NUMA node per device, {count} in all", value=numa_nodes)
    pcie_rows = _symmetric(pcie, count=count) if pcie is not None else None
    return Machine(
        links=_symmetric(links, count=count),
        pcie=_without_direct_links(pcie_rows) if pcie_rows is not None else None,
        numa=tuple(node if isinstance(node, int) and node >= 0 else None for node in numa_nodes),
        nvlink_generation=_positive(nvlink_generation),
        nvswitch=bool(nvswitch),
        link_gbps=_positive(link_gbps if link_gbps is not None and link_gbps <= LINK_GBPS_MAX else None),
        pcie_generation=_positive(pcie_generation),
        inter_socket_gbps=_positive(inter_socket_gbps),
        vendor=vendor,
        nics=near_nics(nics, count=count) if nics is not None else None,
    )


def near_nics(rows: Sequence[Sequence[object]], *, count: int) -> Rows | None:
    """Cells to the adapters that share at least a host bridge with some device, sorted by their cells; None if there is
    none. Other adapters add nothing to the NUMA nodes. Raises MachineError."""
    if len(rows) != count or any(isinstance(row, str) for row in rows):
        raise MachineError(f"needs {count} rows of adapter cells", value=len(rows))
    columns = min(max(map(len, rows)), NICS_MAX)
    cells = [[clean_cell(row[column] if column < len(row) else WORST) for row in rows] for column in range(columns)]
    told = [[WORST if direct_links(cell) else cell for cell in nic] for nic in cells]
    near = sorted(nic for nic in told if any(PCIE_CLOSENESS[cell] > PCIE_CLOSENESS[SAME_NODE] for cell in nic))
    return tuple(zip(*near, strict=True)) if near else None


def asymmetric_pairs(links: Sequence[Sequence[object]]) -> tuple[tuple[int, int], ...]:
    """Pairs of positions whose two ends disagree; reports show them as a condition."""
    count = len(links)
    return tuple(
        (first, second)
        for first in range(count)
        for second in range(first + 1, count)
        if clean_cell(_cell(links, first, second)) != clean_cell(_cell(links, second, first))
    )


def mask_of(positions: Sequence[int]) -> int:
    """Bit mask of positions, in any order, repeated or not."""
    mask = 0
    for position in positions:
        mask |= 1 << position
    return mask


def positions_of(mask: int) -> tuple[int, ...]:
    """Positions of the set bits, ascending."""
    return tuple(position for position in range(mask.bit_length()) if mask >> position & 1)


def check_free(machine: Machine, free: int) -> None:
    """Raise PositionError if the mask has a position that the machine lacks."""
    if not 0 <= free <= machine.full:
        raise PositionError(f"free mask needs bits 0 to {machine.count - 1} only", value=free)


def _cell(rows: Sequence[Sequence[object]], row: int, column: int) -> object:
    cells = rows[row]
    return cells[column] if column < len(cells) else WORST


def _symmetric(rows: Sequence[Sequence[object]], *, count: int) -> Rows:
    if len(rows) != count:
        raise MachineError(f"needs {count} rows of PCIe cells", value=len(rows))
    for row in rows:
        if isinstance(row, str) or len(row) > count:
            raise MachineError(f"needs {count} cells per row", value=row)
    cells = [[SELF] * count for _ in range(count)]
    for first in range(count):
        for second in range(first + 1, count):
            both = weaker(clean_cell(_cell(rows, first, second)), clean_cell(_cell(rows, second, first)))
            cells[first][second] = cells[second][first] = both
    return tuple(tuple(row) for row in cells)


def _without_direct_links(rows: Rows) -> Rows:
    return tuple(tuple(WORST if direct_links(cell) else cell for cell in row) for row in rows)


def _positive(number: Number | None) -> Number | None:
    if number is None or not math.isfinite(number) or number <= 0:
        return None
    return number
