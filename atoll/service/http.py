"""HTTP server plumbing: an application with a bounded body, health endpoints, metrics, and a listener that cleans up.

A check of health or readiness returns None when all is well, else a short reason, which the endpoint shows.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Middleware

from atoll.service.metrics import CONTENT_TYPE_LATEST, Metrics

Check = Callable[[], str | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ALWAYS_ANSWERED = ("/livez", "/readyz", "/metrics")

BODY_BYTES_MAX = 1024 * 1024
IN_FLIGHT_MAX = 1024
"""Requests that are worked on at a time; more are sent away at once instead of being queued without end."""
STOP_SECONDS = 5.0


def application(*, body_bytes_max: int = BODY_BYTES_MAX, in_flight_max: int = IN_FLIGHT_MAX) -> web.Application:
    """Return an empty application that answers 413 to larger bodies, and 429 beyond `in_flight_max` requests at a time.

    Health and metrics are answered all the same: whoever watches must see that there are too many.
    """
    return web.Application(client_max_size=body_bytes_max, middlewares=[_in_flight_limit(in_flight_max)])


def _in_flight_limit(in_flight_max: int) -> Middleware:
    in_flight = 0

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal in_flight
        if request.path in ALWAYS_ANSWERED:
            return await handler(request)
        if in_flight >= in_flight_max:
            return web.Response(status=429, text="too many requests at a time\n", headers={"Retry-After": "1"})
        in_flight += 1
        try:
            return await handler(request)
        finally:
            in_flight -= 1

    return limit


def add_health(
    app: web.Application,
    *,
    live: Mapping[str, Check] | None = None,
    ready: Mapping[str, Check] | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Add /livez, /readyz (200, or 503 with the reasons) and, with `metrics`, /metrics, which tells readiness too."""
    app.router.add_get("/livez", _health_handler(live or {}))
    app.router.add_get("/readyz", _health_handler(ready or {}))
    if metrics is not None:
        checks = ready or {}
        metrics.register_readiness(lambda: not _failures(checks))
        app.router.add_get("/metrics", _metrics_handler(metrics))


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve `app` inside the block and give the port, which matters when `port` is 0. OSError if it is taken."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=ssl_context, reuse_address=True)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def serve(
    app: web.Application,
    host: str,
    port: int,
    ssl_context: ssl.SSLContext | None = None,
    *,
    on_listening: Callable[[int], None] | None = None,
) -> None:
    """Serve `app` until cancelled; `on_listening` is told the port."""
    async with listening(app, host, port, ssl_context) as actual_port:
        if on_listening is not None:
            on_listening(actual_port)
        await asyncio.Event().wait()


def is_loopback(host: str) -> bool:
    """Tell whether only this machine, or this pod, can connect to an address to listen on."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _health_handler(checks: Mapping[str, Check]) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        failures = _failures(checks)
        lines = [f"[-] {name}: {reason}" for name, reason in failures.items()] or ["ok"]
        return web.Response(status=503 if failures else 200, text="\n".join(lines) + "\n")

    return handle


def _failures(checks: Mapping[str, Check]) -> dict[str, str]:
    return {name: reason for name, check in checks.items() if (reason := check()) is not None}


def _metrics_handler(metrics: Metrics) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        metrics.refresh()
        page = await asyncio.to_thread(metrics.page)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return handle
