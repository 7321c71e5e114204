"""Preempt: on which of kube-scheduler's candidate nodes the victims make room for the pod, and which victims it takes.

kube-scheduler chose the victims by count, CPU and memory; they stay. If they leave the pod without the GPUs that its
claim wants, others of a lower priority are added, see `atoll.cluster.node_victims`. kube-scheduler's dry run knows no
GPUs, so it may also offer nodes without victims: such a node gets some, or is dropped. The most important victim comes
first, because kube-scheduler takes the first one's priority for the highest.

kube-scheduler looks at a part of the nodes only, and may want to evict while the pod fits on another; that is in
`extender.beyond_sample`.

A member of a gang counts as a victim that breaks a budget, because the gang may not run without it: kube-scheduler then
prefers nodes whose pods belong to no gang.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.ledger import Ledger
from atoll.cluster.node_victims import all_victims
from atoll.cluster.objects import Pod
from atoll.cluster.occupants import occupancy, pods_by_node
from atoll.cluster.requests import Rejection, Request
from extender.wire import Victim, Victims


@dataclass(frozen=True, slots=True)
class Preemptor:
    """The pod that wants room, and what it asks for."""

    pod: Pod
    request: Request | Rejection


def choose_victims(
    candidates: Mapping[str, Victims],
    preemptor: Preemptor,
    ledger: Ledger,
    *,
    budgets: DisruptionBudgets,
    now_seconds: float,
) -> dict[str, Victims]:
    """Return the candidates on which the pod gets its GPUs once the victims are gone, with all victims that takes."""
    if isinstance(preemptor.request, Rejection):
        return {}
    holders = pods_by_node(ledger)
    kept: dict[str, Victims] = {}
    for node, given in candidates.items():
        occupied = occupancy(
            ledger,
            node,
            holders.get(node, ()),
            preemptor.pod,
            budgets=budgets,
            now_seconds=now_seconds,
            reservation=preemptor.request.reservation,
        )
        if occupied is None:
            continue
        uids = tuple(victim.uid for victim in given.pods or ())
        victims = all_victims(uids, given.pdb_violations, occupied, preemptor.pod, preemptor.request, ledger, budgets)
        if victims is not None and victims.uids:
            kept[node] = Victims(tuple(map(Victim, victims.uids)), victims.violations)
    return kept
