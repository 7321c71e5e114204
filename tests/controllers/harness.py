"""Harness for reconcilers of one term: real client, real mirror, API server in memory, faults on demand.

Time runs five times faster than real time, so that back-offs are short; no test depends on the factor.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import web

from atoll.api.times import format_microtime
from atoll.kube.client import ApiClient
from atoll.kube.errors import Unanswered
from atoll.kube.mirror import ClusterMirror
from atoll.service.metrics import Metrics
from controllers.api import GuardedApi
from controllers.context import Context
from controllers.leases.terminations import PodTerminations
from controllers.loops import Loop
from controllers.metrics import controller_metrics
from controllers.runner import build_loops
from controllers.settings import ControllersSettings
from tests.builders import lease_json, pod_json, report_json
from tests.fakes.api_server import FakeApiServer, Object
from tests.fakes.clock import until
from tests.fakes.listening import kubeconfig
from tests.kube.conftest import no_wait

SPEED = 5.0
LEASES = "/apis/coordination.k8s.io/v1/namespaces/atoll-system/leases"
HEARTBEATS = "/apis/coordination.k8s.io/v1/namespaces/atoll-nodes/leases"
REPORTS = "/apis/gpu.scheduling/v1/gpunodestatuses"
CLAIMS = "/apis/gpu.scheduling/v1/namespaces/team/gpuclaims"
PODS = "/api/v1/namespaces/team/pods"


class HurriedClock:
    """Real time, five times faster; the time of day is off by `ahead`."""

    ahead = timedelta()

    def monotonic_seconds(self) -> float:
        return asyncio.get_running_loop().time() * SPEED

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / SPEED)


class InMemoryServer(FakeApiServer):
    """Adds the status subresource, whose writes change the object, and evictions, which delete at once.

    A dry-run eviction does nothing.
    """

    def respond(self, method: str, path: str, query: dict[str, str], body: Any) -> web.Response:
        if method == "POST" and path.endswith("/eviction"):
            if body["deleteOptions"].get("dryRun"):
                return web.json_response({"kind": "Status", "status": "Success"}, status=201)
            return super().respond("DELETE", path.removesuffix("/eviction"), query, body["deleteOptions"])
        return super().respond(method, path.removesuffix("/status"), query, body)


@dataclass
class FaultyApi:
    """Forwards calls; loses write number `fails_at`, before or after the server handles it."""

    api: ApiClient
    fails_at: int = 0
    is_after: bool = False
    writes: list[tuple[str, str]] = field(default_factory=list)

    async def get(self, path: str, **options: Any) -> bytes:
        return await self.api.get(path, **options)

    async def list(self, path: str, decode: Callable[[bytes], Any], **options: Any) -> Any:
        return await self.api.list(path, decode, **options)

    async def create(self, path: str, body: Any, **options: Any) -> bytes:
        return await self._write("POST", path, lambda: self.api.create(path, body, **options))

    async def patch(self, path: str, body: Any, **options: Any) -> bytes:
        return await self._write("PATCH", path, lambda: self.api.patch(path, body, **options))

    async def delete(self, path: str, options: Any = None, **more: Any) -> bytes:
        return await self._write("DELETE", path, lambda: self.api.delete(path, options, **more))

    async def _write(self, method: str, path: str, send: Callable[[], Any]) -> bytes:
        self.writes.append((method, path))
        is_lost = len(self.writes) == self.fails_at
        if is_lost and not self.is_after:
            raise Unanswered("lost", path=path, sent=False)
        answer: bytes = await send()
        if is_lost:
            raise Unanswered("lost", path=path, sent=True)
        return answer


@dataclass
class Notes:
    """Recorded events as (reason, name), with their notes."""

    recorded: list[tuple[str, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def record(self, regarding: Any, *, reason: str, note: str = "", **_: Any) -> None:
        self.recorded.append((reason, regarding.name))
        self.texts.append(note)

    def notes_on(self, reason: str, name: str) -> list[str]:
        """Return the notes of an object's events, in order."""
        pairs = zip(self.recorded, self.texts, strict=True)
        return [text for one, text in pairs if one == (reason, name)]


@dataclass
class Term:
    """One term of leadership over a real client and mirror."""

    api: FaultyApi
    mirror: ClusterMirror
    notes: Notes
    loops: tuple[Loop[Any], ...]
    is_leading: list[bool]
    metrics: Metrics
    clock: HurriedClock

    def resync(self) -> None:
        """Resync all loops, as the process does every 30 s."""
        for loop in self.loops:
            loop.resync()

    def reconciler(self, name: str) -> Any:
        """Return the reconciler of one of the loops."""
        return next(loop for loop in self.loops if loop.name == name)._reconciler


@dataclass
class ControllerHarness(Term):
    """Server, mirror and loops of one test. Each write calls `leads` first."""

    server: InMemoryServer

    def lease(self, device_id: int, node: str = "n1") -> Object | None:
        return self.server.objects.get(f"{LEASES}/gpu-{node}-{device_id}")

    def held(self) -> set[str]:
        return {path.rpartition("/")[2] for path in self.server.objects if path.startswith(LEASES)}

    def put_pod(self, name: str, **options: Any) -> Object:
        return self.server.put(f"{PODS}/{name}", strip_version(pod_json(name, **options)))

    def put_leases(self, *device_ids: int, **options: Any) -> None:
        for device_id in device_ids:
            body = strip_version(lease_json("n1", device_id, **options))
            self.server.put(f"{LEASES}/{body['metadata']['name']}", body)

    def report(self, sequence: int, **pod: Any) -> None:
        """Publish a complete report that covers all changes so far."""
        body = report_json("n1")
        position = str(self.server.version)
        body["status"]["evidence"] = {
            "sequence": sequence,
            "podResourceVersion": position,
            "liveRead": True,
            "kubeletRead": True,
        }
        body["status"]["pods"] = [pod] if pod else []
        current = self.server.objects.get(f"{REPORTS}/n1", {"metadata": {}})
        self.server.put(f"{REPORTS}/n1", {**body, "metadata": {**current["metadata"], "name": "n1"}})

    async def settled(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; resync the loops if it takes long. Watches send bookmarks, as a server's do."""
        for _ in range(3):
            for stream in self.server.open_streams:
                stream.send("BOOKMARK", self.server.bookmark())
            with contextlib.suppress(TimeoutError):
                await until(condition, timeout_seconds=3.0)
                return
            for loop in self.loops:
                loop.resync()
        await until(condition, timeout_seconds=15.0)


def strip_version(body: Object) -> Object:
    """Return the object without its resourceVersion, which the server sets."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
    return {**body, "metadata": metadata}


@asynccontextmanager
async def leading(
    server: InMemoryServer,
    folder: Path,
    api_of: Callable[[ApiClient], FaultyApi],
    *,
    with_gangs: bool = False,
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[Term]:
    """Run mirror and loops as leader until the block ends; `api_of` wraps the client."""
    clock = HurriedClock()
    config = kubeconfig(folder, server.url)
    async with await ApiClient.connect(config, requests_per_second=1e6, burst=10_000, sleep=no_wait) as client:
        mirror = ClusterMirror(client, clock, with_gangs=with_gangs)
        terminations, notes, tokens = PodTerminations(mirror), Notes(), itertools.count()
        api, is_leading, metrics = api_of(client), [True], Metrics("controllers")
        context = Context(
            api=GuardedApi(api, lambda: is_leading[0]),
            mirror=mirror,
            clock=clock,
            events=notes,
            metrics=controller_metrics(metrics),
            new_token=lambda: f"token-{next(tokens)}",
        )
        loops: list[Loop[Any]] = []

        def observe(kind: Any, change: Any) -> None:
            terminations.observe(kind, change)
            for loop in loops:
                loop.observe(kind, change)

        mirror.on_change(observe)
        watching = asyncio.ensure_future(mirror.run())
        await mirror.synced()
        loops += build_loops(context, terminations, ControllersSettings(claim_status_seconds=0.0, **(settings or {})))
        working = [asyncio.ensure_future(loop.run()) for loop in loops]
        term = Term(api, mirror, notes, tuple(loops), is_leading, metrics, clock)
        term.resync()
        try:
            yield term
        finally:
            for task in (watching, *working):
                task.cancel()
            await asyncio.gather(watching, *working, return_exceptions=True)


@asynccontextmanager
async def running_controllers(
    folder: Path,
    setup: Callable[[InMemoryServer], None] = lambda _: None,
    *,
    fails_at: int = 0,
    is_after: bool = False,
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[ControllerHarness]:
    """Run the loops over a node n1 with eight GPUs; `setup` adds objects before they start."""
    async with InMemoryServer().running() as server:
        server.put(f"{REPORTS}/n1", strip_version(report_json("n1")))
        server.put("/api/v1/nodes/n1", {"metadata": {"name": "n1", "uid": "uid-of-n1"}})
        renewed = format_microtime(datetime.now(UTC))
        beat = {"holderIdentity": "n1", "leaseDurationSeconds": 36_000, "renewTime": renewed}
        server.put(f"{HEARTBEATS}/n1", {"metadata": {"name": "n1"}, "spec": beat})
        setup(server)
        api_of = lambda client: FaultyApi(client, fails_at, is_after)  # noqa: E731
        async with leading(server, folder, api_of, settings=settings) as term:
            yield ControllerHarness(**vars(term), server=server)
