"""The difference between the objects that the file of queues asks for and those in the cluster, as writes.

Only objects that carry this service's id are changed or removed. A namespace only gets missing labels, and is never
removed. An object of the same name that belongs to somebody else is left alone, and named unless it agrees.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from atoll.api import job_names
from atoll.cluster.quantities import parse_amount
from atoll.jobs.queue_objects import Object

HEAD: Final = frozenset({"apiVersion", "kind", "metadata", "status"})
WHOLE: Final = frozenset({"nodeLabels", "podSelector"})
"""Maps in which no other key may stand."""
EXACT: Final = frozenset({"ingress", "egress"})
"""Lists to which the API server adds nothing, so that every addition is somebody's change."""
QUANTITIES: Final = frozenset({"nominalQuota", "borrowingLimit", "lendingLimit", "weight"})
SHARED: Final = "Namespace"
REMOVED: Final = (
    "LocalQueue",
    "ClusterQueue",
    "Cohort",
    "AdmissionCheck",
    "MultiKueueConfig",
    "MultiKueueCluster",
    "ResourceFlavor",
    "WorkloadPriorityClass",
    "NetworkPolicy",
)
"""Kinds that are removed when the file no longer names them, in this order. PriorityClasses stay: pods carry them."""


class QueueVerb(StrEnum):
    """What a write does."""

    CREATE = "create"
    CHANGE = "change"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Kind and name of an object."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class QueueWrite:
    """One write: the object to create, the merge patch of a change, or nothing; `uid` of the object it is about."""

    verb: QueueVerb
    key: ObjectKey
    body: Mapping[str, Any]
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.key}"


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """Writes in their order, and what stands in the way of others."""

    writes: tuple[QueueWrite, ...]
    obstacles: tuple[str, ...] = ()


def key_of(one: Object) -> ObjectKey:
    """Return the key of an object."""
    metadata = one["metadata"]
    return ObjectKey(one["kind"], metadata.get("namespace", ""), metadata["name"])


def plan_queues(wanted: Sequence[Object], there: Iterable[Object], *, service_id: str) -> QueuePlan:
    """Return the writes that make the cluster agree with the wanted objects."""
    found = {key_of(one): one for one in there}
    writes: list[QueueWrite] = []
    obstacles: list[str] = []
    for one in wanted:
        key, current = key_of(one), found.get(key_of(one))
        if current is None:
            writes.append(QueueWrite(QueueVerb.CREATE, key, _without_none(one)))
            continue
        patch = _patch(one, current)
        if _is_leaving(current):
            obstacles.append(f"{key} is being deleted: it is created again when it is gone")
        elif patch and not _is_ours(current, service_id) and key.kind != SHARED:
            obstacles.append(f"{key} exists and does not belong to this service: delete it, or choose another name")
        elif patch:
            writes.append(QueueWrite(QueueVerb.CHANGE, key, patch, current["metadata"].get("uid", "")))
    asked = {key_of(one) for one in wanted}
    left = [
        one for key, one in found.items() if key not in asked and _is_ours(one, service_id) and not _is_leaving(one)
    ]
    for kind in REMOVED:
        writes += [_removal(one) for one in sorted(left, key=lambda one: str(key_of(one))) if one["kind"] == kind]
    return QueuePlan(tuple(writes), tuple(obstacles))


def _removal(one: Object) -> QueueWrite:
    return QueueWrite(QueueVerb.REMOVE, key_of(one), {}, one["metadata"].get("uid", ""))


def _is_ours(one: Object, service_id: str) -> bool:
    return (one["metadata"].get("labels") or {}).get(job_names.SERVICE_ID) == service_id


def _is_leaving(one: Object) -> bool:
    return one["metadata"].get("deletionTimestamp") is not None


def _patch(wanted: Object, there: Object) -> dict[str, Any]:
    """Return the merge patch that corrects an object; empty if it agrees. The owner's label alone is no difference."""
    patch = {
        key: changed
        for key, value in wanted.items()
        if key not in HEAD and (changed := _difference(value, there.get(key), key)) is not _SAME
    }
    labels = {key: value for key, value in wanted["metadata"]["labels"].items() if key != job_names.SERVICE_ID}
    if not labels.items() <= (there["metadata"].get("labels") or {}).items():
        patch["metadata"] = {"labels": labels}
    return patch


_SAME: Final = object()


def _difference(wanted: Any, there: Any, name: str) -> Any:  # noqa: ANN401 - plain values
    """Return the part of a merge patch that turns one value into the other, or _SAME."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        parts = {
            key: part for key, value in wanted.items() if (part := _difference(value, there.get(key), key)) is not _SAME
        }
        if name in WHOLE:
            parts |= dict.fromkeys(there.keys() - wanted.keys())
        return parts or _SAME
    return _SAME if _agrees(wanted, there, name) else _without_none(wanted)


def _agrees(wanted: Any, there: Any, name: str = "") -> bool:  # noqa: ANN401 - plain values
    """Return whether a value holds everything wanted; the API server adds defaults."""
    if name in EXACT:
        return bool(wanted == there)
    if isinstance(wanted, dict):
        if not isinstance(there, dict):
            return not wanted and there is None
        return all(_agrees(value, there.get(key), key) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(there, list) or len(wanted) != len(there):
            return False
        return all(_agrees(one, other, name) for one, other in zip(wanted, there, strict=True))
    if name in QUANTITIES and wanted is not None and there is not None:
        return parse_amount("cpu", str(wanted)) == parse_amount("cpu", str(there))
    return bool(wanted == there) or (wanted in (None, "") and there in (None, ""))


def _without_none(value: Any) -> Any:  # noqa: ANN401 - plain values
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value
