"""Balanced placement: spreads members evenly over few domains instead of filling one after the other.

The DescentInput prefers a level. The result is None, and the ordinary search is used, if no even spread exists or
members are limited per domain above. After Kueue's KEP-2724: for each group of siblings at the requested level, the
domains one level lower are filled greedily; T is the most that all of them can hold equally. The group with the largest
T wins, then with the fewest domains at the requested level. Domains that hold less than T are dropped, the fewest that
hold everything with least surplus are chosen, each takes T, and the rest is distributed evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from topology.gangs.descent import DescentInput, DescentResult, down, spread_of
from topology.gangs.model import Mode
from topology.gangs.selection import DomainOffer, Pick, fewest

GROUPS_MAX: Final = 256
ENTROPY_UNIT: Final = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Siblings at the requested level as offers, with the offers of the domains that each fills."""

    even: int
    siblings: tuple[DomainOffer, ...]
    lower: dict[int, tuple[DomainOffer, ...]]
    count: int


def find_balanced(question: DescentInput) -> DescentResult | None:
    """The most even spread over the fewest domains; None when no group of siblings holds everything."""
    if question.mode is not Mode.PREFERRED or not question.need or question.level > question.shape.level:
        return None
    if any(limited < question.level + _goes_lower(question) for limited in question.room):
        return None
    best: _Group | None = None
    for siblings in _groups(question):
        group = _group(question, siblings)
        if group is not None and (best is None or (-group.even, group.count) < (-best.even, best.count)):
            best = group
    return _placed(question, best) if best is not None else None


def _groups(question: DescentInput) -> Iterable[range]:
    if question.level == 0:
        return [range(question.tree.size(0))]
    above = question.level - 1
    question.budget.bounded |= question.tree.size(above) > GROUPS_MAX
    return [question.tree.children(above, domain) for domain in range(min(question.tree.size(above), GROUPS_MAX))]


def _goes_lower(question: DescentInput) -> bool:
    return question.level < question.shape.level


def _offer(question: DescentInput, level: int, domain: int, first: int = 0) -> DomainOffer:
    counts = question.counts
    return DomainOffer(
        domain,
        int(counts.slices[level][domain]),
        int(counts.slices_led[level][domain]),
        bool(counts.led[level][domain]),
        (first, -int(counts.slices_led[level][domain]), domain),
    )


def _group(question: DescentInput, siblings: range) -> _Group | None:
    """The evenness that the siblings allow, and their remainder without domains that are too small."""
    level = question.level + _goes_lower(question)
    filled = {
        domain: tuple(
            _offer(question, level, child)
            for child in (question.tree.children(question.level, domain) if _goes_lower(question) else (domain,))
        )
        for domain in siblings
    }
    question.budget.spend(sum(map(len, filled.values())))
    even = _evenness(question, [offer for offers in filled.values() for offer in offers])
    if not even:
        return None
    lower = {domain: tuple(one for one in offers if one.units >= even) for domain, offers in filled.items()}
    left = tuple(_summed(domain, offers) for domain, offers in lower.items() if offers)
    chosen = fewest(left, question.need, leader=question.shape.leader)
    return _Group(even, left, lower, len(chosen.picks)) if chosen is not None else None


def _summed(domain: int, offers: Sequence[DomainOffer]) -> DomainOffer:
    """A sibling of the requested level as the sum of its remaining domains; more even ones come first."""
    units = sum(offer.units for offer in offers)
    losses = [offer.units - offer.units_led for offer in offers if offer.led]
    order = (-_entropy([offer.units for offer in offers]), domain)
    return DomainOffer(domain, units, units - min(losses, default=0), bool(losses), order)


def _entropy(sizes: Sequence[int]) -> int:
    total = sum(sizes)
    shares = [size / total for size in sizes if size]
    return round(ENTROPY_UNIT * -sum(share * math.log2(share) for share in shares)) if total else 0


def _evenness(question: DescentInput, offers: Sequence[DomainOffer]) -> int:
    """T; 0 if the domains do not hold everything."""
    left = sorted(offers, key=lambda one: (-one.led, -one.units_led, one.order))
    need, used, even = question.need, 0, question.need
    if question.shape.leader:
        if not left or not left[0].led:
            return 0
        need, used, even = need - left[0].units_led, 1, left[0].units_led
        left = left[1:]
    for offer in sorted(left, key=lambda one: (-one.units, one.order)):
        if need <= 0:
            break
        need, used, even = need - offer.units, used + 1, min(even, offer.units)
    return min(even, question.need // used) if need <= 0 and used else 0


def _placed(question: DescentInput, group: _Group) -> DescentResult | None:
    leader = question.shape.leader
    siblings = fewest(group.siblings, question.need, leader=leader)
    if siblings is None:
        return None
    offers = [offer for pick in siblings.picks for offer in group.lower[pick.domain]]
    chosen = fewest(offers, question.need, leader=leader)
    if chosen is None:
        return None
    by_domain = {offer.domain: offer for offer in offers}
    level = question.level + _goes_lower(question)
    hosts = down(replace(question, apart=True), level, _dealt(question.need, chosen.picks, by_domain))
    if hosts is None:
        return None
    single = len(siblings.picks) == 1
    reached = question.level if single else question.level - 1
    return DescentResult(reached, hosts, spread_of(question, hosts), (-group.even, siblings.surplus))


def _dealt(need: int, picks: Sequence[Pick], offers: dict[int, DomainOffer]) -> tuple[Pick, ...]:
    """Distribute slices evenly; a full domain gets no more, and the first ones get one more."""
    room = {pick.domain: offers[pick.domain].units_led if pick.leader else offers[pick.domain].units for pick in picks}
    order = sorted(room, key=lambda domain: (-room[domain], offers[domain].order))
    given = dict.fromkeys(order, 0)
    left = need
    while left:
        open_ones = [domain for domain in order if given[domain] < room[domain]]
        each = max(1, min(left // len(open_ones), *(room[domain] - given[domain] for domain in open_ones)))
        for domain in open_ones[:left]:
            given[domain] += each
            left -= each
    leaders = {pick.domain for pick in picks if pick.leader}
    return tuple(Pick(domain, given[domain], domain in leaders) for domain in order)
