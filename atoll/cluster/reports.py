"""Does a report speak of the Node as it is now?

In: a Node and a GpuNodeStatus of its name. Out: whether GPUs may be given out by that report. Separate, because two
objects of two watches are compared, of which either may be seen first; the mirror asks whenever one of them changes.

A report is of the past when the Node has another uid (it was deleted and made anew), or when kubelet has told of
another boot than the agent: the machine was started again and the agent has not looked at it since, however fresh its
heartbeat is. Boot ids are compared only where both are the kernel's own, which have the form of a UUID.
"""

from typing import TYPE_CHECKING, Final

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.objects import Lease, Node

if TYPE_CHECKING:
    from atoll.cluster.ledger import Ledger

BOOT_ID_LENGTH: Final = 36
SILENCE_PERIODS: Final = 3
HEARTBEAT_SECONDS_DEFAULT: Final = 60


def silence_seconds_max(heartbeat: Lease) -> float:
    """Return for how long a report stays fresh after this heartbeat of its agent."""
    return float(heartbeat.spec.lease_duration_seconds or SILENCE_PERIODS * HEARTBEAT_SECONDS_DEFAULT)


def reason_of_the_past(status: GpuNodeStatus, node: Node | None) -> str:
    """Return why the report does not count: it was written under another Node of this name, or before the machine's
    last boot. Empty for a report of now."""
    if node is None or status.status is None:
        return ""
    report = status.status
    if report.node_uid and report.node_uid != node.metadata.uid:
        return names.REJECT_PAST_NODE
    boots = (report.boot_id, node.status.node_info.boot_id)
    return names.REJECT_PAST_BOOT if all(map(_is_kernels, boots)) and boots[0] != boots[1] else ""


def take_report(ledger: "Ledger", status: GpuNodeStatus, node: Node | None) -> None:
    """Put a report into the ledger, or count it no more where it is of the past."""
    why = reason_of_the_past(status, node)
    if why:
        ledger.drop_report(status.metadata.name, why=why)
    else:
        ledger.put_report(status)


def _is_kernels(boot_id: str) -> bool:
    return len(boot_id) == BOOT_ID_LENGTH and boot_id.count("-") == 4
