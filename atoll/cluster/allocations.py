"""The allocation of a bound pod: node, device ids and uuids, and its text in annotations.

One codec, so that everybody reads what bind writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.api import names
from atoll.cluster.errors import MalformedValue
from atoll.cluster.objects import Pod

DEVICES_MAX = 64
ID_DIGITS_MAX = 5
ANNOTATIONS_BYTES_MAX = 262_144
"""Keys and values of all annotations of one object together. The API server does not check this at a Binding, but at
every write after it: of a pod that was bound past it kubelet can never again write the status, not even its end."""
OTHER_BYTES_MAX = ANNOTATIONS_BYTES_MAX * 3 // 4
"""What a waiting pod may carry already; one that was filled up later would fail every bind and keep others waiting."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPUs of one pod: `uuids[i]` is the device with id `device_ids[i]` on `node`."""

    node: str
    device_ids: tuple[int, ...]
    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContainerDevices:
    """Literal values of one container's variables: CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES."""

    container: str
    cuda: str
    nvidia: str


def parse_allocation(annotations: Mapping[str, str]) -> Allocation | None:
    """Read the allocation from a pod's annotations; None when there is none.

    Raises MalformedValue when the two annotations do not describe one set, which only a forger or a bug can cause.
    """
    allocated = annotations.get(names.ALLOCATED)
    if allocated is None:
        return None
    node, _, ids_text = allocated.rpartition(":")
    ids = parse_ids(ids_text)
    if not node or not ids:
        raise MalformedValue(f"annotation {names.ALLOCATED}", allocated, "NODE:ID,ID,... with every id once")
    uuids_text = annotations.get(names.UUIDS, "")
    uuids = tuple(uuids_text.split(","))
    if len(uuids) != len(ids) or not all(uuids) or len(set(uuids)) != len(uuids) or len(ids) > DEVICES_MAX:
        raise MalformedValue(f"annotation {names.UUIDS}", uuids_text, f"{len(ids)} different uuids, one per id")
    return Allocation(node, ids, uuids)


def parse_ids(text: str) -> tuple[int, ...]:
    """Read `ID,ID,...`, every id once and at most `DEVICES_MAX`; empty for any other text."""
    parts = text.split(",")
    is_list = len(parts) <= DEVICES_MAX and all(map(_is_id, parts))
    ids = tuple(map(int, parts)) if is_list else ()
    return ids if len(set(ids)) == len(ids) else ()


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= ID_DIGITS_MAX


def allocation_annotations(allocation: Allocation, containers: tuple[ContainerDevices, ...]) -> dict[str, str]:
    """Return the annotations that a Binding carries for this allocation."""
    annotations = {
        names.ALLOCATED: f"{allocation.node}:{','.join(map(str, allocation.device_ids))}",
        names.UUIDS: ",".join(allocation.uuids),
    }
    for devices in containers:
        annotations[names.CONTAINER_DEVICES_PREFIX + devices.container] = devices.cuda
        annotations[names.CONTAINER_UUIDS_PREFIX + devices.container] = devices.nvidia
    return annotations


def annotations_bytes(annotations: Mapping[str, str]) -> int:
    """Return what annotations count against `ANNOTATIONS_BYTES_MAX`."""
    return sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())


def pod_annotations_bytes(pod: Pod, added: Mapping[str, str] = MappingProxyType({})) -> int:
    """Return what a pod's annotations count, with those added and those that Atoll does not keep."""
    return annotations_bytes({**pod.metadata.annotations, **added}) + pod.metadata.other_annotations_bytes


def bound_allocation(pod: Pod) -> Allocation | None:
    """Return what a bound pod was given; None for a pod without node, or whose annotation names another node.

    The mirror of a static pod was never bound: its annotations are a file on a machine. Raises MalformedValue, see
    parse_allocation.
    """
    if not pod.spec.node_name or names.MIRROR in pod.metadata.annotations:
        return None
    allocation = parse_allocation(pod.metadata.annotations)
    if allocation is None or allocation.node != pod.spec.node_name:
        return None
    return allocation
