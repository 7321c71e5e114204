"""Limits on requests: bytes of the body, time to send it, and requests in progress.

Wraps an ASGI application, which then sees only requests whose body has arrived in full. Health is served elsewhere,
so no request is exempt.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.service.connections import READ_SECONDS, Connection
from atoll.service.http import BODY_BYTES_MAX
from jobs.problems import ProblemDetails, problem, response_of

IN_FLIGHT_MAX: Final = 256
"""Requests in progress at a time, streamed logs included."""
TERMINALS_MAX: Final = 32
"""Terminals open at a time: they last long, and leave the requests their room."""

GuardOf = Callable[[Scope], Connection | None]


class BoundedRequests:
    """Answers 413, 408 and 429 itself, and passes other requests on."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        guard_of: GuardOf,
        body_bytes_max: int = BODY_BYTES_MAX,
        in_flight_max: int = IN_FLIGHT_MAX,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self._app = app
        self._guard_of = guard_of
        self._body_bytes_max = body_bytes_max
        self._in_flight_max = in_flight_max
        self._read_seconds = read_seconds
        self._in_flight = 0
        self._terminals = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await self._serve_terminal(scope, receive, send)
        if scope["type"] != "http":
            return
        guard = self._guard_of(scope)
        if guard is not None:
            guard.head_is_here()
        try:
            body = await self._body(receive)
            if isinstance(body, ProblemDetails):
                await response_of(body, {"Connection": "close"})(scope, receive, send)
                return
            if body is None:
                return
            if self._in_flight >= self._in_flight_max:
                told = problem(429, "too-many", "Too many requests at a time", "try again in a second")
                await response_of(told, {"Retry-After": "1"})(scope, receive, send)
                return
            if guard is not None:
                guard.work()
            await self._work(scope, _replayed(body, receive), send)
        finally:
            if guard is not None:
                guard.done()

    async def _serve_terminal(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket; its messages are bounded by the protocol."""
        if self._terminals >= TERMINALS_MAX:
            told = problem(429, "too-many", "Too many terminals at a time", "close one, or try again later")
            await response_of(told, {"Retry-After": "60"})(scope, receive, send)
            return
        guard = self._guard_of(scope)
        self._terminals += 1
        try:
            if guard is not None:
                guard.head_is_here()
                guard.work()
            await self._app(scope, receive, send)
        finally:
            self._terminals -= 1
            if guard is not None:
                guard.done()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1

    async def _body(self, receive: Receive) -> bytes | ProblemDetails | None:
        """Return the whole body, the problem with it, or None if the client disconnected."""
        parts: list[bytes] = []
        held = 0
        try:
            async with asyncio.timeout(self._read_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    held += len(part)
                    if held > self._body_bytes_max:
                        detail = f"the body is larger than {self._body_bytes_max} bytes"
                        return problem(413, "too-large", "Too large", detail)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            detail = f"the body did not arrive within {self._read_seconds:g} s"
            return problem(408, "too-slow", "Too slow", detail)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that gives the body in one piece, and later reports the client's disconnect."""
    is_given = False

    async def give() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give
