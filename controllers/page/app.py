"""The HTTP interface of the page: static files, one stream of events, and explanations of pods. GET alone.

The files hold no data and are open to everybody who can connect; the stream and the explanations need authorization.
Security headers tell browsers to load nothing from elsewhere.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from atoll.kube.clock import Clock
from atoll.service.http import application
from atoll.service.pages import PAGE_HEADERS, STREAM_SECONDS_MAX, event, page_files
from controllers.page.authorization import PATH, PageAuthorizer
from controllers.page.refresher import OverviewRefresher, SnapshotUnavailable, TooManyExplanations
from controllers.page.view import PageView, view_changes

STATIC: Final = Path(__file__).parent / "static"
FILES: Final = page_files(STATIC, "page.html")
WRITE_SECONDS_MAX: Final = 10.0
"""A client that does not read for this long is disconnected."""
PULSE_SECONDS: Final = 15.0
"""A quiet stream says this often that it is alive."""
IN_FLIGHT_MAX: Final = 128

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class PageParts:
    """What the handlers need."""

    refresher: OverviewRefresher
    authorizer: PageAuthorizer
    clock: Clock
    watchers_max: int


def build_page(parts: PageParts) -> web.Application:
    """Return the application."""
    app = application(in_flight_max=IN_FLIGHT_MAX)
    app.middlewares.insert(0, _with_security_headers)  # outside of the limit, whose refusals carry the headers too
    for path, (file, kind) in FILES.items():
        app.router.add_get(path, _file(file, kind))
    handlers = PageHandlers(parts)
    app.router.add_get(f"{PATH}/events", handlers.events)
    app.router.add_get(f"{PATH}/pods/{{namespace}}/{{name}}", handlers.explain)

    async def begin(_app: web.Application) -> None:
        parts.refresher.begin()

    async def end(_app: web.Application) -> None:
        parts.refresher.end()

    app.on_startup.append(begin)
    app.on_shutdown.append(end)
    return app


class PageHandlers:
    """The handlers that need authorization."""

    def __init__(self, parts: PageParts) -> None:
        self._parts = parts

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Tell the cluster, then what changes, until the watcher goes or its time is over."""
        refresher = self._parts.refresher
        refusal = await self._parts.authorizer.refusal(request)
        if refusal is not None:
            return refusal
        if refresher.watchers >= self._parts.watchers_max:
            text = f"{refresher.watchers} others watch already; close one of them, or use atoll top\n"
            return web.Response(status=503, text=text, headers={"Retry-After": "10"})
        refresher.watchers += 1
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            response.headers.update(PAGE_HEADERS)
            await response.prepare(request)
            await self._tell(request, response)
        except (TimeoutError, ConnectionError):
            _clear_write_timeout(request)
        finally:
            refresher.watchers -= 1
        return response

    async def explain(self, request: web.Request) -> web.Response:
        """Say why one pod waits and what would help."""
        refusal = await self._parts.authorizer.refusal(request)
        if refusal is not None:
            return refusal
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        if not (_NAME.fullmatch(namespace) and _NAME.fullmatch(name)):
            return web.Response(status=404, text="no such pod\n")
        try:
            answer = await self._parts.refresher.explanation(namespace, name)
        except TooManyExplanations:
            return web.Response(status=429, text="too many questions wait\n", headers={"Retry-After": "3"})
        except SnapshotUnavailable as error:
            return web.Response(status=503, text=f"{error}\n", headers={"Retry-After": "3"})
        if answer is None:
            return web.Response(status=404, text=f"there is no pod {namespace}/{name}\n")
        return web.Response(body=answer, content_type="application/json")

    async def _tell(self, request: web.Request, response: web.StreamResponse) -> None:
        refresher, clock = self._parts.refresher, self._parts.clock
        told, trouble = None, ""
        began = spoke = clock.monotonic_seconds()
        await refresher.refresh()
        while not refresher.is_over and clock.monotonic_seconds() - began < STREAM_SECONDS_MAX:
            message = _message(told, refresher.view) if not refresher.trouble else b""
            if refresher.trouble != trouble:
                message = event("trouble", _one_line(refresher.trouble)) + message
            told, trouble = (refresher.view if not refresher.trouble else told), refresher.trouble
            now = clock.monotonic_seconds()
            if not message and now - spoke >= PULSE_SECONDS:
                message = b": alive\n\n"
            if message:
                async with asyncio.timeout(WRITE_SECONDS_MAX):
                    await response.write(message)
                spoke = now
            if request.transport is None or request.transport.is_closing():
                return
            await refresher.changed(1.0)


def _message(told: PageView | None, view: PageView | None) -> bytes:
    if view is None or view is told:
        return b""
    found = view_changes(told, view)
    return event("look", found) if found is not None else b""


def _one_line(text: str) -> bytes:
    return " ".join(text.split()).encode()


def _clear_write_timeout(request: web.Request) -> None:
    """End a connection whose other side does not read, with what was written to it."""
    if request.transport is not None:
        request.transport.abort()


def _file(path: Path, kind: str) -> Handler:
    content = path.read_bytes()

    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=content, content_type=kind, charset="utf-8")

    return handle


@web.middleware
async def _with_security_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Put the security headers on every answer, refusals included."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(PAGE_HEADERS)
        raise
    if not response.prepared:
        response.headers.update(PAGE_HEADERS)
    return response
