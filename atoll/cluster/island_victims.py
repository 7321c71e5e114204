"""The victims on one node for a pod to get its GPUs: the fewest, the least important, and none in vain.

`find_victims` returns None where evicting all of them would not help. The extender's preempt verb uses it to add
victims to those of kube-scheduler, and the controllers where the count suffices and the islands do not.

The answer is the first feasible set in this total order, so it is minimal: none of its victims can be spared.

1. fewest victims whose eviction breaks a disruption budget, or a gang below what it needs
2. fewest victims of the highest priority among the occupants, then of the next, and so on down
3. the youngest: of the highest priority first, the older a pod the rather it is spared; then by uid

With up to `EXACT_MAX` occupants all sets are weighed. With more (only machines with more GPUs than that have them) pods
are spared one by one, the most important first, while the rest is enough: minimal too, but not always the fewest; the
result says `bounded`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from atoll.cluster.budgets import violations
from atoll.cluster.machines import NodeDevices
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import Candidate, select
from topology.choice import Reason
from topology.device_requests import Interconnect, Policy

EXACT_MAX = 8
ORDERS_MAX = 1024
LINK_REASONS = frozenset(map(str, (Reason.NO_ISLAND, Reason.NO_NVLINK_ISLAND, Reason.NO_BANDWIDTH)))
"""Refusals where the count would do and the links do not."""


@dataclass(frozen=True, slots=True)
class PreemptionCandidate:
    """A pod that may be evicted: its GPUs as a bit mask, and what makes it more important than others.

    `since` is its creation as RFC 3339 text, which sorts by time; empty counts as the oldest.
    """

    uid: str
    mask: int
    priority: int
    since: str = ""
    budgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VictimSet:
    """Who must go, the least important first, how many budgets' promises that breaks, and what the pod would get."""

    victims: tuple[PreemptionCandidate, ...]
    violations: int
    candidate: Candidate
    bounded: bool = False

    @property
    def order(self) -> tuple[int, int, int, int, tuple[int, float, str]]:
        """The total order over nodes, as kube-scheduler's: smaller is better.

        Fewest broken budgets, lowest highest priority, lowest sum of priorities, fewest victims, best set of GPUs.
        """
        priorities = [victim.priority for victim in self.victims]
        highest = max(priorities, default=-(2**31))
        return (self.violations, highest, sum(priorities), len(priorities), self.candidate.order)


def demands_links(request: Request) -> bool:
    """Tell whether the claim refuses GPUs for how they are joined, so that pods may be evicted for an island."""
    ask = request.ask
    return ask.count > 1 and (
        ask.policy is Policy.ISLAND or ask.interconnect is Interconnect.NVLINK or ask.min_bandwidth_gbps > 0
    )


def lacks_only_links(devices: NodeDevices, free: int, request: Request) -> bool:
    """Tell whether a node refuses the request for its links alone: enough GPUs that match are free."""
    answer = select(devices, free, request)
    return isinstance(answer, Rejection) and answer.reason in LINK_REASONS


def find_victims(
    devices: NodeDevices,
    free: int,
    request: Request,
    occupants: Iterable[PreemptionCandidate],
    *,
    allowed: Mapping[str, int],
) -> VictimSet | None:
    """Return the first set of occupants whose GPUs, with the `free` ones, give the request what it wants.

    `allowed`: evictions that each budget allows now. An empty set is an answer: nobody need go. The caller offers only
    occupants of a lower priority; each is offered once.
    """
    ranked = tuple(sorted((o for o in occupants if o.mask), key=_importance))
    everything = free | _mask(ranked)
    if not _fits(devices, everything, request):
        return None
    is_exact = len(ranked) <= EXACT_MAX
    sets: Iterable[tuple[PreemptionCandidate, ...]] = (
        _in_order(ranked, allowed) if is_exact else (_spared(devices, free, request, ranked, allowed),)
    )
    for victims in sets:
        candidate = _fits(devices, free | _mask(victims), request)
        if candidate is not None:
            return VictimSet(victims, _broken(victims, allowed), candidate, bounded=not is_exact)
    return None


def _importance(occupant: PreemptionCandidate) -> tuple[int, tuple[int, ...], str]:
    """Sort key: the least important first. Younger text sorts later, so its characters count backwards."""
    return (occupant.priority, tuple(-ord(character) for character in occupant.since), occupant.uid)


def _in_order(
    ranked: Sequence[PreemptionCandidate], allowed: Mapping[str, int]
) -> Iterator[tuple[PreemptionCandidate, ...]]:
    """Yield every set of occupants in the order of this module."""
    budgets = tuple(occupant.budgets for occupant in ranked)
    left = tuple(sorted((key, allowed.get(key, 0)) for key in {key for keys in budgets for key in keys}))
    for chosen in _orders(tuple(occupant.priority for occupant in ranked), budgets, left):
        yield tuple(ranked[index] for index in chosen)


@lru_cache(maxsize=ORDERS_MAX)
def _orders(
    priorities: tuple[int, ...], budgets: tuple[tuple[str, ...], ...], allowed: tuple[tuple[str, int], ...]
) -> tuple[tuple[int, ...], ...]:
    """Return every set of indices in order; many nodes have the same priorities and budgets, and share the answer."""
    levels, left = sorted(set(priorities), reverse=True), dict(allowed)

    def cost(chosen: tuple[int, ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        counts = tuple(sum(priorities[index] == level for index in chosen) for level in levels)
        return (violations((budgets[index] for index in chosen), left), counts, tuple(reversed(chosen)))

    size = len(priorities)
    every = (tuple(index for index in range(size) if bits >> index & 1) for bits in range(1 << size))
    return tuple(sorted(every, key=cost))


def _spared(
    devices: NodeDevices, free: int, request: Request, ranked: Sequence[PreemptionCandidate], allowed: Mapping[str, int]
) -> tuple[PreemptionCandidate, ...]:
    """Spare who can be spared: those whose budget allows nothing first, then the most important."""
    victims = list(ranked)
    by_importance = sorted(
        range(len(ranked)),
        key=lambda index: (all(allowed.get(key, 0) > 0 for key in ranked[index].budgets), -index),
    )
    for index in by_importance:
        rest = [victim for victim in victims if victim is not ranked[index]]
        if _fits(devices, free | _mask(rest), request):
            victims = rest
    return tuple(victims)


def _broken(victims: Iterable[PreemptionCandidate], allowed: Mapping[str, int]) -> int:
    return violations((victim.budgets for victim in victims), allowed)


def _mask(occupants: Iterable[PreemptionCandidate]) -> int:
    mask = 0
    for occupant in occupants:
        mask |= occupant.mask
    return mask


def _fits(devices: NodeDevices, free: int, request: Request) -> Candidate | None:
    if (free & devices.usable).bit_count() < request.ask.count:
        return None
    answer = select(devices, free, request)
    return answer if isinstance(answer, Candidate) else None
