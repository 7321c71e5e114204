"""Which waiting pods fit now, so that exactly those are woken.

kube-scheduler hears nothing of a Lease that ends, and a change of a Node would wake every rejected pod. `plan_wakeups`
takes the waiting pods with their requests, the capacity of each node, and what was woken before. It returns the pods to
wake, in order of priority and then age, each with the place that the simulation gave it: a place is given once, so no
more are woken than fit. A node that kube-scheduler would refuse the pod (`host_fit.node_reason`) is no place.

kube-scheduler may refuse a woken pod all the same (no CPU left, pod affinity). The pod keeps its place for
`PATIENCE_SECONDS`; then others may have it, and the pod is tried again ever more rarely, as long as it seems to fit.
The search is bounded: a plan that was cut says so, and the next one continues behind the pods that had no room.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from atoll.api import names
from atoll.cluster import pods
from atoll.cluster.feasibility import NodeFacts, listed, pod_verdict
from atoll.cluster.host_fit import node_reason, required_affinity
from atoll.cluster.machines import NodeDevices, NodeShape
from atoll.cluster.objects import Node, Pod
from atoll.cluster.requests import Rejection, Request, Verdict
from atoll.cluster.selection import Candidate, select
from atoll.cluster.weakness import needs_links, weaknesses
from topology.demand import PRIOR, Demand
from topology.device_requests import gpus

PATIENCE_SECONDS = 4.0
"""A woken pod may sit in kube-scheduler's back-off first; then it is filtered and bound within milliseconds."""
REPEAT_SECONDS_MAX = 60.0
WAKES_MAX = 64
SELECTIONS_MAX = 20_000
CANDIDATES_MAX = 16
EXPLAINED_NODES_MAX = 500
NOMINATION_NODES_MIN = 100
"""From this many nodes on kube-scheduler samples them, and a woken pod could be sampled past its node."""

_WOKEN = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,9}))?(?:@([a-z0-9.-]{1,253}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What one node can give now: bit mask `free` over the positions of `devices`."""

    node: Node
    devices: NodeDevices
    free: int


@dataclass(frozen=True, slots=True)
class LastWake:
    """The last wake-up of a pod: the how manieth in a row that found it a place, of which generation, and when."""

    count: int
    generation: int
    at_seconds: float

    def repeat_seconds(self) -> float:
        """Return how long after it the pod may be woken again although nothing changed."""
        return float(min(REPEAT_SECONDS_MAX, PATIENCE_SECONDS * 2.0 ** min(self.count - 1, 16)))


@dataclass(frozen=True, slots=True)
class Woken:
    """Value of the wake-up annotation: GENERATION, .NUMBER from the second time in it on, @NODE where nominated."""

    generation: int
    number: int
    nominated_node: str

    def __str__(self) -> str:
        repeat = f".{self.number}" if self.number > 1 else ""
        return f"{self.generation}{repeat}" + (f"@{self.nominated_node}" if self.nominated_node else "")


@dataclass(frozen=True, slots=True)
class WakePod:
    """Wake this pod by the annotation value `woken`, and remember `wake`.

    `generation` is the resourceVersion of the newest change that made room. `node` and `uuids` are where the simulation
    put the pod, for people; kube-scheduler decides again. `nominate` tells to name the node in the same write.
    """

    pod: Pod
    generation: int
    woken: str
    wake: LastWake
    node: str
    uuids: tuple[str, ...]
    nominate: bool

    @property
    def uid(self) -> str:
        """Return the pod's uid."""
        return self.pod.metadata.uid


@dataclass(frozen=True, slots=True)
class WakePlan:
    """What to do now, which pods seem not to fit at all, and when to ask again although nothing changed.

    `is_cut`: some pods were not looked at; ask again at once, with those without room to be skipped.
    """

    wakes: tuple[WakePod, ...] = ()
    without_room: tuple[str, ...] = ()
    again_seconds: float | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class WakeInput:
    """Everything that the decision depends on. `lease_holders`: uids of pods that hold any Lease; `skipped`: uids that
    an earlier plan, which was cut, found without room."""

    waiting: Sequence[tuple[Pod, Request]]
    rooms: Sequence[NodeCapacity]
    last_wakes: Mapping[str, LastWake]
    lease_holders: Collection[str]
    generation: int
    now_seconds: float
    skipped: Collection[str] = ()
    kept: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By pod uid: a node and the mask of its free GPUs that are kept for this pod, which `rooms` leave out."""
    demand: Demand = PRIOR
    """What fragmentation is weighed with."""
    nominates: bool = True
    """Whether a wake-up may name a node."""


@dataclass(slots=True)
class _WakeSearch:
    """The simulation: what is left of each room, and what is known not to fit any more."""

    rooms: Sequence[NodeCapacity]
    left: list[int]
    demand: Demand
    selections: int = 0
    hopeless: set[tuple[object, ...]] = field(default_factory=set)
    by_label: dict[tuple[str, str], set[int]] | None = None
    weak: Mapping[NodeShape, float] | None = None

    def order(self, position: int, candidate: Candidate, request: Request) -> tuple[int, float, float, str]:
        """Return the place of a candidate in the order over nodes, as filter would tell it."""
        if self.weak is None:
            self.weak = weaknesses(room.devices.shape for room in self.rooms)
        share = self.weak.get(self.rooms[position].devices.shape, 0.0) if needs_links(request.ask) else 0.0
        return (candidate.preference, share, candidate.choice.cost, candidate.node)

    @property
    def is_exhausted(self) -> bool:
        return self.selections >= SELECTIONS_MAX

    def selected(self, selector: Mapping[str, str]) -> Iterable[int]:
        """Return the positions of the rooms whose Node has all these labels."""
        if not selector:
            return range(len(self.rooms))
        if self.by_label is None:
            self.by_label = {}
            for position, room in enumerate(self.rooms):
                for label in room.node.metadata.labels.items():
                    self.by_label.setdefault(label, set()).add(position)
        return set.intersection(*(self.by_label.get(label, set()) for label in selector.items()))


def plan_wakeups(question: WakeInput) -> WakePlan:
    """Decide which pods to wake. Pods that are gated, bound, not yet rejected or hold a Lease are never among them."""
    search = _WakeSearch(question.rooms, [room.free & room.devices.usable for room in question.rooms], question.demand)
    wakes: list[WakePod] = []
    without_room: list[str] = []
    again: list[float] = []
    is_cut = False
    for pod, request in sorted(question.waiting, key=by_rank):
        uid = pod.metadata.uid
        if uid in question.lease_holders or uid in question.skipped or not is_rejected(pod):
            continue
        if len(wakes) >= WAKES_MAX or search.is_exhausted:
            is_cut = True
            break
        last = question.last_wakes.get(uid)
        rest_seconds = _rest_seconds(last, question)
        if rest_seconds > 0:
            again.append(rest_seconds)
            if not _keeps_its_place(last, question):
                continue
        place = _kept_place(search, pod, request, question.kept.get(uid)) or _place(search, pod, request)
        if place is None and search.is_exhausted and (wakes or without_room):
            is_cut = True
            break
        if place is None:
            without_room.append(uid)
        elif rest_seconds <= 0:
            wakes.append(_wake(pod, place, search, question, last))
    return WakePlan(tuple(wakes), tuple(without_room), min(again, default=None), is_cut)


def together(plans: Sequence[WakePlan]) -> WakePlan:
    """Merge plans for pods that share no capacity."""
    return WakePlan(
        wakes=tuple(wake for plan in plans for wake in plan.wakes),
        without_room=tuple(uid for plan in plans for uid in plan.without_room),
        again_seconds=min((plan.again_seconds for plan in plans if plan.again_seconds is not None), default=None),
        is_cut=any(plan.is_cut for plan in plans),
    )


def is_rejected(pod: Pod) -> bool:
    """Tell whether kube-scheduler has tried the waiting pod and set it aside; others it will try by itself."""
    return pods.is_waiting(pod) and any(
        condition.type == "PodScheduled" and condition.status == "False" and condition.reason == "Unschedulable"
        for condition in pod.status.conditions
    )


def parse_woken(pod: Pod) -> Woken:
    """Read the pod's wake-up annotation; one that is missing or malformed is of generation 0."""
    found = _WOKEN.fullmatch(pod.metadata.annotations.get(names.WOKEN, ""))
    return Woken(int(found[1]), int(found[2] or 1), found[3] or "") if found is not None else Woken(0, 0, "")


def is_nominated_by_us(pod: Pod) -> bool:
    """Tell whether the pod's nominatedNodeName stands there because of a wake-up, not because of a preemption."""
    nominated = pod.status.nominated_node_name
    return bool(nominated) and parse_woken(pod).nominated_node == nominated


def missing_for(pod: Pod, request: Request, rooms: Sequence[NodeCapacity]) -> tuple[tuple[str, int], ...]:
    """Return (reason, nodes) of the first `EXPLAINED_NODES_MAX` rooms that refuse the pod, the most frequent first."""
    reasons: Counter[str] = Counter()
    for room in rooms[:EXPLAINED_NODES_MAX]:
        if refusal := node_reason(pod, room.node):
            reasons[refusal] += 1
            continue
        answer = select(room.devices, room.free & room.devices.usable, request)
        if isinstance(answer, Rejection):
            reasons[answer.reason] += 1
    return tuple(sorted(reasons.items(), key=lambda entry: (-entry[1], entry[0])))


def waiting_note(pod: Pod, request: Request, rooms: Sequence[NodeCapacity], unseen: Sequence[NodeFacts] = ()) -> str:
    """Return the event message of a waiting pod: what is missing, the verdict, and what to do next.

    `unseen`: see `feasibility.unseen_nodes`.
    """
    missing = ", ".join(f"{count} {reason}" for reason, count in missing_for(pod, request, rooms)) or "no report"
    known = (NodeFacts(room.node, room.devices, room.free) for room in rooms)
    verdict, facts = pod_verdict(pod, request, chain(known, unseen))
    sentence = {
        Verdict.NEVER: f"fits no machine of the {len(rooms)} here, not even an empty one",
        Verdict.UNKNOWN: f"fits no machine of {len(rooms)} as they are now, and may fit when {listed(facts, 'or')}",
    }.get(verdict, f"no node of {len(rooms)} can give them now")
    next_step = f"`atoll explain pod/{pod.metadata.name} -n {pod.metadata.namespace}` says what would help"
    return f"{gpus(request.ask.count)} asked, {sentence}: {missing}; {next_step}"


def by_rank(entry: tuple[Pod, Request]) -> tuple[int, str, str]:
    """Return the place of a waiting pod in the order of wake-ups."""
    pod = entry[0]
    return (-pod.spec.priority, pod.metadata.creation_timestamp or "", pod.metadata.uid)


def _rest_seconds(last: LastWake | None, question: WakeInput) -> float:
    """Return how long the pod must still be left alone. A change that made room ends the rest of a first wake-up."""
    if last is None or (last.generation < question.generation and last.count == 1):
        return 0.0
    return last.at_seconds + last.repeat_seconds() - question.now_seconds


def _keeps_its_place(last: LastWake | None, question: WakeInput) -> bool:
    return last is not None and question.now_seconds - last.at_seconds < PATIENCE_SECONDS


def _kept_place(
    search: _WakeSearch, pod: Pod, request: Request, kept: tuple[str, int] | None
) -> tuple[int, Candidate] | None:
    """Place the pod on GPUs that were freed for it, if they are enough by now."""
    node, mask = kept or ("", 0)
    for position, room in enumerate(search.rooms if mask else ()):
        if room.node.metadata.name != node or node_reason(pod, room.node):
            continue
        answer = select(room.devices, search.left[position] | mask & room.devices.usable, request)
        if not isinstance(answer, Rejection):
            search.left[position] &= ~sum(1 << i for i in answer.choice.positions)
            return position, answer
    return None


def _place(search: _WakeSearch, pod: Pod, request: Request) -> tuple[int, Candidate] | None:
    """Find the best place for the pod among the first that fit, and take it. Fuller nodes are asked first."""
    key = (request, tuple(sorted(pod.spec.node_selector.items())), pod.spec.tolerations, required_affinity(pod))
    if key in search.hopeless:
        return None
    found: list[tuple[int, Candidate]] = []
    for position in _by_fullness(search.left, search.selected(pod.spec.node_selector), request.ask.count):
        room = search.rooms[position]
        if len(found) >= CANDIDATES_MAX or search.is_exhausted:
            break
        search.selections += 1
        if node_reason(pod, room.node):
            continue
        answer = select(room.devices, search.left[position], request, search.demand)
        if not isinstance(answer, Rejection):
            found.append((position, answer))
    if not found:
        search.hopeless.add(key)
        return None
    position, candidate = min(found, key=lambda entry: search.order(entry[0], entry[1], request))
    search.left[position] &= ~sum(1 << i for i in candidate.choice.positions)
    return position, candidate


def _by_fullness(left: Sequence[int], positions: Iterable[int], count: int) -> list[int]:
    enough = ((left[position].bit_count(), position) for position in positions if left[position].bit_count() >= count)
    return [position for _, position in sorted(enough)]


def _wake(
    pod: Pod, place: tuple[int, Candidate], search: _WakeSearch, question: WakeInput, last: LastWake | None
) -> WakePod:
    position, candidate = place
    devices = search.rooms[position].devices.devices
    count = last.count + 1 if last is not None else 1
    before = parse_woken(pod)
    is_repeated = max(last.generation if last else 0, before.generation) >= question.generation
    nominate = question.nominates and may_nominate(pod, len(search.rooms))
    nominated = candidate.node if nominate else before.nominated_node if is_nominated_by_us(pod) else ""
    return WakePod(
        pod=pod,
        generation=question.generation,
        woken=str(Woken(question.generation, before.number + 1 if is_repeated else 1, nominated)),
        wake=LastWake(count, question.generation, question.now_seconds),
        node=candidate.node,
        uuids=tuple(devices[i].uuid for i in candidate.choice.positions),
        nominate=nominate,
    )


def may_nominate(pod: Pod, node_count: int) -> bool:
    """Tell whether the wake-up may name the node: once per pod, where sampling applies, and only if refusal clears it.

    kube-scheduler keeps the nomination of a refused pod whose preemptionPolicy is Never, and an occupied node with it.
    A pod for which GPUs were freed may be named again: sampled past them, it would have taken others' place in vain.
    """
    annotations = pod.metadata.annotations
    return (
        node_count >= NOMINATION_NODES_MIN
        and not pod.status.nominated_node_name
        and pod.spec.preemption_policy != "Never"
        and (names.WOKEN not in annotations or names.KEPT in annotations)
    )
