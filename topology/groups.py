"""Cliques of direct links and NUMA nodes of a machine, as tuples of positions.

For displays and explanations; choices use topology.tables.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Final

import networkx as nx

from topology.islands import link_graph
from topology.model import Machine

CLIQUES_MAX: Final = 1_000
"""Limit of cliques listed; sparse meshes of known machines have at most a few dozen."""

Group = tuple[int, ...]


@lru_cache(maxsize=256)
def cliques(machine: Machine) -> tuple[Group, ...]:
    """Maximal sets of two or more in which every pair has a direct link, largest first, then by positions."""
    found = itertools.islice(nx.find_cliques(link_graph(machine)), CLIQUES_MAX)
    groups = [tuple(sorted(clique)) for clique in found if len(clique) > 1]
    return tuple(sorted(groups, key=lambda group: (-len(group), group)))


@lru_cache(maxsize=256)
def numa_groups(machine: Machine) -> tuple[tuple[int | None, Group], ...]:
    """(NUMA node, positions), unknown last."""
    nodes = sorted(set(machine.numa), key=lambda node: (node is None, node))
    return tuple(
        (node, tuple(position for position in range(machine.count) if machine.numa[position] == node)) for node in nodes
    )
