"""Serves an ASGI application with uvicorn's protocol, behind the connection limits of every Atoll listener.

uvicorn's own server is not used: it takes over the process's signals, and does not disconnect slow senders.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from uvicorn.server import ServerState
from wsproto.events import Ping

from atoll.service.connections import IDLE_SECONDS, READ_SECONDS, Admission, Connection
from atoll.service.http import ALL_ADDRESSES, BACKLOG, STOP_SECONDS
from jobs.bounds import BoundedRequests

HEAD_BYTES_MAX: Final = 64 * 1024

TERMINAL_MESSAGE_BYTES_MAX: Final = 64 * 1024

Peer = tuple[str, int]


class PeerConnection(Connection):
    """A guarded connection, found by the client address that requests carry."""

    def __init__(self, admission: Admission, protocol: asyncio.Protocol, peers: dict[Peer, Connection]) -> None:
        super().__init__(admission, protocol)
        self._peers = peers
        self._peer: Peer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        name = transport.get_extra_info("peername")
        if name is not None:
            self._peer = (str(name[0]), int(name[1]))
            self._peers[self._peer] = self
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection."""
        if self._peer is not None and self._peers.get(self._peer) is self:
            del self._peers[self._peer]
        super().connection_lost(exc)


class GuardedWebSocket(WSProtocol):
    """Takes a connection over from its guard, and tells it of the end. A client that does not read neither keeps the
    connection nor makes what waits for it grow."""

    _ping: Ping | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Take the connection over."""
        self._guard = transport.get_protocol()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End both."""
        super().connection_lost(exc)
        self._guard.connection_lost(exc)

    def handle_ping(self, event: Ping) -> None:
        """Answer a ping; while the client does not read, keep the latest: RFC 6455 (5.5.3) asks for no other answer."""
        if self.writable.is_set():
            super().handle_ping(event)
        else:
            self._ping = event

    def resume_writing(self) -> None:
        """Answer the ping that was kept."""
        super().resume_writing()
        event, self._ping = self._ping, None
        if event is not None and not self.close_sent and not self.transport.is_closing():
            super().handle_ping(event)

    def keepalive_timeout(self) -> None:
        """End the connection at once: a client that answers no ping reads no farewell."""
        super().keepalive_timeout()
        self.transport.abort()

    async def run_asgi(self) -> None:
        """Serve it, and give the client a bounded time to read the rest: closing alone would wait for it for ever."""
        await super().run_asgi()
        if not self.disconnected:
            self.loop.call_later(self.close_timeout, self.transport.abort)


@asynccontextmanager
async def serving(app: ASGIApp, host: str, port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve inside the block and yield the port, which matters when `port` is 0. Raises OSError if it is taken."""
    peers: dict[Peer, Connection] = {}

    def guard_of(scope: Scope) -> Connection | None:
        client = scope.get("client")
        return peers.get((client[0], client[1])) if client is not None else None

    state, admission, loop = ServerState(), Admission(), asyncio.get_running_loop()
    make = _protocols(BoundedRequests(app, guard_of=guard_of), state)
    server = await loop.create_server(
        lambda: PeerConnection(admission, make(), peers),
        None if host == ALL_ADDRESSES else host,
        port,
        ssl=context,
        backlog=BACKLOG,
        reuse_address=True,
        ssl_handshake_timeout=None if context is None else READ_SECONDS,
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await _end(state)


def _protocols(app: ASGIApp, state: ServerState) -> Callable[[], H11Protocol]:
    config = uvicorn.Config(
        app,
        http=H11Protocol,
        ws=GuardedWebSocket,
        ws_max_size=TERMINAL_MESSAGE_BYTES_MAX,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(IDLE_SECONDS),
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
    )
    config.load()
    return lambda: H11Protocol(config, state, {})


async def _end(state: ServerState) -> None:
    """Let requests in progress finish, for a bounded time, then close every connection."""
    for connection in list(state.connections):
        connection.shutdown()
    tasks = list(state.tasks)
    if tasks:
        with suppress(TimeoutError):
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        for task in tasks:
            task.cancel()
    for connection in list(state.connections):
        connection.transport.abort()
