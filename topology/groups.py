"""Other ways to see a machine than islands: cliques of direct links, PCIe groups and NUMA nodes.

In: a Machine. Out: tuples of positions, for people's views and explanations; choices are made from topology.tables.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Final

import networkx as nx

from topology.islands import link_graph
from topology.links import PCIE_CLOSENESS
from topology.model import Machine
from topology.rates import pcie_cell

CLIQUES_MAX: Final = 1_000
"""Cliques that are listed; sparse meshes of known machines have at most a few dozen."""

Group = tuple[int, ...]


@lru_cache(maxsize=256)
def cliques(machine: Machine) -> tuple[Group, ...]:
    """Maximal sets of two or more in which every pair has a direct link, largest first, then by positions."""
    found = itertools.islice(nx.find_cliques(link_graph(machine)), CLIQUES_MAX)
    groups = [tuple(sorted(clique)) for clique in found if len(clique) > 1]
    return tuple(sorted(groups, key=lambda group: (-len(group), group)))


@lru_cache(maxsize=256)
def pcie_groups(machine: Machine, *, nearest: str) -> tuple[Group, ...]:
    """Positions joined by PCIe relations at least as near as `nearest`, such as "PIX" for one switch; singles
    included."""
    graph = nx.Graph()
    graph.add_nodes_from(range(machine.count))
    graph.add_edges_from(
        pair
        for pair in itertools.combinations(range(machine.count), 2)
        if PCIE_CLOSENESS[pcie_cell(machine, *pair)] >= PCIE_CLOSENESS[nearest]
    )
    return tuple(sorted(tuple(sorted(part)) for part in nx.connected_components(graph)))


@lru_cache(maxsize=256)
def numa_groups(machine: Machine) -> tuple[tuple[int | None, Group], ...]:
    """(NUMA node, positions), unknown last."""
    nodes = sorted(set(machine.numa), key=lambda node: (node is None, node))
    return tuple(
        (node, tuple(position for position in range(machine.count) if machine.numa[position] == node)) for node in nodes
    )
