"""Builders of pods, reports, Leases and claims: JSON for a real API server, thin objects for pure code.

Every field has a default. Thin objects are always decoded from the JSON, so a test cannot have an object that the API
server would never send.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from atoll.api import names
from atoll.api.claims import GpuClaim
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.allocations import Allocation, allocation_annotations
from atoll.cluster.leases import Holder, Reservation, lease_body
from atoll.cluster.machines import NodeDevices, node_devices
from atoll.cluster.objects import Lease, Pod, decode_lease, decode_pod
from topology.profiles import profile as known_machine

NOW = "2026-01-31T12:00:00.000000Z"
LATER = "2026-01-31T12:01:00.000000Z"


def uuid_of(node: str, number: int) -> str:
    """Return the uuid that `make_report` gives to the device with this id."""
    return f"GPU-{node}-{number:04d}"


def pod_json(
    name: str = "p",
    *,
    namespace: str = "team",
    uid: str | None = None,
    gpus: int | Mapping[str, int] | None = 1,
    resource: str = names.GPU_RESOURCE,
    containers: Sequence[str] = ("main",),
    init_containers: Sequence[str | Mapping[str, Any]] = (),
    claim: GpuClaim | None = None,
    node: str = "",
    allocation: Allocation | None = None,
    annotations: Mapping[str, str] | None = None,
    phase: str = "Pending",
    version: str = "1",
    deleted: bool = False,
    labels: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod. `gpus`: a count for the first container, or a count per container; None for a pod without GPUs."""
    counts = gpus if isinstance(gpus, Mapping) else {} if gpus is None else {containers[0]: gpus}
    claim_keys = {} if claim is None else {names.CLAIM: claim.metadata.name, names.CLAIM_UID: claim.metadata.uid}
    allocated = {} if allocation is None else allocation_annotations(allocation, ())
    inits = [{"name": entry} if isinstance(entry, str) else dict(entry) for entry in init_containers]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid if uid is not None else f"uid-of-{name}",
            "resourceVersion": version,
            "annotations": {**claim_keys, **allocated, **(annotations or {})},
            **({"deletionTimestamp": "2026-01-31T12:00:00Z"} if deleted else {}),
            **({"labels": dict(labels)} if labels else {}),
        },
        "spec": {
            "schedulerName": names.SCHEDULER_NAME,
            "containers": [_container({"name": container}, counts, resource) for container in containers],
            "initContainers": [_container(container, counts, resource) for container in inits],
            **({"nodeName": node} if node else {}),
            **spec,
        },
        "status": {"phase": phase},
    }


def make_pod(name: str = "p", **options: Any) -> Pod:
    """Return a pod as the mirror stores it; options as for `pod_json`."""
    return decode_pod(orjson.dumps(pod_json(name, **options)))


def creatable(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod as a user can POST it: without fields that only the server sets, and valid for the server."""
    metadata = {key: pod["metadata"][key] for key in ("name", "namespace", "annotations")}
    containers = [{**container, "image": "localhost/pause:1"} for container in pod["spec"]["containers"]]
    return {**pod, "metadata": metadata, "spec": {**pod["spec"], "containers": containers}, "status": {}}


def _container(container: Mapping[str, Any], counts: Mapping[str, int], resource: str) -> dict[str, Any]:
    count = counts.get(container["name"])
    if count is None:
        return dict(container)
    quantities = {resource: str(count)}
    return {**container, "resources": {"requests": quantities, "limits": quantities}}


def claim_json(name: str = "c", *, namespace: str = "team", uid: str | None = None, **devices: Any) -> dict[str, Any]:
    """Return a GpuClaim; `devices` are JSON fields of spec.devices, `spec` adds other fields of the spec."""
    extra = devices.pop("spec", {})
    return {
        "apiVersion": names.API_VERSION,
        "kind": "GpuClaim",
        "metadata": {"name": name, "namespace": namespace, "uid": uid if uid is not None else f"uid-of-{name}"},
        "spec": {"devices": {"count": 1, **devices}, **extra},
    }


def make_claim(name: str = "c", **options: Any) -> GpuClaim:
    """Return a GpuClaim; options as for `claim_json`."""
    return GpuClaim.model_validate(claim_json(name, **options))


def report_json(
    node: str = "n1",
    profile: str = "dgx1-v100",
    *,
    ids: Sequence[int] | None = None,
    indices: Sequence[int] | None = None,
    uuids: Mapping[int, str] | None = None,
    cordoned: Sequence[int] = (),
    sick: Sequence[int] = (),
    version: str = "1",
    node_uid: str | None = None,
    boot: str = "boot-1",
    devices: Mapping[int, Mapping[str, Any]] | None = None,
    status: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the report of a known machine. `ids` is by position, everything else by device id.

    `devices` overrides JSON fields of single devices, `status` JSON fields of the report.
    """
    known = known_machine(profile)
    geometry = known.machine
    numbers = list(ids) if ids is not None else list(range(geometry.count))
    uuid_by_id = {number: (uuids or {}).get(number, uuid_of(node, number)) for number in numbers}
    entries = [
        {
            "id": number,
            "uuid": uuid_by_id[number],
            "model": known.model,
            "productName": known.product_name,
            "memoryBytes": known.memory_bytes,
            "computeCapability": known.compute_capability,
            "numaNode": geometry.numa[position],
            "index": indices[position] if indices is not None else position,
            "vendor": geometry.vendor,
            "health": {"state": "unhealthy" if number in sick else "healthy"},
            **(devices or {}).get(number, {}),
        }
        for position, number in enumerate(numbers)
    ]
    links = {"nvlink": geometry.links, "pcie": geometry.pcie or (), "nvswitch": geometry.nvswitch}
    known_links = {
        "nvlinkGeneration": geometry.nvlink_generation,
        "linkGBps": geometry.link_gbps,
        "pcieGeneration": geometry.pcie_generation,
        "interSocketGBps": geometry.inter_socket_gbps,
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": "GpuNodeStatus",
        "metadata": {"name": node, "uid": f"uid-of-report-{node}", "resourceVersion": version},
        "spec": {"cordons": [{"uuid": uuid_by_id[number]} for number in cordoned]},
        "status": {
            "bootId": boot,
            "nodeUid": node_uid if node_uid is not None else f"uid-of-{node}",
            "devices": entries,
            "links": {**links, **{key: value for key, value in known_links.items() if value is not None}},
            **(status or {}),
        },
    }


def make_report(node: str = "n1", profile: str = "dgx1-v100", **options: Any) -> GpuNodeStatus:
    """Return the report of a known machine; options as for `report_json`."""
    return GpuNodeStatus.model_validate_json(orjson.dumps(report_json(node, profile, **options)))


def make_devices(node: str = "n1", profile: str = "dgx1-v100", **options: Any) -> NodeDevices:
    """Return the devices of a report; options as for `report_json`."""
    devices = node_devices(make_report(node, profile, **options))
    assert devices is not None
    return devices


def make_allocation(node: str, *ids: int) -> Allocation:
    """Return the allocation of these device ids, with the uuids of `make_report`."""
    return Allocation(node, ids, tuple(uuid_of(node, number) for number in ids))


def make_reservation(node: str = "n1", *, holder: Holder | None = None, attempt: str = "token") -> Reservation:
    """Return the reservation of a bind attempt."""
    return Reservation(
        node=node,
        node_uid=f"uid-of-{node}",
        holder=holder or Holder("team", "p", "uid-of-p"),
        claim="",
        attempt=attempt,
        now=NOW,
        deadline=LATER,
    )


def lease_json(
    node: str = "n1",
    device_id: int = 0,
    *,
    uuid: str | None = None,
    holder: Holder | None = None,
    attempt: str = "token",
    version: str = "1",
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a GPU Lease as bind writes it."""
    reservation = make_reservation(node, holder=holder, attempt=attempt)
    body = lease_body(reservation, device_id, uuid if uuid is not None else uuid_of(node, device_id))
    body["metadata"].update(uid=f"uid-of-{body['metadata']['name']}", resourceVersion=version)
    body["metadata"]["annotations"].update(annotations or {})
    return body


def make_lease(node: str = "n1", device_id: int = 0, **options: Any) -> Lease:
    """Return a GPU Lease; options as for `lease_json`."""
    return decode_lease(orjson.dumps(lease_json(node, device_id, **options)))
