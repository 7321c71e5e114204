"""A small API server with faults on demand.

It stores objects, checks uid and resourceVersion, lists in pages or as a stream, and watches with bookmarks. It is only
for faults that a real API server does not produce on demand; everything else is tested against the real one.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiohttp import web

from tests.fakes.listening import listening

Object = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Interceptor = Callable[[str, str, Any], web.Response | None]
"""Called with method, path and body; a returned response replaces the usual one."""


@dataclass
class WatchStream:
    """One open watch; the test sends events through it and ends it."""

    query: dict[str, str]
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    cut: bool = False

    def send(self, event_type: str, obj: Object) -> None:
        self.lines.put_nowait(json.dumps({"type": event_type, "object": obj}).encode() + b"\n")

    def send_raw(self, data: bytes) -> None:
        self.lines.put_nowait(data)

    def close(self) -> None:
        """End the watch as a server does on timeout."""
        self.lines.put_nowait(None)

    def break_connection(self) -> None:
        """Break the TCP connection in the middle of the chunked answer."""
        self.cut = True
        self.lines.put_nowait(None)


class FakeApiServer:
    """Serves /api and /apis below `url`. Faults: see `fail`, `intercept` and `streams`."""

    def __init__(self) -> None:
        self.url = ""
        self.version = 100
        self.objects: dict[str, Object] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.streams: asyncio.Queue[WatchStream] = asyncio.Queue()
        self.open_streams: list[WatchStream] = []
        self.accepts_streaming_list = True
        self.sends_events = True
        self.faults: deque[tuple[str, Handler]] = deque()
        self._interceptors: list[Interceptor] = []

    # For tests

    def fail(self, handler: Handler, *, times: int = 1, containing: str = "") -> None:
        """Answer the next `times` requests whose `METHOD path?query` contains the text with `handler`."""
        self.faults.extend([(containing, handler)] * times)

    def intercept(self, interceptor: Interceptor) -> None:
        """Call `interceptor` before each answer to a request for an object, so that a test can change objects first."""
        self._interceptors.append(interceptor)

    def put(self, path: str, obj: Object) -> Object:
        """Create or replace the object at `path` and notify watchers."""
        old = self.objects.get(path)
        self.version += 1
        namespace, name = _split(path)
        metadata = {"name": name, "namespace": namespace, "uid": str(uuid4()), **obj.get("metadata", {})}
        stored = {**obj, "metadata": {**metadata, "resourceVersion": str(self.version)}}
        self.objects[path] = stored
        self._tell("MODIFIED" if old else "ADDED", path, stored)
        return stored

    def remove(self, path: str) -> Object:
        """Delete the object at `path` and notify watchers."""
        self.version += 1
        last = self.objects.pop(path)
        last = {**last, "metadata": {**last["metadata"], "resourceVersion": str(self.version)}}
        self._tell("DELETED", path, last)
        return last

    def bookmark(self, *, initial_events_end: bool = False) -> Object:
        annotations = {"k8s.io/initial-events-end": "true"} if initial_events_end else {}
        return {"metadata": {"resourceVersion": str(self.version), "annotations": annotations}}

    def count(self, containing: str) -> int:
        """Return the number of requests whose `METHOD path?query` contains the text."""
        return sum(containing in _describe(method, path, query) for method, path, query in self.requests)

    # Answers

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeApiServer"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        async with listening(app) as self.url:
            try:
                yield self
            finally:
                for stream in self.open_streams:
                    stream.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append((request.method, request.path, query))
        self.headers.append(dict(request.headers))
        body = await request.read()
        self.bodies.append(json.loads(body) if body else None)
        described = _describe(request.method, request.path, query)
        for index, (containing, handler) in enumerate(self.faults):
            if containing in described:
                del self.faults[index]
                return await handler(request)
        if query.get("watch") == "true":
            return await self._watch(request, query)
        for interceptor in self._interceptors:
            if (answer := interceptor(request.method, request.path, self.bodies[-1])) is not None:
                return answer
        return self.respond(request.method, request.path, query, self.bodies[-1])

    def respond(self, method: str, path: str, query: dict[str, str], body: Any) -> web.Response:
        """Answer one request that is not a watch, as an API server does."""
        if method == "POST":
            return self._create(path, body)
        if path in self.objects:
            return self._change(method, path, body)
        if path == "/apis":
            served = sorted({tuple(one.split("/")[2:4]) for one in self.objects if one.startswith("/apis/")})
            groups = [{"name": name, "versions": [{"groupVersion": f"{name}/{version}"}]} for name, version in served]
            return web.json_response({"kind": "APIGroupList", "groups": groups})
        if method == "GET" and _is_collection(path):
            return self._list(path, query)
        return status(404, "NotFound", f"{path} not found")

    def _create(self, path: str, body: Object) -> web.Response:
        target = f"{path}/{body['metadata']['name']}"
        if target in self.objects:
            return status(409, "AlreadyExists", f"{target} already exists")
        return web.json_response(self.put(target, body), status=201)

    def _change(self, method: str, path: str, body: Any) -> web.Response:
        current = self.objects[path]
        if method == "GET":
            return web.json_response(current)
        wanted = (body or {}).get("preconditions") if method == "DELETE" else (body or {}).get("metadata")
        for key in ("uid", "resourceVersion"):
            if (wanted or {}).get(key, current["metadata"][key]) != current["metadata"][key]:
                return status(409, "Conflict", f"{key} differs")
        if method == "DELETE":
            return web.json_response(self.remove(path))
        changed = merge(current, body)
        return web.json_response(current if changed == current else self.put(path, changed))

    def _list(self, path: str, query: dict[str, str]) -> web.Response:
        items = self._collection(path)
        if selector := query.get("labelSelector"):
            items = [one for one in items if _is_selected(one["metadata"].get("labels") or {}, selector)]
        start, limit = int(query.get("continue", "0")), int(query.get("limit", "0")) or len(items)
        metadata = {"resourceVersion": str(self.version)}
        if start + limit < len(items):
            metadata["continue"] = str(start + limit)
        return web.json_response({"kind": "List", "metadata": metadata, "items": items[start : start + limit]})

    def _collection(self, path: str) -> list[Object]:
        return [obj for key, obj in sorted(self.objects.items()) if _belongs(key, path)]

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        if query.get("sendInitialEvents") and not self.accepts_streaming_list:
            return status(422, "Invalid", "sendInitialEvents is forbidden")
        stream = WatchStream(query | {"path": request.path})
        if query.get("sendInitialEvents") and self.sends_events:
            for obj in self._collection(request.path):
                stream.send("ADDED", obj)
            stream.send("BOOKMARK", self.bookmark(initial_events_end=True))
        self.open_streams.append(stream)
        self.streams.put_nowait(stream)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            while (line := await stream.lines.get()) is not None:
                await response.write(line)
            if stream.cut and request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass
        finally:
            self.open_streams.remove(stream)
        return response

    def _tell(self, event_type: str, path: str, obj: Object) -> None:
        for stream in self.open_streams:
            if self.sends_events and _belongs(path, stream.query["path"]):
                stream.send(event_type, obj)


def status(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """Return a Kubernetes Status as response."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return web.json_response({**body, "message": message}, status=code, headers=headers)


def answering(code: int, reason: str = "", headers: dict[str, str] | None = None) -> Handler:
    """Return a fault: answer with a Status."""

    async def handle(_request: web.Request) -> web.StreamResponse:
        return status(code, reason, f"fault {code}", headers)

    return handle


async def cut_connection(request: web.Request) -> web.StreamResponse:
    """Fault: close the TCP connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(_request: web.Request) -> web.StreamResponse:
    """Fault: never answer."""
    await asyncio.Event().wait()
    return web.Response()


def merge(current: Object, patch: Object) -> Object:
    """Apply a JSON merge patch."""
    result = dict(current)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merge(result[key], value)
        else:
            result[key] = value
    return result


def _describe(method: str, path: str, query: dict[str, str]) -> str:
    return f"{method} {path}?" + "&".join(f"{key}={value}" for key, value in query.items())


def _is_selected(labels: dict[str, str], selector: str) -> bool:
    wanted = (one.partition("=") for one in selector.split(","))
    return all(key in labels and value in ("", labels[key]) for key, _, value in wanted)


def _split(path: str) -> tuple[str, str]:
    parts = path.split("/")
    return (parts[-3] if parts[-4] == "namespaces" else "", parts[-1])


def _is_collection(path: str) -> bool:
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    return len(parts) in {1, 3} and (len(parts) == 1 or parts[0] == "namespaces")


def _belongs(path: str, collection: str) -> bool:
    """True if `collection` contains the object at `path`; it may span all namespaces."""
    parent, _, _name = path.rpartition("/")
    if parent == collection:
        return True
    root, _, plural = collection.rpartition("/")
    return parent.startswith(root + "/namespaces/") and parent.endswith("/" + plural)
