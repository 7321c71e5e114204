"""Pods that a node's report shows alive and that neither the API server nor a Lease knows. Pure.

After a restore from a backup the API server lacks pods whose containers run on until the kubelet ends them. Their GPUs
are held by nobody, so nothing is placed on such a node.
"""

from collections.abc import Mapping

from atoll.api import names
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Pod


def unknown_pods(status: GpuNodeStatus, pods: Mapping[str, Pod], ledger: Ledger) -> frozenset[str]:
    """Return the uids. pods: all of the API server, by uid; the ledger knows the Leases."""
    shown = status.status.pods if status.status is not None else ()
    found = frozenset(
        entry.uid for entry in shown if entry.live and entry.uid not in pods and not ledger.leases_of(entry.uid)
    )
    return found - _static(status.metadata.name, pods) if found else found


def _static(node: str, pods: Mapping[str, Pod]) -> frozenset[str]:
    """Return the kubelet's own uids of a node's static pods."""
    annotations = (pod.metadata.annotations for pod in pods.values() if pod.spec.node_name == node)
    return frozenset(one.get(names.STATIC_POD_UID, "") for one in annotations if names.MIRROR in one)
