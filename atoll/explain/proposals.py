"""Proposals for a waiting pod: changes, each decided again before it is proposed.

Returns Proposals, the cheapest first, and the kinds of change that do not help. The cost is a fixed order over
kinds: changes already under way, the user's request, an administrator's settings, GPUs of other pods, new
machines. Pure and deterministic.

    ending     a pod that is being deleted, or has ended without proof, goes     gpu    cordoned GPUs are given out
    relax      the claim asks less of the set or of the cards                   repair sick GPUs recover
    count      fewer GPUs                                                       end    running pods end
    open       a node is uncordoned, its taints tolerated, labelled             add    a node is added

Each kind is searched by itself. Within a kind the smallest change is found: fewest relaxations, the largest count,
fewest GPUs, fewest pods, all on the one node where the pod then fits. Pods of other nodes do not move.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nsmallest
from itertools import combinations
from typing import Any, Final, Generic, TypeVar

from atoll.api.node_status import GpuNodeStatus
from atoll.cluster import host_fit, pods
from atoll.cluster.health import judge as judge_health
from atoll.cluster.machines import cell_of, node_devices
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import offer, plain
from atoll.cluster.transitions import Availability
from atoll.explain.blockers import NodeHolders, Price, holders_of, kept_for_others, opponents_of, price, smallest_sets
from atoll.explain.changes import ClusterChange, PodCase, changed, relaxations_of, tolerable, well_again
from atoll.explain.decision import IndexedSnapshot, PodDecision, decide, decide_beside, index_snapshot, judge
from atoll.explain.node_slices import NodeSlices
from atoll.explain.shapes import additions

P = TypeVar("P")
H = TypeVar("H")

SHOWN_MAX: Final = 3
"""Limit of proposals of one kind."""
END_SETS_MAX: Final = 64
"""Limit of sets of pods, cheapest first, that are decided again."""
GPU_SETS_MAX: Final = 4096
"""Limit of sets of withheld GPUs tried on one node."""


class ProposalKind(StrEnum):
    """Kinds of change, the cheapest first."""

    ENDING = "ending"
    RELAX = "relax"
    COUNT = "count"
    OPEN = "open"
    GPU = "gpu"
    REPAIR = "repair"
    END = "end"
    ADD = "add"


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change after which the pod fits, with its node and GPUs. `cost` orders proposals of one kind."""

    kind: ProposalKind
    change: ClusterChange
    node: str
    device_ids: tuple[int, ...]
    cost: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Suggestions(Generic[P]):
    """All proposals, cheapest first; the kinds of which none helps; and those whose search was cut."""

    proposals: tuple[P, ...] = ()
    helpless: tuple[ProposalKind, ...] = ()
    cut: tuple[ProposalKind, ...] = ()


def search_all(searches: Mapping[ProposalKind, Callable[[H], tuple[list[P], bool]]], hunt: H) -> Suggestions[P]:
    """Search every kind by itself. A search gives its results, and whether it was cut."""
    proposals: list[P] = []
    helpless: list[ProposalKind] = []
    cut: list[ProposalKind] = []
    for kind, search in searches.items():
        found, is_cut = search(hunt)
        proposals += found
        if is_cut:
            cut.append(kind)
        elif not found:
            helpless.append(kind)
    return Suggestions(tuple(proposals), tuple(helpless), tuple(cut))


@dataclass(frozen=True, slots=True)
class _ProposalSearch:
    """Input of every search. `holders`: of every node; `surroundings`: all by node; `closed`: see PodDecision."""

    case: PodCase
    scene: IndexedSnapshot
    request: Request
    holders: tuple[NodeHolders, ...]
    surroundings: NodeSlices
    closed: Mapping[str, tuple[str, ...]]


def find_suggestions(scene: IndexedSnapshot, pod: Pod, decision: PodDecision) -> Suggestions[Proposal]:
    """Return proposals for a pod that fits nowhere now; none for an invalid request."""
    if isinstance(decision.request, Rejection) or decision.fits:
        return Suggestions()
    case = PodCase(scene.snapshot, pod, scene.snapshot.claim_of(pod))
    kept = kept_for_others(scene.ledger, pod)
    held = (holders_of(scene, name, pod, kept.get(name, ())) for name in sorted(scene.nodes))
    holders = tuple(one for one in held if one is not None)
    hunt = _ProposalSearch(case, scene, decision.request, holders, NodeSlices.of(scene), decision.closed)
    return search_all(_SEARCHES, hunt)


def check(case: PodCase, change: ClusterChange) -> PodDecision:
    """Decide about the pod on the whole changed cluster."""
    after = changed(case, change)
    return decide(index_snapshot(after.snapshot), after.pod, after.claim)


def _verified(
    hunt: _ProposalSearch, kind: ProposalKind, change: ClusterChange, node: str, cost: tuple[Any, ...]
) -> Iterator[Proposal]:
    """Decide again on this node after the change; yield the proposal if the pod fits there."""
    has_neighbours = hunt.scene.minds_neighbours(hunt.case.pod)
    small = hunt.surroundings.around(node, holder_uid=hunt.case.pod.metadata.uid, has_neighbours=has_neighbours)
    after = changed(replace(hunt.case, snapshot=small), change)
    best = decide(index_snapshot(after.snapshot), after.pod, after.claim, only=[node])
    if best.best is not None:
        yield _proposal(kind, change, best, after.snapshot.reports, cost)


def _proposal(
    kind: ProposalKind,
    change: ClusterChange,
    decision: PodDecision,
    reports: Iterable[GpuNodeStatus],
    cost: tuple[Any, ...],
) -> Proposal:
    best = decision.best
    assert best is not None
    report = next(one for one in reports if one.metadata.name == best.node)
    assert report.status is not None
    ids = tuple(report.status.devices[position].id for position in best.choice.positions)
    return Proposal(kind, change, best.node, ids, cost)


def _claim_change(
    hunt: _ProposalSearch, kind: ProposalKind, change: ClusterChange, cost: tuple[Any, ...]
) -> Iterator[Proposal]:
    """Decide with another claim: the scene and its reasons beside GPUs stay valid, because the cluster does not
    change."""
    after = changed(hunt.case, change)
    decision = decide_beside(hunt.scene, after.pod, after.claim, hunt.closed, list(hunt.scene.nodes))
    if decision.fits:
        yield _proposal(kind, change, decision, hunt.case.snapshot.reports, cost)


Found = tuple[list[Proposal], bool]


def _ending(hunt: _ProposalSearch) -> Found:
    """Pods that are ending anyway, all of one node together."""
    found: list[Proposal] = []
    against = opponents_of(hunt.scene, hunt.case.pod)
    for one in hunt.holders:
        concerned = _all_on(hunt.scene, one) | against.get(one.node, frozenset())
        ending = tuple(uid for uid in sorted(concerned) if _is_ending(hunt.scene, uid))
        if ending:
            found += _verified(
                hunt, ProposalKind.ENDING, ClusterChange(ended=ending), one.node, (len(ending), one.node)
            )
    return _first(found), False


def _relax(hunt: _ProposalSearch) -> Found:
    """The fewest relaxations; all sets of them are tried."""
    possible = relaxations_of(hunt.case.claim)
    for size in range(1, len(possible) + 1):
        found: list[Proposal] = []
        for rank, relaxed in enumerate(combinations(possible, size)):
            found += _claim_change(hunt, ProposalKind.RELAX, ClusterChange(relaxed=relaxed), (rank,))
        if found:
            return _first(found), False
    return [], False


def _count(hunt: _ProposalSearch) -> Found:
    """The largest smaller count."""
    for count in range(hunt.request.ask.count - 1, 0, -1):
        found = list(_claim_change(hunt, ProposalKind.COUNT, ClusterChange(count=count), (-count,)))
        if found:
            return found, False
    return [], False


def _open(hunt: _ProposalSearch) -> Found:
    """Nodes whose GPUs fit, which kube-scheduler refuses only because of the Node object."""
    pod = hunt.case.pod
    found: list[Proposal] = []
    for name, node in sorted(hunt.scene.nodes.items()):
        is_open = not host_fit.node_reason(pod, node)
        if is_open or not judge(hunt.scene, pod, hunt.request, [name]).feasible:
            continue
        taints = len(tolerable(pod, node)) + node.spec.unschedulable
        labels = sum(node.metadata.labels.get(key) != value for key, value in pod.spec.node_selector.items())
        found += _verified(hunt, ProposalKind.OPEN, ClusterChange(opened=(name,)), name, (taints + labels, name))
    return _first(found), False


def _gpu(hunt: _ProposalSearch) -> Found:
    return _withheld(hunt, ProposalKind.GPU)


def _repair(hunt: _ProposalSearch) -> Found:
    return _withheld(hunt, ProposalKind.REPAIR)


def _withheld(hunt: _ProposalSearch, kind: ProposalKind) -> Found:
    """The fewest withheld GPUs of one node that would have to become usable."""
    reports = {one.metadata.name: one for one in hunt.case.snapshot.reports}
    found: list[Proposal] = []
    is_cut = False
    for one in hunt.holders:
        if all(state is Availability.HEALTHY for state in one.devices.availability):
            continue
        status = reports[one.node]
        sets = _sets_of(kind, status)
        for number, change in enumerate(sets):
            if number >= GPU_SETS_MAX:
                is_cut = True
                break
            if _fits_after(one, well_again(status, change.uncordoned, change.healed), hunt.request):
                cost = (len(change.uncordoned) + len(change.healed), one.node)
                verified = list(_verified(hunt, kind, change, one.node, cost))
                found += verified
                if verified:
                    break
    return _first(found), is_cut and not found


def _sets_of(kind: ProposalKind, status: GpuNodeStatus) -> Iterator[ClusterChange]:
    """Yield the changes that make withheld GPUs usable, by their number."""
    node, standings = status.metadata.name, judge_health(status).standings
    is_cordon = kind is ProposalKind.GPU
    states = {Availability.CORDONED} if is_cordon else {Availability.QUARANTINED, Availability.UNKNOWN}
    uuids = sorted(uuid for uuid, standing in standings.items() if standing.state in states)
    for size in range(1, len(uuids) + 1):
        for chosen in combinations(uuids, size):
            gpus = tuple((node, uuid) for uuid in chosen)
            yield ClusterChange(uncordoned=gpus) if is_cordon else ClusterChange(healed=gpus)


def _fits_after(one: NodeHolders, status: GpuNodeStatus, request: Request) -> bool:
    devices = node_devices(status)
    if devices is None:
        return False
    return not isinstance(offer(cell_of(devices.shape, one.free & devices.usable), plain(request)), Rejection)


def _end(hunt: _ProposalSearch) -> Found:
    """The fewest running pods of one node, those of the lowest priority first."""
    ends = smallest_sets(hunt.scene, hunt.holders, hunt.case.pod, hunt.request)
    price_of = {uid: price(hunt.scene, uid) for _, uids in ends.sets for uid in uids}
    ranked = nsmallest(END_SETS_MAX, ((_total(price_of, uids), node, tuple(sorted(uids))) for node, uids in ends.sets))
    found: list[Proposal] = []
    for total, node, uids in ranked:
        found += _verified(hunt, ProposalKind.END, ClusterChange(ended=uids), node, (len(uids), total, node))
        if len(found) == SHOWN_MAX:
            break
    is_cut = ends.is_cut or len(ends.sets) > END_SETS_MAX
    return found, is_cut and not found


def _total(price_of: Mapping[str, Price], uids: Iterable[str]) -> tuple[int, int, tuple[str, ...]]:
    """Order of victims: the highest priority among them, then the number of GPUs they hold, then their names."""
    prices = [price_of[uid] for uid in uids]
    named = tuple(sorted(name for _, _, name in prices))
    return max(priority for priority, _, _ in prices), sum(gpus for _, gpus, _ in prices), named


def _add(hunt: _ProposalSearch) -> Found:
    """One more node like the cluster's, then known machines, the smallest first."""
    found: list[Proposal] = []
    for rank, addition in enumerate(additions(hunt.case.snapshot, hunt.case.pod, name=_free_name(hunt.scene))):
        name = addition.node.metadata.name
        found += _verified(hunt, ProposalKind.ADD, ClusterChange(added=(addition,)), name, (rank,))
        if len(found) == SHOWN_MAX:
            break
    return found, False


def _free_name(scene: IndexedSnapshot) -> str:
    name = "new-node"
    while name in scene.nodes:
        name += "-1"
    return name


def _all_on(scene: IndexedSnapshot, one: NodeHolders) -> set[str]:
    return {pod.metadata.uid for pod in scene.pods_by_node.get(one.node, ())} | set(one.uids)


def _is_ending(scene: IndexedSnapshot, uid: str) -> bool:
    """True if a holder is ending anyway: it is deleted, has ended, or only its Leases are left."""
    found = scene.by_uid.get(uid)
    if found is None:
        return bool(scene.ledger.leases_of(uid))
    return found.metadata.deletion_timestamp is not None or pods.is_terminal(found)


def _first(found: list[Proposal]) -> list[Proposal]:
    return sorted(found, key=lambda one: one.cost)[:SHOWN_MAX]


_SEARCHES: Final[dict[ProposalKind, Callable[[_ProposalSearch], Found]]] = {
    ProposalKind.ENDING: _ending,
    ProposalKind.RELAX: _relax,
    ProposalKind.COUNT: _count,
    ProposalKind.OPEN: _open,
    ProposalKind.GPU: _gpu,
    ProposalKind.REPAIR: _repair,
    ProposalKind.END: _end,
    ProposalKind.ADD: _add,
}
