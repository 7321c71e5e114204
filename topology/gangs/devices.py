"""Sets of GPUs for all members of one host together, and the number of members that fit.

Given a MachineRef, its free positions and wants (a request, the masks it may use, the number of members), finds the
most members of one more kind that fit beside others, and disjoint sets for all. Exact on machines of up to
EXACT_DEVICES_MAX GPUs; above, sets are taken greedily, best first, which may find fewer.

Order of the sets of a host: least sum of ranks (see topology.tables) plus what the rest loses, then the sets,
lexicographically.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from topology.choice import Choice, choose
from topology.closeness import closeness, crowding, pair_sums
from topology.device_requests import DeviceRequest, Interconnect, Policy
from topology.fragmentation import losses
from topology.islands import islands
from topology.model import Machine, mask_of
from topology.policies import POLICIES
from topology.tables import admitted_sets, in_one_island

EXACT_DEVICES_MAX: Final = 8
ANSWERS_MAX: Final = 1 << 16
PREFERENCE: Final = 1e6
"""A later model in the claim costs more than any set of the first."""
DECIMALS: Final = 6


@dataclass(frozen=True, slots=True)
class MemberDevices:
    """One member's request for a host's GPUs. masks: empty admits every position. one_island: sets that span islands do
    not count."""

    ask: DeviceRequest
    masks: tuple[int, ...] = ()
    one_island: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class MachineRef:
    """A Machine that is compared by identity, so that caches need not hash its links. Use `machine_ref` to get it."""

    machine: Machine


@lru_cache(maxsize=1024)
def machine_ref(machine: Machine) -> MachineRef:
    """The one MachineRef of a machine."""
    return MachineRef(machine)


Wants = tuple[tuple[MemberDevices, int], ...]
Sets = tuple[int, ...]


@lru_cache(maxsize=ANSWERS_MAX)
def most(machine_ref: MachineRef, free: int, held: Wants, want: MemberDevices) -> int:
    """Members with `want` that fit beside those in `held`; 0 if not even those fit."""
    free &= machine_ref.machine.full
    if machine_ref.machine.count > EXACT_DEVICES_MAX:
        return _most_greedy(machine_ref, free, held, want)
    left = free.bit_count() - sum(other.ask.count * count for other, count in held)
    for count in range(max(left, 0) // want.ask.count, 0, -1):
        if fits(machine_ref, free, add(held, want, count)):
            return count
    return 0


def fits(machine_ref: MachineRef, free: int, wants: Wants) -> bool:
    """True if disjoint sets for all exist."""
    if sum(want.ask.count * count for want, count in wants) > free.bit_count():
        return False
    if all(_is_plain(machine_ref, want) for want, _ in wants):
        return True
    return _best(machine_ref, free, wants) is not None


def sets_for(machine_ref: MachineRef, free: int, wants: Wants) -> tuple[Sets, ...] | None:
    """Disjoint sets, one for each member of each want; None if they do not fit."""
    free &= machine_ref.machine.full
    if machine_ref.machine.count > EXACT_DEVICES_MAX:
        return _sets_greedy(machine_ref, free, wants)
    found = _best(machine_ref, free, wants)
    if found is None:
        return None
    taken = iter(found[2])
    return tuple(tuple(next(taken) for _ in range(count)) for _, count in wants)


def add(held: Wants, want: MemberDevices, count: int) -> Wants:
    """The wants with more members of one kind."""
    if any(other == want for other, _ in held):
        return tuple((other, had + count if other == want else had) for other, had in held)
    return (*held, (want, count))


def has_one_island(machine: Machine) -> bool:
    """True if every set lies in one island anyway."""
    return len(islands(machine)) == 1


@lru_cache(maxsize=ANSWERS_MAX)
def _is_plain(machine_ref: MachineRef, want: MemberDevices) -> bool:
    """True if any set of the right size will do, so that counting is enough."""
    ask = want.ask
    unconditional = ask.interconnect is Interconnect.ANY and ask.min_bandwidth_gbps == 0
    anywhere = (
        any(mask & machine_ref.machine.full == machine_ref.machine.full for mask in want.masks) if want.masks else True
    )
    inside = has_one_island(machine_ref.machine) or not (want.one_island or ask.policy is Policy.ISLAND)
    return unconditional and anywhere and inside and ask.count <= machine_ref.machine.count


@lru_cache(maxsize=4096)
def _candidates(machine_ref: MachineRef, want: MemberDevices) -> tuple[tuple[float, int, int], ...]:
    """(cost, rank in the order of sets, mask) of every set that one member may get."""
    if want.ask.count > machine_ref.machine.count:
        return ()
    sets = admitted_sets(machine_ref.machine, want.ask)
    island = in_one_island(machine_ref.machine, sets.masks)
    masks = want.masks or (machine_ref.machine.full,)
    found: list[tuple[float, int, int]] = []
    for position, mask in enumerate(int(mask) for mask in sets.masks):
        order = next((rank for rank, allowed in enumerate(masks) if mask & ~allowed == 0), None)
        if order is not None and (island[position] or not want.one_island):
            found.append((float(sets.rank[position]) + PREFERENCE * order, position, mask))
    return tuple(found)


@lru_cache(maxsize=256)
def _kept(machine: Machine, policy: Policy) -> tuple[float, ...]:
    """Cost of leaving each free set, as topology.tables weighs it."""
    weights = POLICIES[policy]
    if weights.crowd:
        return tuple((weights.near * pair_sums(crowding(machine))).tolist())
    return tuple((weights.loss * losses(machine) - weights.near * pair_sums(closeness(machine))).tolist())


@lru_cache(maxsize=ANSWERS_MAX)
def _best(machine_ref: MachineRef, free: int, wants: Wants) -> tuple[float, Sets, Sets] | None:
    """Least cost, ranks in the order of sets, and the sets, for all wants in turn."""
    first = next((position for position, (_, count) in enumerate(wants) if count), None)
    if first is None:
        return _kept(machine_ref.machine, wants[-1][0].ask.policy)[free] if wants else 0.0, (), ()
    want, count = wants[first]
    if sum(other.ask.count * number for other, number in wants) > free.bit_count():
        return None
    rest = (*wants[:first], (want, count - 1), *wants[first + 1 :])
    best: tuple[float, Sets, Sets] | None = None
    for cost, place, mask in _candidates(machine_ref, want):
        others = None if mask & ~free else _best(machine_ref, free & ~mask, rest)
        if others is not None:
            found = (round(cost + others[0], DECIMALS), (place, *others[1]), (mask, *others[2]))
            best = found if best is None else min(best, found)
    return best


def _most_greedy(machine_ref: MachineRef, free: int, held: Wants, want: MemberDevices) -> int:
    count = 0
    while _sets_greedy(machine_ref, free, add(held, want, count + 1)) is not None:
        count += 1
    return count


@lru_cache(maxsize=ANSWERS_MAX)
def _sets_greedy(machine_ref: MachineRef, free: int, wants: Wants) -> tuple[Sets, ...] | None:
    found: list[Sets] = []
    for want, count in wants:
        sets: list[int] = []
        for _ in range(count):
            mask = _next_greedy(machine_ref, free, want)
            if mask is None:
                return None
            sets.append(mask)
            free &= ~mask
        found.append(tuple(sets))
    return tuple(found)


@lru_cache(maxsize=ANSWERS_MAX)
def _next_greedy(machine_ref: MachineRef, free: int, want: MemberDevices) -> int | None:
    """The best set of the first mask that can serve the want."""
    for allowed in want.masks or (machine_ref.machine.full,):
        answer = choose(machine_ref.machine, free & allowed & machine_ref.machine.full, want.ask)
        if isinstance(answer, Choice) and not (want.one_island and len(answer.islands) > 1):
            return mask_of(answer.positions)
    return None
