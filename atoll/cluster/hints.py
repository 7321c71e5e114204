"""Sends a pod to a node that kube-scheduler's sample left out.

Where the sample holds no GPUs for a pod, or much worse ones than another node (`atoll.cluster.elsewhere`), the extender
refuses the sample with a reason that names the other node. kube-scheduler writes the reason on the pod. The controllers
read it there and name the node in `status.nominatedNodeName`: kube-scheduler tries that node first, and the write alone
wakes the pod.

A named node is kept from other pods for as long, and to withdraw a name wakes them all. So a pod is sent only to GPUs
that are free, and again only after a pause that doubles.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.api import names
from atoll.cluster.objects import Pod
from atoll.cluster.pod_fit import minds_neighbours
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select
from atoll.cluster.wakeups import (
    NOMINATION_NODES_MIN,
    LastWake,
    NodeCapacity,
    WakePod,
    Woken,
    by_rank,
    is_rejected,
    parse_woken,
)

PAUSE_SECONDS: Final = 10.0
PAUSE_SECONDS_MAX: Final = 300.0

_NAMED = re.compile(re.escape(names.REJECT_ELSEWHERE) + r" ([a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class LastHint:
    """The how manieth hint of a pod it was, and when."""

    count: int
    at_seconds: float

    @property
    def ends_seconds(self) -> float:
        """Time until which the pod gets no further one."""
        return self.at_seconds + min(PAUSE_SECONDS_MAX, PAUSE_SECONDS * 2.0 ** min(self.count - 1, 16))


@dataclass(frozen=True, slots=True)
class HintInput:
    """What the decision depends on. room_of: capacity of a node for a pod with this request, None for a node without
    one; lease_holders: uids of pods that hold any Lease."""

    waiting: Sequence[tuple[Pod, Request]]
    room_of: Callable[[str, Request], NodeCapacity | None]
    last_hints: Mapping[str, LastHint]
    lease_holders: Collection[str]
    generation: int
    now_seconds: float


def refusal(node: str) -> str:
    """Return the reason with which the extender refuses a sample because of another node."""
    return f"{names.REJECT_ELSEWHERE} {node}"


def is_sample(offered: int, nodes: int) -> bool:
    """Tell whether kube-scheduler may have left nodes out: it offers all that its own filters admit below a hundred."""
    return NOMINATION_NODES_MIN <= offered < nodes


def named_node(pod: Pod) -> str:
    """Return the node to which the extender wants to send the waiting pod, by what kube-scheduler wrote on it."""
    for condition in pod.status.conditions if is_rejected(pod) else ():
        if condition.type == "PodScheduled" and (found := _NAMED.search(condition.message)):
            return found[1]
    return ""


def may_be_sent(pod: Pod) -> bool:
    """Tell whether a node may be named for the pod. kube-scheduler keeps a name whose pod's preemptionPolicy is Never,
    so that one would stand until it is withdrawn."""
    return not pod.status.nominated_node_name and pod.spec.preemption_policy != "Never"


def may_wait_for_better(pod: Pod) -> bool:
    """Tell whether a pod for which the sample has GPUs may be refused because of better ones: at its first attempt, and
    if all that kube-scheduler will look at on the other node is known here."""
    annotations = pod.metadata.annotations
    is_first = not is_rejected(pod) and names.WOKEN not in annotations and names.KEPT not in annotations
    return is_first and names.GANG not in annotations and not has_unknown_needs(pod)


def has_unknown_needs(pod: Pod) -> bool:
    """Tell whether a node may refuse the pod for what is not looked at here: its neighbours, spreading, volumes or
    devices of other kinds."""
    spec = pod.spec
    spreads = any(one.when_unsatisfiable == "DoNotSchedule" for one in spec.topology_spread_constraints)
    claims = any(one.persistent_volume_claim is not None or one.ephemeral is not None for one in spec.volumes)
    return spreads or claims or bool(spec.resource_claims) or minds_neighbours(pod)


def plan_hints(question: HintInput) -> tuple[WakePod, ...]:
    """Decide which pods to send now, in the order of wake-ups; two pods are not sent to the same GPUs."""
    taken: dict[str, int] = {}
    found = []
    for pod, request in sorted(question.waiting, key=by_rank):
        uid, node = pod.metadata.uid, named_node(pod)
        last = question.last_hints.get(uid)
        if not node or not may_be_sent(pod) or uid in question.lease_holders:
            continue
        room = question.room_of(node, request)
        if room is None or (last is not None and last.ends_seconds > question.now_seconds):
            continue
        answer = select(room.devices, room.free & ~taken.get(node, 0), request)
        if isinstance(answer, Rejection):
            continue
        positions = answer.choice.positions
        taken[node] = taken.get(node, 0) | sum(1 << position for position in positions)
        before = parse_woken(pod)
        number = before.number + 1 if before.generation >= question.generation else 1
        found.append(
            WakePod(
                pod=pod,
                generation=question.generation,
                woken=str(Woken(question.generation, number, node)),
                wake=LastWake(1, question.generation, question.now_seconds),
                node=node,
                uuids=tuple(room.devices.devices[position].uuid for position in positions),
                nominate=True,
            )
        )
    return tuple(found)


def next_hint(last: LastHint | None, now_seconds: float) -> LastHint:
    """Return what to remember of a hint that was written now."""
    return LastHint(last.count + 1 if last is not None else 1, now_seconds)
