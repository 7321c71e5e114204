"""Nodes beyond kube-scheduler's sample that give a pod something better.

kube-scheduler offers the extender a sample of the nodes. Here is what the others would give: any set where the sample
holds none, else a set that is clearly better than the sample's best. Small differences in cost are not worth another
attempt: only what the pod's user would notice counts, see `is_noticeable`. Most samples hold a set that nothing could
better; those are recognised at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeShape
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import Candidate, offer
from atoll.cluster.verdicts import FilterInput, WeighedRows, weigh
from atoll.cluster.weakness import needs_links
from topology.choice import Choice
from topology.scores import ALIKE

FASTER: Final = 1.1
"""A ring that is so many times as fast is worth a second attempt."""


@dataclass(frozen=True, slots=True)
class SetQuality:
    """What a user notices of a set: the rank of its model in the claim, its islands, and the bandwidth of its ring
    relative to the best set of sound machines of its class. A request that needs no links has the same of the last
    two everywhere."""

    preference: int
    islands: int = 1
    ring: float = 1.0

    @classmethod
    def of(cls, preference: int, choice: Choice, shape: NodeShape, request: Request, ledger: Ledger) -> "SetQuality":
        """Return the quality of a set on a machine of this shape."""
        if not needs_links(request.ask):
            return cls(preference)
        return cls(preference, len(choice.islands), choice.relative_quality * (1 - ledger.fleet.weakness_of(shape)))

    @property
    def may_be_bettered(self) -> bool:
        """Tell whether any set could be noticeably better."""
        return self.preference > 0 or self.islands > 1 or FASTER * self.ring <= 1


def is_noticeable(one: SetQuality, than: SetQuality) -> bool:
    """Tell whether a set is so much better that its user would notice: a model that the claim prefers, fewer islands,
    or a ring that is a tenth faster."""
    if one.preference != than.preference:
        return one.preference < than.preference
    if one.islands != than.islands:
        return one.islands < than.islands
    return one.ring > 0 and one.ring >= FASTER * than.ring


def nodes_elsewhere(question: FilterInput, ledger: Ledger, sampled: Candidate | None) -> Iterator[Candidate]:
    """Return what nodes outside of the sample would give, in filter's order. `sampled`: the best of the sample; None if
    nothing of it fits.

    A pod that holds Leases has its place already: nothing is returned for it. One that names a GpuReservation fits only
    where that holds GPUs.
    """
    request = question.request
    if isinstance(request, Rejection) or ledger.leases_of(question.uid):
        return
    than = None
    if sampled is not None:
        shape = ledger.nodes[sampled.node].shape
        than = SetQuality.of(sampled.preference, sampled.choice, shape, request, ledger)
        if not than.may_be_bettered:
            return
    weighed = weigh(None, request, question, ledger)
    rows, keys, fleet = weighed.rows, weighed.keys, ledger.fleet
    if request.reservation:
        held = [fleet.row_of(record.node) for record in ledger.leases_of(request.reservation)]
        keys[~np.isin(rows, held)] = np.inf
    for name in question.failed_nodes:
        keys[rows == fleet.row_of(name)] = np.inf
    if sampled is not None and than is not None:
        keys[keys >= keys[rows == fleet.row_of(sampled.node)].min(initial=np.inf) - ALIKE] = np.inf
        _leave_better_ones(weighed, than, ledger)
    while keys.min(initial=np.inf) < np.inf:
        candidate = weighed.pick(ledger, cpu_milli=question.cpu_milli)
        yield candidate
        keys[rows == fleet.row_of(candidate.node)] = np.inf


def _leave_better_ones(weighed: WeighedRows, than: SetQuality, ledger: Ledger) -> None:
    """Leave only nodes whose sets are noticeably better."""
    keys, states, asked = weighed.keys, weighed.states, weighed.asked
    for state in np.unique(states[keys < np.inf]).tolist():
        cell = ledger.fleet.cell_at(state)
        answer = offer(cell, asked, ledger.demand)
        if isinstance(answer, Rejection) or not is_noticeable(
            SetQuality.of(answer.order[0], answer.choice, cell.shape, asked, ledger), than
        ):
            keys[states == state] = np.inf
