"""/livez and /readyz: a part that cannot decide is not ready and says why; tests/webhook has the webhook's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from agent.__main__ import add_agent_health
from agent.node_agent import NodeAgent
from atoll.kube.client import ApiClient
from atoll.kube.mirror import BLIND_SECONDS_MAX, ClusterMirror
from atoll.service.http import application
from atoll.service.metrics import Metrics
from controllers.runner import health_app
from extender.app import ExtenderParts, build_health_app
from extender.binder import Binder
from tests.extender.test_app import FakeBinder
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import ManualClock
from tests.fakes.listening import kubeconfig


@pytest.fixture
async def mirror(tmp_path: Path) -> AsyncIterator[tuple[ClusterMirror, ManualClock]]:
    """A mirror of an API server without objects; it does not run yet."""
    clock = ManualClock()
    async with FakeApiServer().running() as server, await ApiClient.connect(kubeconfig(tmp_path, server.url)) as client:
        yield ClusterMirror(client, clock), clock


def app_of(part: str, mirror: ClusterMirror, clock: ManualClock) -> web.Application:
    """Return what a part serves on its port for health."""
    metrics = Metrics(part)
    if part == "controllers":
        return health_app(mirror, metrics)
    return build_health_app(ExtenderParts(mirror, cast("Binder", FakeBinder()), clock, metrics, 10.0))


async def answers(http: TestClient[Any, Any], *paths: str) -> list[int]:
    """Return the status of each path."""
    return [(await http.get(path)).status for path in paths]


@pytest.mark.parametrize("part", ["extender", "controllers"])
async def test_whoever_decides_is_ready_while_its_copies_are_whole_and_fresh(
    mirror: tuple[ClusterMirror, ManualClock], part: str
) -> None:
    """Not before every list is complete, and not after a watch fell silent; alive all the time."""
    copies, clock = mirror
    async with TestClient(TestServer(app_of(part, copies, clock))) as http:
        assert await answers(http, "/readyz", "/livez") == [503, 200]
        assert "list of pod objects is not complete" in await (await http.get("/readyz")).text()

        running = asyncio.create_task(copies.run())
        async with asyncio.timeout(20):
            await copies.synced()
        assert await answers(http, "/readyz", "/livez") == [200, 200]

        await clock.advance(BLIND_SECONDS_MAX + 1)
        assert await answers(http, "/readyz", "/livez") == [503, 200]
        assert "has been silent" in await (await http.get("/readyz")).text()
        assert f"atoll_{part}_ready 0.0" in await (await http.get("/metrics")).text()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_agent_is_ready_when_it_has_published_and_alive_while_it_looks() -> None:
    """An agent that hangs in the driver is not alive; one whose report never got out is alive and not ready."""
    agent = SimpleNamespace(has_published=False, age=1.0, seconds_stuck=lambda: agent.age)
    agent.driver_problem, agent.refused, agent.seconds_refused = "", 0.0, lambda: agent.refused
    app = application()
    add_agent_health(app, cast("NodeAgent", agent), Metrics("agent"), stale_seconds=120.0, driver_seconds_max=300.0)
    async with TestClient(TestServer(app)) as http:
        assert await answers(http, "/readyz", "/livez") == [503, 200]
        agent.has_published = True
        assert await answers(http, "/readyz", "/livez") == [200, 200]
        agent.age = 121.0
        assert await answers(http, "/readyz", "/livez") == [200, 503]
        agent.age, agent.driver_problem, agent.refused = 1.0, "library and driver differ", 1.0
        assert await answers(http, "/readyz", "/livez") == [503, 200], "readiness says so at once, liveness waits"
        assert "library and driver differ" in await (await http.get("/readyz")).text()
        agent.refused = 301.0
        assert await answers(http, "/readyz", "/livez") == [503, 503], "only a new container sees a new driver"
        agent.driver_problem, agent.refused = "a card hangs", 0.0
        assert await answers(http, "/readyz", "/livez") == [503, 200], "a new container would cure no card"
