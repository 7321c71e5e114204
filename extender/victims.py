"""Preempt: on which of kube-scheduler's candidate nodes the victims make room for the pod, and which victims it takes.

kube-scheduler chose the victims by count, CPU and memory; they stay. If they leave the pod without the GPUs that its
claim wants, others of a lower priority are added, see `atoll.cluster.node_victims`. kube-scheduler's dry run knows no
GPUs, so it may also offer nodes without victims: such a node gets some, or is dropped. The most important victim comes
first, because kube-scheduler takes the first one's priority for the highest.

kube-scheduler looks at a part of the nodes only, and may want to evict while the pod fits on another. A pod that was
refused is sent there by a wake-up, so it gets no victims for a while.

A member of a gang counts as a victim that breaks a budget, because the gang may not run without it: kube-scheduler then
prefers nodes whose pods belong to no gang.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from atoll.cluster import host_fit
from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.ledger import Ledger
from atoll.cluster.node_victims import all_victims
from atoll.cluster.objects import Node, Pod
from atoll.cluster.occupants import occupancy, pods_by_node
from atoll.cluster.requests import Rejection, Request
from extender.wire import Victim, Victims

SPARE_SECONDS: Final = 30.0
"""How long a pod gets no victims while it fits on a node; then what keeps it from there is nothing that is known."""
SPARED_MAX: Final = 10_000
LOOKED_AT_MAX: Final = 64
"""Nodes with enough GPUs and the right taints and labels whose free resources are looked at."""


class SparedVictims:
    """Since when pods get no victims, by uid."""

    def __init__(self) -> None:
        self._since: OrderedDict[str, float] = OrderedDict()

    def spares(self, uid: str, *, fits: bool, now_seconds: float) -> bool:
        """Tell whether a pod gets none: it fits as things are, and has not done so for long."""
        if not fits:
            self._since.pop(uid, None)
            return False
        if uid not in self._since and len(self._since) >= SPARED_MAX:
            self._since.popitem(last=False)
            return False
        return now_seconds - self._since.setdefault(uid, now_seconds) < SPARE_SECONDS


def fits_now(pod: Pod, feasible: Sequence[str], nodes: Mapping[str, Node], pods: Iterable[Pod]) -> bool:
    """Tell whether one of the nodes that have the pod's GPUs also takes the pod by its taints, labels and free
    resources. pods: those of all nodes."""
    wanted = (name for name in feasible if name in nodes and not host_fit.node_reason(pod, nodes[name]))
    there: dict[str, list[Pod]] = {name: [] for name in islice(wanted, LOOKED_AT_MAX)}
    for one in pods if there else ():
        if one.spec.node_name in there:
            there[one.spec.node_name].append(one)
    needs = host_fit.needs(pod)
    return any(
        all(left.get(resource, 0) >= amount for resource, amount in needs.items())
        for left in (host_fit.free(nodes[name], found) for name, found in there.items())
    )


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
