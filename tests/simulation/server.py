"""The API server's semantics in memory: versions, preconditions, subresources, watch logs. No network, no time.

All changes of objects go through `_store` or `_remove`, which notify the listeners: watches, kubelets, judge.
`RefusedRequest` has the answer of the real API server.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from atoll.api import names
from atoll.kube.paths import API_GROUPS
from tests.fakes.api_server import merge

Object = dict[str, Any]
PODS = "/api/v1/namespaces/team/pods"
ALL_PODS = "/api/v1/pods"
NODES = "/api/v1/nodes"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{names.SYSTEM_NAMESPACE}/leases"
HEARTBEATS = f"/apis/coordination.k8s.io/v1/namespaces/{names.HEARTBEAT_NAMESPACE}/leases"
RESERVATIONS = f"/apis/{names.API_VERSION}/gpureservations"
REPORTS = f"/apis/{names.API_VERSION}/gpunodestatuses"
GONE = -1
GROUPS = orjson.dumps({"groups": [{"name": "batch", "versions": [{"groupVersion": "batch/v1"}]}]})


class RefusedRequest(Exception):
    """The server answers with a Status."""

    def __init__(self, status: int, reason: str, message: str = "") -> None:
        super().__init__(f"{status} {reason} {message}")
        self.status = status
        self.body = orjson.dumps({"kind": "Status", "code": status, "reason": reason, "message": message or reason})


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One entry of a collection's watch log. `line` is what a watch sends."""

    version: int
    kind: str
    object: Object
    line: bytes


Listener = Callable[[str, Object | None, Object | None], None]
"""Called with the path, the object before and the object after a write."""


class SimulatedServer:
    """Objects by path, and one log per collection. `writer` names who writes now, for the judge's messages."""

    def __init__(self) -> None:
        self.version = 100
        self.uid_count = 0
        self.objects: dict[str, Object] = {}
        self.logs: dict[str, list[ServerEvent]] = {}
        self._members: dict[str, dict[str, Object]] = {}
        self.compacted: dict[str, int] = {}
        self.listeners: list[Listener] = []
        self.writer = ""

    # Requests

    def handle(self, method: str, path: str, query: Mapping[str, str], body: Any) -> tuple[int, bytes]:
        """Answer a request that is no watch. Raises Refused."""
        base, _, last = path.rpartition("/")
        if method == "POST":
            return 201, self._post(path, base, last, body)
        target = base if last == "status" else path
        if target in self.objects:
            return 200, orjson.dumps(self._one(method, target, body))
        if path == API_GROUPS:
            return 200, GROUPS
        if method == "GET" and _is_collection(path):
            return 200, self._list(path, query)
        raise RefusedRequest(404, "NotFound", path)

    def _post(self, path: str, base: str, last: str, body: Object) -> bytes:
        if last == "binding":
            self._bind(base, body)
            return b'{"kind":"Status","status":"Success"}'
        if last == "eviction":
            self.delete(base, (body.get("deleteOptions") or {}).get("preconditions"))
            return b'{"kind":"Status","status":"Success"}'
        if path.endswith("/events"):
            return b"{}"
        return orjson.dumps(self.create(f"{path}/{body['metadata']['name']}", body))

    def _one(self, method: str, path: str, body: Any) -> Object:
        if method == "GET":
            return self.objects[path]
        if method == "DELETE":
            return self.delete(path, (body or {}).get("preconditions"))
        self._check(path, body.get("metadata") or {})
        if method == "PUT":
            return self._store(path, body)
        return self._store(path, merge(self.objects[path], body))

    def create(self, path: str, body: Object) -> Object:
        """Create an object; the server gives uid and version. Raises Refused."""
        if path in self.objects:
            raise RefusedRequest(409, "AlreadyExists", path)
        self.uid_count += 1
        uid = f"{path.rpartition('/')[2]}.u{self.uid_count}"
        metadata = {"annotations": {}, **body["metadata"], "uid": uid, "namespace": _namespace(path)}
        metadata.pop("resourceVersion", None)
        return self._store(path, {**body, "metadata": metadata})

    def patch(self, path: str, patch: Object, *, uid: str = "") -> bool:
        """Patch as an actor of the model; False when the object is gone or another one."""
        current = self.objects.get(path)
        if current is None or (uid and current["metadata"]["uid"] != uid):
            return False
        self._store(path, merge(current, patch))
        return True

    def delete(self, path: str, preconditions: Mapping[str, str] | None = None, *, force: bool = False) -> Object:
        """Delete; a bound pod is only marked, unless by force: its kubelet deletes it in the end. Raises Refused."""
        current = self.objects.get(path)
        if current is None:
            raise RefusedRequest(404, "NotFound", path)
        self._check(path, preconditions or {})
        is_bound_pod = path.startswith(PODS) and bool(current["spec"].get("nodeName"))
        if not is_bound_pod or force:
            return self._remove(path)
        if current["metadata"].get("deletionTimestamp"):
            return current
        return self._store(path, merge(current, {"metadata": {"deletionTimestamp": "2026-01-31T12:00:00Z"}}))

    def _bind(self, path: str, body: Object) -> None:
        current = self.objects.get(path)
        if current is None:
            raise RefusedRequest(404, "NotFound", path)
        metadata = body["metadata"]
        self._check(path, metadata)
        if current["metadata"].get("deletionTimestamp") or current["spec"].get("nodeName"):
            raise RefusedRequest(409, "Conflict", "pod is being deleted or already assigned")
        if current["spec"].get("schedulingGates"):
            raise RefusedRequest(409, "Conflict", "pod has non-empty .spec.schedulingGates")
        patch = {
            "metadata": {"annotations": metadata.get("annotations", {})},
            "spec": {"nodeName": body["target"]["name"]},
        }
        self._store(path, merge(current, patch))

    def _check(self, path: str, wanted: Mapping[str, Any]) -> None:
        metadata = self.objects[path]["metadata"]
        for key in ("uid", "resourceVersion"):
            if wanted.get(key) and wanted[key] != metadata[key]:
                raise RefusedRequest(409, "Conflict", f"{path}: {key} differs")

    def _list(self, path: str, query: Mapping[str, str]) -> bytes:
        items = self.collection(path)
        selector = query.get("fieldSelector", "")
        if selector.startswith("metadata.name="):
            items = [item for item in items if item["metadata"]["name"] == selector.removeprefix("metadata.name=")]
        if label := query.get("labelSelector"):
            items = [item for item in items if label in item["metadata"].get("labels", {})]
        return orjson.dumps({"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": items})

    def collection(self, path: str) -> list[Object]:
        """Return the objects of a collection, by path."""
        return list(self._members.get(canonical(path), {}).values())

    def log(self, path: str) -> list[ServerEvent]:
        """Return the watch log of a collection."""
        return self.logs.setdefault(canonical(path), [])

    def pods(self) -> list[Object]:
        """Return every pod."""
        return self.collection(PODS)

    # Writes

    def _store(self, path: str, obj: Object) -> Object:
        old = self.objects.get(path)
        self.version += 1
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        if old is not None:
            stored["metadata"]["uid"] = old["metadata"]["uid"]
            stored["metadata"]["namespace"] = old["metadata"]["namespace"]
        self.objects[path] = stored
        self._members.setdefault(canonical(path.rpartition("/")[0]), {})[path] = stored
        self._tell("MODIFIED" if old is not None else "ADDED", path, old, stored)
        return stored

    def _remove(self, path: str) -> Object:
        self.version += 1
        old = self.objects.pop(path)
        del self._members[canonical(path.rpartition("/")[0])][path]
        last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self.version)}}
        self._tell("DELETED", path, old, last)
        return last

    def _tell(self, kind: str, path: str, old: Object | None, obj: Object) -> None:
        line = b'{"type":"%s","object":%s}\n' % (kind.encode(), orjson.dumps(obj))
        self.log(path.rpartition("/")[0]).append(ServerEvent(self.version, kind, obj, line))
        for listener in self.listeners:
            listener(path, old, None if kind == "DELETED" else obj)


def canonical(path: str) -> str:
    """Return the collection that a watch over all namespaces and one over the only namespace share."""
    return path.replace("/namespaces/team", "")


def _namespace(path: str) -> str:
    parts = path.split("/")
    return parts[-3] if parts[-4] == "namespaces" else ""


def _is_collection(path: str) -> bool:
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    return len(parts) in {1, 3} and (len(parts) == 1 or parts[0] == "namespaces")
