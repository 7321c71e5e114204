"""GB/s that collective communication can expect from a link or a PCIe path, per direction.

Effective rates are below the data sheet's. The figures are those of NCCL's and RCCL's own topology models
(NCCL src/graph/topo.h: NVLink 18/20/20/20.6/40.1 per link by
generation, 12 on GA102; PCIe x16 12/24/48 for generations 3/4/5; peer-to-peer over a host bridge costs 6/5; sockets 6
to 40. RCCL: xGMI 24, 36, 48). A figure here is what NCCL would print, not a measurement of this machine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from topology.links import PCIE_CLOSENESS, direct_links
from topology.model import Machine

LINK_GBPS_BY_GENERATION: Final[dict[int, float]] = {1: 18.0, 2: 20.0, 3: 20.0, 4: 20.6, 5: 40.1}
NVLINK_RATES: Final[tuple[tuple[float, float], ...]] = ((14.0625, 12.0), (20.0, 18.0), (25.0, 20.0), (50.0, 40.1))
"""(specified, effective) GB/s per link, for known rates; 25 means 20.6 in generation 4."""
XGMI_RATES: Final[tuple[tuple[float, float], ...]] = ((46.0, 24.0), (50.0, 36.0), (64.0, 48.0))
PCIE_GBPS_BY_GENERATION: Final[dict[int, float]] = {3: 12.0, 4: 24.0, 5: 48.0}
HOST_BRIDGE_COST: Final = 1.2
NO_PEER_COST: Final = 2.0
"""Without peer access everything is copied into host memory and out again."""
RATE_TOLERANCE: Final = 0.1
UNKNOWN_LINK_GBPS: Final = 12.0
UNKNOWN_PCIE_GBPS: Final = 12.0
UNKNOWN_SOCKET_GBPS: Final = 6.0
"""The slowest known rate replaces a missing fact: unknown never scores above known."""


def rates_known(machine: Machine) -> bool:
    """True if ring bandwidths are GB/s of this machine; else they are relative to slow defaults."""
    has_links = any(direct_links(cell) for row in machine.links for cell in row)
    if has_links:
        return machine.nvlink_generation in LINK_GBPS_BY_GENERATION or machine.link_gbps is not None
    return machine.pcie_generation is not None


def link_gbps(machine: Machine) -> float:
    """Effective GB/s of one NVLink or xGMI link, one direction."""
    told = machine.link_gbps
    if machine.vendor == "amd":
        return _nearest(told, XGMI_RATES) if told is not None else XGMI_RATES[0][1]
    generation = machine.nvlink_generation or 0
    by_generation = LINK_GBPS_BY_GENERATION.get(min(generation, max(LINK_GBPS_BY_GENERATION)))
    if told is None:
        return by_generation or UNKNOWN_LINK_GBPS
    by_rate = _nearest(told, NVLINK_RATES)
    if by_generation is not None and abs(by_rate - by_generation) <= RATE_TOLERANCE * by_generation:
        return by_generation
    return by_rate


def pcie_gbps(machine: Machine) -> float:
    """Effective GB/s of one GPU's PCIe x16 path below the host bridge, one direction."""
    generation = machine.pcie_generation
    if generation is None or generation < min(PCIE_GBPS_BY_GENERATION):
        return UNKNOWN_PCIE_GBPS
    return PCIE_GBPS_BY_GENERATION[min(generation, max(PCIE_GBPS_BY_GENERATION))]


def pcie_cell(machine: Machine, first: int, second: int) -> str:
    """The PCIe relation of two positions; if NVLink hides it, NUMA gives at least the socket."""
    if machine.pcie is not None:
        return machine.pcie[first][second]
    cell = machine.links[first][second]
    if cell in PCIE_CLOSENESS:
        return cell
    same_node = machine.numa[first] is not None and machine.numa[first] == machine.numa[second]
    return "NODE" if same_node else "SYS"


@lru_cache(maxsize=1024)
def pcie_paths_gbps(machine: Machine) -> tuple[tuple[float, ...], ...]:
    """GB/s of the PCIe path of every pair; 0 on the diagonal."""
    count = machine.count
    return tuple(
        tuple(0.0 if first == second else _path_gbps(machine, first, second) for second in range(count))
        for first in range(count)
    )


def _path_gbps(machine: Machine, first: int, second: int) -> float:
    below_bridge = pcie_gbps(machine)
    cell = pcie_cell(machine, first, second)
    if cell in {"PIX", "PXB", "PSB"}:
        return below_bridge
    over_bridge = below_bridge / HOST_BRIDGE_COST
    if cell in {"PHB", "NODE"}:
        return over_bridge
    across = min(over_bridge, machine.inter_socket_gbps or UNKNOWN_SOCKET_GBPS)
    return across / NO_PEER_COST if cell == "NS" else across


def _nearest(told: float, rates: tuple[tuple[float, float], ...]) -> float:
    """The effective rate of the nearest known rate within tolerance, else scaled down by the lowest ratio."""
    specified, effective = min(rates, key=lambda pair: abs(pair[0] - told))
    if abs(told - specified) <= RATE_TOLERANCE * specified:
        return effective
    return told * min(effective / specified for specified, effective in rates)
