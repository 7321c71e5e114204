"""Phase one: members and whole slices that every domain could hold, rolled up from the hosts.

Gives `Counts` per level from the capacities per host (with and without the leader) and the shape of the slices. A
domain holds the sum of its children, each rounded down to whole inner slices if those end at the child's level, up to
its own limit and those above it. With the leader it holds that sum less the smallest loss over the children that can
take the leader. At the slice level, slices are members divided by the size; above, the sum of the children's slices.
The counts are exact: a domain can hold n slices (and the leader) if and only if its count says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from topology.gangs.tree import DomainTree
from topology.quality import Bools, Ints

NEVER: Final = np.int64(1 << 40)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Grouping of members. size, level: the outermost slice (1 at the hosts' level without slices). inner: per level
    below it, the size of which every domain takes a multiple. leader: one leader comes with them."""

    size: int
    level: int
    inner: tuple[tuple[int, int], ...] = ()
    leader: bool = False

    def unit(self, level: int) -> int:
        """Size of the groups that domains of a level take whole."""
        return self.size if level <= self.level else dict(self.inner).get(level, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Arrays per level. slices: valid down to the slice level. led: the leader fits; members_led and slices_led: what
    fits beside it, equal to the others if it does not fit or there is none."""

    members: tuple[Ints, ...]
    members_led: tuple[Ints, ...]
    slices: tuple[Ints, ...]
    slices_led: tuple[Ints, ...]
    led: tuple[Bools, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    members: Ints
    members_led: Ints
    slices: Ints
    slices_led: Ints
    led: Bools


def count_up(
    tree: DomainTree, capacity: Ints, *, beside: Ints, led: Bools, shape: GroupShape, room: Mapping[int, Ints]
) -> Counts:
    """Roll capacities per host up to the highest level. beside: capacity with the leader there, valid where `led`."""
    limits = _limits(tree, room)
    if tree.hosts in limits:
        capacity, beside = np.minimum(capacity, limits[tree.hosts]), np.minimum(beside, limits[tree.hosts])
    rows = [_host_row(capacity, beside, led, size=shape.size if tree.hosts == shape.level else 0)]
    for level in range(tree.hosts - 1, -1, -1):
        rows.append(_roll_up(rows[-1], tree.starts[level], shape=shape, level=level, room=limits))
    rows.reverse()
    return Counts(
        members=tuple(row.members for row in rows),
        members_led=tuple(row.members_led for row in rows),
        slices=tuple(row.slices for row in rows),
        slices_led=tuple(row.slices_led for row in rows),
        led=tuple(row.led for row in rows),
    )


def _limits(tree: DomainTree, room: Mapping[int, Ints]) -> dict[int, Ints]:
    """Per level, the most that each domain may take by its own limit and those above it; levels above the first limit
    are absent."""
    limits: dict[int, Ints] = {}
    for level in range(min(room, default=tree.hosts + 1), tree.hosts + 1):
        first_hosts = np.searchsorted(tree.above[level], np.arange(tree.size(level)))
        rows = [left[tree.above[limited][first_hosts]] for limited, left in room.items() if limited <= level]
        limits[level] = np.minimum.reduce(rows)
    return limits


def _host_row(capacity: Ints, beside: Ints, led: Bools, *, size: int) -> _Row:
    beside = np.where(led, beside, capacity)
    return _Row(capacity, beside, _divided(capacity, size), _divided(beside, size), led)


def _roll_up(below: _Row, starts: Ints, *, shape: GroupShape, level: int, room: Mapping[int, Ints]) -> _Row:
    inner = dict(shape.inner).get(level + 1, 1)
    members, members_led = below.members // inner * inner, below.members_led // inner * inner
    led: Bools = np.logical_or.reduceat(below.led, starts) if len(starts) else below.led[:0]
    total = _sums(members, starts)
    total_led = np.where(led, total - _least(members - members_led, below.led, starts), total)
    if level in room:
        total, total_led = np.minimum(total, room[level]), np.minimum(total_led, room[level])
    if level >= shape.level:
        size = shape.size if level == shape.level else 0
        return _Row(total, total_led, _divided(total, size), _divided(total_led, size), led)
    slices = _sums(below.slices, starts)
    slices_led = np.where(led, slices - _least(below.slices - below.slices_led, below.led, starts), slices)
    if level in room:
        most = room[level] // shape.size
        slices, slices_led = np.minimum(slices, most), np.minimum(slices_led, most)
    return _Row(total, total_led, slices, slices_led, led)


def _sums(values: Ints, starts: Ints) -> Ints:
    sums: Ints = np.add.reduceat(values, starts) if len(starts) else values[:0]
    return sums


def _least(losses: Ints, led: Bools, starts: Ints) -> Ints:
    """Smallest loss over the children that can take the leader."""
    least: Ints = np.minimum.reduceat(np.where(led, losses, NEVER), starts) if len(starts) else losses[:0]
    return least


def _divided(members: Ints, size: int) -> Ints:
    return members // size if size else np.zeros_like(members)
