"""Kueue's order: finds the places that Kueue's topology-aware scheduling would choose, for migration from Kueue.

After KEP-2724. Domains are sorted by most slices, then fewest members, then names. If the first holds everything, the
domain that holds it with least left is taken; otherwise a preferred level goes one up, and at the top, domains are
taken one after the other, the last by best fit. Further down, the children of all chosen domains are sorted together
above the slices, and per domain at and below them. Without a constraint the order is reversed: smallest domains first.
A leader goes to the first domain that still leaves room for everything. For balanced requests see
topology.gangs.balanced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from topology.gangs.descent import DescentInput, DescentResult, HostCount, spread_of
from topology.gangs.model import Mode


@dataclass(frozen=True, slots=True)
class _Domain:
    """units, units_led: capacity in slices or in groups of members, without and with the leader. sorted_by: the units
    that decide its place in the order, none below the slices. liking: negative if its hosts are preferred."""

    index: int
    units: int
    units_led: int
    led: bool
    members: int
    sorted_by: int
    liking: int

    def sort_key(self, *, ascending: bool) -> tuple[int, int, int, int]:
        """Place in Kueue's order."""
        return (self.liking, self.sorted_by if ascending else -self.sorted_by, self.members, self.index)


@dataclass(frozen=True, slots=True)
class _Share:
    """Share of one domain, in its own units."""

    index: int
    units: int
    leader: bool


def find_compatible(question: DescentInput) -> DescentResult | None:
    """Places in Kueue's order; None if Kueue's rules find none."""
    if not question.tree.size(question.level):
        return None
    ascending = question.mode is Mode.UNCONSTRAINED
    leader = question.shape.leader
    levels = range(question.level, -1, -1) if question.mode is Mode.PREFERRED else (question.level,)
    for level in levels:
        domains = _domains(question, level, range(question.tree.size(level)), 1)
        chosen = _single(domains, question.need, leader=leader, ascending=ascending)
        if chosen is not None:
            return _down(question, level, level, (_Share(chosen.index, question.need, leader),), ascending=ascending)
    if question.mode is Mode.REQUIRED:
        return None
    start = question.level if ascending and not question.room else 0
    domains = _domains(question, start, range(question.tree.size(start)), 1)
    shares = _shares(domains, question.need, leader=leader, ascending=ascending)
    return None if shares is None else _down(question, start, -1, shares, ascending=ascending)


def _domains(question: DescentInput, level: int, indices: Iterable[int], unit: int) -> list[_Domain]:
    """Domains of a level, in slices down to the slice level, below it in groups of `unit` members."""
    counts = question.counts
    in_slices = level <= question.shape.level
    units, units_led = (
        (counts.slices[level], counts.slices_led[level])
        if in_slices
        else (counts.members[level] // unit, counts.members_led[level] // unit)
    )
    return [
        _Domain(
            index,
            int(units[index]),
            int(units_led[index]),
            bool(counts.led[level][index]),
            int(counts.members[level][index]),
            int(units[index]) if in_slices else 0,
            int(question.likings[level][index]),
        )
        for index in indices
    ]


def _single(domains: Sequence[_Domain], need: int, *, leader: bool, ascending: bool) -> _Domain | None:
    """The domain that holds everything with least left, the first in order among equals."""
    fitting = [one for one in domains if (one.led and one.units_led >= need if leader else one.units >= need)]
    held = {one.index: one.units_led if leader else one.units for one in fitting}
    return min(
        fitting,
        key=lambda one: (held[one.index], one.sort_key(ascending=ascending)),
        default=None,
    )


def _shares(domains: Sequence[_Domain], need: int, *, leader: bool, ascending: bool) -> tuple[_Share, ...] | None:
    """Domains in order, each filled, the last one by best fit unless the smallest come first."""
    left = sorted(domains, key=lambda one: one.sort_key(ascending=ascending))
    shares: list[_Share] = []
    if leader:
        total = sum(one.units for one in left)
        whole = _single(left, need, leader=True, ascending=ascending)
        able = [one for one in left if one.led and total - one.units + one.units_led >= need]
        if not able:
            return None
        host = whole or min(able, key=lambda one: (-one.units_led, one.members, one.index))
        shares.append(_Share(host.index, min(host.units_led, need), leader=True))
        left = [one for one in left if one.index != host.index]
        need -= shares[0].units
    while need > 0 and left:
        best = None if ascending or left[0].units < need else _single(left, need, leader=False, ascending=ascending)
        taken = best or left[0]
        left.remove(taken)
        if taken.units:
            shares.append(_Share(taken.index, min(taken.units, need), leader=False))
            need -= min(taken.units, need)
    return tuple(shares) if need <= 0 else None


def _down(
    question: DescentInput, level: int, reached: int, shares: Sequence[_Share], *, ascending: bool
) -> DescentResult | None:
    tree, shape = question.tree, question.shape
    while level < tree.hosts:
        if not question.is_apart(level):
            children = [child for share in shares for child in tree.children(level, share.index)]
            need, leader = sum(share.units for share in shares), any(share.leader for share in shares)
            groups = [(_domains(question, level + 1, children, 1), need, leader, 1)]
        else:
            unit = shape.unit(level + 1)
            scale = unit if level + 1 > shape.level else 1
            per = shape.size if level <= shape.level else 1
            groups = [
                (
                    _domains(question, level + 1, tree.children(level, share.index), unit),
                    share.units * per // unit,
                    share.leader,
                    scale,
                )
                for share in shares
            ]
        found: list[_Share] = []
        for domains, need, leader, scale in groups:
            part = _shares(domains, need, leader=leader, ascending=ascending)
            if part is None:
                return None
            found += [_Share(share.index, share.units * scale, share.leader) for share in part]
        shares, level = found, level + 1
    size = shape.size if shape.level == tree.hosts else 1
    hosts = tuple(HostCount(share.index, share.units * size, share.leader) for share in shares)
    return DescentResult(reached, hosts, spread_of(question, hosts), ())
