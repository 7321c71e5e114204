"""Phase two: choose domains level by level downwards, until every member has a host.

The start is the lowest allowed level at which one domain holds everything. Further down, the children of all chosen
domains compete above the slices; at and below them each domain fills its own. If that uses more domains of the
requested level than needed, they are chosen directly from the top, see topology.gangs.straight.

Total order of results: fewest domains at the requested level, then at each lower level; then least surplus of the
domain that holds everything, preferred hosts, least free GPUs, least members that would have fitted, names. Bounded:
at most CANDIDATES_MAX domains of a level are followed down, and above the requested level two sets of children.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from topology.gangs.counts import Counts, GroupShape
from topology.gangs.model import Mode
from topology.gangs.selection import DomainOffer, Pick, Picks, fewest
from topology.gangs.straight import DomainCap, fewest_below
from topology.gangs.tree import DomainTree
from topology.quality import Bools, Ints

CANDIDATES_MAX: Final = 8
STEPS_MAX: Final = 200_000
"""Limit of siblings examined in one search."""
COUNTED_MAX: Final = 1_000_000
"""Limit of hosts counted in one search, each as often as a unit is tried: three to four seconds of one CPU."""
COUNTED_ALWAYS: Final = 200
"""What counting none costs too, in hosts."""


@dataclass(slots=True)
class StepBudget:
    """Counts the work of one search, or of several that share it; `bounded` once a limit is hit."""

    steps: int = 0
    counted: int = 0
    bounded: bool = False

    def spend(self, steps: int) -> None:
        """Count some steps."""
        self.steps += steps

    def count(self, hosts: int) -> None:
        """Count so many hosts once more."""
        self.counted += COUNTED_ALWAYS + hosts

    @property
    def is_spent(self) -> bool:
        """True if only the first candidate of each choice is followed from now on."""
        return self.steps > STEPS_MAX

    def is_over(self) -> bool:
        """True once the search must end with the best it has, which is `bounded` then."""
        is_over = self.counted > COUNTED_MAX
        self.bounded |= is_over
        return is_over


@dataclass(frozen=True, slots=True, eq=False)
class DescentInput:
    """level: index of the requested level. need: slices. weights: per level, free GPUs lost to others if a domain is
    used. likings: per level, negative if hosts are preferred. room: per level above the hosts with a limit of members,
    how many each domain takes; its count holds for it alone. apart: all other counts do too."""

    tree: DomainTree
    counts: Counts
    shape: GroupShape
    need: int
    mode: Mode
    level: int
    weights: tuple[Ints, ...]
    likings: tuple[Ints, ...]
    room: Mapping[int, Ints] = field(default_factory=dict)
    apart: bool = False
    budget: StepBudget = field(default_factory=StepBudget)

    def is_apart(self, level: int) -> bool:
        """True if children of a level's domains may not compete: each domain fills its own."""
        return self.apart or level + 1 > self.shape.level or any(limited <= level for limited in self.room)


@dataclass(frozen=True, slots=True)
class HostCount:
    """Members on one host, and whether the leader is there."""

    host: int
    members: int
    leader: bool


@dataclass(frozen=True, slots=True)
class DescentResult:
    """level: index of the level at which one domain holds all; -1 if it takes several of the highest. spread: domains
    used at the requested level and at each lower one."""

    level: int
    hosts: tuple[HostCount, ...]
    spread: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The total order: smaller is better."""
        return (self.spread, self.order)


def find(question: DescentInput) -> DescentResult | None:
    """Best places for all slices (and the leader); None if they do not fit as near as required."""
    for level in _levels(question):
        candidates = np.flatnonzero(_holds_all(question, level))
        if len(candidates):
            return _best_of(question, level, candidates)
    if question.mode is Mode.REQUIRED:
        return None
    start = question.level if question.mode is Mode.UNCONSTRAINED and not question.room else 0
    everything = range(question.tree.size(start))
    found = (
        _landed(question, start, picks, level=-1, order=(picks.surplus,))
        for picks in _choices(question, start, everything, question.need, leader=question.shape.leader)
    )
    return _least(found)


def _levels(question: DescentInput) -> Iterable[int]:
    if question.mode in (Mode.REQUIRED, Mode.UNCONSTRAINED):
        return (question.level,)
    return range(question.level, -1, -1)


def _holds_all(question: DescentInput, level: int) -> Bools:
    """Domains of a level at or above the slices that hold everything."""
    counts = question.counts
    if not question.shape.leader:
        return counts.slices[level] >= question.need
    enough: Bools = (counts.slices_led[level] >= question.need) & counts.led[level]
    return enough


def _best_of(question: DescentInput, level: int, candidates: Ints) -> DescentResult | None:
    """Follow the most promising domains down, and the one that would have least left."""
    surplus = question.counts.slices[level][candidates] - question.need
    likings, weights = question.likings[level][candidates], question.weights[level][candidates]
    near = _needed(question, level, question.level)[candidates]
    hosts = _needed(question, level, question.tree.hosts)[candidates]
    members = question.counts.members[level][candidates]
    ranked = np.lexsort((candidates, members, weights, likings, surplus, hosts, near))
    followed = [int(position) for position in ranked[: 1 if question.budget.is_spent else CANDIDATES_MAX]]
    tightest = int(np.lexsort((candidates, members, surplus))[0])
    if tightest not in followed:
        followed.append(tightest)
        question.budget.bounded = True

    def landed() -> Iterator[DescentResult | None]:
        for position in followed:
            order = (surplus[position], likings[position], weights[position], members[position], candidates[position])
            pick = Pick(int(candidates[position]), question.need, leader=question.shape.leader)
            yield _landed(
                question, level, Picks((pick,), int(surplus[position])), level=level, order=tuple(map(int, order))
            )

    return _least(landed())


def _landed(
    question: DescentInput, start: int, picks: Picks, *, level: int, order: tuple[int, ...]
) -> DescentResult | None:
    if not picks.exact:
        question.budget.bounded = True
    hosts = down(question, start, picks.picks)
    straight = _straight(question, start, picks.picks, hosts, within=level)
    if straight is not None and (hosts is None or spread_of(question, straight) < spread_of(question, hosts)):
        hosts = straight
    return None if hosts is None else DescentResult(level, hosts, spread_of(question, hosts), order)


def _straight(
    question: DescentInput, start: int, picks: Sequence[Pick], hosts: Sequence[HostCount] | None, *, within: int
) -> tuple[HostCount, ...] | None:
    """The fewest domains of the requested level below the one pick (or, with `within` -1, below everything); None if
    the result so far has no more of them than necessary."""
    tree, level = question.tree, question.level
    if start >= level:
        return None
    inside = tree.below(start, picks[0].domain, level) if within >= 0 else range(tree.size(level))
    held = np.cumsum(np.sort(question.counts.slices[level][inside])[::-1])
    least = int(np.searchsorted(held, question.need)) + 1
    if hosts is not None and spread_of(question, hosts)[0] <= least:
        return None
    offers = _crowded(question, start, _offers(question, level, inside, unit=question.shape.size))
    found = fewest_below(offers, question.need, _domain_caps(question, offers), leader=question.shape.leader)
    if found is None:
        return None
    question.budget.bounded |= not found.exact
    return down(question, level, found.picks)


def _crowded(question: DescentInput, start: int, offers: Sequence[DomainOffer]) -> list[DomainOffer]:
    """The offers in another order: of equal ones, those in the roomiest intermediate domains first."""
    tree, level = question.tree, question.level

    def order(offer: DomainOffer) -> tuple[int, ...]:
        around = [(upper, tree.ancestor(level, offer.domain, upper)) for upper in range(start, level)]
        crowd = itertools.chain.from_iterable((-int(question.counts.slices[at][one]), one) for at, one in around)
        return (offer.order[0], *crowd, *offer.order[1:])

    return [replace(offer, order=order(offer)) for offer in offers]


def _domain_caps(question: DescentInput, offers: Sequence[DomainOffer]) -> list[DomainCap]:
    """Limits above the requested level, lowest first, in slices."""
    tree, level = question.tree, question.level
    found: list[DomainCap] = []
    for limited in sorted((one for one in question.room if one < level), reverse=True):
        above = {offer.domain: tree.ancestor(level, offer.domain, limited) for offer in offers}
        left = {domain: int(question.room[limited][domain]) // question.shape.size for domain in set(above.values())}
        found.append(DomainCap(above, left))
    return found


def _least(found: Iterable[DescentResult | None]) -> DescentResult | None:
    return min((one for one in found if one is not None), key=lambda one: one.key, default=None)


def down(question: DescentInput, level: int, picks: Sequence[Pick]) -> tuple[HostCount, ...] | None:
    """The best way down from these domains; above the requested level every set of children is followed."""
    tree, shape = question.tree, question.shape
    if level == tree.hosts:
        size = shape.size if shape.level == level else 1
        return tuple(HostCount(pick.domain, pick.units * size, pick.leader) for pick in picks)
    if question.is_apart(level):
        return down(question, level + 1, _each(question, level, picks))
    children = [child for pick in picks for child in tree.children(level, pick.domain)]
    need, leader = sum(pick.units for pick in picks), any(pick.leader for pick in picks)
    best: tuple[HostCount, ...] | None = None
    for choice in _choices(question, level + 1, children, need, leader=leader):
        hosts = down(question, level + 1, choice.picks)
        if hosts is not None and (best is None or spread_of(question, hosts) < spread_of(question, best)):
            best = hosts
    return best


def _each(question: DescentInput, level: int, picks: Sequence[Pick]) -> tuple[Pick, ...]:
    """Children of each domain by itself, in units of whole groups."""
    shape = question.shape
    at = shape.unit(level + 1)
    chosen: list[Pick] = []
    for pick in picks:
        members = pick.units * (shape.size if level <= shape.level else 1)
        offers = _offers(question, level + 1, question.tree.children(level, pick.domain), unit=at)
        found = fewest(offers, members // at, leader=pick.leader)
        assert found is not None, "counts promise that a domain holds what it was given"
        scale = at if level + 1 > shape.level else 1
        chosen += [Pick(child.domain, child.units * scale, child.leader) for child in found.picks]
    return tuple(chosen)


def _choices(question: DescentInput, level: int, domains: Iterable[int], need: int, *, leader: bool) -> Iterator[Picks]:
    """The set of least surplus and, down to the requested level, the greedy one, which may need fewer domains below."""
    unit = question.shape.size if level <= question.shape.level else 1
    offers = _offers(question, level, domains, unit=unit)
    first = fewest(offers, need, leader=leader)
    if first is None:
        return
    yield first
    if level <= question.level and level < question.tree.hosts and not question.budget.is_spent:
        second = fewest(offers, need, leader=leader, greedy=True)
        if second is not None and second.picks != first.picks:
            yield second


def _offers(question: DescentInput, level: int, domains: Iterable[int], *, unit: int) -> list[DomainOffer]:
    """Offers of siblings, in slices down to the slice level, below it in groups of `unit` members."""
    counts = question.counts
    index = np.fromiter(domains, dtype=np.int64)
    question.budget.spend(len(index))
    in_slices = level <= question.shape.level
    units = counts.slices[level][index] if in_slices else counts.members[level][index] // unit
    units_led = counts.slices_led[level][index] if in_slices else counts.members_led[level][index] // unit
    useful = np.flatnonzero((units > 0) | (counts.led[level][index] if question.shape.leader else False))
    index, units, units_led = index[useful], units[useful], units_led[useful]
    rows = zip(
        index.tolist(),
        units.tolist(),
        units_led.tolist(),
        counts.led[level][index].tolist(),
        question.likings[level][index].tolist(),
        question.weights[level][index].tolist(),
        counts.members[level][index].tolist(),
        strict=True,
    )
    return [
        DomainOffer(domain, held, led_held, led, (liking, weight, members, domain))
        for domain, held, led_held, led, liking, weight, members in rows
    ]


def spread_of(question: DescentInput, hosts: Sequence[HostCount]) -> tuple[int, ...]:
    """Domains used at the requested level and at each lower one."""
    index = np.array([host.host for host in hosts], dtype=np.int64)
    tree = question.tree
    return tuple(len(np.unique(tree.above[level][index])) for level in range(question.level, tree.hosts + 1))


def _needed(question: DescentInput, level: int, target: int) -> Ints:
    """Per domain of `level`, the least number of lower-level domains needed, without the leader."""
    tree, shape = question.tree, question.shape
    if target <= level:
        return np.ones(tree.size(level), dtype=np.int64)
    in_slices = target <= shape.level
    offered = (question.counts.slices if in_slices else question.counts.members)[target]
    need = question.need if in_slices else question.need * shape.size
    above = np.arange(tree.size(target), dtype=np.int64)
    for lower in range(target, level, -1):
        above = tree.parents[lower - 1][above]
    order = np.lexsort((-offered, above))
    held = np.cumsum(offered[order])
    starts = np.searchsorted(above[order], np.arange(tree.size(level)))
    before = np.concatenate(([0], held))[starts]
    open_before = held - offered[order] - before[above[order]] < need
    needed: Ints = np.bincount(above[order], weights=open_before & (offered[order] > 0), minlength=tree.size(level))
    return needed.astype(np.int64)
