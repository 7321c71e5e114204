"""Limit of concurrent binds: kube-scheduler may send a thousand at once, but the API server gets few at a time."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from aiohttp import web

from atoll.api import names
from atoll.api.claims import VisibleDevices
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.mirror import ClusterMirror
from extender.binder import Binder, BinderSettings
from extender.wire import BindCall
from tests.builders import make_pod, make_report
from tests.extender.test_app import FakeMirror
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import ManualClock
from tests.fakes.listening import kubeconfig

LEASES = f"POST {paths.leases(names.SYSTEM_NAMESPACE)}"
PODS = 4
GPUS = 2
AGES_SECONDS = 600.0


@dataclass
class Rush:
    """A binder whose API server lets Leases wait until `release` is set."""

    server: FakeApiServer
    client: ApiClient
    mirror: FakeMirror
    binder: Binder
    release: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    waiting_max: int = 0

    async def hold(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a Lease once that is released."""
        self.waiting += 1
        self.waiting_max = max(self.waiting, self.waiting_max)
        await self.release.wait()
        self.waiting -= 1
        return self.server.respond(request.method, request.path, {}, json.loads(await request.read()))

    def bind(self, number: int) -> "asyncio.Task[str]":
        """Begin a bind as kube-scheduler asks for it."""
        return asyncio.create_task(self.binder.bind(BindCall(f"p{number}", "team", f"u{number}", "n1")))

    async def until(self, question: Callable[[], bool]) -> None:
        """Wait, and let everything else have its turn."""
        while not question():
            await self.client.get(paths.pods("team", "p0"))


@asynccontextmanager
async def rush(folder: Path, answer_seconds: float) -> AsyncIterator[Rush]:
    """One node of eight GPUs, four pods that ask for two each, and one bind at a time."""
    clock, mirror = ManualClock(), FakeMirror()
    mirror.ledger.put_report(make_report("n1"))
    mirror.ledger.put_heartbeat("n1", clock.monotonic_seconds(), 180.0)
    async with (
        FakeApiServer().running() as server,
        await ApiClient.connect(kubeconfig(folder, server.url), requests_per_second=1e4, burst=10_000) as client,
    ):
        for number in range(PODS):
            pod = make_pod(f"p{number}", uid=f"u{number}", gpus=GPUS)
            mirror.ledger.put_pod(pod)
            server.put(paths.pods("team", f"p{number}"), {"metadata": {"name": f"p{number}"}})
        settings = BinderSettings(answer_seconds, 60.0, VisibleDevices.UUID, binds_at_once=1)
        binder = Binder(client, cast("ClusterMirror", mirror), clock, settings, new_token=lambda: "attempt")
        made = Rush(server, client, mirror, binder)
        server.fail(made.hold, times=PODS * GPUS, containing=LEASES)
        try:
            yield made
        finally:
            made.release.set()
            await binder.drain()


async def test_binds_wait_for_their_turn_and_all_are_carried_out(tmp_path: Path) -> None:
    """However many come, one at a time asks for Leases; in the end every pod has its own."""
    async with rush(tmp_path, AGES_SECONDS) as rushed:
        binds = [rushed.bind(number) for number in range(PODS)]
        await rushed.until(lambda: rushed.waiting == GPUS)
        for _ in range(10):
            await rushed.until(lambda: True)
            await rushed.client.get(paths.pods("team", "p0"))
        rushed.release.set()

        assert await asyncio.gather(*binds) == [""] * PODS
        assert rushed.waiting_max == GPUS
        assert sum("/leases/" in path for path in rushed.server.objects) == PODS * GPUS


async def test_a_bind_without_a_turn_leaves_nothing_and_blames_no_node(tmp_path: Path) -> None:
    """It is refused before kube-scheduler loses patience, with nothing written, and carried out when it comes again."""
    async with rush(tmp_path, 0.4) as rushed:
        first = rushed.bind(0)
        await rushed.until(lambda: rushed.waiting == GPUS)

        assert "other binds wait" in await rushed.bind(1)
        assert rushed.binder.failed_nodes("u1") == frozenset()
        assert rushed.server.count(LEASES) == GPUS
        assert "has not answered" in await first

        rushed.release.set()
        await rushed.binder.drain()
        await rushed.bind(1)
        await rushed.binder.drain()
        assert sum("/leases/" in path for path in rushed.server.objects) == 2 * GPUS
