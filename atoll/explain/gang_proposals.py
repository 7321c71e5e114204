"""Proposals for a gang that waits for room: changes, each decided again before it is proposed.

Returns GangProposals, the cheapest first, and the kinds of change that do not help. The kinds and their order are those
of `atoll.explain.proposals`. Pure and deterministic.

A gang takes many nodes, so a change does too: each kind first tries everything it offers. If that does not help,
nothing of the kind does; if it does, the search by which the controllers choose victims
(`atoll.cluster.gangs.preemption.fewest_units`) leaves out all unnecessary parts. Evictions are tried on the landscape,
other changes on the changed snapshot; every proposal is decided again on the latter.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, TypeVar

from atoll.api.gangs import GpuGang
from atoll.cluster import host_fit, pods
from atoll.cluster.feasibility import could_serve
from atoll.cluster.gangs.lifecycle import GangAction
from atoll.cluster.gangs.placing import FoundPlacement, search
from atoll.cluster.gangs.preemption import EvictionUnit, HeldDevices, fewest_units, holdings_of, units_of, without
from atoll.cluster.health import judge as judge_health
from atoll.cluster.machines import node_devices
from atoll.cluster.requests import Request
from atoll.cluster.transitions import Availability
from atoll.explain.changes import Addition, ClusterChange, changed_gang, relaxations_of_gang
from atoll.explain.decision import index_snapshot
from atoll.explain.gang_decision import FindPlacesInput, GangDecision, IndexedGangs, decide_gang, index_gangs
from atoll.explain.proposals import SHOWN_MAX, ProposalKind, Suggestions, search_all
from atoll.explain.shapes import additions_for
from atoll.explain.snapshot import ClusterSnapshot

T = TypeVar("T")

ADDED_MAX: Final = 64
"""Limit of nodes that one proposal adds."""
SHAPES_MAX: Final = 16
"""Limit of kinds of nodes tried, of those that could serve some member."""
RELAXATIONS_MAX: Final = 64
"""Limit of sets of relaxations tried."""


@dataclass(frozen=True, slots=True)
class GangProposal:
    """One change after which the gang fits, with the number of nodes and members."""

    kind: ProposalKind
    change: ClusterChange
    members: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _GangProposalSearch:
    gangs: IndexedGangs
    gang: GpuGang
    asked: FindPlacesInput

    @property
    def snapshot(self) -> ClusterSnapshot:
        return self.gangs.scene.snapshot


def find_gang_suggestions(gangs: IndexedGangs, gang: GpuGang, decision: GangDecision) -> Suggestions[GangProposal]:
    """Return proposals for a gang whose members find no place now; none if it waits for something else."""
    if decision.asked is None or decision.fits or decision.act is not GangAction.PLACE:
        return Suggestions()
    return search_all(_SEARCHES, _GangProposalSearch(gangs, gang, decision.asked))


def check_gang(snapshot: ClusterSnapshot, gang: GpuGang, change: ClusterChange) -> GangDecision:
    """Decide about the gang on the changed cluster."""
    after, changed = changed_gang(snapshot, gang, change)
    return decide_gang(index_gangs(index_snapshot(after)), changed)


Hunted = tuple[list[GangProposal], bool]


def _verified(hunt: _GangProposalSearch, kind: ProposalKind, change: ClusterChange) -> Iterator[GangProposal]:
    decision = check_gang(hunt.snapshot, hunt.gang, change)
    if decision.fits:
        nodes = tuple(sorted({seat.allocation.node for seat in decision.assignments}))
        yield GangProposal(kind, change, len(decision.assignments), nodes)


def _ending(hunt: _GangProposalSearch) -> Hunted:
    """All pods that are ending anyway, and Leases of pods that are gone."""
    scene = hunt.gangs.scene
    known = {pod.metadata.uid for pod in scene.snapshot.pods}
    ending = {
        pod.metadata.uid
        for pod in scene.snapshot.pods
        if pod.spec.node_name and (pod.metadata.deletion_timestamp is not None or pods.is_terminal(pod))
    }
    ending |= {record.holder.uid for record in scene.ledger.leases.values()} - known
    return _least(
        hunt, ProposalKind.ENDING, {uid: uid for uid in sorted(ending)}, lambda uids: ClusterChange(ended=uids)
    )


def _relax(hunt: _GangProposalSearch) -> Hunted:
    """The fewest relaxations of the gang and its claims."""
    possible = relaxations_of_gang(hunt.snapshot, hunt.gang)
    tried = 0
    for size in range(1, len(possible) + 1):
        found: list[GangProposal] = []
        for relaxed in combinations(possible, size):
            tried += 1
            if tried > RELAXATIONS_MAX:
                return found, not found
            found += _verified(hunt, ProposalKind.RELAX, ClusterChange(relaxed=relaxed))
        if found:
            return found[:SHOWN_MAX], False
    return [], False


def _count(hunt: _GangProposalSearch) -> Hunted:
    """As many members as fit, in whole slices, by the search itself."""
    asked = hunt.asked
    one_each = tuple((one.name, 1) for one in hunt.gang.spec.pod_sets)
    for least in (one_each, (one_each[0],)) if len(one_each) > 1 else (one_each,):
        after, gang = changed_gang(hunt.snapshot, hunt.gang, ClusterChange(members=least))
        decision = decide_gang(index_gangs(index_snapshot(after)), gang)
        if not decision.fits or len(decision.assignments) >= len(asked.chosen):
            continue
        placed = {name: 0 for name, _ in one_each}
        for seat in decision.assignments:
            placed[seat.member.pod_set] += 1
        change = ClusterChange(members=tuple((name, count) for name, count in placed.items() if count))
        return list(_verified(hunt, ProposalKind.COUNT, change)), False
    return [], False


def _open(hunt: _GangProposalSearch) -> Hunted:
    """Nodes that kube-scheduler refuses only because of the Node object."""
    template = hunt.asked.chosen[0].pod
    closed = [name for name, node in sorted(hunt.gangs.scene.nodes.items()) if host_fit.node_reason(template, node)]
    return _least(hunt, ProposalKind.OPEN, {name: name for name in closed}, lambda names: ClusterChange(opened=names))


def _gpu(hunt: _GangProposalSearch) -> Hunted:
    found = _withheld(hunt, {Availability.CORDONED})
    return _least(hunt, ProposalKind.GPU, found, lambda gpus: ClusterChange(uncordoned=gpus))


def _repair(hunt: _GangProposalSearch) -> Hunted:
    found = _withheld(hunt, {Availability.QUARANTINED, Availability.UNKNOWN})
    return _least(hunt, ProposalKind.REPAIR, found, lambda gpus: ClusterChange(healed=gpus))


def _withheld(hunt: _GangProposalSearch, states: set[Availability]) -> dict[str, tuple[str, str]]:
    return {
        f"{status.metadata.name}/{uuid}": (status.metadata.name, uuid)
        for status in hunt.snapshot.reports
        for uuid, standing in sorted(judge_health(status).standings.items())
        if standing.state in states
    }


def _end(hunt: _GangProposalSearch) -> Hunted:
    """The units that the controllers would evict, whatever their priority, the least important first. If these do not
    suffice, pods without GPUs too, which may hold cpu, a port, or have an anti-affinity."""
    holdings = holdings_of(hunt.gangs.scene.ledger)
    chosen = _fewest_to_end(hunt, holdings) or _fewest_to_end(hunt, [*holdings, *_without_gpus(hunt, holdings)])
    if not chosen:
        return [], False
    ended = tuple(sorted({uid for unit in chosen for uid in unit.uids}))
    found = list(_verified(hunt, ProposalKind.END, ClusterChange(ended=ended)))
    return found, not found


def _fewest_to_end(hunt: _GangProposalSearch, holdings: Sequence[HeldDevices]) -> tuple[EvictionUnit, ...] | None:
    asked = hunt.asked
    running = [one for one in holdings if one.pod.metadata.deletion_timestamp is None]

    def fits(gone: frozenset[str]) -> bool:
        landscape = without(asked.landscape, holdings, gone)
        return isinstance(search(asked.view, asked.chosen, asked.requests, asked.site, landscape), FoundPlacement)

    return fewest_units(units_of(running, hunt.gangs.admitted(), below=None), fits)


def _without_gpus(hunt: _GangProposalSearch, holdings: Sequence[HeldDevices]) -> Iterator[HeldDevices]:
    """Yield the other running pods, as holders without GPUs."""
    known = {one.pod.metadata.uid for one in holdings}
    for node, there in hunt.gangs.scene.pods_by_node.items():
        for pod in there:
            if pod.metadata.uid not in known and not pods.is_terminal(pod):
                yield HeldDevices(pod, node, 0)


def _add(hunt: _GangProposalSearch) -> Hunted:
    """The fewest nodes of one kind: like those of the cluster, each in its domain, then known machines."""
    found: list[GangProposal] = []
    template, snapshot = hunt.asked.chosen[0].pod, hunt.snapshot
    taken = set(hunt.gangs.scene.nodes)
    prefix = "new-node"
    while any(name.startswith(prefix) for name in taken):
        prefix += "-1"
    most = min(ADDED_MAX, len(hunt.asked.chosen))
    names = [f"{prefix}-{number}" for number in range(1, most + 1)]
    wanted = frozenset(hunt.asked.requests.values())
    for number, additions in enumerate(one for one in additions_for(snapshot, template, names) if _serves(one, wanted)):
        if number == SHAPES_MAX:
            return found, not found
        low, high = 0, len(additions)
        if not list(_verified(hunt, ProposalKind.ADD, ClusterChange(added=additions))):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            fits = any(_verified(hunt, ProposalKind.ADD, ClusterChange(added=additions[:middle])))
            low, high = (low, middle) if fits else (middle, high)
        found += _verified(hunt, ProposalKind.ADD, ClusterChange(added=additions[:high]))
        if len(found) == SHOWN_MAX:
            break
    return found, False


def _serves(additions: Sequence[Addition], wanted: Collection[Request]) -> bool:
    """True if a machine of the kind could serve some member."""
    devices = node_devices(additions[0].report)
    return devices is not None and any(could_serve(devices, request) for request in wanted)


def _least(
    hunt: _GangProposalSearch,
    kind: ProposalKind,
    items: Mapping[str, T],
    change: Callable[[tuple[T, ...]], ClusterChange],
) -> Hunted:
    """Return the change with as few items as possible, all necessary."""
    if not items:
        return [], False

    def of(keys: Sequence[str]) -> ClusterChange:
        return change(tuple(items[key] for key in sorted(keys)))

    units = tuple(EvictionUnit(frozenset({key}), 0, name=key) for key in items)
    chosen = fewest_units(units, lambda keys: any(_verified(hunt, kind, of(sorted(keys)))) if keys else False)
    if not chosen:
        return [], False
    return list(_verified(hunt, kind, of([key for unit in chosen for key in unit.uids]))), False


_SEARCHES: Final[dict[ProposalKind, Callable[[_GangProposalSearch], Hunted]]] = {
    ProposalKind.ENDING: _ending,
    ProposalKind.RELAX: _relax,
    ProposalKind.COUNT: _count,
    ProposalKind.OPEN: _open,
    ProposalKind.GPU: _gpu,
    ProposalKind.REPAIR: _repair,
    ProposalKind.END: _end,
    ProposalKind.ADD: _add,
}
