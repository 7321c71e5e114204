"""Islands: which GPUs of a machine belong together.

An island is a maximal set of GPUs joined by NVLink (or xGMI), directly or through others or a switch. GPUs without
any such link are grouped by NUMA node; where the NUMA node is unknown, by PCIe relations better than "SYS". Every GPU
lies in exactly one island. In: a Machine. Out: islands, NVLink ones first, each ordered by its lowest position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import networkx as nx

from topology.links import PCIE_CLOSENESS, WORST, direct_links
from topology.model import Machine, mask_of

IslandKind = Literal["nvlink", "pcie"]


@dataclass(frozen=True, slots=True)
class Island:
    """One island: `nvlink-group-N` (kind nvlink), `numa-N` or, with NUMA unknown, `pcie-group-N` (kind pcie)."""

    name: str
    kind: IslandKind
    positions: tuple[int, ...]

    @property
    def mask(self) -> int:
        """Bit mask of the positions."""
        return mask_of(self.positions)


@lru_cache(maxsize=1024)
def islands(machine: Machine) -> tuple[Island, ...]:
    """All islands of the machine; together they hold every position once."""
    graph = link_graph(machine)
    linked = [sorted(part) for part in nx.connected_components(graph) if len(part) > 1]
    lonely = [position for position in range(machine.count) if not graph.degree(position)]
    groups = [
        Island(name=f"nvlink-group-{number}", kind="nvlink", positions=tuple(part))
        for number, part in enumerate(sorted(linked))
    ]
    return tuple(groups + _numa_islands(machine, lonely=lonely) + _pcie_islands(machine, lonely=lonely))


def link_graph(machine: Machine) -> nx.Graph:
    """Graph of direct links: an edge with attribute `links` for each pair that NVLink or xGMI joins."""
    graph = nx.Graph()
    graph.add_nodes_from(range(machine.count))
    for first in range(machine.count):
        for second in range(first + 1, machine.count):
            count = direct_links(machine.links[first][second])
            if count:
                graph.add_edge(first, second, links=count)
    return graph


def island_of(machine: Machine) -> tuple[Island, ...]:
    """The island of each position, by position."""
    by_position = {position: island for island in islands(machine) for position in island.positions}
    return tuple(by_position[position] for position in range(machine.count))


def _numa_islands(machine: Machine, *, lonely: list[int]) -> list[Island]:
    members: dict[int, list[int]] = {}
    for position in lonely:
        node = machine.numa[position]
        if node is not None:
            members.setdefault(node, []).append(position)
    return [
        Island(name=f"numa-{node}", kind="pcie", positions=tuple(positions))
        for node, positions in sorted(members.items(), key=lambda item: item[1])
    ]


def _pcie_islands(machine: Machine, *, lonely: list[int]) -> list[Island]:
    graph = nx.Graph()
    unknown = [position for position in lonely if machine.numa[position] is None]
    graph.add_nodes_from(unknown)
    near = [
        (first, second)
        for index, first in enumerate(unknown)
        for second in unknown[index + 1 :]
        if PCIE_CLOSENESS[machine.links[first][second]] > PCIE_CLOSENESS[WORST]
    ]
    graph.add_edges_from(near)
    parts = sorted(sorted(part) for part in nx.connected_components(graph))
    return [
        Island(name=f"pcie-group-{number}", kind="pcie", positions=tuple(part)) for number, part in enumerate(parts)
    ]
