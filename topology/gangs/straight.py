"""Choice of the fewest domains of the requested level directly from a much higher domain.

Level by level, choosing the fewest racks may miss the fewest hosts; and with a limit of members per rack, the number of
hosts depends on which rack is filled first. Here the levels in between count only by their limits. Each domain gains
what it holds, cut off at a limit above it. Below one limit the gains in descending order give the most that any number
of domains holds, and a cut-off keeps them descending; so merging the children's gains upwards and taking the first ones
is exact. The leader's domain is needed in any case, so its gain comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topology.gangs.selection import LEADER_KINDS_MAX, DomainOffer, Pick, Picks, fewest


@dataclass(frozen=True, slots=True)
class DomainCap:
    """Limits of one level above the offers. above: the limited domain around each offer's domain; left: what each of
    those may hold, in the offers' units."""

    above: Mapping[int, int]
    left: Mapping[int, int]


def fewest_below(
    offers: Sequence[DomainOffer], need: int, ceilings: Sequence[DomainCap], *, leader: bool
) -> Picks | None:
    """The fewest domains that hold the need (and the leader) below all ceilings, given lowest first."""
    if not ceilings:
        return fewest(offers, need, leader=leader)
    if not leader:
        return _taken(offers, need, ceilings, None)
    kinds: dict[tuple[object, ...], DomainOffer] = {}
    for offer in sorted((one for one in offers if one.led), key=lambda one: (one.units - one.units_led, one.order)):
        places = tuple(ceiling.above[offer.domain] for ceiling in ceilings)
        kinds.setdefault((offer.units, offer.units_led, places), offer)
    leading = list(kinds.values())[:LEADER_KINDS_MAX]
    found = [picks for one in leading if (picks := _taken(offers, need, ceilings, one)) is not None]
    best = min(found, key=lambda picks: len(picks.picks), default=None)
    return best if best is None else replace(best, exact=len(kinds) <= LEADER_KINDS_MAX)


def _taken(
    offers: Sequence[DomainOffer], need: int, ceilings: Sequence[DomainCap], led: DomainOffer | None
) -> Picks | None:
    """The first gains that reach the need, including that of the leader's domain."""
    gains = [(offer, offer.units) for offer in offers if offer is not led and offer.units > 0]
    if led is not None:
        gains.append((led, led.units_led))
    for ceiling in ceilings:
        gains = _cut_off(_falling(gains, led), ceiling)
    picks: list[Pick] = []
    rest = need
    for offer, gain in _falling(gains, led):
        if rest <= 0 and offer is not led:
            break
        picks.append(Pick(offer.domain, min(gain, rest), leader=offer is led))
        rest -= picks[-1].units
    return Picks(tuple(picks), 0) if rest <= 0 else None


def _falling(gains: Sequence[tuple[DomainOffer, int]], led: DomainOffer | None) -> list[tuple[DomainOffer, int]]:
    return sorted(gains, key=lambda one: (one[0] is not led, -one[1], one[0].order))


def _cut_off(gains: Sequence[tuple[DomainOffer, int]], ceiling: DomainCap) -> list[tuple[DomainOffer, int]]:
    """Gains below each limited domain, cut off at its limit; the leader's domain stays, even without gain."""
    left = dict(ceiling.left)
    kept: list[tuple[DomainOffer, int]] = []
    for position, (offer, gain) in enumerate(gains):
        domain = ceiling.above[offer.domain]
        held = min(gain, left[domain])
        left[domain] -= held
        if held > 0 or position == 0:
            kept.append((offer, held))
    return kept
