"""Number of GPUs that the Node object offers to kube-scheduler, quotas and autoscalers.

Makes the patch of the Node's status from the report, the Node and its pods; None if nothing changes. Pure. Rules:

* every GPU on record counts, unhealthy ones too: the extender refuses those, while a smaller number would make a
  restarted kubelet fail pods that already run;
* the number is never less than the running pods ask for, whatever the report says;
* the number is never 0: a resource is withdrawn by deleting its key, because the kubelet fails running pods at 0 and
  ignores an absent resource;
* capacity and allocatable are equal and written together, because the kubelet computes one from the other;
* a card in MIG mode counts as no GPU; its instances are counted under one resource per profile. A profile that no
  card offers any more is withdrawn.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from atoll.api import names
from atoll.api.node_status import GpuNodeStatusReport
from atoll.cluster.objects import Node, Pod
from atoll.cluster.pods import container_count, device_count, is_terminal


def offer(report: GpuNodeStatusReport) -> dict[str, int]:
    """Count per resource by the report."""
    whole = sum(device.mig is None or not (device.mig.enabled or device.mig.profile) for device in report.devices)
    profiles = Counter(device.mig.profile for device in report.devices if device.mig is not None and device.mig.profile)
    return {names.GPU_RESOURCE: whole} | {names.mig_resource(one): count for one, count in sorted(profiles.items())}


def with_withdrawn(offered: Mapping[str, int], node: Node) -> dict[str, int]:
    """Add 0 for every MIG resource that the Node still shows and the machine no longer has."""
    shown = (*node.status.capacity, *node.status.allocatable)
    return dict.fromkeys((name for name in shown if name.startswith(names.MIG_RESOURCE_PREFIX)), 0) | dict(offered)


def in_use(pods: Iterable[Pod], resources: Iterable[str]) -> dict[str, int]:
    """Count per resource requested by the node's unfinished pods; init containers count as in the kubelet."""
    running = [pod for pod in pods if not is_terminal(pod)]
    return {resource: sum(_request(pod, resource) for pod in running) for resource in resources}


def capacity_patch(node: Node, *, offered: Mapping[str, int], used: Mapping[str, int]) -> dict[str, Any] | None:
    """Merge patch that makes the Node's status offer these counts; None if it does already."""
    wanted = {name: max(count, used.get(name, 0)) for name, count in offered.items()}
    capacity = _changes(node.status.capacity, wanted)
    allocatable = _changes(node.status.allocatable, wanted)
    if not capacity and not allocatable:
        return None
    return {"status": {"capacity": capacity, "allocatable": allocatable}}


def _request(pod: Pod, resource: str) -> int:
    """Count for a pod as in the kubelet: the sum of its containers, or its largest init container if that is more."""
    together = device_count(pod, resource)
    return max(together, *(container_count(container, resource) for container in pod.spec.init_containers), 0)


def _changes(now: Mapping[str, str], wanted: Mapping[str, int]) -> dict[str, str | None]:
    changes: dict[str, str | None] = {}
    for name, count in wanted.items():
        if count > 0 and now.get(name) != str(count):
            changes[name] = str(count)
        elif count == 0 and name in now:
            changes[name] = None
    return changes
