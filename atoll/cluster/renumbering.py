"""Containers whose GPU numbers mean other GPUs since their machine was renumbered.

It finds the containers of a bound pod whose `CUDA_VISIBLE_DEVICES` is wrong by what the agent reports now. Only mode
`index` without an isolating runtime is concerned: uuids stay right, and under the RuntimeClass a container counts its
own GPUs from 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.api import names
from atoll.api.claims import Vendor
from atoll.api.node_status import Device, HealthState
from atoll.cluster import pods
from atoll.cluster.allocations import bound_allocation
from atoll.cluster.errors import MalformedValue
from atoll.cluster.objects import Pod

NUMBER_DIGITS_MAX = 5


@dataclass(frozen=True, slots=True)
class StaleContainer:
    """A container, the driver's numbers that it was told, and those that its GPUs have now, as far as reported."""

    container: str
    told: tuple[int, ...]
    current: tuple[int, ...]

    def __str__(self) -> str:
        now = ",".join(map(str, self.current)) or "unknown"
        return f"container {self.container} was told {','.join(map(str, self.told))}, its GPUs are now {now}"


def stale_containers(pod: Pod, devices: Iterable[Device]) -> tuple[StaleContainer, ...]:
    """Return the containers of a bound, not terminal pod whose numbers mean other GPUs in `devices`, its node's report.

    Numbers that only changed places among a container's own GPUs are not stale. The report keeps a card that the driver
    no longer counts, with its last number: so only a healthy device proves that a number belongs to somebody else. A
    uuid that the report does not know proves nothing by itself.
    """
    if pods.is_terminal(pod) or pod.spec.runtime_class_name == names.RUNTIME_CLASS or not _is_bound(pod):
        return ()
    counted = tuple(device for device in devices if device.vendor == Vendor.NVIDIA and not _is_instance(device))
    annotations = pod.metadata.annotations
    stale = []
    for container in pods.all_container_names(pod):
        told = _numbers(annotations.get(names.CONTAINER_DEVICES_PREFIX + container, ""))
        uuids = annotations.get(names.CONTAINER_UUIDS_PREFIX + container, "").split(",")
        current = tuple(device.index for device in counted if device.uuid in uuids)
        others = (device for device in counted if device.uuid not in uuids)
        foreign = (device.index for device in others if device.health.state is HealthState.HEALTHY)
        if told and (not set(told).issuperset(current) or not set(told).isdisjoint(foreign)):
            stale.append(StaleContainer(container, told, tuple(sorted(current))))
    return tuple(stale)


def _is_bound(pod: Pod) -> bool:
    try:
        return bound_allocation(pod) is not None
    except MalformedValue:
        return False


def _is_instance(device: Device) -> bool:
    return device.mig is not None and bool(device.mig.profile)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list; empty for a list of anything else, such as uuids."""
    parts = text.split(",")
    are_numbers = all(part.isascii() and part.isdigit() and len(part) <= NUMBER_DIGITS_MAX for part in parts)
    return tuple(map(int, parts)) if are_numbers else ()
