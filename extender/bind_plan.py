"""What a bind would do: the devices, the values its containers get, the Binding that carries them.

Pure: takes the ledger, a pod and its request; returns a BindPlan or a Rejection, and the body of the Binding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.api.node_status import Device
from atoll.cluster import pods
from atoll.cluster.allocations import (
    ANNOTATIONS_BYTES_MAX,
    Allocation,
    ContainerDevices,
    allocation_annotations,
    pod_annotations_bytes,
)
from atoll.cluster.ledger import Ledger
from atoll.cluster.machines import NodeDevices
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request
from atoll.cluster.selection import select
from atoll.cluster.verdicts import why_unseen
from topology.demand import PRIOR, Demand
from topology.split import split


@dataclass(frozen=True, slots=True)
class BindPlan:
    """The GPUs of one pod on one node, the annotations that tell its containers, and how good the set is: 0 to 1
    against the best of its size on the empty machine."""

    allocation: Allocation
    annotations: dict[str, str]
    relative_quality: float = 1.0


def plan_on_node(
    pod: Pod,
    node: str,
    request: Request,
    ledger: Ledger,
    default_mode: VisibleDevices,
    *,
    lost: frozenset[str],
    now_seconds: float,
) -> BindPlan | Rejection:
    """Choose devices of `node` as the ledger sees it now, without those whose uuid is in `lost`.

    A member of a gang may take only what the admission of its gang reserved for it there.
    """
    devices, uid = ledger.nodes.get(node), pod.metadata.uid
    if devices is None:
        return Rejection(why_unseen(node, ledger))
    free = ledger.free(
        node,
        now_seconds=now_seconds,
        asking_uid=uid,
        asking_priority=pod.spec.priority,
        asking_reservation=request.reservation,
    )
    free &= ~devices.mask_of((), lost)
    if names.GANG in pod.metadata.annotations:
        held = ledger.leases_of(uid)
        free &= devices.mask_of((), frozenset(record.device_uuid for record in held if record.node == node))
    return plan_bind(pod, devices, free, request, default_mode, ledger.demand)


def plan_bind(
    pod: Pod,
    devices: NodeDevices,
    free: int,
    request: Request,
    default_mode: VisibleDevices,
    demand: Demand = PRIOR,
) -> BindPlan | Rejection:
    """Choose devices for `pod` among the `free` ones (bit mask over positions), by the demand that filter judged by."""
    candidate = select(devices, free, request, demand)
    if isinstance(candidate, Rejection):
        return candidate
    positions = candidate.choice.positions
    chosen = [devices.devices[position] for position in positions]
    allocation = Allocation(devices.node, tuple(d.id for d in chosen), tuple(d.uuid for d in chosen))
    mode = request.visible_devices or default_mode
    isolates = pod.spec.runtime_class_name == names.RUNTIME_CLASS
    containers = tuple(
        ContainerDevices(container, _cuda_value(part, mode, isolates=isolates), ",".join(d.uuid for d in part))
        for container, part in _parts(pod, devices, positions, request)
    )
    annotations = allocation_annotations(allocation, containers)
    if not fits_annotations(pod, annotations):
        return Rejection(names.REJECT_ANNOTATIONS)
    return BindPlan(allocation, annotations, candidate.choice.relative_quality)


def fits_annotations(pod: Pod, added: Mapping[str, str]) -> bool:
    """Tell whether the pod may have these annotations too; a Binding alone would be let pass with too many."""
    return pod_annotations_bytes(pod, added) <= ANNOTATIONS_BYTES_MAX


def _parts(
    pod: Pod, devices: NodeDevices, positions: tuple[int, ...], request: Request
) -> list[tuple[str, list[Device]]]:
    if not request.container_counts:
        whole = [devices.devices[position] for position in positions]
        return [(container, whole) for container in pods.all_container_names(pod)]
    counts = tuple(count for _, count in request.container_counts)
    parts = split(devices.machine, positions, counts)
    return [
        (container, [devices.devices[position] for position in part])
        for (container, _), part in zip(request.container_counts, parts, strict=True)
    ]


def _cuda_value(part: list[Device], mode: VisibleDevices, *, isolates: bool) -> str:
    """Return CUDA_VISIBLE_DEVICES: uuids, or numbers where the claim wants them; MIG instances always by uuid.

    Where the runtime isolates, the container sees only its own devices and counts them from 0.
    """
    if mode is VisibleDevices.UUID or any(device.mig is not None and device.mig.profile for device in part):
        return ",".join(device.uuid for device in part)
    if isolates:
        return ",".join(str(number) for number in range(len(part)))
    return ",".join(str(device.index) for device in part)


def binding_body(pod: Pod, node: str, annotations: dict[str, str], resource_version: str) -> dict[str, Any]:
    """Return the fenced Binding: it lands only on this uid, and only while the pod is as it was read."""
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": pod.metadata.name,
            "namespace": pod.metadata.namespace,
            "uid": pod.metadata.uid,
            "resourceVersion": resource_version,
            "annotations": annotations,
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
