"""Filter and prioritize: pure answers from the ledger.

They give the feasible nodes, the reasons of the others, and the best node. They change nothing outside memory, because
kube-scheduler and autoscalers also call these verbs for what-ifs.

Thousands of names are looked up once and judged by one gather over arrays, see atoll.cluster.fleet. The keys come from
the tables that bind takes its GPUs from, so prioritize and bind cannot disagree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from atoll.api import names
from atoll.cluster.feasibility import machine_verdict
from atoll.cluster.fleet import Floats, Ints
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import Cell
from atoll.cluster.requests import Rejection, Request, Verdict
from atoll.cluster.selection import Candidate, CellOffer, offer, plain


@dataclass(frozen=True, slots=True)
class NodeVerdicts:
    """Answer of filter: the names that fit, in the order of the question, and the first of them in the order (model
    preference, cost and price of CPU, free CPU, node name). `rejected` has the reason of every name where none fits;
    else nobody would read it. `verdict`: of all nodes together."""

    verdict: Verdict
    feasible: Sequence[str] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    best: Candidate | None = None


@dataclass(frozen=True, slots=True)
class FilterInput:
    """What filter is asked: a pod's uid, its request, the moment, and nodes on which its bind failed moments ago or
    that refused the last pods of its owner.

    `priority` decides whose kept GPUs the pod may take; without one it ranks below all. `cpu_milli` is what the pod
    asks for beside GPUs.
    """

    uid: str
    request: Request | Rejection
    now_seconds: float
    failed_nodes: frozenset[str] = frozenset()
    priority: int | None = None
    cpu_milli: int = 0


def judge_nodes(node_names: Sequence[str], question: FilterInput, ledger: Ledger) -> NodeVerdicts:
    """Say for every node whether it can give the pod its GPUs now, and which would give the best set.

    A pod that still holds Leases of an earlier attempt goes back to their node, or waits until they are taken back.
    A pod that names a GpuReservation fits only nodes where the reservation holds GPUs. A node where the pod's bind
    failed moments ago is left out while any other node fits.
    """
    request = question.request
    if isinstance(request, Rejection):
        return NodeVerdicts(request.verdict, rejected=dict.fromkeys(node_names, request.reason))
    held = {record.node for record in ledger.leases_of(question.uid)}
    if held:
        verdicts = _judge([name for name in node_names if name in held], request, question, ledger)
        return verdicts if verdicts.best else _elsewhere(node_names, verdicts, names.REJECT_HOLDS_ELSEWHERE)
    if request.reservation:
        reserved = {record.node for record in ledger.leases_of(request.reservation)}
        verdicts = _judge([name for name in node_names if name in reserved], request, question, ledger)
        return verdicts if verdicts.best else _elsewhere(node_names, verdicts, names.REJECT_RESERVATION_ELSEWHERE)
    if question.failed_nodes:
        others = [name for name in node_names if name not in question.failed_nodes]
        verdicts = _judge(others, request, question, ledger)
        if verdicts.best:
            return verdicts
    return _judge(node_names, request, question, ledger)


def _elsewhere(node_names: Sequence[str], verdicts: NodeVerdicts, reason: str) -> NodeVerdicts:
    """Return verdicts in which no node fits: nodes that were not checked are refused for the reason. Where none was
    checked, the pod's GPUs are on other nodes."""
    verdict = verdicts.verdict if verdicts.rejected else Verdict.BUSY
    return NodeVerdicts(verdict, rejected={**dict.fromkeys(node_names, reason), **verdicts.rejected})


@dataclass(frozen=True, slots=True)
class WeighedRows:
    """What rows of the fleet are worth to a request: state and key of each, and the cells of nodes that look different
    to the asking pod."""

    asked: Request
    rows: Ints
    states: Ints
    keys: Floats
    own: Mapping[str, Cell]

    def pick(self, ledger: Ledger, *, cpu_milli: int) -> Candidate:
        """Return the best of the rows, of which one at least has a finite key."""
        fleet, demand = ledger.fleet, ledger.demand
        name = fleet.pick(self.rows, self.keys, self.states, self.asked, demand, cpu_milli=cpu_milli)
        answer = offer(self.own.get(name) or fleet.cell_of(name), self.asked, demand)
        assert isinstance(answer, CellOffer)
        return answer.at(name)


def weigh(node_names: Sequence[str] | None, request: Request, question: FilterInput, ledger: Ledger) -> WeighedRows:
    """Look the names up once, all nodes where there are none; all else is arrays: the states of the nodes, and the keys
    of those states."""
    asked = plain(request)
    own = ledger.own_cells(
        now_seconds=question.now_seconds,
        asking_uid=question.uid,
        asking_priority=question.priority,
        asking_reservation=request.reservation,
    )
    fleet, demand = ledger.fleet, ledger.demand
    rows = fleet.all_rows() if node_names is None else fleet.rows_of(node_names)
    states = fleet.states_of(rows)
    for name, cell in own.items():
        states[rows == fleet.row_of(name)] = fleet.state_of(cell)
    keys = fleet.with_node_costs(fleet.keys(states, asked, demand), rows, states, asked.ask, demand)
    return WeighedRows(asked, rows, states, keys, own)


def _judge(node_names: Sequence[str], request: Request, question: FilterInput, ledger: Ledger) -> NodeVerdicts:
    weighed = weigh(node_names, request, question, ledger)
    if weighed.keys.min(initial=np.inf) == np.inf:
        known = weighed.states.tolist()
        rejected = _reasons(node_names, known, weighed.asked, ledger)
        return NodeVerdicts(_verdict(node_names, known, weighed.asked, ledger), rejected=rejected)
    best = weighed.pick(ledger, cpu_milli=question.cpu_milli)
    feasible = list(compress(node_names, (weighed.keys < np.inf).tobytes()))
    return NodeVerdicts(Verdict.FITS, feasible=feasible, best=best)


def _verdict(node_names: Sequence[str], states: list[int], asked: Request, ledger: Ledger) -> Verdict:
    """Return the verdict on machines of which none can serve the request now; those without a state are not known."""
    kinds = {
        (devices.shape, devices.usable): devices
        for name, state in zip(node_names, states, strict=True)
        if state and (devices := ledger.nodes.get(name)) is not None
    }
    found = {machine_verdict(devices, asked) for devices in kinds.values()}
    if Verdict.BUSY in found:
        return Verdict.BUSY
    return Verdict.NEVER if states and all(states) and found <= {Verdict.NEVER} else Verdict.UNKNOWN


def _reasons(node_names: Sequence[str], states: list[int], asked: Request, ledger: Ledger) -> dict[str, str]:
    """Return why no node fits: one reason per state, and for nodes without a state why they have none."""
    reasons: dict[int, str] = {}
    for state in set(states) - {0}:
        answer = offer(ledger.fleet.cell_at(state), asked, ledger.demand)
        assert isinstance(answer, Rejection)
        reasons[state] = answer.reason
    return {
        name: reasons[state] if state else why_unseen(name, ledger)
        for name, state in zip(node_names, states, strict=True)
    }


def why_unseen(name: str, ledger: Ledger) -> str:
    """Return why a node is judged to have no GPUs: no report, one that does not count, or one of long ago."""
    if name in ledger.nodes:
        return names.REJECT_STALE_REPORT
    return ledger.uncounted.get(name) or names.REJECT_NO_REPORT
