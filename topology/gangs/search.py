"""Gang search, the one entry: places for all members of a gang, close together, or a PlacementRefusal.

Pure and deterministic.

The first attempt has no restrictions and shows how near the members can be. Stricter attempts follow, which must be as
near: GPUs of one island for each contiguous member, no spare host, only preferred hosts. The strictest that succeeds is
the answer. An attempt places the units one after the other; if a later one finds no place, other orders and other
domains for the earlier ones are tried, TRIES_MAX in all. The work of all attempts together is bounded, see StepBudget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from topology.device_requests import Policy
from topology.gangs.descent import DescentResult, StepBudget
from topology.gangs.devices import has_one_island
from topology.gangs.members import placement_of
from topology.gangs.model import Cause, Gang, Mode, Order, Placement, PlacementRefusal, PodSet
from topology.gangs.occupancy import SearchOccupancy
from topology.gangs.placing import Rules, descent_input, place_unit, put
from topology.gangs.requests import PlacementUnit, Whole, units_of, whole_of
from topology.gangs.snapshot import HostSnapshot
from topology.quality import Bools, Ints

TRIES_MAX: Final = 64
ALTERNATIVES_MAX: Final = 3
WHOLE_CANDIDATES_MAX: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Places of all units, in the order of the gang. level: of the domain that holds everything, -1 for none."""

    founds: tuple[DescentResult, ...]
    level: int
    occupancy: SearchOccupancy

    @property
    def distance(self) -> tuple[int, ...]:
        """Distance between the members; smaller is nearer, unit by unit."""
        return (-self.level, *itertools.chain.from_iterable((found.spread[0], -found.level) for found in self.founds))


@dataclass(slots=True)
class _Attempt:
    """One attempt under one set of rules, and its result."""

    units: tuple[PlacementUnit, ...]
    whole: Whole
    snapshot: HostSnapshot
    rules: Rules
    budget: StepBudget
    tries: int = 0
    refusal: PlacementRefusal | None = None

    def may_try(self) -> bool:
        """Count one more try; False if none is left."""
        self.tries += 1
        is_over = self.tries > TRIES_MAX or (self.tries > len(self.units) and self.budget.is_over())
        self.budget.bounded |= is_over
        return not is_over


def place(
    gang: Gang, snapshot: HostSnapshot, *, order: Order = Order.NEAREST, budget: StepBudget | None = None
) -> Placement | PlacementRefusal:
    """Places for all members; if pod sets have a least count, for as many as fit between it and the count. budget: one
    that several searches share."""
    budget = budget or StepBudget()
    answer = _place(gang, snapshot, budget, order)
    if isinstance(answer, Placement) or answer.cause is not Cause.NO_FIT:
        return answer
    steps = max(pod_set.count - _least(pod_set) for pod_set in gang.pod_sets)
    low, high = 0, steps
    best: Placement | PlacementRefusal = answer
    while low < high and not budget.is_over():
        middle = (low + high) // 2 if low else 0
        fewer = _place(_reduced(gang, middle, of=steps), snapshot, budget, order)
        if isinstance(fewer, PlacementRefusal):
            high = middle
        else:
            best, low = fewer, middle + 1
    return replace(best, bounded=True) if budget.is_over() else best


def _least(pod_set: PodSet) -> int:
    """The least count that whole slices allow."""
    size = pod_set.request.slices[0].size if pod_set.request.slices else 1
    least = pod_set.count if pod_set.min_count is None else pod_set.min_count
    return min(-(-least // size) * size, pod_set.count)


def _reduced(gang: Gang, step: int, *, of: int) -> Gang:
    """The gang with every pod set at the same share of the way from its least count to its count."""

    def reduced(pod_set: PodSet) -> PodSet:
        size = pod_set.request.slices[0].size if pod_set.request.slices else 1
        least = _least(pod_set)
        return replace(pod_set, count=least + (pod_set.count - least) * step // of // size * size)

    return replace(gang, pod_sets=tuple(reduced(pod_set) for pod_set in gang.pod_sets))


def _place(gang: Gang, snapshot: HostSnapshot, budget: StepBudget, order: Order) -> Placement | PlacementRefusal:
    units, whole = units_of(gang, snapshot.tree), whole_of(gang, snapshot.tree)
    if isinstance(units, PlacementRefusal):
        return units
    if isinstance(whole, PlacementRefusal):
        return whole
    if len(units) == 1 and (units[0].mode, units[0].level) == (whole.mode, whole.level):
        whole = Whole(Mode.UNCONSTRAINED, snapshot.tree.hosts)
    attempt = _Attempt(units, whole, snapshot, Rules(order=order), budget)
    loosest = _solve(attempt)
    if isinstance(loosest, PlacementRefusal):
        return replace(loosest, bounded=not _is_proven(attempt))
    best = loosest
    for rules in _strict_rules(units, snapshot) if order is Order.NEAREST else ():
        if budget.is_over():
            break
        strict = _solve(_Attempt(units, whole, snapshot, rules, budget))
        if isinstance(strict, Solution) and strict.distance <= loosest.distance:
            best = strict
            break
    return placement_of(gang, units, best.founds, best.occupancy, budget)


def _is_proven(attempt: _Attempt) -> bool:
    """True if the refusal holds for every placement: some unit finds no place even by itself. A gang of one unit is
    searched exhaustively; several that fail only together may have a placement that was not tried."""
    empty = SearchOccupancy(attempt.snapshot)
    return len(attempt.units) == 1 or any(
        isinstance(place_unit(unit, empty, rules=Rules(), budget=attempt.budget), PlacementRefusal)
        for unit in attempt.units
    )


def _strict_rules(units: tuple[PlacementUnit, ...], snapshot: HostSnapshot) -> Iterator[Rules]:
    """Stricter rules than the loosest, strictest first: islands are given up last, then spare hosts, then likings."""
    pod_sets = [pod_set for unit in units for pod_set in (unit.pod_set, unit.leader) if pod_set is not None]
    likings = sorted({0, *(value for one in pod_sets for value in one.preferences.values())}, reverse=True)
    thresholds: list[int | None] = [value for value in (likings[0], 0) if value > likings[-1]]
    choices = itertools.product(
        [True, False] if _has_islands(pod_sets, snapshot) else [False],
        [False, True] if snapshot.spare.any() else [True],
        [*dict.fromkeys(thresholds), None],
    )
    for one_island, spare, liking in choices:
        rules = Rules(one_island, spare, liking)
        if rules != Rules():
            yield rules


def _has_islands(pod_sets: Iterable[PodSet], snapshot: HostSnapshot) -> bool:
    """True if some member could get GPUs of several islands although one island could serve it."""
    several = any(board is not None and not has_one_island(board.machine) for board, _, _ in snapshot.cells)
    asks = (pod_set.ask for pod_set in pod_sets if pod_set.ask is not None)
    return several and any(ask.policy is Policy.CONTIGUOUS and ask.count > 1 for ask in asks)


def _solve(attempt: _Attempt) -> Solution | PlacementRefusal:
    """The nearest domain for everything in which all units find their places."""
    whole, tree = attempt.whole, attempt.snapshot.tree
    if whole.mode is Mode.UNCONSTRAINED:
        return _sequence(attempt, None, level=-1) or _refused(attempt)
    levels = [whole.level] if whole.mode is Mode.REQUIRED else range(whole.level, -1, -1)
    for level in levels:
        for domain in _candidates(attempt, level):
            solution = _sequence(attempt, tree.above[level] == domain, level=level)
            if solution is not None:
                return solution
    if whole.mode is not Mode.REQUIRED:
        return _sequence(attempt, None, level=-1) or _refused(attempt)
    return replace(_refused(attempt), level=tree.name_of(whole.level))


def _candidates(attempt: _Attempt, level: int) -> list[int]:
    """Domains that could hold every unit by itself, tightest first; if there is none, only the roomiest, so that the
    refusal can say what it lacks."""
    tree = attempt.snapshot.tree
    fits = np.ones(tree.size(level), dtype=np.bool_)
    room: Ints = np.zeros(tree.size(level), dtype=np.int64)
    occupancy = SearchOccupancy(attempt.snapshot, attempt.rules.one_island)
    for unit in attempt.units:
        counts = descent_input(unit, occupancy, attempt.rules, attempt.budget).counts
        fits &= counts.members_led[level] >= unit.need * unit.shape.size
        if unit.leader is not None:
            fits &= counts.led[level]
        room += counts.members[level]
    if not len(fits):
        return []
    if not fits.any():
        return [int(np.argmax(room))]
    ranked = [int(domain) for domain in np.argsort(room, kind="stable") if fits[domain]]
    attempt.budget.bounded |= len(ranked) > WHOLE_CANDIDATES_MAX
    return ranked[:WHOLE_CANDIDATES_MAX]


def _refused(attempt: _Attempt) -> PlacementRefusal:
    assert attempt.refusal is not None, "no unit was refused"
    return attempt.refusal


def _sequence(attempt: _Attempt, allowed: Bools | None, *, level: int) -> Solution | None:
    """All units among the allowed hosts, in the order of the gang, else in others."""
    for order in _orders(attempt.units):
        founds: dict[int, DescentResult] = {}
        occupancy = _extended(
            attempt, order, SearchOccupancy(attempt.snapshot, attempt.rules.one_island), allowed, founds
        )
        if occupancy is not None:
            return Solution(tuple(founds[position] for position in range(len(order))), level, occupancy)
    return None


def _orders(units: tuple[PlacementUnit, ...]) -> list[tuple[int, ...]]:
    """As given; most GPUs per member first; the reverse."""
    given = tuple(range(len(units)))
    sizes = [unit.pod_set.ask.count if unit.pod_set.ask is not None else 0 for unit in units]
    hardest = tuple(sorted(given, key=lambda position: (-sizes[position], -units[position].shape.size, position)))
    return list(dict.fromkeys((given, hardest, given[::-1])))


def _extended(
    attempt: _Attempt,
    order: tuple[int, ...],
    occupancy: SearchOccupancy,
    allowed: Bools | None,
    founds: dict[int, DescentResult],
) -> SearchOccupancy | None:
    """Places for the units left in `order`; if later ones fail, the first is tried in its next domain."""
    if not order:
        return occupancy
    unit = attempt.units[order[0]]
    usable = _beside_mates(attempt, unit, allowed, founds)
    for _ in range(ALTERNATIVES_MAX if len(order) > 1 else 1):
        if not attempt.may_try():
            return None
        found = place_unit(unit, occupancy, rules=attempt.rules, budget=attempt.budget, allowed=usable)
        if isinstance(found, PlacementRefusal):
            attempt.refusal = attempt.refusal or found
            return None
        founds[order[0]] = found
        taken = occupancy.copy()
        put(unit, found, taken)
        rest = _extended(attempt, order[1:], taken, allowed, founds)
        if rest is None:
            for position in order[1:]:
                founds.pop(position, None)
        if rest is not None or found.level < 0 or not found.hosts:
            return rest
        above = attempt.snapshot.tree.above[found.level]
        elsewhere = above != above[found.hosts[0].host]
        usable = elsewhere if usable is None else usable & elsewhere
    return None


def _beside_mates(
    attempt: _Attempt, unit: PlacementUnit, allowed: Bools | None, founds: Mapping[int, DescentResult]
) -> Bools | None:
    """Domain of a group's placed units if a required level binds the group."""
    if not unit.group or unit.mode is not Mode.REQUIRED:
        return allowed
    above = attempt.snapshot.tree.above[unit.level]
    for position, found in founds.items():
        if attempt.units[position].group == unit.group and found.hosts:
            inside: Bools = above == above[found.hosts[0].host]
            return inside if allowed is None else inside & allowed
    return allowed
