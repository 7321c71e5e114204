"""An HTTP proxy in front of a real API server that applies faults to chosen requests.

It takes an administrator's kubeconfig and offers a plain HTTP address to the code under test. Rules choose the requests
that are cut, answered by the proxy, delayed, or lose their answer. Watches pass unchanged, so the code under test sees
the real order of events.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from atoll.kube.credentials import Credentials
from tests.fakes.listening import kubeconfig, listening

Forward = Callable[[], Awaitable[web.Response]]
Fault = Callable[[web.Request, Forward], Awaitable[web.StreamResponse]]

PASSED_HEADERS = ("Accept", "Content-Type")
LIMIT_BYTES = 64 * 1024 * 1024


@dataclass
class Rule:
    """Applies a fault to the `nth` matching request from now on, and to the `times` - 1 after it."""

    pattern: re.Pattern[str]
    fault: Fault
    nth: int
    times: int
    seen: int = 0

    def applies(self, described: str) -> bool:
        """Count a request; True if the fault applies to it."""
        if not self.pattern.search(described):
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times


class FaultProxy:
    """Forwards all requests except those with a fault. `requests` lists all calls but watches in order of arrival."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._rules: list[Rule] = []
        self.requests: list[str] = []
        self.url = ""

    def spoil(self, pattern: str, fault: Fault, *, nth: int = 1, times: int = 1) -> None:
        """Apply `fault` to requests whose `METHOD /path` matches the regular expression; the first rule wins."""
        self._rules.append(Rule(re.compile(pattern), fault, nth, times))

    def heal(self) -> None:
        """Remove all rules."""
        self._rules.clear()

    def count(self, pattern: str) -> int:
        """Return the number of requests that match the regular expression."""
        return sum(1 for described in self.requests if re.search(pattern, described))

    def client_kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig that uses this proxy."""
        return kubeconfig(folder, self.url, {}, name="through-the-proxy")

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FaultProxy"]:
        """Listen until the block ends."""
        credentials = await Credentials.load(self._kubeconfig)
        connector = aiohttp.TCPConnector(ssl=credentials.ssl_context or True, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        plain = {"Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=plain) as session:
            app = web.Application(client_max_size=LIMIT_BYTES)

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, session, credentials.host)

            app.router.add_route("*", "/{path:.*}", handle)
            async with listening(app) as self.url:
                yield self

    async def _handle(self, request: web.Request, session: aiohttp.ClientSession, host: str) -> web.StreamResponse:
        url = host + request.raw_path
        if request.query.get("watch"):
            return await _stream(request, session, url)
        body = await request.read()
        headers = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}

        async def forward() -> web.Response:
            async with session.request(request.method, url, data=body, headers=headers) as answer:
                content = await answer.read()
                kept = {name: answer.headers[name] for name in ("Content-Type",) if name in answer.headers}
                return web.Response(status=answer.status, body=content, headers=kept)

        described = f"{request.method} {request.path}"
        self.requests.append(described)
        for rule in list(self._rules):
            if rule.applies(described):
                return await rule.fault(request, forward)
        return await forward()


async def _stream(request: web.Request, session: aiohttp.ClientSession, url: str) -> web.StreamResponse:
    async with session.get(url, headers={"Accept": "application/json"}) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with suppress(ConnectionError, aiohttp.ClientError):
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        return response


async def cut_before(request: web.Request, forward: Forward) -> web.StreamResponse:
    """Fault: the connection breaks before the API server gets the request."""
    return _cut(request)


async def drop_answer(request: web.Request, forward: Forward) -> web.StreamResponse:
    """Fault: the API server handles the request, but its answer is lost."""
    await forward()
    return _cut(request)


def answering(status: int, reason: str = "") -> Fault:
    """Return a fault: the proxy answers, and the API server does not get the request."""

    async def answer(request: web.Request, forward: Forward) -> web.StreamResponse:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason}
        return web.json_response({**body, "message": f"fault {status}"}, status=status)

    return answer


def answering_after(status: int) -> Fault:
    """Return a fault: the API server handles the request, but the proxy answers with an error."""
    answer = answering(status)

    async def act_then_answer(request: web.Request, forward: Forward) -> web.StreamResponse:
        await forward()
        return await answer(request, forward)

    return act_then_answer


def garbled(request: web.Request, forward: Forward) -> Awaitable[web.StreamResponse]:
    """Fault: the API server handles the request, but the answer is not JSON."""

    async def act_then_garble() -> web.StreamResponse:
        answer = await forward()
        return web.Response(status=answer.status, text="<html>a proxy's page</html>")

    return act_then_garble()


class Held:
    """A fault that delays requests until `release` is called; `reached` is set when one has arrived.

    The request reaches the API server even if the client gives up meanwhile.
    """

    def __init__(self, *, after: bool = False) -> None:
        """Delay the request before the API server gets it, or with `after` the answer."""
        self._after = after
        self._released = asyncio.Event()
        self._tasks: set[asyncio.Task[web.Response]] = set()
        self.reached = asyncio.Event()

    async def __call__(self, request: web.Request, forward: Forward) -> web.StreamResponse:
        """Delay one request."""
        task = asyncio.create_task(self._pass_on(forward))
        self._tasks.add(task)
        return await asyncio.shield(task)

    async def release(self) -> list[int]:
        """Forward all delayed requests; return the API server's status for each."""
        self._released.set()
        return [answer.status for answer in await asyncio.gather(*self._tasks)]

    async def _pass_on(self, forward: Forward) -> web.Response:
        answer = await forward() if self._after else None
        self.reached.set()
        await self._released.wait()
        return answer or await forward()


def doing(work: Callable[[], Awaitable[object]]) -> Fault:
    """Return a fault: run `work` first, then forward the request."""

    async def act_first(request: web.Request, forward: Forward) -> web.StreamResponse:
        await work()
        return await forward()

    return act_first


def _cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
