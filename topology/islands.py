"""Islands: GPUs of a machine that belong together.

An island is a maximal set of GPUs joined by NVLink (or xGMI), directly or through others or a switch. GPUs without
any such link are grouped by NUMA node; if the NUMA node is unknown, by PCIe relations better than "SYS". Every GPU
is in exactly one island. NVLink islands come first, ordered by their lowest positions.

Only `link_graph` imports networkx: the agent on every machine needs islands, but not an 11 MB library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from topology.links import PCIE_CLOSENESS, WORST, direct_links
from topology.model import Machine, mask_of

if TYPE_CHECKING:
    import networkx as nx

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
    """All islands of the machine; each position is in exactly one."""
    edges = [(first, second) for first, second, _ in _linked_pairs(machine)]
    parts = _components(range(machine.count), edges)
    linked = [part for part in parts if len(part) > 1]
    lonely = [part[0] for part in parts if len(part) == 1]
    groups = [
        Island(name=f"nvlink-group-{number}", kind="nvlink", positions=tuple(part))
        for number, part in enumerate(sorted(linked))
    ]
    return tuple(groups + _numa_islands(machine, lonely=lonely) + _pcie_islands(machine, lonely=lonely))


def link_graph(machine: Machine) -> nx.Graph:
    """Graph of direct links: an edge with attribute `links` for each pair that NVLink or xGMI joins."""
    networkx = import_module("networkx")
    graph: nx.Graph = networkx.Graph()
    graph.add_nodes_from(range(machine.count))
    for first, second, count in _linked_pairs(machine):
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
    unknown = [position for position in lonely if machine.numa[position] is None]
    near = [
        (first, second)
        for index, first in enumerate(unknown)
        for second in unknown[index + 1 :]
        if PCIE_CLOSENESS[machine.links[first][second]] > PCIE_CLOSENESS[WORST]
    ]
    return [
        Island(name=f"pcie-group-{number}", kind="pcie", positions=tuple(part))
        for number, part in enumerate(_components(unknown, near))
    ]


def _linked_pairs(machine: Machine) -> Iterator[tuple[int, int, int]]:
    """Pairs of linked positions, and their number of links."""
    for first in range(machine.count):
        for second in range(first + 1, machine.count):
            count = direct_links(machine.links[first][second])
            if count:
                yield first, second, count


def _components(positions: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Connected components, each sorted, in the order of their lowest position."""
    part_of = {position: [position] for position in positions}
    for first, second in edges:
        if part_of[first] is not part_of[second]:
            joined = part_of[first] + part_of[second]
            part_of |= dict.fromkeys(joined, joined)
    return sorted({id(part): sorted(part) for part in part_of.values()}.values())
