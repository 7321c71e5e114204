"""A snapshot as one JSON document, and back.

It has only the fields that decisions read, in the form of the API server's objects: no environment, image, command or
foreign annotation. The document names its format for later versions.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from pydantic import ValidationError

from atoll.api import names
from atoll.api.base import Model
from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.api.node_status import GpuNodeStatus
from atoll.api.reservations import GpuReservation
from atoll.api.topologies import Topology
from atoll.cluster.allocations import OTHER_BYTES_MAX, annotations_bytes, pod_annotations_bytes
from atoll.cluster.budgets import DisruptionBudget
from atoll.cluster.csi import CsiDriver, CsiNode, StorageCapacity
from atoll.cluster.errors import MalformedValue
from atoll.cluster.gangs import kueue_topology
from atoll.cluster.gangs.membership import RANKING_ANNOTATIONS
from atoll.cluster.ledger import Ledger
from atoll.cluster.objects import Lease, Namespace, Node, Pod, PriorityClass
from atoll.cluster.request_history import RequestHistory, recall
from atoll.cluster.storage import PersistentVolume, PersistentVolumeClaim, StorageClass
from atoll.cluster.volume_fit import claim_names
from atoll.explain.snapshot import ClusterSnapshot

FORMAT: Final = "atoll-snapshot/1"
BYTES_MAX: Final = 1 << 30

M = TypeVar("M", bound=Model)
T = TypeVar(
    "T",
    Node,
    Lease,
    DisruptionBudget,
    PriorityClass,
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
    CsiNode,
    CsiDriver,
    StorageCapacity,
    Namespace,
)


class SnapshotMistake(ValueError):
    """The bytes are not a snapshot that this version can read."""


def encode_snapshot(snapshot: ClusterSnapshot) -> bytes:
    """Return the document."""
    return msgspec.json.encode(document_of(snapshot))


def document_of(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """Return the document as plain values."""
    kinds = snapshot.storage_classes
    classes = [_plain(_without_foreign(one)) for one in kinds] if kinds is not None else None
    ranking = frozenset({*RANKING_ANNOTATIONS, *kueue_topology.KUEUE_ANNOTATIONS, *_index_labels(snapshot.gangs)})
    return {
        "format": FORMAT,
        "takenAt": snapshot.taken_at,
        "nodes": [_plain(_without_foreign(node)) for node in snapshot.nodes],
        "pods": [_plain(_sized(pod, ranking)) for pod in snapshot.pods],
        "leases": [_plain(_without_foreign(lease)) for lease in snapshot.leases],
        "heartbeats": [_plain(_without_foreign(lease)) for lease in snapshot.heartbeats],
        "claims": [_model(claim) for claim in snapshot.claims],
        "reports": [_model(report) for report in snapshot.reports],
        "gangs": [_model(gang) for gang in snapshot.gangs],
        "topologies": [_model(topology) for topology in snapshot.topologies],
        **({"reservations": [_model(one) for one in snapshot.reservations]} if snapshot.reservations else {}),
        "budgets": [_plain(_without_foreign(budget)) for budget in snapshot.budgets],
        "priorityClasses": [_plain(_without_foreign(one)) for one in snapshot.priority_classes],
        "volumes": [_plain(_without_foreign(one)) for one in snapshot.volumes],
        "volumeClaims": [_plain(_without_foreign(one)) for one in snapshot.volume_claims],
        "csiNodes": [_plain(_without_foreign(one)) for one in snapshot.csi_nodes],
        "csiDrivers": [_plain(_without_foreign(one)) for one in snapshot.csi_drivers],
        "storageCapacities": [_plain(_without_foreign(one)) for one in snapshot.storage_capacities],
        "namespaces": [_plain(_without_foreign(one)) for one in snapshot.namespaces],
        **({"storageClasses": classes} if classes is not None else {}),
        "unread": list(snapshot.unread),
        "refused": dict(snapshot.refused),
        **({"pastAsks": msgspec.to_builtins(snapshot.past_asks)} if snapshot.past_asks is not None else {}),
    }


def decode_snapshot(data: bytes) -> ClusterSnapshot:
    """Return the snapshot. Raises SnapshotMistake."""
    if len(data) > BYTES_MAX:
        raise SnapshotMistake(f"{len(data)} bytes are more than a snapshot may have ({BYTES_MAX})")
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SnapshotMistake(f"no JSON: {error}") from error
    return snapshot_of(document)


def snapshot_of(document: object) -> ClusterSnapshot:
    """Return the snapshot of a document. Raises SnapshotMistake."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        told = document.get("format") if isinstance(document, dict) else None
        raise SnapshotMistake(f"format is {str(told)[:80]!r}, this version reads {FORMAT!r}")
    try:
        found = ClusterSnapshot(
            taken_at=str(document.get("takenAt", "")),
            nodes=msgspec.convert(document.get("nodes", []), tuple[Node, ...]),
            pods=msgspec.convert(document.get("pods", []), tuple[Pod, ...]),
            leases=msgspec.convert(document.get("leases", []), tuple[Lease, ...]),
            heartbeats=msgspec.convert(document.get("heartbeats", []), tuple[Lease, ...]),
            claims=_models(document, "claims", GpuClaim),
            reports=_models(document, "reports", GpuNodeStatus),
            gangs=_models(document, "gangs", GpuGang),
            topologies=_models(document, "topologies", Topology),
            reservations=_models(document, "reservations", GpuReservation),
            budgets=msgspec.convert(document.get("budgets", []), tuple[DisruptionBudget, ...]),
            past_asks=msgspec.convert(document.get("pastAsks"), RequestHistory | None),
            refused=msgspec.convert(document.get("refused", {}), dict[str, str]),
            priority_classes=msgspec.convert(document.get("priorityClasses", []), tuple[PriorityClass, ...]),
            volumes=msgspec.convert(document.get("volumes", []), tuple[PersistentVolume, ...]),
            volume_claims=msgspec.convert(document.get("volumeClaims", []), tuple[PersistentVolumeClaim, ...]),
            storage_classes=msgspec.convert(document.get("storageClasses"), tuple[StorageClass, ...] | None),
            csi_nodes=msgspec.convert(document.get("csiNodes", []), tuple[CsiNode, ...]),
            csi_drivers=msgspec.convert(document.get("csiDrivers", []), tuple[CsiDriver, ...]),
            storage_capacities=msgspec.convert(document.get("storageCapacities", []), tuple[StorageCapacity, ...]),
            namespaces=msgspec.convert(document.get("namespaces", []), tuple[Namespace, ...]),
            unread=msgspec.convert(document.get("unread", []), tuple[str, ...]),
        )
        if found.past_asks is not None:
            recall(Ledger(), found.past_asks)
    except (msgspec.ValidationError, ValidationError, MalformedValue) as error:
        raise SnapshotMistake(f"an object of the snapshot cannot be read: {str(error)[:500]}") from error
    return found


def _models(document: Mapping[str, Any], key: str, kind: type[M]) -> tuple[M, ...]:
    entries = document.get(key, [])
    if not isinstance(entries, list):
        raise SnapshotMistake(f"{key} is no list")
    return tuple(kind.model_validate_json(msgspec.json.encode(entry)) for entry in entries)


def _sized(pod: Pod, ranking: Collection[str]) -> Pod:
    """Leave out foreign annotations and labels, which may be private; keep their size if it matters, and keys that rank
    and place members of a gang."""
    own = {key: text for key, text in pod.metadata.annotations.items() if _is_read(key) or key in ranking}
    size_bytes = pod_annotations_bytes(pod)
    others_bytes = size_bytes - annotations_bytes(own) if size_bytes > OTHER_BYTES_MAX else 0
    metadata = msgspec.structs.replace(pod.metadata, annotations=own, other_annotations_bytes=others_bytes)
    return msgspec.structs.replace(pod, metadata=metadata)


def _without_foreign(thing: T) -> T:
    """Leave out foreign annotations on any other object: `kubectl apply` writes the whole manifest there."""
    own = {key: value for key, value in thing.metadata.annotations.items() if _is_read(key)}
    metadata = msgspec.structs.replace(thing.metadata, annotations=own, other_annotations_bytes=0)
    return msgspec.structs.replace(thing, metadata=metadata)


def _index_labels(gangs: Iterable[GpuGang]) -> Iterator[str]:
    """Yield the keys that rank members in their gangs; an annotation counts like a label."""
    for gang in gangs:
        for request in (gang.spec.topology, *(one.topology for one in gang.spec.pod_sets)):
            keys = (request.pod_index_label, request.sub_group_index_label) if request is not None else ()
            yield from (key for key in keys if key)


def _is_read(key: str) -> bool:
    group = key.partition("/")[0]
    return group == names.GROUP or group.endswith(f".{names.GROUP}") or key == names.MIRROR


def _model(model: GpuClaim | GpuNodeStatus | GpuGang | Topology | GpuReservation) -> dict[str, Any]:
    own = {key: value for key, value in model.metadata.annotations.items() if _is_read(key)}
    bare = model.model_copy(update={"metadata": model.metadata.model_copy(update={"annotations": own})})
    return bare.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)


@lru_cache(maxsize=256)
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Return (name, name on the wire, default) of every field; NODEFAULT if there is none."""
    found = []
    for field in msgspec.structs.fields(kind):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        found.append((field.name, field.encode_name, default))
    return tuple(found)


def _plain(value: object) -> object:
    """Return a thin object as plain values, without defaults."""
    if isinstance(value, msgspec.Struct):
        given = ((wire, getattr(value, name), default) for name, wire, default in _fields(type(value)))
        return {
            wire: _plain(found) for wire, found, default in given if default is msgspec.NODEFAULT or found != default
        }
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value


def with_objects(
    snapshot: ClusterSnapshot, *, pods: Iterable[Pod] = (), claims: Iterable[GpuClaim] = ()
) -> ClusterSnapshot:
    """Return the snapshot with pods and claims added; one of the same namespace and name is replaced. If the pods name
    claims for volumes that are yet to come, claims that are not bound are left to kube-scheduler."""
    more_pods = {(pod.metadata.namespace, pod.metadata.name): pod for pod in pods}
    more_claims = {(claim.metadata.namespace, claim.metadata.name): claim for claim in claims}
    kept = [p for p in snapshot.pods if (p.metadata.namespace, p.metadata.name) not in more_pods]
    kept_claims = [c for c in snapshot.claims if (c.metadata.namespace, c.metadata.name) not in more_claims]
    known = {(one.metadata.namespace, one.metadata.name) for one in snapshot.volume_claims}
    are_known = all((key[0], name) in known for key, pod in more_pods.items() for name in claim_names(pod))
    return replace(
        snapshot,
        pods=(*kept, *more_pods.values()),
        claims=(*kept_claims, *more_claims.values()),
        storage_classes=snapshot.storage_classes if are_known else None,
    )
