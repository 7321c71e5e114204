"""The tree of domains above hosts: static, with dense indices, shared by all snapshots of the same hosts.

Per level, domains are in the order of their paths, so the children of one domain are neighbours and a roll-up is one
`reduceat`. The lowest level is the hosts. Counts are kept in arrays by these indices (see topology.gangs.counts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from topology.gangs.errors import GangError
from topology.gangs.model import HOST, LEVELS_MAX
from topology.quality import Ints

HOSTS_MAX: Final = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class DomainTree:
    """Level 0 is the highest, level `len(levels)` the hosts.

    paths: per level, the path of every domain. starts: per level above the hosts, the first child of each domain
    in the level below. parents: per level below the first, the index of each domain's parent.
    above: per level, the index of each host's domain.
    """

    levels: tuple[str, ...]
    paths: tuple[tuple[tuple[str, ...], ...], ...]
    starts: tuple[Ints, ...]
    parents: tuple[Ints, ...]
    above: tuple[Ints, ...]

    @property
    def hosts(self) -> int:
        """Index of the level of hosts."""
        return len(self.levels)

    def size(self, level: int) -> int:
        """Number of domains at a level."""
        return len(self.paths[level])

    def level_of(self, name: str) -> int | None:
        """Index of a level by its name; None if there is none."""
        if name in self.levels:
            return self.levels.index(name)
        return self.hosts if name == HOST else None

    def name_of(self, level: int) -> str:
        """Name of a level."""
        return self.levels[level] if level < self.hosts else HOST

    def children(self, level: int, domain: int) -> range:
        """Indices, one level below, of a domain's children."""
        starts = self.starts[level]
        end = int(starts[domain + 1]) if domain + 1 < len(starts) else self.size(level + 1)
        return range(int(starts[domain]), end)

    def below(self, level: int, domain: int, target: int) -> range:
        """Indices of all domains of a lower level inside one; at its own level, the domain itself."""
        first, last = domain, domain
        for step in range(level, target):
            first, last = self.children(step, first).start, self.children(step, last).stop - 1
        return range(first, last + 1)

    def ancestor(self, level: int, domain: int, target: int) -> int:
        """Index of the domain of a higher level around one; at its own level, the domain itself."""
        for step in range(level, target, -1):
            domain = int(self.parents[step - 1][domain])
        return domain


def path_of(labels: Mapping[str, str], levels: Sequence[str]) -> tuple[str, ...] | None:
    """A host's path by its labels; None (outside the topology) if a level is missing or empty."""
    path = tuple(labels.get(level, "") for level in levels)
    return path if all(path) else None


def domain_tree(levels: Sequence[str], paths: Sequence[tuple[str, ...]], names: Sequence[str]) -> DomainTree:
    """Build the tree over hosts that are sorted by (path, name).

    Raises GangError for too many levels or hosts, repeated levels, a path of another length, or repeated host names.
    """
    check_levels(levels)
    if len(paths) > HOSTS_MAX:
        raise GangError(f"needs at most {HOSTS_MAX} hosts", value=len(paths))
    if len(set(names)) != len(names):
        raise GangError("needs one name per host", value=sorted(name for name in set(names) if names.count(name) > 1))
    odd = next((path for path in paths if len(path) != len(levels)), None)
    if odd is not None:
        raise GangError(f"needs paths of {len(levels)} names", value=odd)
    per_level: list[tuple[tuple[str, ...], ...]] = []
    above: list[Ints] = []
    for level in range(len(levels)):
        cut = [path[: level + 1] for path in paths]
        index = {path: position for position, path in enumerate(dict.fromkeys(cut))}
        per_level.append(tuple(index))
        above.append(np.array([index[path] for path in cut], dtype=np.int64))
    per_level.append(tuple((*path, name) for path, name in zip(paths, names, strict=True)))
    above.append(np.arange(len(paths), dtype=np.int64))
    parents = tuple(_parents(above[level], above[level + 1]) for level in range(len(levels)))
    return DomainTree(
        levels=tuple(levels),
        paths=tuple(per_level),
        starts=tuple(_starts(row) for row in parents),
        parents=parents,
        above=tuple(above),
    )


def check_levels(levels: Sequence[str]) -> None:
    """Raise GangError unless there are at most LEVELS_MAX levels, each with a name of its own."""
    if len(levels) > LEVELS_MAX or len(set(levels)) != len(levels) or not all(levels):
        raise GangError(f"needs at most {LEVELS_MAX} levels with names of their own", value=tuple(levels))


def _parents(upper: Ints, lower: Ints) -> Ints:
    """Parent of each domain of the lower level, by its hosts."""
    _, first = np.unique(lower, return_index=True)
    parents: Ints = upper[first]
    return parents


def _starts(parents: Ints) -> Ints:
    _, first = np.unique(parents, return_index=True)
    starts: Ints = first.astype(np.int64)
    return starts
