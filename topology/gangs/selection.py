"""Choice of the fewest siblings that hold what is needed.

Offers and need are in whole units, with or without a leader. Order: fewest siblings, then least surplus, then the
siblings' own order; every pick but the last is filled. Exact by a dynamic program over (count, sum) up to CELLS_MAX
cells; beyond, the largest are taken and the last one is the smallest that still holds the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CELLS_MAX: Final = 1 << 14
LEADER_KINDS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class DomainOffer:
    """One sibling. units, units_led: capacity without and with the leader; order: its place among equals."""

    domain: int
    units: int
    units_led: int
    led: bool
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pick:
    """Share of one sibling."""

    domain: int
    units: int
    leader: bool


@dataclass(frozen=True, slots=True)
class Picks:
    """A choice; surplus: unused units of the chosen siblings; exact: no limit was hit."""

    picks: tuple[Pick, ...]
    surplus: int
    exact: bool = True


def fewest(offers: Sequence[DomainOffer], need: int, *, leader: bool, greedy: bool = False) -> Picks | None:
    """The fewest siblings that hold `need` units (and the leader). greedy: largest first, without the program."""
    if not leader:
        return _fewest([offer for offer in offers if offer.units > 0], need, greedy=greedy)
    return _with_leader(offers, need, greedy=greedy)


def _with_leader(offers: Sequence[DomainOffer], need: int, *, greedy: bool) -> Picks | None:
    """Try the leader in one sibling of each kind, smallest loss first."""
    kinds: dict[tuple[int, int], DomainOffer] = {}
    for offer in sorted((one for one in offers if one.led), key=lambda one: one.order):
        kinds.setdefault((offer.units, min(offer.units_led, need)), offer)
    hosts = sorted(kinds.values(), key=lambda one: (one.units - one.units_led, -one.units_led, one.order))
    if greedy:
        hosts.sort(key=lambda one: (-one.units_led, one.order))
    single = [one for one in offers if one.led and one.units_led >= need]
    if single:
        best = min(single, key=lambda one: (one.units_led - need, one.order))
        return Picks((Pick(best.domain, need, leader=True),), best.units_led - need)
    found: list[tuple[tuple[int, int, tuple[int, ...]], Picks]] = []
    for host in hosts[:LEADER_KINDS_MAX]:
        others = [offer for offer in offers if offer.units > 0 and offer.domain != host.domain]
        rest = _fewest(others, need - host.units_led, greedy=greedy)
        if rest is not None:
            picks = (Pick(host.domain, host.units_led, leader=True), *rest.picks)
            exact = rest.exact and len(hosts) <= LEADER_KINDS_MAX
            found.append(((len(picks), rest.surplus, host.order), Picks(picks, rest.surplus, exact)))
            if greedy:
                break
    return min(found, key=lambda one: one[0])[1] if found else None


def _fewest(offers: Sequence[DomainOffer], need: int, *, greedy: bool) -> Picks | None:
    if need <= 0:
        return Picks((), 0)
    ordered = sorted(offers, key=lambda offer: (-offer.units, offer.order))
    count, held = 0, 0
    while held < need and count < len(ordered):
        held, count = held + ordered[count].units, count + 1
    if held < need:
        return None
    kept = _kept(ordered, count)
    if greedy or count == 1 or len(kept) * count > CELLS_MAX:
        chosen = [*ordered[: count - 1]]
        rest = need - sum(offer.units for offer in chosen)
        chosen.append(min(_fitting(ordered[count - 1 :], rest), key=lambda offer: (offer.units, offer.order)))
        exact = count == 1 or greedy or kept[0].units == kept[-1].units
    else:
        chosen, exact = _least_surplus(kept, count, need), True
    return _filled(chosen, need, exact=exact)


def _fitting(offers: Sequence[DomainOffer], need: int) -> list[DomainOffer]:
    return [offer for offer in offers if offer.units >= need]


def _kept(ordered: Sequence[DomainOffer], count: int) -> list[DomainOffer]:
    """Drop siblings of equal capacity beyond the number that could be chosen."""
    kept: list[DomainOffer] = []
    alike = 0
    for position, offer in enumerate(ordered):
        alike = alike + 1 if position and ordered[position - 1].units == offer.units else 1
        if alike <= count:
            kept.append(offer)
    return kept


def _least_surplus(offers: Sequence[DomainOffer], count: int, need: int) -> list[DomainOffer]:
    """Set of `count` siblings that holds the need with the least sum; among equals, the first in order.

    sums[j] has bit s if j of the siblings seen so far hold s together.
    """
    top = (1 << (need + offers[0].units)) - 1
    history: list[list[int]] = [[1] + [0] * count]
    for offer in offers:
        before = history[-1]
        history.append([before[0], *(before[j] | before[j - 1] << offer.units & top for j in range(1, count + 1))])
    above = history[-1][count] >> need
    total, left = need + (above & -above).bit_length() - 1, count
    chosen: list[DomainOffer] = []
    for position in range(len(offers) - 1, -1, -1):
        if not history[position][left] >> total & 1:
            chosen.append(offers[position])
            total, left = total - offers[position].units, left - 1
    return chosen[::-1]


def _filled(chosen: Sequence[DomainOffer], need: int, *, exact: bool) -> Picks:
    picks: list[Pick] = []
    rest = need
    for offer in sorted(chosen, key=lambda one: (-one.units, one.order)):
        taken = min(offer.units, rest)
        rest -= taken
        picks.append(Pick(offer.domain, taken, leader=False))
    return Picks(tuple(picks), sum(offer.units for offer in chosen) - need, exact)
