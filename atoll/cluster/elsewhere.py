"""Nodes beyond kube-scheduler's sample that give a pod something better.

kube-scheduler offers the extender a sample of the nodes. Here is what the others would give: any set where the sample
holds none, else a set that is clearly better than the sample's best. Small differences in cost are not worth another
attempt: only what the pod's user would notice counts, see `is_noticeable`.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from atoll.cluster.ledger import Ledger
from atoll.cluster.requests import Rejection
from atoll.cluster.selection import Candidate, CellOffer, offer
from atoll.cluster.verdicts import FilterInput, WeighedRows, weigh
from atoll.cluster.weakness import needs_links
from topology.choice import Choice
from topology.device_requests import DeviceRequest
from topology.scores import ALIKE

FASTER: Final = 1.1
"""A ring that is so many times as fast is worth a second attempt."""


def nodes_elsewhere(question: FilterInput, ledger: Ledger, sampled: Candidate | None) -> Iterator[Candidate]:
    """Return what nodes outside of the sample would give, in filter's order. `sampled`: the best of the sample; None if
    nothing of it fits.

    A pod that holds Leases has its place already: nothing is returned for it. One that names a GpuReservation fits only
    where that holds GPUs.
    """
    request = question.request
    if isinstance(request, Rejection) or ledger.leases_of(question.uid):
        return
    weighed = weigh(None, request, question, ledger)
    if request.reservation:
        held = [ledger.fleet.row_of(record.node) for record in ledger.leases_of(request.reservation)]
        weighed.keys[~np.isin(weighed.rows, held)] = np.inf
    for name in question.failed_nodes:
        weighed.keys[weighed.rows == ledger.fleet.row_of(name)] = np.inf
    if sampled is not None:
        _leave_better_ones(weighed, sampled, ledger)
    while weighed.keys.min(initial=np.inf) < np.inf:
        candidate = weighed.pick(ledger, cpu_milli=question.cpu_milli)
        yield candidate
        weighed.keys[weighed.rows == ledger.fleet.row_of(candidate.node)] = np.inf


def is_noticeable(one: CellOffer, than: Candidate, ask: DeviceRequest) -> bool:
    """Tell whether a set is so much better that its user would notice: a model that the claim prefers, fewer islands,
    or a ring that is a tenth faster."""
    preference = one.order[0]
    if preference != than.preference or not needs_links(ask):
        return preference < than.preference
    return _is_faster(one.choice, than.choice)


def _is_faster(one: Choice, than: Choice) -> bool:
    if len(one.islands) != len(than.islands):
        return len(one.islands) < len(than.islands)
    return one.ring_gbps > 0 and one.ring_gbps >= FASTER * than.ring_gbps


def _leave_better_ones(weighed: WeighedRows, sampled: Candidate, ledger: Ledger) -> None:
    """Leave only nodes before the sampled one in the order whose sets are noticeably better."""
    fleet, keys, states = ledger.fleet, weighed.keys, weighed.states
    limit = keys[weighed.rows == fleet.row_of(sampled.node)].min(initial=np.inf)
    keys[keys >= limit - ALIKE] = np.inf
    for state in np.unique(states[keys < np.inf]).tolist():
        answer = offer(fleet.cell_at(state), weighed.asked, ledger.demand)
        if isinstance(answer, Rejection) or not is_noticeable(answer, sampled, weighed.asked.ask):
            keys[states == state] = np.inf
