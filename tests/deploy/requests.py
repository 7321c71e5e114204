"""Requests to an API server as values, and builders of the pods, Leases and changes in them."""

from dataclasses import dataclass
from typing import Any

from atoll.api import names

PODS = "/api/v1/namespaces/doors/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces"
REPORTS = "/apis/gpu.scheduling/v1/gpunodestatuses"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"
GATE = "gpu.scheduling/gang-admission"
CLAIM_UID = "11111111-2222-3333-4444-555555555555"
ALLOCATION = {
    "gpu.scheduling/allocated": "node-a:0",
    "gpu.scheduling/uuids": "GPU-aaaa",
    "devices.gpu.scheduling/main": "GPU-aaaa",
    "uuids.gpu.scheduling/main": "GPU-aaaa",
}


ALL_GPUS = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
MOUNT = {"volumeMounts": [{"name": "v", "mountPath": "/var/run/nvidia-container-devices/all"}]}
VOLUMES = [{"name": "v", "emptyDir": {}}]
GATES = [{"name": GATE}]
REMOVE_GATE = [{"op": "remove", "path": "/spec/schedulingGates/0"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One request; `policy` is who must refuse it, empty where it must go through."""

    title: str
    path: str
    body: Any = None
    method: str = "PATCH"
    identity: str = "admin"
    content_type: str = "application/json"
    policy: str = ""


def reference(kind: str, container: str) -> dict[str, Any]:
    """Return a variable's source that reads one of Atoll's annotations."""
    return {"fieldRef": {"fieldPath": f"metadata.annotations['{kind}.gpu.scheduling/{container}']"}}


def shaped_container(name: str = "main", gpus: int | None = None) -> dict[str, Any]:
    """Return a container as the webhook leaves it."""
    container: dict[str, Any] = {
        "name": name,
        "image": "none",
        "env": [
            {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": reference("uuids", name)},
            {"name": "CUDA_VISIBLE_DEVICES", "valueFrom": reference("devices", name)},
            *({"name": variable, "value": ""} for variable in names.DRIVER_DEVICE_VARIABLES),
        ],
    }
    if gpus is not None:
        container["resources"] = {"limits": {"gpu.scheduling/gpu": str(gpus)}}
    return container


def plain_container(name: str = "main", **env: str) -> dict[str, Any]:
    """Return a container of somebody who knows nothing of Atoll."""
    return {"name": name, "image": "none", "env": [{"name": key, "value": value} for key, value in env.items()]}


def pod(
    name: str, *containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """Return a pod; without containers a plain one."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {
            "containers": list(containers) or [plain_container()],
            "schedulerName": "nobody",
            "automountServiceAccountToken": False,
            **spec,
        },
    }


def shaped(
    name: str, *containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """Return a claimed pod as the webhook leaves it."""
    claimed = {"gpu.scheduling/claim": "two", "gpu.scheduling/claim-uid": CLAIM_UID}
    return pod(
        name,
        *(containers or [shaped_container(gpus=1)]),
        annotations=claimed if annotations is None else annotations,
        **{"schedulerName": "gpu-scheduler", **spec},
    )


def launcher(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return a member of a gang without GPUs, as the webhook leaves it."""
    gates = [{"name": "gpu.scheduling/gang-admission"}]
    waiting = {"schedulerName": "gpu-scheduler", "schedulingGates": gates}
    return pod("new", *containers, annotations={"gpu.scheduling/gang": "g"}, **{**waiting, **spec})


def binding(name: str, annotations: dict[str, str]) -> dict[str, Any]:
    """Return a Binding of the pod to node-a."""
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": annotations},
        "target": {"kind": "Node", "name": "node-a"},
    }


def eviction(name: str) -> dict[str, Any]:
    """Return an Eviction of the pod."""
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "doors"}}


def lease(name: str, holder: str = "default/p/uid") -> dict[str, Any]:
    """Return a Lease."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": holder},
    }


def report(name: str) -> dict[str, Any]:
    """Return an empty GpuNodeStatus."""
    return {"apiVersion": "gpu.scheduling/v1", "kind": "GpuNodeStatus", "metadata": {"name": name}}


def create(title: str, body: dict[str, Any], *, policy: str = "", namespace: str = "doors", **more: Any) -> Probe:
    """Return the creation of a pod."""
    return Probe(
        title=title, method="POST", path=f"/api/v1/namespaces/{namespace}/pods", body=body, policy=policy, **more
    )


def annotate(title: str, target: str, annotations: dict[str, str | None], *, policy: str = "", **more: Any) -> Probe:
    """Return a change of annotations; `target` may name a subresource."""
    body = {"metadata": {"annotations": annotations}}
    return Probe(title=title, path=f"{PODS}/{target}", body=body, content_type=MERGE, policy=policy, **more)


def debug(title: str, target: str, container: dict[str, Any], *, policy: str = "") -> Probe:
    """Return the addition of an ephemeral container."""
    body = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "none", **container}]}}
    path = f"{PODS}/{target}/ephemeralcontainers"
    return Probe(
        title=title, path=path, body=body, content_type="application/strategic-merge-patch+json", policy=policy
    )


def node_status(
    title: str, node: str, body: dict[str, Any], *, policy: str = "", identity: str = "agent@node-a"
) -> Probe:
    """Return a change of a Node's status."""
    path = f"/api/v1/nodes/{node}/status"
    return Probe(title=title, path=path, body=body, content_type=MERGE, identity=identity, policy=policy)


def shaped_with_env(*extra: dict[str, Any]) -> dict[str, Any]:
    """Return a claimed pod whose container has more variables than the webhook gave it."""
    container = shaped_container(gpus=1)
    return shaped("new", {**container, "env": [*container["env"], *extra]})
