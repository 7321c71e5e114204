"""How many GPUs the Node object offers to kube-scheduler, quotas and autoscalers.

In: the report, the Node, the pods of the node. Out: the patch of the Node's status, or None. Pure. The rules:

* every GPU on record counts, sick ones too: the extender refuses those, while a smaller number would make the kubelet
  fail pods that already run when it starts again;
* never less than the running pods ask for, whatever the report says;
* never 0: to withdraw, the key is deleted, because the kubelet fails running pods at 0 and ignores an absent resource;
* capacity and allocatable are equal, because the kubelet computes the one from the other, and both are written at once;
* cards in MIG mode count as no GPU; their instances are counted by profile, each profile under its own resource. A
  profile that nobody offers any more is withdrawn.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from atoll.api import names
from atoll.api.node_status import GpuNodeStatusReport
from atoll.cluster.objects import Node, Pod
from atoll.cluster.pods import container_count, device_count, is_terminal


def offer(report: GpuNodeStatusReport) -> dict[str, int]:
    """Resource to count, as the report has it."""
    whole = sum(device.mig is None or not (device.mig.enabled or device.mig.profile) for device in report.devices)
    profiles = Counter(device.mig.profile for device in report.devices if device.mig is not None and device.mig.profile)
    return {names.GPU_RESOURCE: whole} | {names.mig_resource(one): count for one, count in sorted(profiles.items())}


def with_withdrawn(offered: Mapping[str, int], node: Node) -> dict[str, int]:
    """What is offered, with 0 for every MIG resource that the Node still shows and the machine has no more."""
    shown = (*node.status.capacity, *node.status.allocatable)
    return dict.fromkeys((name for name in shown if name.startswith(names.MIG_RESOURCE_PREFIX)), 0) | dict(offered)


def in_use(pods: Iterable[Pod], resources: Iterable[str]) -> dict[str, int]:
    """Resource to count, as the pods of the node that may still run ask for it; init containers as the kubelet does."""
    running = [pod for pod in pods if not is_terminal(pod)]
    return {resource: sum(_request(pod, resource) for pod in running) for resource in resources}


def capacity_patch(node: Node, *, offered: Mapping[str, int], used: Mapping[str, int]) -> dict[str, Any] | None:
    """Merge patch of the Node's status that makes it offer what is there; None when it does already."""
    wanted = {name: max(count, used.get(name, 0)) for name, count in offered.items()}
    capacity = _changes(node.status.capacity, wanted)
    allocatable = _changes(node.status.allocatable, wanted)
    if not capacity and not allocatable:
        return None
    return {"status": {"capacity": capacity, "allocatable": allocatable}}


def _request(pod: Pod, resource: str) -> int:
    """What the kubelet counts for a pod: its containers together, or its hungriest init container if that is more."""
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
