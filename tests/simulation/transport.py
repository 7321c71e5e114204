"""Replacement of the HTTP session below `atoll.kube.client`, the only interface where the shells are simulated.

It takes the requests of one process and returns the server's answers: late, lost, doubled or refused, as the faults
require. A sent request is carried out even if its sender has given up or died meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import timedelta
from email.utils import format_datetime
from functools import lru_cache
from typing import Any, Self
from urllib.parse import parse_qsl

import aiohttp
import orjson
from yarl import URL

from tests.simulation.faults import FaultPlan
from tests.simulation.server import RefusedRequest, ServerEvent, SimulatedServer, canonical
from tests.simulation.virtual_time import START, VirtualLoop

PROMPT_SECONDS = (0.001, 0.03)
LATE_SECONDS = (2.0, 40.0)
TWICE_SECONDS = (0.02, 15.0)
SLOW_SECONDS = (0.3, 3.0)
REPLAYED_EVENTS = 5
ERRORS = {
    "error 500": (500, "InternalError"),
    "error 503": (503, "ServiceUnavailable"),
    "error 429": (429, "TooManyRequests"),
}
OnSent = Callable[[str, str, str, Any], None]


class SimulatedCredentials:
    """Fits Credentials: an address and nothing to prove."""

    host = "http://simulated"
    server_hostname = None
    ssl_context = None
    proxy = None

    async def headers(self) -> dict[str, str]:
        """Return nothing to prove."""
        return {}

    async def reload(self) -> None:
        """Nothing rotates."""


class SimulatedAnswer:
    """Fits ClientResponse as far as the client reads it."""

    def __init__(self, status: int, chunks: AsyncIterator[bytes]) -> None:
        now = START + timedelta(seconds=asyncio.get_running_loop().time())
        self.status = status
        self.headers = {"Date": format_datetime(now, usegmt=True)}
        self.content = self
        self._chunks = chunks

    def iter_any(self) -> AsyncIterator[bytes]:
        """Return the body as it arrives."""
        return self._chunks

    async def read(self, _bytes_max: int) -> bytes:
        """Return the whole body."""
        return b"".join([chunk async for chunk in self._chunks])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass


class SimulatedWatch:
    """One open watch. Events arrive in order, each after a delay."""

    def __init__(self, session: "SimulatedSession", collection: str, silence_seconds: float) -> None:
        self._session = session
        self.collection = collection
        self._silence_seconds = silence_seconds
        self._pending: deque[tuple[int, bytes]] = deque()
        self._arrived: deque[tuple[int, bytes]] = deque()
        self._last_at = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self.is_silent = False
        self.is_cut = False

    def push(self, version: int, line: bytes) -> None:
        """Send a line of this version; it arrives after this watch's delay, never before those sent earlier."""
        if self.is_silent:
            return
        session = self._session
        delay = session.watch_delay_seconds(self.collection)
        self._last_at = max(self._last_at + 1e-6, session.loop.time() + delay)
        self._pending.append((version, line))
        session.loop.call_at(self._last_at, self._arrive)

    def give(self, version: int, lines: list[bytes]) -> None:
        """Have lines there at once: the beginning of a watch, up to this version."""
        self._arrived.extend((version, line) for line in lines)

    def fall_silent(self) -> None:
        """Let nothing through any more; the reader notices when its patience ends."""
        self.is_silent = True
        self._session.loop.call_later(self._silence_seconds, self.cut)

    def cut(self) -> None:
        """Break the connection; what has not arrived is lost."""
        self.is_cut = True
        self._wake()

    def _arrive(self) -> None:
        if self._pending:
            self._arrived.append(self._pending.popleft())
            if not self._session.is_held:
                self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what arrives, in pieces as large as they come."""
        watches = self._session.watches
        watches.append(self)
        try:
            while True:
                if self.is_cut:
                    raise aiohttp.ClientPayloadError("the simulated watch was cut")
                if self._arrived and not self._session.is_held:
                    self._session.heard[self.collection] = self._arrived[-1][0]
                    lines = b"".join(line for _, line in self._arrived)
                    self._arrived.clear()
                    yield lines
                    continue
                self._waiter = self._session.loop.create_future()
                await self._waiter
        finally:
            watches.remove(self)

    def wake(self) -> None:
        """Look again: the process is no longer held."""
        self._wake()


class SimulatedSession:
    """Fits ClientSession: the requests of one process. `die` is SIGKILL, `hold` a partition or SIGSTOP."""

    def __init__(self, server: SimulatedServer, weather: FaultPlan, loop: VirtualLoop, name: str) -> None:
        self._server = server
        self._weather = weather
        self.loop = loop
        self.name = name
        self.timeout = aiohttp.ClientTimeout(total=None)
        self.closed = False
        self.is_dead = False
        self.is_held = False
        self._held: list[Callable[[], None]] = []
        self.watches: list[SimulatedWatch] = []
        self.slow_watches: dict[str, float] = {}
        self.heard: dict[str, int] = {}
        """By collection: the version of the last event that a watch has brought to the process."""
        self.on_sent: OnSent | None = None
        self.kills: Callable[[str, str, bool], bool] | None = None
        """Asked before a write is sent, and again (True) when it was carried out: shall the process die here?"""
        self.in_flight: dict[int, tuple[str, str, Any]] = {}
        self._sequence = 0

    async def close(self) -> None:
        """End."""
        self.closed = True

    def die(self) -> None:
        """Send and hear nothing any more; what is under way is carried out."""
        self.is_dead = True
        self.in_flight.clear()

    def hold(self, *, is_held: bool) -> None:
        """Keep everything that comes and goes, or let it through."""
        self.is_held = is_held
        if not is_held:
            held, self._held = self._held, []
            for action in held:
                self.loop.call_soon(action)
            for watch in self.watches:
                watch.wake()

    def watch_delay_seconds(self, collection: str) -> float:
        """Return how long an event takes to this process."""
        slow = 0.0 if self._weather.is_calm else self.slow_watches.get(collection, 0.0)
        return self._weather.between(f"watch {self.name}", 0.001, 0.05) + slow

    def tell(self, collection: str, event: ServerEvent) -> None:
        """Pass an event to the watches of its collection."""
        for watch in self.watches:
            if watch.collection == collection:
                watch.push(event.version, event.line)

    async def request(
        self,
        method: str,
        url: URL,
        *,
        data: bytes | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
        trace_request_ctx: Any = None,
        **_: Any,
    ) -> SimulatedAnswer:
        """Carry out one request as the weather has it."""
        if self.is_dead:
            await self.loop.create_future()
        path, query = _split(url.raw_path_qs)
        if query.get("watch") == "true":
            return await self._watch(path, query, timeout)
        fault = self._fault(method, path)
        if fault == "never sent":
            raise aiohttp.ClientConnectionError("connection refused")
        trace_request_ctx.sent = True
        return await self._exchange(method, path, query, orjson.loads(data) if data else None, fault)

    def _fault(self, method: str, path: str) -> str:
        if path.endswith("/binding"):
            if self._weather.strikes("late Binding", path):
                return "late"
            if self._weather.strikes("lost Binding", path):
                return "answer lost"
        return self._weather.request_fault(f"{self.name} {method} {path.rpartition('/')[2]}")

    async def _exchange(
        self, method: str, path: str, query: Mapping[str, str], body: Any, fault: str
    ) -> SimulatedAnswer:
        if fault == "cut before":
            raise aiohttp.ClientOSError("connection reset")
        if fault in ERRORS:
            await asyncio.sleep(0.005)
            status, reason = ERRORS[fault]
            return _answer(status, orjson.dumps({"kind": "Status", "code": status, "reason": reason}))
        self._sequence += 1
        number = self._sequence
        self.in_flight[number] = (method, path, body)
        if method != "GET" and self.on_sent is not None:
            self.on_sent(self.name, method, path, body)
        if method != "GET" and self.kills is not None and self.kills(method, path, False):
            self.die()
            await self.loop.create_future()
        answer: asyncio.Future[tuple[int, bytes]] = self.loop.create_future()
        self._schedule(method, path, query, body, fault, answer)
        try:
            status, raw = await answer
        finally:
            self.in_flight.pop(number, None)
        if fault == "answer lost":
            raise aiohttp.ServerDisconnectedError
        if fault == "error 504":
            return _answer(504, b'{"kind":"Status","code":504,"reason":"Timeout"}')
        return _answer(status, raw)

    def _schedule(
        self, method: str, path: str, query: Mapping[str, str], body: Any, fault: str, answer: asyncio.Future[Any]
    ) -> None:
        """Let the request arrive once, or twice, and its answer come back."""
        weather, what = self._weather, f"{self.name} {method}"
        delay = weather.between(what, *{"late": LATE_SECONDS, "slow": SLOW_SECONDS}.get(fault, PROMPT_SECONDS))
        again = delay + weather.between(what, *TWICE_SECONDS) if fault == "twice" else None

        def arrive() -> None:
            result = self._carry_out(method, path, query, body)
            self.loop.call_later(weather.between(what, 0.0005, 0.01), self._come_back, answer, result)

        def send() -> None:
            if self.is_dead:
                return
            self.loop.call_later(delay, arrive)
            if again is not None:
                self.loop.call_later(again, self._carry_out, method, path, query, body)

        if self.is_held:
            self._held.append(send)
        else:
            send()

    def _come_back(self, answer: asyncio.Future[Any], result: tuple[int, bytes]) -> None:
        if self.is_held:
            self._held.append(lambda: self._come_back(answer, result))
        elif not answer.done() and not self.is_dead:
            answer.set_result(result)

    def _carry_out(self, method: str, path: str, query: Mapping[str, str], body: Any) -> tuple[int, bytes]:
        self._server.writer = self.name
        try:
            status, raw = self._server.handle(method, path, query, body)
        except RefusedRequest as refusal:
            return refusal.status, refusal.body
        finally:
            self._server.writer = ""
        if method != "GET" and self.kills is not None and self.kills(method, path, True):
            self.die()
        return status, raw

    async def _watch(
        self, path: str, query: Mapping[str, str], timeout: aiohttp.ClientTimeout | None
    ) -> SimulatedAnswer:
        await asyncio.sleep(self._weather.between(f"watch {self.name}", 0.001, 0.02))
        collection = canonical(path)
        silence = timeout.sock_read if timeout is not None and timeout.sock_read else 75.0
        watch = SimulatedWatch(self, collection, silence)
        watch.give(self._server.version, self._beginning(path, query))
        return SimulatedAnswer(200, watch.chunks())

    def _beginning(self, path: str, query: Mapping[str, str]) -> list[bytes]:
        server = self._server
        if query.get("sendInitialEvents"):
            items = [b'{"type":"ADDED","object":%s}\n' % orjson.dumps(obj) for obj in server.collection(path)]
            annotations = {"k8s.io/initial-events-end": "true"}
            mark = {"metadata": {"resourceVersion": str(server.version), "annotations": annotations}}
            return [*items, b'{"type":"BOOKMARK","object":%s}\n' % orjson.dumps(mark)]
        since = int(query["resourceVersion"])
        collection = canonical(path)
        is_expired = since < server.compacted.get(collection, 0)
        if is_expired or self._weather.strikes("expired", self.name):
            return [b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}\n']
        log = server.log(path)
        first = next((index for index, event in enumerate(log) if event.version > since), len(log))
        if self._weather.strikes("replayed", self.name):
            first = max(0, first - REPLAYED_EVENTS)
        return [event.line for event in log[first:]]


@lru_cache(maxsize=4096)
def _split(target: str) -> tuple[str, Mapping[str, str]]:
    path, _, query = target.partition("?")
    return path, dict(parse_qsl(query))


def _answer(status: int, body: bytes) -> SimulatedAnswer:
    return SimulatedAnswer(status, _once(body))


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body
