"""Why a pod waits: the decision, grouped by the necessary change, with what would help.

An Explanation has one headline, the nodes grouped by reason, and proposals. The headline is one bounded line, short
enough for an event; details of single nodes are in the nodes' answers. Pure.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.gangs.membership import gang_key, has_gate
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.reservation_use import reservation_name
from atoll.explain.decision import IndexedSnapshot, PodDecision, decide
from atoll.explain.nodes import NodeAnswer, NodeBlocker, answers, describe_request
from atoll.explain.proposals import Proposal, Suggestions, find_suggestions
from topology.device_requests import gpus

HEADLINE_LENGTH_MAX: Final = 900
"""An event's note may have 1024 characters."""


class PodState(StrEnum):
    """State of the pod."""

    BOUND = "bound"
    ENDED = "ended"
    NO_GPUS = "no-gpus"
    """The pod does not ask Atoll for anything."""
    REFUSED = "refused"
    """The request itself is invalid."""
    GATED = "gated"
    """A foreign scheduling gate holds the pod."""
    FITS = "fits"
    BUSY = "busy"
    WITHHELD = "withheld"
    CLOSED = "closed"
    """kube-scheduler's own rules exclude the nodes that could serve the pod."""
    UNKNOWN = "unknown"
    """No known machine could serve it, and some nodes have no fresh report."""
    NEVER = "never"
    """No machine of the cluster could serve it, not even an empty one."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes with the same blocker and the same reason."""

    standing: NodeBlocker
    reason: str
    others: tuple[str, ...]
    nodes: tuple[NodeAnswer, ...]


NO_HELP: Final[Suggestions[Proposal]] = Suggestions()


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer about one pod. `waits_seconds`: since its creation; infinity if unknown."""

    pod: str
    state: PodState
    headline: str
    asked: str
    waits_seconds: float
    groups: tuple[NodeGroup, ...] = ()
    help: Suggestions[Proposal] = NO_HELP
    node: str = ""
    device_ids: tuple[int, ...] = ()


FOREIGN_RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu")
"""GPU resources of the vendors' device plugins."""

REMEDIES: Final = {
    names.REJECT_CLAIM_MISSING: "create the GpuClaim that annotation gpu.scheduling/claim names",
    names.REJECT_CLAIM_REPLACED: "create the pod anew: it was made for a GpuClaim that is gone",
    names.REJECT_COUNT_MISMATCH: "make the containers' gpu.scheduling/gpu add up to the claim's count, and create the "
    "pod anew",
    names.REJECT_ANNOTATIONS: "take large annotations off the pod",
    names.REJECT_RESERVATION_MISSING: "create the GpuReservation that annotation gpu.scheduling/reservation names",
    names.REJECT_RESERVATION_FOREIGN: "add the pod's namespace or account to the GpuReservation",
    names.REJECT_RESERVATION_OVER: "create another GpuReservation, and create the pod again with its name",
    names.REJECT_RESERVATION_SMALL: "create a larger GpuReservation, or ask for fewer GPUs",
}
"""What to do about a request that is refused before any node is examined."""


def explain(scene: IndexedSnapshot, pod: Pod) -> Explanation:
    """Explain one pod."""
    return _explained(scene, pod, has_help=True)


def explain_without_help(scene: IndexedSnapshot, pod: Pod) -> Explanation:
    """Explain one pod without what would help, which is most of the work."""
    return _explained(scene, pod, has_help=False)


def _explained(scene: IndexedSnapshot, pod: Pod, *, has_help: bool) -> Explanation:
    settled = _settled(scene, pod)
    if settled is not None:
        return settled
    claim = scene.snapshot.claim_of(pod)
    decision = decide(scene, pod, claim)
    if isinstance(decision.request, Rejection):
        reason = decision.request.reason
        remedy = _gang_remedy(scene, pod) if reason == names.REJECT_GANG else REMEDIES.get(reason, "")
        return _told(scene, pod, PodState.REFUSED, f"{reason}: {remedy}" if remedy else reason)
    reserved = reservation_name(pod)
    found = answers(scene, pod, decision.request, decision)
    groups = grouped(found)
    state = _state(found)
    gates = ", ".join(gate.name for gate in pod.spec.scheduling_gates)
    if gates:
        return _told(scene, pod, PodState.GATED, f"held by the scheduling gates {gates}", groups=groups)
    if state is PodState.FITS:
        return _fitting(scene, pod, decision, groups)
    return Explanation(
        pod=_name(pod),
        state=state,
        headline=headline(decision.request, state, groups),
        asked=describe_request(decision.request) + (f", from GpuReservation {reserved}" if reserved else ""),
        waits_seconds=scene.snapshot.age_seconds(pod.metadata.creation_timestamp),
        groups=groups,
        help=find_suggestions(scene, pod, decision) if has_help and not reserved else NO_HELP,
    )


def grouped(found: Sequence[NodeAnswer]) -> tuple[NodeGroup, ...]:
    """Group the answers by blocker, reason and other reasons: nearest to fitting first, then largest."""
    by_key: dict[tuple[NodeBlocker, str, tuple[str, ...]], list[NodeAnswer]] = {}
    for one in found:
        by_key.setdefault((one.standing, one.reason, one.others), []).append(one)
    order = list(NodeBlocker)
    ranked = sorted(by_key.items(), key=lambda entry: (order.index(entry[0][0]), -len(entry[1]), entry[0][1:]))
    return tuple(NodeGroup(*key, tuple(nodes)) for key, nodes in ranked)


SENTENCES: Final = {
    PodState.BUSY: "waits for GPUs that others hold",
    PodState.WITHHELD: "waits for GPUs that are cordoned or sick",
    PodState.CLOSED: "the nodes that could serve it are closed to it",
    PodState.UNKNOWN: "no machine that is known could serve it, and some nodes have no fresh GPU report",
    PodState.NEVER: "fits no machine of this cluster, not even an empty one",
}


def headline(request: Request, state: PodState, groups: Sequence[NodeGroup]) -> str:
    """Return one line: the request, what it waits for, and the number of nodes per reason."""
    count = sum(len(group.nodes) for group in groups)
    reasons: Counter[str] = Counter()
    for group in groups:
        reasons[", ".join(dict.fromkeys((group.reason, *group.others)))] += len(group.nodes)
    told = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items(), key=lambda e: (-e[1], e[0])))
    text = f"{gpus(request.ask.count)} asked: {SENTENCES[state]}. Of {count} nodes: {told or 'none'}"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= HEADLINE_LENGTH_MAX else text[: HEADLINE_LENGTH_MAX - 3] + "..."


def _gang_remedy(scene: IndexedSnapshot, pod: Pod) -> str:
    """Return what to do about a member that waits for its gang."""
    space, name = gang_key(pod) or (pod.metadata.namespace, "")
    if name and scene.snapshot.gang(space, name) is None and names.GANG_SIZE not in pod.metadata.annotations:
        return (
            f"there is no GpuGang {name!r} in namespace {space}; create it, or say on every member by "
            f"{names.GANG_SIZE} how many they are"
        )
    return f"its members start together or not at all; `atoll explain gang/{name} -n {space}` says what it waits for"


def _foreign_text(pod: Pod) -> str:
    """Return the pod's requests for other schedulers' GPUs, which were often meant for Atoll."""
    containers = (*pod.spec.init_containers, *pod.spec.containers)
    asked = sorted({name for one in containers for name in one.resources.limits if name in FOREIGN_RESOURCES})
    return f"; {', '.join(asked)} is not Atoll's, ask for {names.GPU_RESOURCE}" if asked else ""


def _settled(scene: IndexedSnapshot, pod: Pod) -> Explanation | None:
    if not pods.is_gpu_pod(pod) and gang_key(pod) is None:
        text = f"asks for no GPU of Atoll: no annotation {names.CLAIM}, no resource {names.GPU_RESOURCE}"
        return _told(scene, pod, PodState.NO_GPUS, text + _foreign_text(pod))
    if pods.is_terminal(pod):
        return _told(scene, pod, PodState.ENDED, f"has ended ({pod.status.phase})")
    if pod.spec.node_name:
        allocation = scene.ledger.allocation_of(pod.metadata.uid)
        ids = allocation.device_ids if allocation is not None else ()
        gpus = f"GPUs {','.join(map(str, ids))}" if ids else "no GPU of Atoll"
        text = f"runs on {pod.spec.node_name} with {gpus}"
        return _told(scene, pod, PodState.BOUND, text, node=pod.spec.node_name, device_ids=ids)
    if not pods.is_gpu_pod(pod):
        if has_gate(pod):
            return _told(scene, pod, PodState.REFUSED, f"{names.REJECT_GANG}: {_gang_remedy(scene, pod)}")
        return _told(scene, pod, PodState.NO_GPUS, "a member of a gang that needs no GPUs; kube-scheduler binds it")
    return None


def _fitting(scene: IndexedSnapshot, pod: Pod, decision: PodDecision, groups: tuple[NodeGroup, ...]) -> Explanation:
    best = decision.best
    assert best is not None
    devices = scene.ledger.nodes[best.node].devices
    ids = tuple(devices[position].id for position in best.choice.positions)
    text = f"fits now, best on {best.node} with GPUs {','.join(map(str, ids))}; kube-scheduler has yet to bind it"
    refused = next((c for c in pod.status.conditions if c.type == "PodScheduled" and c.status == "False"), None)
    if refused is not None and refused.message:
        text += f". It last said: {refused.message}"
    return _told(scene, pod, PodState.FITS, _cut(text), groups=groups, node=best.node, device_ids=ids)


def _told(
    scene: IndexedSnapshot,
    pod: Pod,
    state: PodState,
    text: str,
    *,
    groups: tuple[NodeGroup, ...] = (),
    node: str = "",
    device_ids: tuple[int, ...] = (),
) -> Explanation:
    waits = scene.snapshot.age_seconds(pod.metadata.creation_timestamp)
    return Explanation(_name(pod), state, text, "", waits, groups, node=node, device_ids=device_ids)


def _state(found: Sequence[NodeAnswer]) -> PodState:
    """State by the smallest change on any node that would help the pod."""
    standings = {one.standing for one in found if not one.others}
    for standing, state in (
        (NodeBlocker.FITS, PodState.FITS),
        (NodeBlocker.BUSY, PodState.BUSY),
        (NodeBlocker.WITHHELD, PodState.WITHHELD),
    ):
        if standing in standings:
            return state
    if any(one.standing in (NodeBlocker.CLOSED, NodeBlocker.BUSY, NodeBlocker.WITHHELD) for one in found):
        return PodState.CLOSED
    return PodState.UNKNOWN if any(one.standing is NodeBlocker.SILENT for one in found) else PodState.NEVER


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
