"""Number of rings that fit into the links of a set of GPUs: the packing problem behind the quality of a set.

Collective communication runs over rings through all GPUs of a set, several at a time, each on links of its own. From
the matrix of link counts inside the set follows the largest number of one-way rings whose links do not overlap.

With relay (NVIDIA: a GPU of the set may pass traffic on for a pair that has no link of its own), rings are directed
and an unlinked step takes one link to the relay and one from it. Without relay (AMD), rings are cycles that serve
both directions, so their one-way count is even.

Phases: closed form for complete graphs -> upper bound (degrees, cuts, units) -> all candidate rings -> depth-first
packing, densest target first. Exact until CANDIDATES_MAX or WORK_MAX is reached; then the best packing found, marked
inexact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

CANDIDATES_MAX: Final = 2_000
"""Limit of candidate rings; beyond it, the packing is a lower bound."""
SEARCHED_MAX: Final = 1_000
DEPTH_MAX: Final = 8
"""A better packing than the greedy one is searched for up to this many candidates and rings; above, the greedy packing
is relatively close and a search would take too long."""
WORK_MAX: Final = 400_000
STEP_WORK: Final = 50
"""Bound of one search, in tests of one ring against the links left; a step counts as STEP_WORK of them."""
FIELD_BITS: Final = 8
"""Width of one arc's counter in a packed integer; its top bit guards against borrowing."""
FIELD: Final = (1 << FIELD_BITS) - 1

Capacity = tuple[tuple[int, ...], ...]
"""Links per pair, symmetric, zero diagonal."""
Arc = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Packing:
    """count: one-way rings that fit; exact: whether no larger number can fit."""

    count: int
    exact: bool


def pack_rings(capacity: Capacity, *, relay: bool) -> Packing:
    """Largest number of one-way rings through all members; a pair counts its links.

    Answers are cached by a form of the matrix that most relabellings share, so that equal sets are solved once.
    """
    return _pack(_sorted_form(capacity), relay=relay)


@lru_cache(maxsize=8192)
def _pack(capacity: Capacity, *, relay: bool) -> Packing:
    size = len(capacity)
    if size < 2:
        return Packing(count=0, exact=True)
    if size == 2:
        return Packing(count=capacity[0][1], exact=True)
    uniform = _uniform_links(capacity)
    if uniform is not None:
        return Packing(count=complete_rings(size, links=uniform, relay=relay), exact=True)
    bound = _upper_bound(capacity, relay=relay)
    if bound == 0:
        return Packing(count=0, exact=True)
    cycles = _pack(capacity, relay=False) if relay else None
    if cycles is not None and cycles.count == bound:
        return Packing(count=bound, exact=True)
    candidates = list(itertools.islice(_candidates(capacity, relay=relay), CANDIDATES_MAX + 1))
    complete = len(candidates) <= CANDIDATES_MAX
    found = _densest(capacity, candidates[:CANDIDATES_MAX], bound=bound, relay=relay, complete=complete)
    if cycles is not None and cycles.count > found.count:
        return Packing(count=cycles.count, exact=False)
    return found


def _sorted_form(capacity: Capacity) -> Capacity:
    """The matrix with members sorted by what they see, refined once from each member; the least of these orders.

    Equal forms always mean isomorphic matrices. The reverse holds for nearly all small machines: a miss costs a
    second search, never a wrong answer.
    """
    size = len(capacity)
    if size <= 2:
        return capacity
    seen = _refined(capacity, [tuple(sorted(row)) for row in capacity])
    return min(_permuted(capacity, _order_from(capacity, seen, first)) for first in range(size))


def _refined(capacity: Capacity, colours: list[tuple[object, ...]]) -> list[int]:
    """Colour classes as small numbers, after two rounds of looking at the neighbours' colours."""
    size = len(capacity)
    ranks = _ranks(colours)
    for _ in range(2):
        ranks = _ranks(
            [
                (ranks[member], *sorted((capacity[member][other], ranks[other]) for other in range(size)))
                for member in range(size)
            ]
        )
    return ranks


def _ranks(colours: list[tuple[object, ...]]) -> list[int]:
    order = {colour: rank for rank, colour in enumerate(sorted(set(colours)))}
    return [order[colour] for colour in colours]


def _order_from(capacity: Capacity, ranks: list[int], first: int) -> list[int]:
    marked = [(rank, member == first) for member, rank in enumerate(ranks)]
    refined = _refined(capacity, list(marked))
    return sorted(range(len(capacity)), key=lambda member: (refined[member], member))


def _permuted(capacity: Capacity, order: list[int]) -> Capacity:
    return tuple(tuple(capacity[row][column] for column in order) for row in order)


def _uniform_links(capacity: Capacity) -> int | None:
    counts = {links for row, cells in enumerate(capacity) for column, links in enumerate(cells) if row != column}
    return counts.pop() if len(counts) == 1 else None


def complete_rings(size: int, *, links: int, relay: bool) -> int:
    """Complete graph with equal links. Cycles: Walecki's decomposition. One-way rings: Tillson's theorem, which fails
    for four and six members with single links only."""
    if not relay:
        return 2 * (links * (size - 1) // 2)
    if links == 1 and size in {4, 6}:
        return size - 2
    return links * (size - 1)


def _upper_bound(capacity: Capacity, *, relay: bool) -> int:
    """Upper bound: every one-way ring leaves every part of the set over its own link; cycles cross twice."""
    size = len(capacity)
    bound = min(sum(row) for row in capacity)
    for part in range(1, 1 << min(size - 1, 10)):
        crossing = sum(
            capacity[inside][outside]
            for inside in range(size)
            if part >> inside & 1
            for outside in range(size)
            if not part >> outside & 1
        )
        bound = min(bound, crossing)
        if not bound:
            return 0
    return bound if relay else 2 * (bound // 2)


def _candidates(capacity: Capacity, *, relay: bool) -> Iterator[tuple[Arc, ...]]:
    """Every ring that fits alone, as the sorted arcs it takes, once per set of arcs.

    Without relay an arc and its reverse are one link, written upwards, so each cycle appears once.
    """
    size = len(capacity)
    seen: set[tuple[Arc, ...]] = set()
    for tail in _orders(capacity, relay=relay):
        ring = (0, *tail)
        steps = [_ways(capacity, ring[index], ring[(index + 1) % size], relay=relay) for index in range(size)]
        for ways in itertools.product(*steps):
            links = itertools.chain.from_iterable(ways)
            arcs = tuple(sorted(links if relay else ((min(arc), max(arc)) for arc in links)))
            if arcs not in seen and all(arcs.count(arc) <= capacity[arc[0]][arc[1]] for arc in arcs):
                seen.add(arcs)
                yield arcs


def _orders(capacity: Capacity, *, relay: bool) -> Iterator[tuple[int, ...]]:
    """Orders of members 1.. in which every step of the ring from 0 back to 0 is possible, lexicographic."""
    size = len(capacity)
    reach = [
        [other for other in range(size) if other != member and _ways(capacity, member, other, relay=relay)]
        for member in range(size)
    ]

    def extend(order: list[int]) -> Iterator[tuple[int, ...]]:
        if len(order) == size:
            if 0 in reach[order[-1]]:
                yield tuple(order[1:])
            return
        for member in reach[order[-1]]:
            if member not in order:
                yield from extend([*order, member])

    return extend([0])


def _ways(capacity: Capacity, start: int, end: int, *, relay: bool) -> list[tuple[Arc, ...]]:
    if capacity[start][end]:
        return [((start, end),)]
    if not relay:
        return []
    middles = (member for member in range(len(capacity)) if capacity[start][member] and capacity[member][end])
    return [((start, middle), (middle, end)) for middle in middles]


class _Counters:
    """Link counters of all arcs packed into one integer, so that "does it fit" is one subtraction."""

    def __init__(self, capacity: Capacity, *, relay: bool) -> None:
        self._relay = relay
        size = len(capacity)
        self._shift = {
            (row, column): FIELD_BITS * (row * size + column) for row in range(size) for column in range(size)
        }
        self._guards = sum(1 << (shift + FIELD_BITS - 1) for shift in self._shift.values())
        self.full = sum(capacity[row][column] << self._shift[row, column] for row, column in self._arcs(size))
        ends = (0, 1) if relay else (None,)
        self.stars = [
            [self._shift[arc] for arc in self._arcs(size) if member in (arc if end is None else arc[end : end + 1])]
            for member in range(size)
            for end in ends
        ]
        self.star_links_per_ring = 1 if relay else 2

    def _arcs(self, size: int) -> list[Arc]:
        return [(row, column) for row in range(size) for column in range(size) if self._relay or row < column]

    def take(self, arcs: tuple[Arc, ...]) -> int:
        """The arcs as one integer to subtract."""
        return sum(1 << self._shift[arc] for arc in arcs)

    def fits(self, left: int, taken: int) -> bool:
        """True if every counter stays at zero or above."""
        return ((left | self._guards) - taken) & self._guards == self._guards


def _densest(
    capacity: Capacity, candidates: list[tuple[Arc, ...]], *, bound: int, relay: bool, complete: bool
) -> Packing:
    if not candidates:
        return Packing(count=0, exact=complete)
    counters = _Counters(capacity, relay=relay)
    takes = [counters.take(arcs) for arcs in sorted(candidates, key=lambda arcs: (len(arcs), arcs))]
    ways = 1 if relay else 2
    links = sum(map(sum, capacity)) // ways
    shortest = min(len(arcs) for arcs in candidates) if complete else len(capacity)
    target = min(bound // ways, links // shortest)
    found = _greedy(counters, takes)
    searchable = len(candidates) <= SEARCHED_MAX and target <= DEPTH_MAX
    search = _Search(counters, work=WORK_MAX if searchable else 0)
    for count in range(target, found, -1):
        if search.packs(counters.full, takes, count):
            found = count
            break
    proven = complete and search.work_left > 0
    return Packing(count=found * ways, exact=proven or found == target)


def _greedy(counters: _Counters, takes: list[int]) -> int:
    """The better of two simple orders: each ring as often as it fits, or all rings in turns."""
    exhausting, exhausted = counters.full, 0
    turning, turned, before = counters.full, 0, -1
    for taken in takes:
        while counters.fits(exhausting, taken):
            exhausting -= taken
            exhausted += 1
    while turned > before:
        before = turned
        for taken in takes:
            if counters.fits(turning, taken):
                turning -= taken
                turned += 1
    return max(exhausted, turned)


class _Search:
    """Depth-first packing: the member with the fewest spare links decides what to branch on."""

    def __init__(self, counters: _Counters, *, work: int) -> None:
        self._counters = counters
        self.work_left = work

    def packs(self, left: int, takes: list[int], count: int) -> bool:
        """True if `count` of the rings, each as often as it fits, can be taken from what is left; False at the limit.

        Either some ring uses the pivot link (branch on which), or none does (the link is struck out).
        """
        if count == 0:
            return True
        while self.work_left > 0:
            self.work_left -= len(takes) + STEP_WORK
            pivot = self._pivot(left, count)
            if pivot is None:
                return False
            takes = [taken for taken in takes if self._counters.fits(left, taken)]
            using = [taken for taken in takes if taken >> pivot & FIELD]
            if any(self.packs(left - taken, takes, count - 1) for taken in using):
                return True
            left &= ~(FIELD << pivot)
        return False

    def _pivot(self, left: int, count: int) -> int | None:
        """A link of the tightest member; None if some member has too few links, in or out, for that many rings."""
        tightest, pivot = None, None
        for shifts in self._counters.stars:
            links = sum(left >> shift & FIELD for shift in shifts)
            spare = links - count * self._counters.star_links_per_ring
            if spare < 0:
                return None
            if tightest is None or spare < tightest:
                tightest, pivot = spare, next(shift for shift in shifts if left >> shift & FIELD)
        return pivot
