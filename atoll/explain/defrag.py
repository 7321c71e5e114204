"""Pods that would have to move so that a set of a given size fits, and their new places.

Returns MovePlans, the cheapest first. A move is an eviction after which the owner creates the pod again. Pure: nothing
is evicted here.

Each plan is decided again on the changed state: the pods of the plan are removed, the requested set is placed on their
node, then the pods are placed one after the other, anywhere, by the scheduler's own decision. A plan is dropped if one
of them finds no place. A pod may move only if a controller recreates it, it is in no gang (a member that stops may stop
all), it is not a static pod, its priority is not above that of the requested set, and all moves of a plan together
break no PodDisruptionBudget. Sets of movable pods are searched on each node, the fewest first.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

import msgspec

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.cluster import pods
from atoll.cluster.allocations import Allocation
from atoll.cluster.budgets import DisruptionBudgets, violations
from atoll.cluster.gangs.membership import gang_key
from atoll.cluster.machines import cell_of
from atoll.cluster.objects import Container, Metadata, Pod, PodSpec, Resources, Toleration
from atoll.cluster.occupants import pods_by_node, sole_mask
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import offer, plain
from atoll.explain.changes import without_pods
from atoll.explain.codec import with_objects
from atoll.explain.decision import INSUFFICIENT, IndexedSnapshot, PodDecision, decide, index_snapshot
from atoll.explain.simulation import allocation_of, bound_pod
from atoll.explain.snapshot import NOW_SECONDS

SETS_MAX: Final = 4096
"""Limit of sets of pods tried on bit masks per node."""
CHECKED_MAX: Final = 48
"""Limit of plans, cheapest first, that are decided again."""
SHOWN_MAX: Final = 5
ASKING: Final = "asked-set"


@dataclass(frozen=True, slots=True)
class DefragRequest:
    """The set to make room for. `claim`: the request beyond the count; `tolerated`: keys of tolerated taints."""

    claim: GpuClaim
    priority: int = 0
    tolerated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """One pod goes from its GPUs to others."""

    pod: Pod
    source: Allocation
    target: Allocation


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Moves after which the requested set fits, with its node and GPUs."""

    moves: tuple[Move, ...]
    room: Allocation

    @property
    def cost(self) -> tuple[int, int, int, str, tuple[str, ...]]:
        """Order of plans: fewest moves, fewest moved GPUs, lowest priorities, then names."""
        priorities = max((move.pod.spec.priority for move in self.moves), default=0)
        gpus = sum(len(move.source.device_ids) for move in self.moves)
        return len(self.moves), gpus, priorities, self.room.node, tuple(_named(move.pod) for move in self.moves)


@dataclass(frozen=True, slots=True)
class Defrag:
    """The answer. `fits`: where the set fits without a move; `unmoved`: GPU pods that cannot move, by reason; `closed`:
    GPU nodes that kube-scheduler refuses for such a pod, by reason."""

    fits: Allocation | None
    plans: tuple[MovePlan, ...]
    unmoved: Mapping[str, int]
    is_cut: bool = False
    closed: Mapping[str, int] = field(default_factory=dict)


def find_moves(scene: IndexedSnapshot, ask: DefragRequest) -> Defrag:
    """Return the plans that make room, the cheapest first; none if the set fits already."""
    asking = asking_pod(ask)
    decision = decide(scene, asking, ask.claim)
    if decision.best is not None:
        return Defrag(allocation_of(scene, decision), (), {})
    if isinstance(decision.request, Rejection):
        return Defrag(None, (), {decision.request.reason: 1})
    budgets = DisruptionBudgets(scene.snapshot.budgets)
    movable, unmoved = _movable(scene, ask, budgets)
    sets, is_cut = _sets(scene, decision, movable, budgets)
    ranked = sorted(sets, key=lambda one: _price(*one))
    plans: list[MovePlan] = []
    for node, moved in ranked[:CHECKED_MAX]:
        plan = check_moves(scene, ask, node, moved)
        if plan is not None:
            plans.append(plan)
        if len(plans) == SHOWN_MAX:
            break
    plans.sort(key=lambda plan: plan.cost)
    is_cut = is_cut or (len(ranked) > CHECKED_MAX and not plans)
    shut = (_shut(decision, node) for node in scene.ledger.nodes)
    return Defrag(None, tuple(plans), unmoved, is_cut, dict(sorted(Counter(filter(None, shut)).items())))


def asking_pod(ask: DefragRequest) -> Pod:
    """Return a pod that asks for the set."""
    metadata = ask.claim.metadata
    asked = ask.claim.spec.devices
    resource = names.mig_resource(asked.mig_profile) if asked.mig_profile else names.GPU_RESOURCE
    counts: dict[str, str | int | float] = {resource: str(asked.count)}
    own = {names.CLAIM: metadata.name, names.CLAIM_UID: metadata.uid}
    return Pod(
        Metadata(ASKING, metadata.namespace, f"uid-of-{ASKING}", annotations=own),
        PodSpec(
            scheduler_name=names.SCHEDULER_NAME,
            priority=ask.priority,
            tolerations=tuple(Toleration(key, "Exists") for key in ask.tolerated),
            containers=(Container("main", Resources(counts, counts)),),
        ),
    )


def check_moves(scene: IndexedSnapshot, ask: DefragRequest, node: str, moved: Sequence[Pod]) -> MovePlan | None:
    """Decide again: without the pods the set is placed on the node, then each pod anywhere; None if one finds no
    place."""
    sources = {pod.metadata.uid: scene.ledger.allocation_of(pod.metadata.uid) for pod in moved}
    after = without_pods(scene.snapshot, frozenset(sources))
    changed, asking = index_snapshot(after), asking_pod(ask)
    decision = decide(changed, asking, ask.claim, only=[node])
    if decision.best is None:
        return None
    room = allocation_of(changed, decision)
    after = with_objects(after, pods=[bound_pod(asking, room)])
    moves: list[Move] = []
    for pod in sorted(moved, key=lambda one: (-one.spec.priority, _named(one))):
        fresh = unplaced(pod)
        changed = index_snapshot(after)
        found = decide(changed, fresh, after.claim_of(fresh))
        source = sources[pod.metadata.uid]
        if found.best is None or source is None:
            return None
        target = allocation_of(changed, found)
        moves.append(Move(pod, source, target))
        after = with_objects(after, pods=[bound_pod(fresh, target)])
    return MovePlan(tuple(moves), room)


def unplaced(pod: Pod) -> Pod:
    """Return the pod as its owner would recreate it."""
    kept = (names.CLAIM_UID,)
    annotations = {
        key: value for key, value in pod.metadata.annotations.items() if key in kept or not names.is_own_annotation(key)
    }
    metadata = msgspec.structs.replace(
        pod.metadata, annotations=annotations, uid=f"{pod.metadata.uid}-anew", deletion_timestamp=None
    )
    spec = msgspec.structs.replace(pod.spec, node_name="")
    return Pod(metadata, spec)


def _movable(
    scene: IndexedSnapshot, ask: DefragRequest, budgets: DisruptionBudgets
) -> tuple[dict[str, list[Pod]], dict[str, int]]:
    """Return the pods that may move, by node, and the number of others by reason."""
    allowed = budgets.allowed()
    found: dict[str, list[Pod]] = {}
    unmoved: dict[str, int] = {}
    for node, holders in pods_by_node(scene.ledger).items():
        for pod in holders:
            reason = _stays(pod, ask, budgets, allowed)
            if reason:
                unmoved[reason] = unmoved.get(reason, 0) + 1
            else:
                found.setdefault(node, []).append(pod)
    return found, dict(sorted(unmoved.items()))


def _stays(pod: Pod, ask: DefragRequest, budgets: DisruptionBudgets, allowed: Mapping[str, int]) -> str:
    """Return why a pod may not move; empty if it may."""
    if pods.is_terminal(pod) or pod.metadata.deletion_timestamp is not None:
        return "ends anyway"
    if names.MIRROR in pod.metadata.annotations:
        return "static pod"
    if gang_key(pod) is not None:
        return "member of a gang"
    if pod.spec.priority > ask.priority:
        return "of a higher priority"
    if not any(owner.controller for owner in pod.metadata.owner_references):
        return "which nobody would make anew"
    return "protected by a PodDisruptionBudget" if violations([budgets.of(pod)], allowed) else ""


def _shut(decision: PodDecision, node: str) -> str:
    """Return why kube-scheduler refuses a node even if pods leave it; empty if it does not."""
    return next((reason for reason in decision.closed.get(node, ()) if not reason.startswith(INSUFFICIENT)), "")


def _sets(
    scene: IndexedSnapshot, decision: PodDecision, movable: Mapping[str, Sequence[Pod]], budgets: DisruptionBudgets
) -> tuple[list[tuple[str, tuple[Pod, ...]]], bool]:
    """Return minimal sets of pods per node whose GPUs would make room."""
    request = decision.request
    assert isinstance(request, Request)
    allowed, found, is_cut = budgets.allowed(), [], False
    for node, there in sorted(movable.items()):
        devices = scene.ledger.nodes.get(node)
        if devices is None or scene.ledger.is_stale(node, NOW_SECONDS) or _shut(decision, node):
            continue
        free = scene.ledger.free(node, now_seconds=NOW_SECONDS)
        masks = {pod.metadata.uid: sole_mask(scene.ledger, devices, pod.metadata.uid) for pod in there}
        chosen: list[frozenset[str]] = []
        for number, some in enumerate(_by_size(there)):
            if number >= SETS_MAX:
                is_cut = True
                break
            uids = frozenset(pod.metadata.uid for pod in some)
            if any(smaller <= uids for smaller in chosen) or violations(map(budgets.of, some), allowed):
                continue
            mask = free
            for uid in uids:
                mask |= masks[uid]
            if not isinstance(offer(cell_of(devices.shape, mask & devices.usable), plain(request)), Rejection):
                chosen.append(uids)
                found.append((node, some))
    return found, is_cut


def _by_size(there: Sequence[Pod]) -> Iterator[tuple[Pod, ...]]:
    ordered = sorted(there, key=lambda pod: (pod.spec.priority, pods.device_count(pod), _named(pod)))
    for size in range(1, len(ordered) + 1):
        yield from combinations(ordered, size)


def _price(node: str, moved: Sequence[Pod]) -> tuple[int, int, int, str, tuple[str, ...]]:
    gpus = sum(pods.device_count(pod) for pod in moved)
    return len(moved), gpus, max(pod.spec.priority for pod in moved), node, tuple(map(_named, moved))


def _named(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
