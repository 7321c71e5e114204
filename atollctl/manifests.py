"""Manifests as the pods that they would become: read, multiplied by their owner, shaped by the webhook.

In: files of YAML or JSON. Out: pods as the API server would store them, and claims. The shaping is the webhook's own
`mutate`, so a pod that it would deny is denied here with the same words. Nothing is sent anywhere.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from pydantic import ValidationError

from atoll.api.claims import GpuClaim
from atoll.cluster.objects import Pod, decode_pod
from webhook.demand import ClaimMissing, Defaults, claim_name_of
from webhook.errors import WebhookError
from webhook.mutation import mutate
from webhook.pods import decode_pod as decode_view
from webhook.review import Denial, User

PODS_MAX: Final = 10_000
FILE_BYTES_MAX: Final = 64 << 20
REPLICATED: Final[Mapping[str, str]] = {
    "Job": "parallelism",
    "Deployment": "replicas",
    "ReplicaSet": "replicas",
    "StatefulSet": "replicas",
}
"""Kinds whose pods come from a template, and the field that says how many run at once."""


class ManifestMistake(ValueError):
    """A manifest cannot be read, or its pod would be denied."""


@dataclass(frozen=True, slots=True)
class Manifests:
    """What the files hold. `ignored`: objects of other kinds, as KIND/NAME."""

    pods: tuple[dict[str, Any], ...]
    claims: tuple[GpuClaim, ...]
    ignored: tuple[str, ...]


def read_manifests(files: Sequence[Path], *, namespace: str) -> Manifests:
    """Read the files. Raises OSError and ManifestMistake."""
    pods: list[dict[str, Any]] = []
    claims: list[GpuClaim] = []
    ignored: list[str] = []
    for file in files:
        for document in _documents(file):
            kind, metadata = str(document.get("kind", "")), document.get("metadata") or {}
            name = f"{kind}/{metadata.get('name', '')}"
            if kind == "GpuClaim":
                claims.append(_claim(document, namespace, file))
            elif kind == "Pod":
                pods.append(document)
            elif kind in REPLICATED:
                pods += _replicas(document, REPLICATED[kind], file)
            else:
                ignored.append(name)
            if len(pods) > PODS_MAX:
                raise ManifestMistake(f"{file}: more than {PODS_MAX} pods; ask for fewer at once")
    return Manifests(tuple(pods), tuple(claims), tuple(ignored))


def shaped(
    documents: Iterable[dict[str, Any]],
    *,
    namespace: str,
    claim: Callable[[str, str], GpuClaim | None],
    now: str,
) -> list[Pod]:
    """Return the pods as the webhook would leave them. Raises ManifestMistake with its words where it denies one."""
    return [_shaped(document, namespace, claim, now) for document in documents]


def _shaped(document: dict[str, Any], namespace: str, claim: Callable[[str, str], GpuClaim | None], now: str) -> Pod:
    body = copy.deepcopy(document)
    metadata = body.setdefault("metadata", {})
    name = str(metadata.get("name") or metadata.get("generateName") or "pod")
    space = str(metadata.get("namespace") or namespace)
    try:
        view = decode_view(msgspec.json.encode(body))
        told = claim_name_of(view)
        if isinstance(told, Denial):
            raise ManifestMistake(f"pod {space}/{name} would be denied: {told.message}")
        found = None if told is None else claim(space, told) or ClaimMissing()
        decision = mutate(view, namespace=space, user=User(), claim=found, defaults=Defaults())
        if isinstance(decision, Denial):
            raise ManifestMistake(f"pod {space}/{name} would be denied: {decision.message}")
        for operation in decision.operations:
            _apply(body, operation)
        uid = metadata.get("uid") or f"uid-of-simulated-{space}-{name}"
        body["metadata"] |= {"name": name, "namespace": space, "uid": uid, "creationTimestamp": now}
        body["spec"].pop("nodeName", None)
        body.pop("status", None)
        return decode_pod(msgspec.json.encode(body))
    except (WebhookError, msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise ManifestMistake(f"pod {space}/{name} cannot be read: {error}") from error


def _documents(file: Path) -> list[dict[str, Any]]:
    with file.open("rb") as stream:
        data = stream.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ManifestMistake(f"{file}: larger than {FILE_BYTES_MAX} bytes")
    try:
        found = [one for one in yaml.safe_load_all(data) if one is not None]
    except yaml.YAMLError as error:
        raise ManifestMistake(f"{file}: no YAML: {str(error)[:300]}") from error
    flat = [item for one in found for item in (one["items"] if isinstance(one, dict) and "items" in one else [one])]
    for one in flat:
        if not isinstance(one, dict):
            raise ManifestMistake(f"{file}: holds a {type(one).__name__} where an object is expected")
    return flat


def _claim(document: dict[str, Any], namespace: str, file: Path) -> GpuClaim:
    metadata = document.get("metadata") or {}
    space = metadata.get("namespace") or namespace
    uid = metadata.get("uid") or f"uid-of-simulated-{space}-{metadata.get('name')}"
    try:
        return GpuClaim.model_validate({**document, "metadata": {**metadata, "namespace": space, "uid": uid}})
    except ValidationError as error:
        raise ManifestMistake(f"{file}: GpuClaim {metadata.get('name')}: {str(error)[:500]}") from error


def _replicas(document: dict[str, Any], field: str, file: Path) -> list[dict[str, Any]]:
    try:
        name = str(document["metadata"]["name"])
        template = document["spec"]["template"]
        count = int(document["spec"].get(field) or 1)
        if not 0 <= count <= PODS_MAX:
            raise ManifestMistake(f"{file}: {name} asks for {count} pods; at most {PODS_MAX} are simulated")
        space = document["metadata"].get("namespace")
        own = {**(template.get("metadata") or {}), **({"namespace": space} if space else {})}
        return [
            {**template, "kind": "Pod", "apiVersion": "v1", "metadata": {**own, "name": f"{name}-{number}"}}
            for number in range(count)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestMistake(f"{file}: {document.get('kind')} has no readable template: {error}") from error


def _apply(body: dict[str, Any], operation: Mapping[str, Any]) -> None:
    """Do one operation of the webhook's patch, which only adds and removes (RFC 6902)."""
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
