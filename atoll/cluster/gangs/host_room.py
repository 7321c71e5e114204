"""What kube-scheduler counts on a node: cpu, memory, room for pods, extended resources.

In: a node, its pods, a pod. Out: whole units by resource: cpu in thousandths, memory and storage in bytes, the rest as
counted. Only requests count, as in kube-scheduler: the sum over containers and sidecars, or the largest init container
beside the sidecars before it, plus the pod's overhead.
"""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from atoll.cluster import pods
from atoll.cluster.objects import Container, Node, Pod

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip


@lru_cache(maxsize=4096)
def units(resource: str, quantity: str | float) -> int:
    """Return a quantity in whole units, rounded up; 0 for what is none: the API server has checked it."""
    text = str(quantity).strip()
    number = text.rstrip("numkKMGTPEi")
    suffix = text[len(number) :]
    try:
        value = Decimal(number) * _SUFFIXES[suffix]
    except (InvalidOperation, KeyError):
        return 0
    return math.ceil(value * 1000) if resource == "cpu" else math.ceil(value)


def needs_of(pod: Pod) -> dict[str, int]:
    """Return what kube-scheduler counts for a pod; `pods` is one."""
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in pod.spec.init_containers:
        wanted = _requests(container)
        if container.restart_policy == "Always":
            _add(sidecars, wanted)
            _raise(peak, sidecars)
        else:
            _raise(peak, _sum(sidecars, wanted))
    needs = dict(sidecars)
    for container in pod.spec.containers:
        _add(needs, _requests(container))
    _raise(needs, peak)
    needs["pods"] = 1
    return {resource: amount for resource, amount in needs.items() if amount}


def free_of(node: Node, occupants: Iterable[Pod]) -> dict[str, int]:
    """Return what is left on a node beside its pods; those that have ended hold nothing."""
    left = {resource: units(resource, amount) for resource, amount in node.status.allocatable.items()}
    for pod in occupants:
        if pods.is_terminal(pod):
            continue
        for resource, amount in needs_of(pod).items():
            left[resource] = left.get(resource, 0) - amount
    return {resource: max(0, amount) for resource, amount in left.items()}


def _requests(container: Container) -> dict[str, int]:
    resources = container.resources
    return {name: units(name, amount) for name, amount in {**resources.limits, **resources.requests}.items()}


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for resource, amount in more.items():
        total[resource] = total.get(resource, 0) + amount


def _raise(total: dict[str, int], least: Mapping[str, int]) -> None:
    for resource, amount in least.items():
        total[resource] = max(total.get(resource, 0), amount)


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    total = dict(one)
    _add(total, other)
    return total
