"""A worker's offer to machine-learning jobs, and how well it serves one.

Makes a WorkerCapability of a Node, its GpuNodeStatus and annotations with loaded models; finds the hard conditions that
it does not meet, and a score that only ranks. GPUs are matched by the same search that places pods.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atoll.api import names
from atoll.api.claims import COUNT_MAX, DeviceClaim, InterconnectKind, Vendor
from atoll.api.node_status import GpuNodeStatus
from atoll.cluster.machines import DeviceAttributes, NodeDevices, node_devices
from atoll.cluster.objects import Node
from atoll.cluster.quantities import parse_amount, parse_bytes
from atoll.cluster.requests import Rejection, device_request
from atoll.cluster.selection import matches_model, select
from atoll.ml import tables
from atoll.ml.attributes import Accelerator, MlAttributes, TpuType
from atoll.ml.mapping import device_claim
from atoll.ml.registry import LoadedModel
from atoll.ml.selection import NODE_LABELS, Labels

MODELS_MAX: Final = 256
ANNOTATION_BYTES_MAX: Final = 64 * 1024
_GB: Final = 10**9
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class GpuCapability:
    """The GPUs of one type. memory_gb: nominal, per card; interconnect: of all of them together."""

    type: str
    count: int
    memory_gb: int
    compute_capability: str
    interconnect: InterconnectKind


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapability:
    """A worker's offer. devices: the GPUs that can be given out, None without; gpus: the same by type, the most
    numerous first; unreadable: annotations that could not be read."""

    worker_id: str
    accelerator: Accelerator
    gpus: tuple[GpuCapability, ...] = ()
    devices: NodeDevices | None = None
    tpu_type: TpuType | None = None
    tpu_topology: str = ""
    tpu_chip_count: int = 0
    cpu_cores: int = 0
    memory_gb: float = 0
    storage_gb: float = 0
    shm_size_gb: float = 0
    models_loaded: tuple[LoadedModel, ...] = ()
    models_cached: tuple[LoadedModel, ...] = ()
    runtimes: tuple[str, ...] = ()
    labels: Labels
    unreadable: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the worker's advertisement."""
        out: dict[str, Any] = {"worker_id": self.worker_id, "accelerator": self.accelerator.value}
        if self.gpus:
            first = self.gpus[0]
            out["gpu"] = {name: getattr(first, name) for name in GpuCapability.__slots__}
        if self.tpu_type is not None:
            out["tpu"] = {"type": self.tpu_type.value, "topology": self.tpu_topology, "count": self.tpu_chip_count}
        models = [{name: getattr(model, name) for name in LoadedModel.__slots__} for model in self.models_loaded]
        return {
            **out,
            **{name: getattr(self, name) for name in ("cpu_cores", "memory_gb", "storage_gb", "shm_size_gb")},
            "models_loaded": models,
            "runtimes": list(self.runtimes),
            "labels": dict(self.labels),
        }


def capability_of(
    node: Node, status: GpuNodeStatus | None = None, pod_annotations: Iterable[Mapping[str, str]] = ()
) -> WorkerCapability:
    """Return a node's offer. pod_annotations: of the pods that run there, which may list models as nodes do."""
    devices = node_devices(status) if status is not None else None
    gpus = _gpus(devices) if devices is not None else ()
    tpu_type, topology, chips = _tpu(node)
    has_tpu = tpu_type is not None and chips > 0
    loaded, cached, unreadable = _told((node.metadata.annotations, *pod_annotations))
    amounts = node.status.allocatable
    memory_gb = parse_amount("memory", amounts.get("memory", "0")) / _GB
    return WorkerCapability(
        worker_id=node.metadata.name,
        accelerator=Accelerator.GPU if gpus else Accelerator.TPU if has_tpu else Accelerator.CPU,
        gpus=gpus,
        devices=devices if gpus else None,
        tpu_type=tpu_type if has_tpu else None,
        tpu_topology=topology if has_tpu else "",
        tpu_chip_count=chips,
        cpu_cores=parse_amount("cpu", amounts.get("cpu", "0")) // 1000,
        memory_gb=memory_gb,
        storage_gb=parse_amount("ephemeral-storage", amounts.get("ephemeral-storage", "0")) / _GB,
        shm_size_gb=memory_gb,
        models_loaded=loaded,
        models_cached=cached,
        runtimes=tuple(filter(None, map(str.strip, node.metadata.annotations.get(names.RUNTIMES, "").split(","))))[
            :MODELS_MAX
        ],
        labels=_labels(node, gpus),
        unreadable=unreadable,
    )


def _gpus(devices: NodeDevices) -> tuple[GpuCapability, ...]:
    """Return the whole GPUs that can be given out, by type and size."""
    counts: dict[tuple[str, int, tuple[int, int], str], tuple[int, DeviceAttributes]] = {}
    for position, card in enumerate(devices.shape.cards):
        if devices.usable >> position & 1 and not card.mig_profile:
            row = (*_type_and_memory(card), card.compute_capability, card.vendor)
            counts[row] = (counts.get(row, (0, card))[0] + 1, card)
    found = [
        GpuCapability(
            gpu_type, count, memory_gb, tables.capability_text(capability), _interconnect(devices, card, count)
        )
        for (gpu_type, memory_gb, capability, _), (count, card) in counts.items()
    ]
    return tuple(sorted(found, key=lambda gpu: (-gpu.count, gpu.type, gpu.memory_gb)))


def _type_and_memory(card: DeviceAttributes) -> tuple[str, int]:
    """Return the id of a card's type, and its nominal GB."""
    size_gb = card.memory_bytes // _GIB
    rows = [row for row in tables.GPU_TYPES.values() if any(matches_model(card.model, slug) for slug in row.models)]
    if not rows:
        return card.model, size_gb
    row = max(rows, key=lambda one: len(one.id))
    fitting = [size for size in row.memory_gb if parse_bytes(tables.claim_memory(size, row.id)) <= card.memory_bytes]
    return row.id, max([size_gb * row.devices, *fitting])


def _interconnect(devices: NodeDevices, card: DeviceAttributes, count: int) -> InterconnectKind:
    """Tell whether all GPUs of a type are joined by NVLink, as a claim of all of them would find."""
    claim = DeviceClaim(
        count=min(count, COUNT_MAX),
        models=(card.model,),
        interconnect=InterconnectKind.NVLINK,
        vendor=Vendor(card.vendor),
    )
    joined = not isinstance(select(devices, devices.usable, device_request(claim)), Rejection)
    return InterconnectKind.NVLINK if joined and count > 1 else InterconnectKind.PCIE


def _tpu(node: Node) -> tuple[TpuType | None, str, int]:
    label = node.metadata.labels.get(tables.TPU_TYPE_LABEL, "")
    kind = next((kind for kind, facts in tables.TPU_TYPES.items() if label in facts.node_label_values), None)
    chips = parse_amount(tables.TPU_RESOURCE, node.status.allocatable.get(tables.TPU_RESOURCE, "0"))
    return kind, node.metadata.labels.get(tables.TPU_TOPOLOGY_LABEL, ""), chips


def _labels(node: Node, gpus: tuple[GpuCapability, ...]) -> Labels:
    """Return the node's labels, with short forms of well-known ones, and those from its GPU report."""
    labels = dict(node.metadata.labels)
    for short, long in NODE_LABELS.items():
        if long in labels:
            labels.setdefault(short, labels[long])
    if gpus:
        first = gpus[0]
        labels |= {
            "gpu_type": first.type,
            "gpu_memory": str(first.memory_gb),
            "compute_capability": first.compute_capability,
            "gpu_interconnect": first.interconnect.value,
        }
    return labels


def _told(
    annotations: Iterable[Mapping[str, str]],
) -> tuple[tuple[LoadedModel, ...], tuple[LoadedModel, ...], tuple[str, ...]]:
    """Return loaded models, cached models, and keys that could not be read."""
    found: dict[str, dict[LoadedModel, None]] = {names.MODELS_LOADED: {}, names.MODELS_CACHED: {}}
    unreadable: dict[str, None] = {}
    for one in annotations:
        for key, into in found.items():
            models = _models(one.get(key, "[]"))
            into.update(dict.fromkeys(models or ()))
            unreadable.update({key: None} if models is None else {})
    loaded, cached = (tuple(models)[:MODELS_MAX] for models in found.values())
    return loaded, cached, tuple(unreadable)


def _models(text: str) -> tuple[LoadedModel, ...] | None:
    """Return the models of an annotation; None for anything but a list of mappings of text."""
    try:
        rows = json.loads(text) if len(text) <= ANNOTATION_BYTES_MAX else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    fields = [{key: row[key] for key in LoadedModel.__slots__ if key in row} for row in rows[:MODELS_MAX]]
    if not all("model_id" in row and all(isinstance(value, str) for value in row.values()) for row in fields):
        return None
    return tuple(LoadedModel(**row) for row in fields)


def gpus_of(worker: WorkerCapability, attributes: MlAttributes, free: int | None = None) -> str:
    """Return why the worker cannot give the job's GPUs; empty if it can. free: mask of the free positions; None checks
    whether it ever could."""
    if (attributes.gpu_count or 0) > COUNT_MAX:
        return names.REJECT_NEVER_FITS
    claim = device_claim(attributes)
    if claim is None:
        return ""
    if worker.devices is None:
        return "no GPU can be given out"
    answer = select(worker.devices, worker.devices.usable if free is None else free, device_request(claim))
    return answer.reason if isinstance(answer, Rejection) else ""
