"""What would become of pods that nobody has created yet: where, with which devices, and what is left.

In: a snapshot, changed where the question says so, and pods as the webhook leaves them. Out: one Outcome per pod and
the Room before and after. Each pod is decided by `atoll.explain.decision`, and counted as bound before the next, in the
order in which kube-scheduler takes them: priority, then the order given. Pure. Nothing is preempted here, and members
of gangs are told apart: their gang is placed as one, not pod by pod.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from atoll.cluster.allocations import Allocation, allocation_annotations
from atoll.cluster.objects import Pod
from atoll.cluster.pods import is_gpu_pod
from atoll.explain.changes import Addition, with_node, without_pods
from atoll.explain.codec import with_objects
from atoll.explain.decision import Decision, Scene, decide, scene_of
from atoll.explain.explanation import Explanation, explain
from atoll.explain.snapshot import NOW_SECONDS, ClusterSnapshot
from topology.islands import islands

ADDED_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """One pod. It fits where `allocation` is given; else `explanation` says why not, and what would help."""

    pod: Pod
    node: str
    allocation: Allocation | None
    islands: tuple[str, ...]
    ring_gbps: float
    relative_quality: float
    explanation: Explanation | None


@dataclass(frozen=True, slots=True)
class Room:
    """GPUs that could be given out, per node, and the largest set of them on one island anywhere."""

    free: Mapping[str, int]
    largest_island: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The answer. `after`: the cluster as it would then be."""

    outcomes: tuple[Outcome, ...]
    before: Room
    after: Room


def simulate(snapshot: ClusterSnapshot, asking: Sequence[Pod]) -> Simulation:
    """Place the pods one after another. Their claims stand in the snapshot."""
    scene = scene_of(snapshot)
    before = room_of(scene)
    outcomes = []
    for pod in sorted(asking, key=lambda one: -one.spec.priority):
        outcome, scene = _place(scene, pod)
        outcomes.append(outcome)
    return Simulation(tuple(outcomes), before, room_of(scene))


def without_nodes(snapshot: ClusterSnapshot, gone: Sequence[str]) -> ClusterSnapshot:
    """Return the snapshot without these nodes, and without the pods that ran there."""
    there = {pod.metadata.uid for pod in snapshot.pods if pod.spec.node_name in gone}
    left = without_pods(snapshot, there)
    return replace(
        left,
        nodes=tuple(one for one in left.nodes if one.metadata.name not in gone),
        reports=tuple(one for one in left.reports if one.metadata.name not in gone),
        heartbeats=tuple(one for one in left.heartbeats if one.metadata.name not in gone),
    )


def with_nodes(snapshot: ClusterSnapshot, added: Sequence[Addition]) -> ClusterSnapshot:
    """Return the snapshot with nodes added."""
    for one in added:
        snapshot = with_node(snapshot, one)
    return snapshot


def room_of(scene: Scene) -> Room:
    """Return what every node can give out now."""
    cells = scene.ledger.cells(now_seconds=NOW_SECONDS)
    largest = (
        (cell.free & island.mask).bit_count() for cell in set(cells.values()) for island in islands(cell.shape.machine)
    )
    return Room({name: cells[name].free.bit_count() for name in sorted(cells)}, max(largest, default=0))


def _place(scene: Scene, pod: Pod) -> tuple[Outcome, Scene]:
    """Return what becomes of a pod, and the scene afterwards."""
    if not is_gpu_pod(pod):
        return Outcome(pod, "", None, (), 0.0, 0.0, explain(scene, pod)), scene
    decision = decide(scene, pod, scene.snapshot.claim_of(pod))
    if decision.best is None or pod.spec.scheduling_gates:
        return Outcome(pod, "", None, (), 0.0, 0.0, explain(scene, pod)), scene
    allocation = allocation_of(scene, decision)
    choice = decision.best.choice
    outcome = Outcome(pod, allocation.node, allocation, choice.islands, choice.ring_gbps, choice.relative_quality, None)
    return outcome, scene_of(with_objects(scene.snapshot, pods=[bound_pod(pod, allocation)]))


def allocation_of(scene: Scene, decision: Decision) -> Allocation:
    """Return what bind would write for a pod that fits."""
    assert decision.best is not None
    devices = scene.ledger.nodes[decision.best.node].devices
    chosen = [devices[position] for position in decision.best.choice.positions]
    return Allocation(decision.best.node, tuple(one.id for one in chosen), tuple(one.uuid for one in chosen))


def bound_pod(pod: Pod, allocation: Allocation) -> Pod:
    """Return the pod as it is once it runs with these GPUs."""
    annotations = {**pod.metadata.annotations, **allocation_annotations(allocation, ())}
    return msgspec.structs.replace(
        pod,
        metadata=msgspec.structs.replace(pod.metadata, annotations=annotations),
        spec=msgspec.structs.replace(pod.spec, node_name=allocation.node),
        status=msgspec.structs.replace(pod.status, phase="Running"),
    )


def numbered(count: int, shape: str) -> Iterator[str]:
    """Yield the names of nodes that are added."""
    for number in range(1, min(count, ADDED_MAX) + 1):
        yield f"added-{shape}-{number}"
