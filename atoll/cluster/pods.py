"""What Atoll reads from a pod: claim, GPU counts per container, phase. Only this module knows where a pod has it."""

from atoll.api import names
from atoll.cluster.leases import Holder
from atoll.cluster.objects import Container, ContainerStatus, Pod

TERMINAL_PHASES = ("Succeeded", "Failed")
ENDED_BY_KUBELET = ("PodFailed", "PodCompleted")
"""Reasons of the Ready condition that only kubelet writes, once it has decided to run nothing of the pod again."""


def holder_of(pod: Pod) -> Holder:
    """Return the identity under which the pod holds Leases."""
    return Holder(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid)


def claim_name(pod: Pod) -> str:
    """Return the GpuClaim that the pod names, or an empty text."""
    return pod.metadata.annotations.get(names.CLAIM, "")


def is_gpu_pod(pod: Pod) -> bool:
    """Tell whether the pod concerns Atoll: it names a claim, asks for our resource, or carries an allocation."""
    annotations = pod.metadata.annotations
    return names.CLAIM in annotations or names.ALLOCATED in annotations or asks_for_gpus(pod)


def asks_for_gpus(pod: Pod) -> bool:
    """Tell whether any container names one of our resources, as kube-scheduler's managedResources would."""
    return any(
        resource == names.GPU_RESOURCE or resource.startswith(names.MIG_RESOURCE_PREFIX)
        for container in (*pod.spec.init_containers, *pod.spec.containers)
        for resource in (*container.resources.limits, *container.resources.requests)
    )


def container_count(container: Container, resource: str) -> int:
    """Return how many devices the container itself asks for; 0 when none, or when the quantity is no whole number."""
    resources = container.resources
    value = resources.limits.get(resource)
    if value is None:
        value = resources.requests.get(resource)
        if value is None:
            return 0
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0


def device_counts(pod: Pod, resource: str = names.GPU_RESOURCE) -> tuple[tuple[str, int], ...]:
    """Return (container, count) of the containers that ask for some, in the pod's order, sidecars before the others.

    Ordinary init containers do not count: the webhook refuses a request of their own.
    """
    return tuple(
        (container.name, count)
        for container in _counted_containers(pod)
        if (count := container_count(container, resource)) > 0
    )


def device_count(pod: Pod, resource: str = names.GPU_RESOURCE) -> int:
    """Return how many devices the containers ask for together."""
    counted = _counted_containers(pod)
    if len(counted) == 1:
        return container_count(counted[0], resource)
    return sum(container_count(container, resource) for container in counted)


def _counted_containers(pod: Pod) -> tuple[Container, ...]:
    inits = pod.spec.init_containers
    if not inits:
        return pod.spec.containers
    return (*(container for container in inits if container.restart_policy == "Always"), *pod.spec.containers)


def has_own_counts(pod: Pod, resource: str = names.GPU_RESOURCE) -> bool:
    """Tell whether the containers asked for devices themselves, so that each sees its own part and the others none.

    The webhook marks such a pod by a request of 0 on the containers that did not ask; in every other pod the count
    stands on one container and all of them see the whole set.
    """
    containers = (*pod.spec.init_containers, *pod.spec.containers)
    return sum(1 for container in containers if resource in container.resources.limits) > 1


def all_container_names(pod: Pod) -> tuple[str, ...]:
    """Return the names of init and regular containers."""
    return tuple(container.name for container in (*pod.spec.init_containers, *pod.spec.containers))


def is_terminal(pod: Pod) -> bool:
    """Tell whether the phase is Succeeded or Failed; that alone is no proof that its containers ended."""
    return pod.status.phase in TERMINAL_PHASES


def may_be_preempted(pod: Pod) -> bool:
    """Return whether a pod of a higher priority may preempt it: it has not opted out, and is not a static pod."""
    return pod.metadata.labels.get(names.PREEMPTIBLE) != "false" and names.MIRROR not in pod.metadata.annotations


def is_waiting(pod: Pod) -> bool:
    """Tell whether kube-scheduler may still place the pod: no node, not ending, not gated."""
    return is_unplaced(pod) and not pod.spec.scheduling_gates


def is_unplaced(pod: Pod) -> bool:
    """Tell whether the pod may still get a node, gated or not."""
    return not pod.spec.node_name and not is_terminal(pod) and pod.metadata.deletion_timestamp is None


def container_statuses(pod: Pod) -> tuple[ContainerStatus, ...]:
    """Return the statuses of all containers that kubelet listed."""
    status = pod.status
    return (*status.init_container_statuses, *status.container_statuses, *status.ephemeral_container_statuses)
