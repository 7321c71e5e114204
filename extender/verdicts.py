"""Filter and prioritize: pure answers from the ledger.

In: a pod, node names, the ledger and the claim. Out: feasible nodes, reasons of the others, the best node. Nothing
outside memory changes, because kube-scheduler and autoscalers also call these verbs for what-ifs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atoll.api import names
from atoll.cluster.ledger import Ledger
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import Candidate, select


@dataclass(frozen=True, slots=True)
class NodeVerdicts:
    """Answer of filter. Every name that was asked for stands in exactly one of the two."""

    feasible: Mapping[str, Candidate]
    rejected: Mapping[str, str]

    @property
    def best(self) -> Candidate | None:
        """The candidate that prioritize names: first in the order (model preference, cost, node name)."""
        return min(self.feasible.values(), key=lambda candidate: candidate.order, default=None)


@dataclass(frozen=True, slots=True)
class Question:
    """What filter is asked: a pod's uid, its request, the moment, and nodes on which its bind failed moments ago."""

    uid: str
    request: Request | Rejection
    now_seconds: float
    failed_nodes: frozenset[str] = frozenset()


def judge_nodes(node_names: Iterable[str], question: Question, ledger: Ledger) -> NodeVerdicts:
    """Say for every node whether it can give the pod its GPUs now, and which it would give.

    A pod that still holds Leases of an earlier attempt goes back to their node, or waits until they are taken back.
    A node where the pod's bind failed moments ago is left out while any other node fits.
    """
    feasible: dict[str, Candidate] = {}
    rejected: dict[str, str] = {}
    held_nodes = {record.node for record in ledger.leases_of(question.uid)}
    for name in node_names:
        if held_nodes and name not in held_nodes:
            rejected[name] = names.REJECT_HOLDS_ELSEWHERE
            continue
        answer = judge_node(name, question, ledger)
        if isinstance(answer, Rejection):
            rejected[name] = answer.reason
        else:
            feasible[name] = answer
    spared = {name for name in feasible if name in question.failed_nodes}
    if spared and len(spared) < len(feasible):
        for name in spared:
            del feasible[name]
            rejected[name] = names.REJECT_RECENT_BIND_FAILURE
    return NodeVerdicts(feasible, rejected)


def judge_node(name: str, question: Question, ledger: Ledger) -> Candidate | Rejection:
    """Say whether one node can give the pod its GPUs now."""
    if isinstance(question.request, Rejection):
        return question.request
    devices = ledger.nodes.get(name)
    if devices is None:
        return Rejection(names.REJECT_NO_REPORT)
    if ledger.is_stale(name, question.now_seconds):
        return Rejection(names.REJECT_STALE_REPORT)
    free = ledger.free(name, now_seconds=question.now_seconds, asking_uid=question.uid)
    return select(devices, free, question.request)
