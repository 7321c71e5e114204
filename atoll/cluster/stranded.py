"""Pods whose GPUs are no longer on their machine: they cannot start again.

A card that was taken out, or a MIG layout that a reboot did not bring back, leaves bound pods with uuids that nothing
has any more: the kubelet starts their containers again and again, and the runtime refuses each time. In: a bound pod
and the report of its node. Out: the uuids that are gone. Pure. A card that is only not seen is on record, and not gone;
a report whose driver could not be read says nothing of what it lacks, but for the cards that it knows to have left.
"""

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus, GpuNodeStatusReport
from atoll.cluster import pods
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.objects import Pod


def gone_gpus(pod: Pod, status: GpuNodeStatus | None) -> tuple[str, ...]:
    """Return the GPUs of a bound pod that its machine has no more; empty for a pod that has ended."""
    report = status.status if status is not None else None
    if report is None or pods.is_terminal(pod):
        return ()
    try:
        allocation = bound_allocation(pod)
    except MalformedValue:
        return ()
    if allocation is None or status is None or allocation.node != status.metadata.name:
        return ()
    missing = set(allocation.uuids) - {device.uuid for device in report.devices}
    proven = missing if _names_all(report) else missing & {card.uuid for card in report.departed}
    return tuple(uuid for uuid in allocation.uuids if uuid in proven)


def runs_on(pod: Pod) -> bool:
    """Tell whether the pod works in spite of what it lost: nobody takes that from it."""
    return any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions)


def _names_all(report: GpuNodeStatusReport) -> bool:
    return any(one.type == names.CONDITION_DEVICES_READABLE and one.status == "True" for one in report.conditions)
