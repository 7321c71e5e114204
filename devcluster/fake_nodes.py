"""Thousands of fake nodes for benchmarks: Node objects without a machine, whose pods kwok marks as running.

Returns Node objects, and kwok's stages for their pods. Pods end as under kubelet: first every container terminates,
then the object is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from devcluster.api import AdminRequest

Labels = Mapping[str, str] | Callable[[int], Mapping[str, str]]

FAKE_ANNOTATION = "kwok.x-k8s.io/node"
KWOK = "kwok"
"""User as which kwok simulates kubelets; not a node's, so that it can have rights on all of them."""
DEFAULT_ALLOCATABLE = {"cpu": "128", "memory": "1Ti", "pods": "256"}

_CONDITIONS = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
_CONTAINERS = """
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  restartCount: 0
  STATE
{{ end }}
"""
_RUNNING = 'ready: true\n  started: true\n  state: {running: {startedAt: "{{ Now }}"}}'
_TERMINATED = (
    'ready: false\n  started: false\n  state: {terminated: {exitCode: 0, reason: Completed, finishedAt: "{{ Now }}"}}'
)
_READY = """
conditions:
{{ range (list "Initialized" "Ready" "ContainersReady") }}
- {type: {{ . | Quote }}, status: "True", lastTransitionTime: "{{ Now }}"}
{{ end }}
"""
_DONE = """
conditions:
{{ range (list "Ready" "ContainersReady") }}
- {type: {{ . | Quote }}, status: "False", reason: PodCompleted, lastTransitionTime: "{{ Now }}"}
{{ end }}
"""


def node_requests(count: int, *, prefix: str, labels: Labels, allocatable: Mapping[str, str]) -> Iterator[AdminRequest]:
    """Yield one request per node; labels may depend on the node's number, from 0."""
    for number in range(count):
        own = labels(number) if callable(labels) else labels
        body = node_object(f"{prefix}-{number}", labels=own, allocatable=allocatable)
        yield AdminRequest(method="POST", path="/api/v1/nodes", body=body)


def node_object(name: str, *, labels: Mapping[str, str], allocatable: Mapping[str, str]) -> dict[str, Any]:
    """Return a Node that is Ready from the start; `allocatable` overrides or extends the default resources."""
    resources = {**DEFAULT_ALLOCATABLE, **allocatable}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **labels},
            "annotations": {FAKE_ANNOTATION: "fake"},
        },
        "status": {
            "allocatable": resources,
            "capacity": resources,
            "conditions": [{"type": kind, "status": status} for kind, status in _CONDITIONS.items()],
            "nodeInfo": dict.fromkeys(
                (
                    "architecture",
                    "bootID",
                    "containerRuntimeVersion",
                    "kernelVersion",
                    "kubeProxyVersion",
                    "kubeletVersion",
                    "machineID",
                    "operatingSystem",
                    "osImage",
                    "systemUUID",
                ),
                "fake",
            ),
        },
    }


def rights() -> dict[str, Any]:
    """Return the binding that lets kwok manage the pods of all fake nodes."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": KWOK},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": KWOK}],
    }


def stages() -> str:
    """Return kwok's configuration: start pods, end pods that are being deleted, remove ended ones."""
    deleted = _selector(".metadata.deletionTimestamp", "Exists")
    alive = _selector(".metadata.deletionTimestamp", "DoesNotExist")
    running = f"phase: Running\n{_READY}{_CONTAINERS.replace('STATE', _RUNNING)}"
    ended = f"phase: Succeeded\n{_DONE}{_CONTAINERS.replace('STATE', _TERMINATED)}"
    rows = [
        _stage("pod-starts", [alive, _phase_in("Pending")], {"statusTemplate": running}),
        _stage("pod-ends", [deleted, _phase_in("Pending", "Running")], {"statusTemplate": ended}),
        _stage("pod-goes", [deleted, _phase_in("Succeeded", "Failed")], {"delete": True}),
        # kwok manages pods only if nodes have a stage too. Our nodes are created Ready, so this stage never applies.
        _stage("node-stays", [deleted], {"delete": True}, kind="Node"),
    ]
    return yaml.safe_dump_all(rows)


def _stage(
    name: str, conditions: list[dict[str, Any]], following: dict[str, Any], *, kind: str = "Pod"
) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": conditions},
            "next": following,
        },
    }


def _phase_in(*phases: str) -> dict[str, Any]:
    return _selector(".status.phase", "In", list(phases))


def _selector(key: str, operator: str, values: list[str] | None = None) -> dict[str, Any]:
    return {"key": key, "operator": operator, **({"values": values} if values else {})}
