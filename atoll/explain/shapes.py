"""Nodes that could be added: copies of the cluster's machines, and known machines.

An Addition is an empty, healthy machine with a fresh heartbeat that matches the pod's selector. The same name gives the
same node. Pure.
"""

from collections.abc import Iterator, Sequence

import msgspec

from atoll.api import names
from atoll.api.base import ObjectMeta
from atoll.api.node_status import (
    Device,
    GpuNodeStatus,
    GpuNodeStatusReport,
    GpuNodeStatusSpec,
    Health,
    Links,
)
from atoll.api.topologies import HOSTNAME
from atoll.cluster import host_fit, pod_fit
from atoll.cluster.objects import Lease, LeaseSpec, Metadata, Node, NodeStatus, Pod
from atoll.explain.changes import Addition
from atoll.explain.snapshot import ClusterSnapshot
from topology.profiles import profile, profile_names

ALLOCATABLE = {"cpu": "192", "memory": "2Ti", "ephemeral-storage": "4Ti", "pods": "110"}
"""Assumed resources of a known machine beside GPUs."""


def additions(snapshot: ClusterSnapshot, pod: Pod, *, name: str = "new-node") -> Iterator[Addition]:
    """Yield one node per kind of machine in the cluster that the pod could use, by the name of the first, then every
    known machine by its number of GPUs. Nodes of a kind have the same GPUs and the same values of the labels in the
    pod's affinity and anti-affinity."""
    nodes = {node.metadata.name: node for node in snapshot.nodes}
    keys = {term.topology_key for term in (*pod_fit.anti_terms(pod), *pod_fit.affinity_terms(pod))} - {HOSTNAME}
    seen = set()
    for report in sorted(snapshot.reports, key=lambda one: one.metadata.name):
        node = nodes.get(report.metadata.name)
        if node is None or report.status is None or not _may_take(_emptied(node, name), pod):
            continue
        kind = (*_machine(report.status), *(node.metadata.labels.get(key) for key in sorted(keys)))
        if kind not in seen:
            seen.add(kind)
            yield like_node(snapshot, node, report, name=name)
    for known in sorted(profile_names(), key=lambda one: (profile(one).machine.count, one)):
        yield known_machine(known, snapshot, name=name, labels=pod.spec.node_selector)


def additions_for(snapshot: ClusterSnapshot, pod: Pod, names: Sequence[str]) -> Iterator[tuple[Addition, ...]]:
    """Yield nodes of those names, all of one kind: like one of the cluster, once per machine and place in its
    topologies, then known machines without labels."""
    nodes = {node.metadata.name: node for node in snapshot.nodes}
    keys = {label for topology in snapshot.topologies for label in topology.spec.labels}
    keys |= {term.topology_key for term in (*pod_fit.anti_terms(pod), *pod_fit.affinity_terms(pod))}
    seen = set()
    for report in sorted(snapshot.reports, key=lambda one: one.metadata.name):
        node = nodes.get(report.metadata.name)
        if node is None or report.status is None or not _may_take(_emptied(node, names[0]), pod):
            continue
        kind = (*_machine(report.status), *(node.metadata.labels.get(key) for key in sorted(keys - {HOSTNAME})))
        if kind not in seen:
            seen.add(kind)
            yield tuple(like_node(snapshot, node, report, name=name) for name in names)
    for known in sorted(profile_names(), key=lambda one: (profile(one).machine.count, one)):
        yield tuple(known_machine(known, snapshot, name=name, labels=pod.spec.node_selector) for name in names)


def _machine(status: GpuNodeStatusReport) -> tuple[object, ...]:
    """Return the properties that machines of one kind share."""
    return status.links, tuple((device.model, device.memory_bytes, device.mig) for device in status.devices)


def like_node(snapshot: ClusterSnapshot, node: Node, report: GpuNodeStatus, *, name: str) -> Addition:
    """Return another node like this one: its labels and taints, its machine, empty and healthy."""
    assert report.status is not None
    uuids = {device.uuid: f"{name}-{position}" for position, device in enumerate(report.status.devices)}
    devices = tuple(_fresh(device, uuids) for device in report.status.devices)
    status = report.status.model_copy(
        update={"devices": devices, "pods": (), "host_uses": (), "node_uid": f"uid-of-{name}", "boot_id": ""}
    )
    return Addition(
        f"like {node.metadata.name}", _emptied(node, name), _status(name, status), _heartbeat(snapshot, name)
    )


def _emptied(node: Node, name: str) -> Node:
    """Return the Node of a new machine: without a cordon or a taint that reports its condition."""
    labels = {**node.metadata.labels, HOSTNAME: name}
    taints = tuple(taint for taint in node.spec.taints if not host_fit.tells_state(taint))
    spec = msgspec.structs.replace(node.spec, unschedulable=False, taints=taints)
    return Node(Metadata(name, uid=f"uid-of-{name}", labels=labels), spec, NodeStatus(node.status.allocatable))


def _may_take(node: Node, pod: Pod) -> bool:
    """True if kube-scheduler would accept the empty node for the pod, whatever its GPUs."""
    left = host_fit.free(node, ())
    return not host_fit.node_reason(pod, node) and all(
        amount <= left.get(resource, 0) for resource, amount in host_fit.needs(pod).items()
    )


def known_machine(
    shape: str, snapshot: ClusterSnapshot, *, name: str, labels: dict[str, str] | None = None
) -> Addition:
    """Return a node with a known machine, see `topology.profiles`. Raises ProfileError for another shape."""
    known = profile(shape)
    geometry = known.machine
    links = Links(
        nvlink=geometry.links,
        pcie=geometry.pcie or (),
        nvlink_generation=geometry.nvlink_generation,
        nvswitch=geometry.nvswitch,
        link_gbps=geometry.link_gbps,
        pcie_generation=geometry.pcie_generation,
        inter_socket_gbps=geometry.inter_socket_gbps,
    )
    devices = tuple(
        Device(
            id=position,
            uuid=f"{name}-{position}",
            model=known.model,
            product_name=known.product_name,
            memory_bytes=known.memory_bytes,
            compute_capability=known.compute_capability,
            numa_node=geometry.numa[position],
            index=position,
            vendor=geometry.vendor,
        )
        for position in range(geometry.count)
    )
    status = GpuNodeStatusReport(node_uid=f"uid-of-{name}", devices=devices, links=links)
    allocatable = {**ALLOCATABLE, names.GPU_RESOURCE: str(geometry.count)}
    metadata = Metadata(name, uid=f"uid-of-{name}", labels={**(labels or {}), HOSTNAME: name})
    node = Node(metadata, status=NodeStatus(allocatable))
    return Addition(shape, node, _status(name, status), _heartbeat(snapshot, name))


def _fresh(device: Device, uuids: dict[str, str]) -> Device:
    mig = device.mig
    if mig is not None and mig.parent_uuid:
        mig = mig.model_copy(update={"parent_uuid": uuids.get(mig.parent_uuid, mig.parent_uuid)})
    return device.model_copy(update={"uuid": uuids[device.uuid], "health": Health(), "incidents": (), "mig": mig})


def _status(name: str, report: GpuNodeStatusReport) -> GpuNodeStatus:
    metadata = ObjectMeta(name=name, uid=f"uid-of-report-{name}")
    return GpuNodeStatus(metadata=metadata, spec=GpuNodeStatusSpec(), status=report)


def _heartbeat(snapshot: ClusterSnapshot, name: str) -> Lease:
    return Lease(Metadata(name), LeaseSpec(holder_identity=name, renew_time=snapshot.taken_at))
