"""Preempt: which of kube-scheduler's candidate nodes would really make room for the pod.

In: nodes with the victims that kube-scheduler chose, the ledger, the request. Out: the nodes that remain, with their
victims unchanged. Victims for islands alone are chosen by the controllers, so a node without victims helps nobody here.
"""

from collections.abc import Mapping

from atoll.cluster.ledger import Ledger
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select
from extender.wire import Victims


def keep_helpful(
    candidates: Mapping[str, Victims], request: Request | Rejection, ledger: Ledger, now_seconds: float
) -> dict[str, Victims]:
    """Return the candidates on which the pod would get its GPUs once the victims are gone."""
    if isinstance(request, Rejection):
        return {}
    return {
        node: victims
        for node, victims in candidates.items()
        if victims.pods and _helps(node, victims, request, ledger, now_seconds)
    }


def _helps(node: str, victims: Victims, request: Request, ledger: Ledger, now_seconds: float) -> bool:
    devices = ledger.nodes.get(node)
    if devices is None:
        return False
    mask = ledger.free(node, now_seconds=now_seconds)
    for victim in victims.pods or ():
        allocation = ledger.allocation_of(victim.uid)
        if allocation is not None and allocation.node == node:
            mask |= devices.mask_of(allocation.device_ids, allocation.uuids)
    return not isinstance(select(devices, mask, request), Rejection)
