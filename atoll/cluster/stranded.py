"""Pods whose GPUs are gone from their machine: they cannot start again. Pure.

After a card was removed, or a reboot did not restore a MIG layout, bound pods have uuids that no longer exist: the
kubelet restarts their containers again and again, and the runtime refuses each time. A card that is only not seen is on
record and not gone. If the driver could not be read, the report proves only that its departed cards are gone.
"""

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus, GpuNodeStatusReport
from atoll.cluster import pods
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.objects import Pod


def gone_gpus(pod: Pod, status: GpuNodeStatus | None) -> tuple[str, ...]:
    """Return the uuids of a bound pod's GPUs that its machine no longer has; empty for a pod that has ended."""
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
    """Return whether the pod still works without the lost GPU: then it is not evicted."""
    return any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions)


def _names_all(report: GpuNodeStatusReport) -> bool:
    return any(one.type == names.CONDITION_DEVICES_READABLE and one.status == "True" for one in report.conditions)
