"""Which pods to evict so that a waiting gang fits, and which GPUs to keep for it meanwhile.

Victims come in units: a pod without a gang; a member that its gang does not need; or all members of a gang, because
what is left below its minimum would run in vain.

Units are ordered by the highest priority in them, unneeded members before whole gangs, the youngest first, then by
name. The shortest prefix that suffices is taken; then units in it are spared, the most important first, while the rest
suffices. Free GPUs count in all of it. Only strictly lower priorities are victims, so that no two gangs evict each
other in turn.

Where nobody may be evicted, the same search says whom to wait for, and GPUs are kept as they become free.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.api import names
from atoll.cluster import host_fit, pods
from atoll.cluster.gangs.gang_budgets import may_end_whole, priority_of
from atoll.cluster.gangs.lifecycle import GangView
from atoll.cluster.gangs.member_assignments import member_assignments
from atoll.cluster.gangs.membership import COUNTING, STARTED, GangKey, GangMember, gang_key
from atoll.cluster.gangs.node_domains import NodeDomains
from atoll.cluster.gangs.placing import FoundPlacement, NoPlacement, search
from atoll.cluster.gangs.readiness import counted, minimum_of
from atoll.cluster.gangs.search_input import PlacementSnapshot
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import cell_of
from atoll.cluster.objects import Pod
from atoll.cluster.occupants import pods_by_node, sole_mask
from atoll.cluster.requests import Request
from atoll.cluster.soft_reservations import SoftReservation

UNITS_MAX: Final = 4096
PRIORITY_TOP: Final = 2**31
"""Above every priority: what is kept for anybody counts as free for it."""
SEARCHES_MAX: Final = 64
"""Searches for one plan; once they are used up, some victim might have been spared."""


@dataclass(frozen=True, slots=True)
class EvictionUnit:
    """Pods that are evicted together. `gang`: set if all members of that gang are. `may_go`: every pod may be
    preempted; other units are waited for."""

    uids: frozenset[str]
    priority: int
    is_needed: bool = True
    since: str = ""
    name: str = ""
    gang: GangKey | None = None
    may_go: bool = True

    @property
    def importance(self) -> tuple[int, bool, tuple[int, ...], str]:
        """Sort key: the least important first; younger before older."""
        return (self.priority, self.is_needed, tuple(-ord(character) for character in self.since), self.name)


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """A pod that holds GPUs which would be free without it: positions of a node's devices, as a mask."""

    pod: Pod
    node: str
    mask: int


def holdings_of(ledger: Ledger, reservation: str = "") -> list[HeldDevices]:
    """Return the pods that hold GPUs, with those that would be free without them; less what is kept for others.

    `reservation`: uid of the GpuReservation that the gang uses: GPUs of one become free only for its own pods."""
    found = []
    for node, holders in pods_by_node(ledger).items():
        devices = ledger.nodes.get(node)
        if devices is not None:
            kept = ledger.kept_mask(node, "", None)
            found += [
                HeldDevices(pod, node, sole_mask(ledger, devices, pod.metadata.uid, reservation=reservation) & ~kept)
                for pod in holders
            ]
    return found


def units_of(
    holdings: Iterable[HeldDevices], admitted: Mapping[GangKey, GangView], *, below: int | None
) -> tuple[EvictionUnit, ...]:
    """Return the units below the given priority that may be preempted (all units without a priority), least important
    first."""
    found: list[EvictionUnit] = []
    seen: set[GangKey] = set()
    for holding in holdings:
        pod, key = holding.pod, gang_key(holding.pod)
        if names.MIRROR in pod.metadata.annotations:
            continue
        if key is None or key not in admitted:
            found.append(_single(pod))
        elif key not in seen:
            seen.add(key)
            found += _gang_units(key, admitted[key])
    low = (unit for unit in found if unit.uids and (below is None or (unit.priority < below and unit.may_go)))
    return tuple(sorted(low, key=lambda unit: unit.importance)[:UNITS_MAX])


def _single(pod: Pod, *, is_needed: bool = True) -> EvictionUnit:
    metadata = pod.metadata
    name = f"{metadata.namespace}/{metadata.name}"
    since, may_go = metadata.creation_timestamp or "", pods.may_be_preempted(pod)
    return EvictionUnit(frozenset({metadata.uid}), pod.spec.priority, is_needed, since, name, may_go=may_go)


def _gang_units(key: GangKey, view: GangView) -> list[EvictionUnit]:
    """Return the members that are not needed, each by itself, and the whole gang."""
    live = [member for member in view.members if member.stage in STARTED]
    priority = priority_of(view)
    created = view.gang.metadata.creation_timestamp or ""
    whole = EvictionUnit(
        frozenset(member.uid for member in live),
        priority,
        since=created,
        name="/".join(key),
        gang=key,
        may_go=may_end_whole(view),
    )
    extra = [_single(member.pod, is_needed=False) for member in unneeded(view)]
    return [*(replace(unit, priority=priority) for unit in extra), whole]


def unneeded(view: GangView) -> tuple[GangMember, ...]:
    """Return the members beyond what the gang needs as a whole and of each pod set, the highest ranks first."""
    spec = view.gang.spec
    counting = [member for member in view.members if member.stage in COUNTING]
    counts = counted(view.members, COUNTING, view.status.succeeded)
    left, spare = counts.total() - spec.quorum, []
    for member in sorted(counting, key=lambda member: (-member.rank, member.pod_set, member.uid)):
        if left <= 0:
            break
        if member.stage in STARTED and member.pod_set and counts[member.pod_set] > minimum_of(spec, member.pod_set):
            counts[member.pod_set] -= 1
            left -= 1
            spare.append(member)
    return tuple(spare)


def fewest_units(
    units: Sequence[EvictionUnit],
    fits: Callable[[frozenset[str]], bool],
    touched: Callable[[frozenset[str]], Collection[str]] | None = None,
) -> tuple[EvictionUnit, ...] | None:
    """Return units that suffice and of which none can be spared; None where all of them are not enough.

    `units`: the least important first. `fits`: whether the gang fits without these pods; more never hurts. `touched`:
    of these pods those that are in the way of the places that are found then.
    """
    if fits(frozenset()):
        return ()
    if not units or not fits(_uids(units)):
        return None
    low, high = 0, len(units)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(_uids(units[:middle])) else (middle, high)
    chosen = list(units[:high])
    if touched is not None:
        in_the_way = touched(_uids(chosen))
        chosen = [unit for unit in chosen if unit is units[high - 1] or not unit.uids.isdisjoint(in_the_way)]
    chosen = _without_spared(chosen, fits)
    whole = {uid for unit in chosen if unit.gang is not None for uid in unit.uids}
    return tuple(unit for unit in chosen if unit.gang is not None or not unit.uids <= whole)


def _without_spared(chosen: list[EvictionUnit], fits: Callable[[frozenset[str]], bool]) -> list[EvictionUnit]:
    """Leave out runs of units that are not missed, long runs first, in each round the most important units first."""
    left, size = SEARCHES_MAX, max(1, len(chosen) // 2)
    while True:
        end = len(chosen)
        while end > 0 and left > 0:
            rest = chosen[: max(0, end - size)] + chosen[end:]
            left -= 1
            if fits(_uids(rest)):
                chosen = rest
            end = max(0, end - size)
        if size == 1:
            return chosen
        size //= 2


def _uids(units: Iterable[EvictionUnit]) -> frozenset[str]:
    return frozenset(uid for unit in units for uid in unit.uids)


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """`kept`: by uid of the member, the GPUs that are kept for it. `evicted`: who must go; `awaited`: pods that end by
    themselves, sooner or later, before all of it is free."""

    kept: Mapping[str, SoftReservation]
    evicted: tuple[EvictionUnit, ...] = ()
    awaited: int = 0


@dataclass(frozen=True, slots=True)
class GangRequest:
    """The waiting gang, the members to place, what each asks for, and the cluster."""

    view: GangView
    chosen: tuple[GangMember, ...]
    requests: Mapping[str, Request]
    node_domains: NodeDomains
    cluster: PlacementSnapshot

    @property
    def priority(self) -> int:
        """The lowest priority among the members: what all of them may push out."""
        return min(member.pod.spec.priority for member in self.chosen)

    @property
    def may_preempt(self) -> bool:
        """Whether every member may push others out."""
        return all(member.pod.spec.preemption_policy != "Never" for member in self.chosen)


def plan_preemption(
    request: GangRequest,
    holdings: Sequence[HeldDevices],
    admitted: Mapping[GangKey, GangView],
    *,
    is_spared: Callable[[EvictionUnit], bool] | None,
) -> PreemptionPlan | None:
    """Return how the gang comes by its GPUs; None when that is not possible. With `is_spared` units of a lower priority
    are evicted that it does not spare; without it nobody is, and all that hold GPUs are waited for."""
    ending = frozenset(one.pod.metadata.uid for one in holdings if one.pod.metadata.deletion_timestamp is not None)
    running = [one for one in holdings if one.pod.metadata.uid not in ending]
    units = units_of(running, admitted, below=None if is_spared is None else request.priority)
    if is_spared is not None:
        units = tuple(unit for unit in units if not is_spared(unit))

    def found(gone: frozenset[str]) -> FoundPlacement | NoPlacement:
        cluster = without(request.cluster, holdings, gone | ending)
        return search(request.view, request.chosen, request.requests, request.node_domains, cluster)

    def in_the_way(gone: frozenset[str]) -> set[str]:
        answer = found(gone)
        places = answer.placement.assignments if isinstance(answer, FoundPlacement) else ()
        hosts = {member.host for assignment in places for member in assignment.members}
        return {one.pod.metadata.uid for one in running if one.node in hosts}

    chosen = fewest_units(units, lambda gone: isinstance(found(gone), FoundPlacement), in_the_way)
    if chosen is None:
        return None
    answer = found(_uids(chosen))
    assert isinstance(answer, FoundPlacement), "the same search has just found it"
    assignments = member_assignments(answer.placement, answer.question.asked, request.cluster.devices)
    kept = {
        assigned.member.uid: SoftReservation(
            assigned.allocation.node, assigned.allocation.device_ids, assigned.member.pod.spec.priority
        )
        for assigned in assignments
        if assigned.allocation.device_ids
    }
    return PreemptionPlan(
        kept, () if is_spared is None else chosen, len(ending) + (len(chosen) if is_spared is None else 0)
    )


def with_kept(
    cluster: PlacementSnapshot, ledger: Ledger, kept: Iterable[SoftReservation], *, now_seconds: float
) -> PlacementSnapshot:
    """Return the snapshot as the gang sees it for whose members these GPUs are kept: they are free for it."""
    cells, reservation = dict(cluster.cells), cluster.pool.reservation if cluster.pool is not None else ""
    for one in kept:
        cell, devices = cells.get(one.node), ledger.nodes.get(one.node)
        if cell is None or devices is None:
            continue
        free = ledger.free(
            one.node, now_seconds=now_seconds, asking_priority=PRIORITY_TOP, asking_reservation=reservation
        )
        own = free & devices.mask_of(one.device_ids) & devices.usable
        cells[one.node] = cell_of(cell.shape, cell.free | own)
    return replace(cluster, cells=cells)


def without(cluster: PlacementSnapshot, holdings: Iterable[HeldDevices], gone: Collection[str]) -> PlacementSnapshot:
    """Return the snapshot as it is once these pods have ended."""
    cells, free = dict(cluster.cells), dict(cluster.free)
    left: dict[str, set[str]] = {}
    for holding in holdings:
        node, pod = holding.node, holding.pod
        if pod.metadata.uid not in gone or node not in cells:
            continue
        cells[node] = cell_of(cells[node].shape, cells[node].free | holding.mask & cluster.devices[node].usable)
        back = host_fit.needs(pod)
        free[node] = {name: amount + back.get(name, 0) for name, amount in free.get(node, {}).items()}
        left.setdefault(node, set()).add(pod.metadata.uid)
    pods_on = dict(cluster.pods_on)
    for node, uids in left.items():
        pods_on[node] = [pod for pod in pods_on.get(node, ()) if pod.metadata.uid not in uids]
    return replace(cluster, cells=cells, pods_on=pods_on, free=free)
