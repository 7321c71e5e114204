"""Pods that a node's report shows alive and that neither the API server nor a Lease knows. Pure.

After a restore from a backup the API server lacks pods whose containers run on until the kubelet ends them. Their GPUs
are held by nobody, so nothing is placed on such a node. A static pod never was in the API server but as a mirror under
another uid, which may be refused: the kubelet tells the agent that it is one.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod


def unknown_pods(
    status: GpuNodeStatus, pods: Mapping[str, Pod], ledger: Ledger, static: AbstractSet[str] | None = None
) -> frozenset[str]:
    """Return the uids. pods: all of the API server, by uid; the ledger knows the Leases. static: the kubelet's own uids
    of the node's static pods that have a mirror; without it all pods are searched for them."""
    shown = status.status.pods if status.status is not None else ()
    found = frozenset(
        entry.uid
        for entry in shown
        if entry.live and not entry.static and entry.uid not in pods and not ledger.leases_of(entry.uid)
    )
    if found and static is None:
        static = {static_uid(pod) for pod in pods.values() if pod.spec.node_name == status.metadata.name}
    return found - (static or frozenset())


def static_uid(pod: Pod) -> str:
    """Return the kubelet's own uid of a static pod, of which this is the mirror; empty for any other pod."""
    annotations = pod.metadata.annotations
    return annotations.get(names.STATIC_POD_UID, "") if names.MIRROR in annotations else ""
