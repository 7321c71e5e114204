"""Which nodes kube-scheduler would refuse a pod, GPUs aside.

It gives a short constant reason per refused node, a preference per liked or disliked one, and the counted resources
that a pod needs and a node has left.

It follows kube-scheduler's filters: NodeUnschedulable, TaintToleration, NodeAffinity (with the node selector),
NodeResourcesFit, NodePorts, InterPodAffinity, VolumeBinding and VolumeZone. Spreading constraints are in
atoll.cluster.spread; preferred pod affinity is left to kube-scheduler. A node that is not Ready is refused even before
it is tainted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from atoll.api import names
from atoll.cluster.labels import holds
from atoll.cluster.objects import (
    Container,
    ContainerStatus,
    Node,
    NodeSelector,
    NodeSelectorTerm,
    Pod,
    Requirement,
    Taint,
    Toleration,
)
from atoll.cluster.pod_fit import NEIGHBOURS, PodNeighbours
from atoll.cluster.pods import container_statuses, is_terminal
from atoll.cluster.quantities import parse_amount
from atoll.cluster.volume_fit import Volumes, volume_requirements

NOT_READY: Final = "not ready"
CORDONED: Final = "cordoned"
TAINTED: Final = "untolerated taint"
SELECTOR: Final = "node selector"
AFFINITY: Final = "node affinity"
PORTS: Final = "host port in use"
VOLUME: Final = "volume in another zone"
REASONS: Final = (NOT_READY, CORDONED, TAINTED, SELECTOR, AFFINITY, PORTS, VOLUME, NEIGHBOURS)

PODS: Final = "pods"
EVERY_ADDRESS: Final = "0.0.0.0"  # noqa: S104 the wildcard of the API
RESIZE_PENDING: Final = "PodResizePending"
UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"
"""Taint of a cordoned node: it comes and goes with the cordon."""
STATE_TAINTS: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Prefixes of taints that tell how a node is, and go when it is well."""
_UNSCHEDULABLE: Final = Taint(key=UNSCHEDULABLE, effect="NoSchedule")
_GPU_LABELS: Final = ("nvidia.com/gpu.present", "amd.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")
_GPU_RESOURCES: Final = (names.GPU_RESOURCE, "nvidia.com/gpu", "amd.com/gpu")
_DISLIKED: Final = 1000
"""One PreferNoSchedule taint outweighs every preferred affinity (100 at most each) that a pod sensibly has."""


def excluded_nodes(
    pod: Pod,
    nodes: Sequence[Node],
    pods_by_node: Mapping[str, Sequence[Pod]],
    *,
    volumes: Volumes | None = None,
    namespace_labels: Mapping[str, Mapping[str, str]] | None = None,
    mates: Sequence[Pod] = (),
) -> dict[str, str]:
    """Return the nodes that would refuse `pod` whatever it needs of counted resources, each with the first reason.
    `mates`: pods that start together with it."""
    reachable = volume_requirements(pod, volumes or Volumes())
    neighbours = PodNeighbours.of(pod, nodes, pods_by_node, namespace_labels or {}, mates)
    refused: dict[str, str] = {}
    for node in nodes:
        reason = node_reason(pod, node)
        if not reason and not all(matches_terms(terms, node) for terms in reachable):
            reason = VOLUME
        if not reason and ports_clash(pod, pods_by_node.get(node.metadata.name, ())):
            reason = PORTS
        if not reason and neighbours.refuse(node):
            reason = NEIGHBOURS
        if reason:
            refused[node.metadata.name] = reason
    return refused


def node_reason(pod: Pod, node: Node) -> str:
    """Return why the node alone refuses the pod; empty when it does not."""
    if not is_ready(node):
        return NOT_READY
    if node.spec.unschedulable and not tolerates(pod.spec.tolerations, _UNSCHEDULABLE):
        return CORDONED
    if is_tainted(pod, node):
        return TAINTED
    return _unwanted(pod, node)


def is_tainted(pod: Pod, node: Node) -> bool:
    """Tell whether one of the node's taints keeps the pod off."""
    return any(taint.effect in ("NoSchedule", "NoExecute") for taint in untolerated(pod, node))


def is_wanted(pod: Pod, node: Node) -> bool:
    """Tell whether the pod's node selector and required node affinity choose the node."""
    return not _unwanted(pod, node)


def _unwanted(pod: Pod, node: Node) -> str:
    labels = node.metadata.labels
    if any(labels.get(key) != value for key, value in pod.spec.node_selector.items()):
        return SELECTOR
    required = required_affinity(pod)
    if required is not None and not matches_terms(required.node_selector_terms, node):
        return AFFINITY
    return ""


def required_affinity(pod: Pod) -> NodeSelector | None:
    """Return the node affinity that the pod requires."""
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity is not None else None
    return affinity.required_during_scheduling_ignored_during_execution if affinity is not None else None


def is_ready(node: Node) -> bool:
    """Tell whether kubelet says that it is; a Node of which nobody has said anything is taken for ready."""
    return next((row.status for row in node.status.conditions if row.type == "Ready"), "True") == "True"


def opened(node: Node) -> Node:
    """Return the node as it is once it is ready and open: no cordon, no taints of its state."""
    if is_ready(node) and not node.spec.unschedulable and not any(tells_state(taint) for taint in node.spec.taints):
        return node
    taints = tuple(taint for taint in node.spec.taints if not tells_state(taint))
    conditions = tuple(row for row in node.status.conditions if row.type != "Ready")
    return msgspec.structs.replace(
        node,
        spec=msgspec.structs.replace(node.spec, unschedulable=False, taints=taints),
        status=msgspec.structs.replace(node.status, conditions=conditions),
    )


def may_have_gpus(node: Node) -> bool:
    """Tell whether a node says that it has GPUs, by a label of feature discovery or by a resource."""
    labels, resources = node.metadata.labels, node.status.allocatable
    return any(labels.get(key) == "true" for key in _GPU_LABELS) or any(
        resources.get(key, "0") not in ("0", 0) for key in _GPU_RESOURCES
    )


def preference(pod: Pod, node: Node) -> int:
    """Return how much the pod likes the node: weights of preferred node affinity, less for soft taints."""
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity is not None else None
    preferred = affinity.preferred_during_scheduling_ignored_during_execution if affinity is not None else ()
    liked = sum(row.weight for row in preferred if matches_terms((row.preference,), node))
    return liked - _DISLIKED * sum(taint.effect == "PreferNoSchedule" for taint in untolerated(pod, node))


def untolerated(pod: Pod, node: Node) -> tuple[Taint, ...]:
    """Return the node's taints that the pod does not endure."""
    return _untolerated(pod.spec.tolerations, node.spec.taints) if node.spec.taints else ()


@lru_cache(maxsize=1024)
def _untolerated(tolerations: tuple[Toleration, ...], taints: tuple[Taint, ...]) -> tuple[Taint, ...]:
    """The nodes of a cluster have few different sets of taints."""
    return tuple(taint for taint in taints if not tolerates(tolerations, taint))


def tells_state(taint: Taint) -> bool:
    """Tell whether a taint says how the node is, instead of who should keep off it."""
    return taint.key.startswith(STATE_TAINTS)


def tolerates(tolerations: Iterable[Toleration], taint: Taint) -> bool:
    """Tell whether one of the tolerations matches the taint; an empty key with Exists matches every taint."""
    return any(
        row.effect in ("", taint.effect)
        and (row.key == taint.key or (not row.key and row.operator == "Exists"))
        and _endures(row, taint.value)
        for row in tolerations
    )


def _endures(row: Toleration, value: str) -> bool:
    """Tell whether a toleration means a taint's value. Where kube-scheduler lacks Gt and Lt, no pod has them."""
    if row.operator in ("Gt", "Lt"):
        is_number = value.removeprefix("-").isdecimal() and value == str(int(value))
        return is_number and holds(Requirement("", row.operator, (row.value,)), {"": value})
    return row.operator == "Exists" or (row.operator in ("", "Equal") and row.value == value)


def matches_terms(terms: Iterable[NodeSelectorTerm], node: Node) -> bool:
    """Tell whether one of the terms matches; a term without conditions matches nothing."""
    fields = {"metadata.name": node.metadata.name}
    return any(
        (term.match_expressions or term.match_fields)
        and all(holds(row, node.metadata.labels) for row in term.match_expressions)
        and all(holds(row, fields) for row in term.match_fields)
        for term in terms
    )


def needs(pod: Pod) -> dict[str, int]:
    """Return what one pod takes of counted resources, cpu in thousandths, and one of `pods`.

    As kube-scheduler counts: the sum of the containers, sidecars with them, or what a single init container needs
    beside the sidecars started before it, whichever is more; pod-level requests instead where they are given; and
    overhead. While a container is resized it counts the maximum of requested, allocated and actual resources; a request
    that the kubelet found infeasible does not count.
    """
    total: dict[str, int] = {}
    told = {status.name: status for status in container_statuses(pod) if status.resources is not None}
    asks = not told or not _is_infeasible(pod)
    for container in pod.spec.containers:
        _add(total, _resized(_requests(container), told.get(container.name), asks=asks))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in pod.spec.init_containers:
        own = _requests(container)
        if container.restart_policy == "Always":
            _add(sidecars, _resized(own, told.get(container.name), asks=asks))
            own = {}
        for resource in own.keys() | sidecars.keys():
            peak[resource] = max(peak.get(resource, 0), own.get(resource, 0) + sidecars.get(resource, 0))
    _add(total, sidecars)
    for resource, amount in peak.items():
        total[resource] = max(total.get(resource, 0), amount)
    if pod.spec.resources is not None:
        total.update(_amounts(pod.spec.resources.requests))
    _add(total, _amounts(pod.spec.overhead))
    total[PODS] = 1
    return total


def free(node: Node, pods: Iterable[Pod], needs_of: Callable[[Pod], Mapping[str, int]] | None = None) -> dict[str, int]:
    """Return what is left on a node beside its pods; those that have ended do not count, those that are ending do.
    `needs_of` stands for `needs` where somebody remembers its answers."""
    left = _amounts(node.status.allocatable)
    for pod in pods:
        if not is_terminal(pod):
            for resource, amount in (needs_of or needs)(pod).items():
                left[resource] = left.get(resource, 0) - amount
    return left


def host_ports(pod: Pod) -> tuple[tuple[str, str, int], ...]:
    """Return (protocol, address, port) that the pod opens on its host."""
    containers = (*pod.spec.containers, *(one for one in pod.spec.init_containers if one.restart_policy == "Always"))
    return tuple(
        (port.protocol or "TCP", port.host_ip or EVERY_ADDRESS, port.host_port)
        for container in containers
        for port in container.ports
        if port.host_port > 0
    )


def ports_clash(pod: Pod, others: Iterable[Pod]) -> bool:
    """Tell whether a host port of the pod is taken by one of the others, on its address or on all of them."""
    wanted: dict[tuple[str, int], set[str]] = {}
    for protocol, address, port in host_ports(pod):
        wanted.setdefault((protocol, port), set()).add(address)
    return bool(wanted) and any(
        addresses and (taken == EVERY_ADDRESS or not addresses.isdisjoint((taken, EVERY_ADDRESS)))
        for other in others
        if not is_terminal(other)
        for protocol, taken, port in host_ports(other)
        for addresses in (wanted.get((protocol, port)),)
    )


def _resized(asked: dict[str, int], status: ContainerStatus | None, *, asks: bool) -> dict[str, int]:
    """Return the resources of a container that may be resizing. asks: include its spec's request."""
    if status is None or status.resources is None:
        return asked
    amounts = [_amounts(status.resources.requests), _amounts(status.allocated_resources), *([asked] if asks else [])]
    return {
        resource: max(amount.get(resource, 0) for amount in amounts)
        for resource in {name for amount in amounts for name in amount}
    }


def _is_infeasible(pod: Pod) -> bool:
    """Return whether the kubelet reports that its node can never fit the resized pod."""
    return any(one.type == RESIZE_PENDING and one.reason == "Infeasible" for one in pod.status.conditions)


def _requests(container: Container) -> dict[str, int]:
    """Requests of a container; a limit stands in for a request that is not given."""
    return _amounts({**container.resources.limits, **container.resources.requests})


def _amounts(quantities: Mapping[str, str | int | float]) -> dict[str, int]:
    return {resource: parse_amount(resource, quantity) for resource, quantity in quantities.items()}


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for resource, amount in more.items():
        total[resource] = total.get(resource, 0) + amount
