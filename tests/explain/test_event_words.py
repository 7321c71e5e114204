"""The event of a waiting pod and `atoll explain` say the same about the same cluster."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.host_fit import REASONS, node_reason
from atoll.cluster.requests import Rejection
from atoll.cluster.wakeups import NodeCapacity, missing_for, waiting_note
from atoll.explain.decision import IndexedSnapshot, decide, index_snapshot
from atoll.explain.explanation import PodState, explain_without_help
from atoll.explain.nodes import GPUS_COUNTED, NodeAnswer
from atoll.explain.snapshot import NOW_SECONDS
from tests.explain.test_proposals_by_force import cluster

STATES = {
    "not even an empty one": (PodState.NEVER, PodState.CLOSED),
    "may fit when": (PodState.UNKNOWN, PodState.WITHHELD, PodState.CLOSED),
    "can give them now": (PodState.BUSY, PodState.CLOSED, PodState.WITHHELD),
}
"""Words of the event, and the states that explain may give. Explain also weighs what kube-scheduler refuses a node for:
of two nodes, one busy and short of CPU, the other cordoned, it names the one that needs less."""


def rooms_of(scene: IndexedSnapshot) -> list[NodeCapacity]:
    """Return what the controllers see of the nodes whose agents are heard."""
    ledger = scene.ledger
    return [
        NodeCapacity(scene.nodes[name], devices, ledger.free(name, now_seconds=NOW_SECONDS))
        for name, devices in sorted(ledger.nodes.items())
        if not ledger.is_stale(name, NOW_SECONDS)
    ]


def gpu_reason(one: NodeAnswer) -> str:
    """Return what the GPUs of a node have against the pod; empty where it is something else, or nothing."""
    is_ours = one.reason not in ("", GPUS_COUNTED, ", ".join(one.others))
    return one.reason if is_ours else ""


@given(st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_event_says_what_explain_says(seed: int) -> None:
    """Whether it is busy, not known or never, and of how many nodes the GPUs say what."""
    found = cluster(seed)
    scene = index_snapshot(found.snapshot)
    request, rooms = decide(scene, found.pod, found.claim).request, rooms_of(scene)
    assert not isinstance(request, Rejection)
    told = explain_without_help(scene, found.pod)
    if told.state is PodState.FITS or not rooms:
        return

    note = waiting_note(found.pod, request, rooms, tuple(scene.unseen.values()))
    said = next(states for words, states in STATES.items() if words in note)
    assert told.state in said, note
    seen = [one for group in told.groups for one in group.nodes if one.node not in scene.unseen]
    nodes = [one for one in seen if not node_reason(found.pod, scene.nodes[one.node])]
    missing = {reason: count for reason, count in missing_for(found.pod, request, rooms) if reason not in REASONS}
    assert missing == Counter(reason for one in nodes if (reason := gpu_reason(one)))
