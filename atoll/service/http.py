"""HTTP server: an application with bounded requests, health endpoints, metrics, and a listener that cleans up.

A check of health or readiness returns None if healthy, else a short reason, which the endpoint shows.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from atoll.service.connections import IDLE_SECONDS, READ_SECONDS, Admission, connection_of
from atoll.service.metrics import CONTENT_TYPE_LATEST, Metrics

Check = Callable[[], str | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ALWAYS_ANSWERED = ("/livez", "/readyz", "/metrics")

BODY_BYTES_MAX = 1024 * 1024
ALL_ADDRESSES: Final = "*"
"""Host to listen on every address, IPv4 and IPv6. `0.0.0.0` and `::` each mean one family."""
IN_FLIGHT_MAX = 1024
"""Requests processed at a time; more are refused at once instead of queued."""
STOP_SECONDS = 5.0
LINGERING_SECONDS: Final = 1.0
"""Time for which a refused client may go on sending, so that it reads the refusal."""
BACKLOG: Final = 1024
"""Connections that the kernel holds until they are accepted; a flood must not keep others from being accepted."""


def application(
    *, body_bytes_max: int = BODY_BYTES_MAX, in_flight_max: int = IN_FLIGHT_MAX, read_seconds: float = READ_SECONDS
) -> web.Application:
    """Return an empty application that answers 413 to larger bodies, 408 to bodies that take longer than `read_seconds`
    to arrive, and 429 beyond `in_flight_max` requests that are worked on at a time.

    Handlers find the whole body in `request.read()`. Health and metrics are always answered, so that monitoring sees
    the overload.
    """
    middlewares = (_body_limit(body_bytes_max, read_seconds), _in_flight_limit(in_flight_max))
    return web.Application(client_max_size=body_bytes_max, middlewares=middlewares)


def _body_limit(bytes_max: int, read_seconds: float) -> Middleware:
    """Read the body before processing: an incomplete request takes no slot."""

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = connection_of(request)
        if connection is not None:
            connection.head_is_here()
        try:
            if (request.content_length or 0) > bytes_max:
                return _refusal(413, f"the body is larger than {bytes_max} bytes")
            try:
                if request.content.is_eof():  # a small body comes with its head
                    await request.read()
                else:
                    async with asyncio.timeout(read_seconds):
                        await request.read()
            except TimeoutError:
                return _refusal(408, f"the body did not arrive within {read_seconds:g} s")
            except ConnectionError as error:  # gone or cut: no client reads the answer
                # aiohttp keeps the error, and with its frames the body, until the garbage collector comes.
                error.__traceback__ = None
                return _refusal(400, "the body did not arrive")
            if connection is not None:
                connection.work()
            return await handler(request)
        finally:
            if connection is not None:
                connection.done()

    return limit


def _refusal(status: int, text: str) -> web.Response:
    response = web.Response(status=status, text=f"{text}\n")
    response.force_close()
    return response


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
    """Add /livez, /readyz (200, or 503 with the reasons) and, with `metrics`, /metrics, which includes readiness."""
    app.router.add_get("/livez", _health_handler(live or {}))
    app.router.add_get("/readyz", _health_handler(ready or {}))
    if metrics is not None:
        checks = ready or {}
        metrics.register_readiness(lambda: not _failures(checks))
        app.router.add_get("/metrics", _metrics_handler(metrics))


class _GuardedSite(web.BaseSite):
    """aiohttp's TCPSite with guarded connections, and a handshake with the time limit of a request's head."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, *, ssl_context: ssl.SSLContext | None) -> None:
        super().__init__(runner, ssl_context=ssl_context, backlog=BACKLOG)
        self._address = host, port

    @property
    def name(self) -> str:
        """Name in aiohttp's messages."""
        host, port = self._address
        return f"{'http' if self._ssl_context is None else 'https'}://{in_url(host)}:{port}"

    async def start(self) -> None:
        """Listen."""
        await super().start()
        assert self._runner.server is not None
        host, port = self._address
        self._server = await asyncio.get_running_loop().create_server(
            Admission().guarded(self._runner.server),
            None if host == ALL_ADDRESSES else host,
            port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            reuse_address=True,
            ssl_handshake_timeout=None if self._ssl_context is None else READ_SECONDS,
        )


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve `app` inside the block and give the port, which matters when `port` is 0. OSError if it is taken.

    Connections and their bytes are bounded (`atoll.service.connections`). Bodies are not decompressed.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=STOP_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
        lingering_time=LINGERING_SECONDS,
        auto_decompress=False,
    )
    await runner.setup()
    try:
        await _GuardedSite(runner, host, port, ssl_context=ssl_context).start()
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
    """Serve `app` until cancelled; `on_listening` gets the port."""
    async with listening(app, host, port, ssl_context) as actual_port:
        if on_listening is not None:
            on_listening(actual_port)
        await asyncio.Event().wait()


def in_url(host: str) -> str:
    """Return the host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """True if only this machine, or this pod, can connect to a listening address."""
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
