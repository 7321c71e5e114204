"""How much of a gang every domain could hold, level by level, to explain a gang that finds no place.

Gives DomainFits for each pod set by itself, with the excluded hosts by reason. The search chooses by the same numbers
(topology.gangs.counts), and they are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from topology.gangs.descent import StepBudget
from topology.gangs.model import Gang, PlacementRefusal
from topology.gangs.occupancy import SearchOccupancy
from topology.gangs.placing import Rules, descent_input
from topology.gangs.refusals import excluded_hosts
from topology.gangs.requests import PlacementUnit, units_of
from topology.gangs.snapshot import HostSnapshot

DOMAINS_MAX: Final = 64
"""Limit of domains listed per level, the roomiest first."""


@dataclass(frozen=True, slots=True)
class DomainFit:
    """One domain: how many of the needed pods (or slices) fit there, and why hosts take none.

    level, path: both empty for all hosts together.
    """

    pod_set: str
    level: str
    path: tuple[str, ...]
    fits: int
    of: int
    unit: str
    hosts: int
    excluded: tuple[tuple[str, int], ...]


def domain_fits(gang: Gang, snapshot: HostSnapshot) -> tuple[DomainFit, ...]:
    """Return every pod set's domains: all hosts first, then level by level down to that of its slices; within a level
    the roomiest first, then by name. Empty for a request that the topology cannot answer."""
    units = units_of(gang, snapshot.tree)
    if isinstance(units, PlacementRefusal):
        return ()
    return tuple(fit for unit in units for fit in _fits(unit, snapshot))


def _fits(unit: PlacementUnit, snapshot: HostSnapshot) -> list[DomainFit]:
    tree, occupancy = snapshot.tree, SearchOccupancy(snapshot)
    counts = descent_input(unit, occupancy, Rules(), StepBudget()).counts
    capacity = counts.members[tree.hosts]
    everything = np.arange(len(snapshot.hosts))
    lowest = min(tree.hosts, unit.shape.level)
    rows: list[DomainFit] = []

    def told(level: str, path: tuple[str, ...], fits: int, among: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        out = excluded_hosts(unit.pod_set, occupancy, among[capacity[among] == 0])
        word = "pod" if unit.shape.size == 1 else "slice"
        rows.append(DomainFit(unit.pod_set.name, level, path, min(fits, unit.need), unit.need, word, len(among), out))

    top = np.where(counts.led[0], counts.slices_led[0], counts.slices[0]) if tree.size(0) else np.zeros(0, np.int64)
    told("", (), int(top.sum()), everything)
    for level in range(min(lowest + 1, tree.hosts)):
        room = np.where(counts.led[level], counts.slices_led[level], counts.slices[level])
        for domain in np.argsort(-room, kind="stable")[:DOMAINS_MAX].tolist():
            among = np.flatnonzero(tree.above[level] == domain)
            told(tree.name_of(level), tree.paths[level][domain], int(room[domain]), among)
    return rows
