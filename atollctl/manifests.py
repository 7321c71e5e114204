"""Turns manifests (YAML or JSON) into the pods that the API server would store, and claims.

Owners become as many pods as they have replicas. The webhook's own `mutate` changes each pod, so a pod that it would
deny is denied here with the same words. Nothing is sent.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml
from pydantic import ValidationError

from atoll.api.claims import GpuClaim
from atoll.api.gangs import GpuGang
from atoll.cluster.objects import Metadata, Pod, PriorityClass, decode_pod, decode_priority_class
from atoll.explain.snapshot import ClusterSnapshot
from atollctl.sentences import faults
from webhook.errors import WebhookError
from webhook.mutation import mutate
from webhook.pods import decode_pod as decode_view
from webhook.requests import ClaimMissing, Defaults, claim_name_of
from webhook.review import Denial, User

PODS_MAX: Final = 10_000
FILE_BYTES_MAX: Final = 64 << 20
REPLICATED: Final[Mapping[str, str]] = {
    "Job": "parallelism",
    "Deployment": "replicas",
    "ReplicaSet": "replicas",
    "StatefulSet": "replicas",
}
"""Kinds whose pods come from a template, and the field with the number that run at once."""


BUILT_IN: Final = (
    PriorityClass(Metadata("system-cluster-critical"), 2_000_000_000),
    PriorityClass(Metadata("system-node-critical"), 2_000_001_000),
)
"""PriorityClasses of every API server."""

M = TypeVar("M", GpuClaim, GpuGang)


class ManifestMistake(ValueError):
    """A manifest cannot be read, or its pod would be denied."""


@dataclass(frozen=True, slots=True)
class Manifests:
    """Content of the files. `makes_pods`: also if scaled to zero. `ignored`: objects of other kinds, as KIND/NAME."""

    pods: tuple[dict[str, Any], ...]
    makes_pods: bool
    claims: tuple[GpuClaim, ...]
    gangs: tuple[GpuGang, ...]
    priority_classes: tuple[PriorityClass, ...]
    ignored: tuple[str, ...]


def read_manifests(files: Sequence[Path], *, namespace: str) -> Manifests:
    """Read the files. Raises OSError and ManifestMistake."""
    return sort_documents([(file, one) for file in files for one in _documents(file)], namespace=namespace)


def sort_documents(documents: Iterable[tuple[Path, dict[str, Any]]], *, namespace: str) -> Manifests:
    """Sort objects by kind; each comes with its file for messages. Raises ManifestMistake."""
    pods: list[dict[str, Any]] = []
    claims: list[GpuClaim] = []
    gangs: list[GpuGang] = []
    priorities: list[PriorityClass] = []
    ignored: list[str] = []
    kinds: set[str] = set()
    for file, document in documents:
        kind, name = str(document.get("kind", "")), _name_of(document, file)
        kinds.add(kind)
        if kind == "GpuClaim":
            claims.append(_model(GpuClaim, document, namespace, file))
        elif kind == "GpuGang":
            gangs.append(_model(GpuGang, document, namespace, file))
        elif kind == "PriorityClass":
            priorities.append(_priority_class(document, file))
        elif kind == "Pod":
            pods.append(document)
        elif kind in REPLICATED:
            pods += _replicas(document, REPLICATED[kind], file)
        else:
            ignored.append(f"{kind}/{name}")
        if len(pods) > PODS_MAX:
            raise ManifestMistake(f"{file}: more than {PODS_MAX} pods; ask for fewer at once")
    makes_pods = bool(kinds & {"Pod", *REPLICATED})
    return Manifests(tuple(pods), makes_pods, tuple(claims), tuple(gangs), tuple(priorities), tuple(ignored))


def shaped(documents: Iterable[dict[str, Any]], *, namespace: str, cluster: ClusterSnapshot) -> list[Pod]:
    """Return the pods as the API server and the webhook would store them. Raises ManifestMistake with the webhook's
    words if it denies one, for an undefined priorityClassName, and for a name that is taken."""
    known = {one.metadata.name: one for one in (*BUILT_IN, *cluster.priority_classes)}
    named = _Names(cluster, namespace)
    return [_shaped(_with_priority(named.given(document), known), cluster) for document in documents]


class _Names:
    """Gives every pod its own name, namespace and uid."""

    def __init__(self, cluster: ClusterSnapshot, namespace: str) -> None:
        self._namespace = namespace
        self._known = {(pod.metadata.namespace, pod.metadata.name): pod for pod in cluster.pods}
        self._given: set[tuple[str, str]] = set()
        self._numbers: dict[tuple[str, str], Iterator[int]] = {}

    def given(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest with these. Raises ManifestMistake if another pod has the chosen name."""
        metadata = document.get("metadata") or {}
        space = str(metadata.get("namespace") or self._namespace)
        name, prefix = str(metadata.get("name") or ""), str(metadata.get("generateName") or "pod-")
        if not name:
            numbers = self._numbers.setdefault((space, prefix), count())
            name = next(one for number in numbers if self._is_free(space, one := f"{prefix}{number}"))
        elif (space, name) in self._given:
            raise ManifestMistake(f"pod {space}/{name} is in the files twice; each needs its own name")
        before = self._known.get((space, name))
        if before is not None and before.spec.node_name:
            raise ManifestMistake(
                f"pod {space}/{name} would be denied: one of that name is on {before.spec.node_name}; say "
                f"--without {space}/{name} where it ends first"
            )
        self._given.add((space, name))
        uid = before.metadata.uid if before is not None else f"uid-of-simulated-{space}-{name}"
        return {**document, "metadata": {**metadata, "name": name, "namespace": space, "uid": uid}}

    def _is_free(self, space: str, name: str) -> bool:
        return (space, name) not in self._given and (space, name) not in self._known


def _with_priority(document: dict[str, Any], known: Mapping[str, PriorityClass]) -> dict[str, Any]:
    """Return the pod with its priorityClassName resolved, as the API server's admission does."""
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return document
    name = str(spec.get("priorityClassName") or "")
    if name and name not in known:
        pod = (document.get("metadata") or {}).get("name", "pod")
        raise ManifestMistake(f"pod {pod} would be denied: there is no PriorityClass {name!r}")
    default = next((one for _, one in sorted(known.items()) if one.global_default), None)
    chosen = known.get(name, default)
    if chosen is None:
        return document
    policy = spec.get("preemptionPolicy") or chosen.preemption_policy
    return {**document, "spec": {**spec, "priority": chosen.value, "preemptionPolicy": policy}}


def _shaped(document: dict[str, Any], cluster: ClusterSnapshot) -> Pod:
    space, name = document["metadata"]["namespace"], document["metadata"]["name"]
    try:
        body = copy.deepcopy(document)
        view = decode_view(msgspec.json.encode(body))
        told = claim_name_of(view)
        if isinstance(told, Denial):
            raise ManifestMistake(f"pod {space}/{name} would be denied: {told.message}")
        found = None if told is None else cluster.claim(space, told) or ClaimMissing()
        decision = mutate(view, namespace=space, user=User(), claim=found, defaults=Defaults())
        if isinstance(decision, Denial):
            raise ManifestMistake(f"pod {space}/{name} would be denied: {decision.message}")
        for operation in decision.operations:
            _apply(body, operation)
        body["metadata"] |= {"creationTimestamp": cluster.taken_at, "deletionTimestamp": None}
        body["spec"].pop("nodeName", None)
        body.pop("status", None)
        return decode_pod(msgspec.json.encode(body))
    except (WebhookError, msgspec.MsgspecError, KeyError, TypeError, AttributeError, *_UNWRITABLE) as error:
        raise ManifestMistake(f"pod {space}/{name} cannot be read: {error}") from error


_UNWRITABLE: Final = (OverflowError, RecursionError)
"""Values that YAML allows and JSON does not: numbers beyond 64 bits, and a document that contains itself."""


def _documents(file: Path) -> list[dict[str, Any]]:
    with file.open("rb") as stream:
        data = stream.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ManifestMistake(f"{file}: larger than {FILE_BYTES_MAX} bytes")
    try:
        found = [one for one in yaml.safe_load_all(data) if one is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise ManifestMistake(f"{file}: no YAML: {str(error)[:300]}") from error
    flat: list[dict[str, Any]] = []
    for one in found:
        items = one.get("items", [one]) if isinstance(one, dict) else [one]
        for item in items if isinstance(items, list) else [items]:
            if not isinstance(item, dict):
                raise ManifestMistake(f"{file}: holds a {type(item).__name__} where an object is expected")
            flat.append(item)
    return flat


def _name_of(document: dict[str, Any], file: Path) -> str:
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ManifestMistake(f"{file}: metadata of a {document.get('kind')} is a {type(metadata).__name__}, no object")
    return str(metadata.get("name", ""))


def _model(kind: type[M], document: dict[str, Any], namespace: str, file: Path) -> M:
    metadata = document.get("metadata") or {}
    space = metadata.get("namespace") or namespace
    uid = metadata.get("uid") or f"uid-of-simulated-{space}-{metadata.get('name')}"
    try:
        return kind.model_validate({**document, "metadata": {**metadata, "namespace": space, "uid": uid}})
    except ValidationError as error:
        raise ManifestMistake(f"{file}: {kind.__name__} {metadata.get('name')}: {faults(error)}") from error


def _priority_class(document: dict[str, Any], file: Path) -> PriorityClass:
    try:
        return decode_priority_class(msgspec.json.encode(document))
    except (msgspec.MsgspecError, TypeError, *_UNWRITABLE) as error:
        raise ManifestMistake(f"{file}: a PriorityClass cannot be read: {error}") from error


def _replicas(document: dict[str, Any], field: str, file: Path) -> list[dict[str, Any]]:
    """Return as many pods as run at once, with names like their owner's."""
    try:
        metadata, spec = document["metadata"], document["spec"]
        name, template = str(metadata["name"]), spec["template"]
        wanted = 1 if spec.get(field) is None else int(spec[field])
        if spec.get("completions") is not None and document["kind"] == "Job":
            wanted = min(wanted, int(spec["completions"]))
        own = {**(template.get("metadata") or {}), "name": None, "generateName": f"{name}-"}
        if metadata.get("namespace"):
            own["namespace"] = metadata["namespace"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestMistake(f"{file}: {document.get('kind')} has no readable template: {error}") from error
    if not 0 <= wanted <= PODS_MAX:
        raise ManifestMistake(f"{file}: {name} asks for {wanted} pods; 0 to {PODS_MAX} are simulated")
    return [{**template, "kind": "Pod", "apiVersion": "v1", "metadata": own} for _ in range(wanted)]


def _apply(body: dict[str, Any], operation: Mapping[str, Any]) -> None:
    """Apply one operation of the webhook's patch, which only adds and removes (RFC 6902)."""
    *path, last = (
        part.replace("~1", "/").replace("~0", "~") for part in str(operation["path"]).removeprefix("/").split("/")
    )
    target: Any = body
    for part in path:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if operation["op"] == "remove":
        del target[int(last) if isinstance(target, list) else last]
    elif isinstance(target, list):
        target.insert(len(target) if last == "-" else int(last), operation["value"])
    else:
        target[last] = operation["value"]
