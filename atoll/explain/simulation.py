"""Simulates pods that do not exist yet: their nodes, their devices, and the remaining capacity.

Returns one PodOutcome per pod, and the capacity before and after. `atoll.explain.decision` decides each pod,
`atoll.explain.gang_decision` each gang, in the order of priority, then as given; each counts as bound before the next.
A pod without a place that may preempt evicts others, which are not placed again. Pure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Final

import msgspec

from atoll.api.gangs import GpuGang, GpuGangStatus
from atoll.api.times import seconds_of
from atoll.cluster.allocations import Allocation, allocation_annotations
from atoll.cluster.gangs import lifecycle
from atoll.cluster.gangs.membership import gang_key, key_of
from atoll.cluster.objects import Pod
from atoll.cluster.pods import is_gpu_pod
from atoll.explain.changes import without_pods
from atoll.explain.codec import with_objects
from atoll.explain.decision import IndexedSnapshot, PodDecision, decide, index_snapshot
from atoll.explain.explanation import Explanation, explain
from atoll.explain.gang_decision import decide_gang, gang_victims, index_gangs
from atoll.explain.preemption import preemptions_for
from atoll.explain.snapshot import NOW_SECONDS, ClusterSnapshot
from topology.islands import islands

ADDED_MAX: Final = 1000
NO_GANG: Final = "its GpuGang is missing: put it into the files, or create it; without it no member starts"


@dataclass(frozen=True, slots=True)
class PodOutcome:
    """One pod. `allocation`: its place if it fits; else `explanation` says why not and what would help, or `note` why
    its gang does not start. `evicted`: pods that it or its gang evicts."""

    pod: Pod
    node: str = ""
    allocation: Allocation | None = None
    islands: tuple[str, ...] = ()
    ring_gbps: float = 0.0
    relative_quality: float = 0.0
    explanation: Explanation | None = None
    note: str = ""
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeCapacity:
    """Usable free GPUs per node, and the largest set of them on one island."""

    free: Mapping[str, int]
    largest_island: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The answer. `after`: the cluster afterwards."""

    outcomes: tuple[PodOutcome, ...]
    before: FreeCapacity
    after: FreeCapacity


def simulate(
    snapshot: ClusterSnapshot,
    asking: Sequence[Pod],
    gangs: Sequence[GpuGang] = (),
    *,
    preempts: bool = True,
    until_missing: bool = False,
) -> Simulation:
    """Place pods and gangs one after another; a gang's turn is that of its last member. Their claims are in the
    snapshot; `gangs` replaces the specs of existing gangs. Without `preempts` no pod is evicted. `until_missing`: stop
    at the first pod without a place."""
    snapshot = _with_gangs(snapshot, gangs)
    scene = index_snapshot(snapshot)
    before = free_capacity_of(scene)
    outcomes: list[PodOutcome] = []
    for unit in _in_order(asking):
        if len(unit) == 1 and gang_key(unit[0]) is None:
            outcome, scene = _place(scene, unit[0], preempts=preempts)
            outcomes.append(outcome)
        else:
            more, scene = place_gang(scene, unit, preempts=preempts)
            outcomes += more
        if until_missing and outcomes[-1].allocation is None:
            break
    return Simulation(tuple(outcomes), before, free_capacity_of(scene))


def _with_gangs(snapshot: ClusterSnapshot, gangs: Sequence[GpuGang]) -> ClusterSnapshot:
    """Apply the gangs: a new spec changes neither a gang's identity nor its status."""
    applied = {key_of(gang): gang.model_copy(update={"status": None}) for gang in gangs}
    for before in snapshot.gangs:
        now = applied.get(key_of(before))
        if now is not None:
            told = {"metadata": before.metadata, "status": before.status}
            applied[key_of(before)] = now.model_copy(update=told)
    others = (gang for gang in snapshot.gangs if key_of(gang) not in applied)
    return replace(snapshot, gangs=(*others, *applied.values()))


def _in_order(asking: Sequence[Pod]) -> list[tuple[Pod, ...]]:
    """Return single pods and gangs in the order of their turns: priority, then as given."""
    units: dict[object, list[Pod]] = {}
    for number, pod in enumerate(asking):
        key = gang_key(pod)
        name: object = key if key is not None else number
        before = units.pop(name, [])
        units[name] = [*before, pod]
    return sorted(map(tuple, units.values()), key=lambda unit: -max(pod.spec.priority for pod in unit))


def without_nodes(snapshot: ClusterSnapshot, gone: Collection[str]) -> ClusterSnapshot:
    """Return the snapshot without these nodes and their pods."""
    there = {pod.metadata.uid for pod in snapshot.pods if pod.spec.node_name in gone}
    left = without_pods(snapshot, there)
    return replace(
        left,
        nodes=tuple(one for one in left.nodes if one.metadata.name not in gone),
        reports=tuple(one for one in left.reports if one.metadata.name not in gone),
        heartbeats=tuple(one for one in left.heartbeats if one.metadata.name not in gone),
    )


def free_capacity_of(scene: IndexedSnapshot) -> FreeCapacity:
    """Return the usable free GPUs of every node."""
    cells = scene.ledger.cells(now_seconds=NOW_SECONDS)
    largest = (
        (cell.free & island.mask).bit_count() for cell in set(cells.values()) for island in islands(cell.shape.machine)
    )
    return FreeCapacity({name: cells[name].free.bit_count() for name in sorted(cells)}, max(largest, default=0))


def _place(scene: IndexedSnapshot, pod: Pod, *, preempts: bool) -> tuple[PodOutcome, IndexedSnapshot]:
    """Return the outcome of a pod, and the scene afterwards."""
    if not is_gpu_pod(pod) or pod.spec.scheduling_gates:
        return PodOutcome(pod, explanation=explain(scene, pod)), scene
    decision = decide(scene, pod, scene.snapshot.claim_of(pod))
    evicted: tuple[Pod, ...] = ()
    for plan in preemptions_for(scene, pod, decision) if preempts else ():
        after = index_snapshot(without_pods(scene.snapshot, {victim.metadata.uid for victim in plan.victims}))
        made = decide(after, pod, scene.snapshot.claim_of(pod), only=[plan.node])
        if made.best is not None:
            scene, decision, evicted = after, made, plan.victims
            break
    if decision.best is None:
        return PodOutcome(pod, explanation=explain(scene, pod)), scene
    allocation = allocation_of(scene, decision)
    choice = decision.best.choice
    outcome = PodOutcome(
        pod, allocation.node, allocation, choice.islands, choice.ring_gbps, choice.relative_quality,
        evicted=tuple(map(_named, evicted)),
    )  # fmt: skip
    return outcome, index_snapshot(with_objects(scene.snapshot, pods=[bound_pod(pod, allocation)]))


def place_gang(
    scene: IndexedSnapshot, members: Sequence[Pod], *, preempts: bool
) -> tuple[list[PodOutcome], IndexedSnapshot]:
    """Return the outcomes of one gang's members, and the scene afterwards: all have their GPUs, or none."""
    key = gang_key(members[0])
    scene = index_snapshot(with_objects(scene.snapshot, pods=members))
    gang = scene.snapshot.gang(*key) if key is not None else None
    if gang is None:
        return [PodOutcome(pod, note=NO_GANG) for pod in members], scene
    evicted: tuple[Pod, ...] = ()
    decision = decide_gang(index_gangs(scene), gang)
    if not decision.fits and preempts and decision.reason == "WaitForRoom":
        evicted = gang_victims(index_gangs(scene), decision)
        if evicted:
            scene = index_snapshot(without_pods(scene.snapshot, {pod.metadata.uid for pod in evicted}))
            decision = decide_gang(index_gangs(scene), gang)
    if not decision.fits:
        return [PodOutcome(pod, note=f"gang {gang.metadata.name}: {decision.message}") for pod in members], scene
    seats = {seat.member.uid: seat.allocation for seat in decision.assignments}
    bound = [bound_pod(pod, seats[pod.metadata.uid]) for pod in members if pod.metadata.uid in seats]
    names_of = tuple(map(_named, evicted))
    outcomes = [
        PodOutcome(pod, seats[pod.metadata.uid].node, seats[pod.metadata.uid], evicted=() if number else names_of)
        if pod.metadata.uid in seats
        else PodOutcome(pod, note=f"gang {gang.metadata.name} starts without it")
        for number, pod in enumerate(members)
    ]
    return outcomes, index_snapshot(_admitted(with_objects(scene.snapshot, pods=bound), gang))


def _admitted(snapshot: ClusterSnapshot, gang: GpuGang) -> ClusterSnapshot:
    """Mark the gang as admitted, so that it counts as a gang when others need room."""
    now = seconds_of(snapshot.taken_at) or 0.0
    status = lifecycle.admit(gang.status or GpuGangStatus(), now_seconds=now, message="simulated")
    admitted = gang.model_copy(update={"status": status})
    return replace(snapshot, gangs=tuple(admitted if one is gang else one for one in snapshot.gangs))


def _named(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"


def allocation_of(scene: IndexedSnapshot, decision: PodDecision) -> Allocation:
    """Return the allocation that bind would write for a pod that fits."""
    assert decision.best is not None
    devices = scene.ledger.nodes[decision.best.node].devices
    chosen = [devices[position] for position in decision.best.choice.positions]
    return Allocation(decision.best.node, tuple(one.id for one in chosen), tuple(one.uuid for one in chosen))


def bound_pod(pod: Pod, allocation: Allocation) -> Pod:
    """Return the pod running with these GPUs."""
    annotations = {**pod.metadata.annotations, **allocation_annotations(allocation, ())}
    return msgspec.structs.replace(
        pod,
        metadata=msgspec.structs.replace(pod.metadata, annotations=annotations),
        spec=msgspec.structs.replace(pod.spec, node_name=allocation.node, scheduling_gates=()),
        status=msgspec.structs.replace(pod.status, phase="Running"),
    )


def numbered(wanted: int, shape: str, taken: Collection[str]) -> Iterator[str]:
    """Yield unused names for added nodes."""
    free = (name for number in count(1) if (name := f"added-{shape}-{number}") not in taken)
    return islice(free, wanted)
