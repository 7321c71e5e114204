"""Bounds the resources of a listener's clients before processing: connections, bytes, and the time to send.

Wraps aiohttp's protocol factory and gives each connection a guard. A client that sends nothing, or slowly, uses memory;
beyond the bounds the most expensive connection is closed, so that fast clients are answered however many slow ones
exist. A request is processed when it is complete, and is not cut then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web

READ_SECONDS = 5.0
"""For a handshake, for the head of a request from its first byte, and for its body; good clients need milliseconds."""
IDLE_SECONDS = 120.0
"""Before the first byte of each request. Longer than the 90 s after which Go's clients close an idle connection, which
they may have opened ahead of need: a server that closes first loses calls."""
UNREAD_SECONDS = 30.0
"""For a client that reads nothing of its answer."""
CONNECTIONS_MAX = 256
"""Limit of waiting connections; asyncio keeps a buffer of 256 KiB per TLS connection."""
BYTES_MAX = 32 * 1024 * 1024
"""Limit of bytes of all requests that arrive or are processed, and of all answers that nobody has read yet."""


@dataclass(slots=True, kw_only=True)
class Admission:
    """All connections of one listener, and their bytes."""

    connections_max: int = CONNECTIONS_MAX
    bytes_max: int = BYTES_MAX
    read_seconds: float = READ_SECONDS
    idle_seconds: float = IDLE_SECONDS
    unread_seconds: float = UNREAD_SECONDS
    bytes_held: int = 0
    connections: set[Connection] = field(default_factory=set)

    @property
    def is_exceeded(self) -> bool:
        """Whether a limit is exceeded."""
        return self.bytes_held > self.bytes_max or len(self.connections) > self.connections_max

    def guarded(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], Connection]:
        """Return a factory of guarded connections."""
        return lambda: Connection(self, factory())

    def enforce(self) -> None:
        """Close waiting connections until the rest is within the bounds; requests in process have their own bounds."""
        while self.is_exceeded:
            waiting = [connection for connection in self.connections if not connection.is_worked_on]
            if self.bytes_held > self.bytes_max and any(connection.bytes_held for connection in waiting):
                max(waiting, key=Connection.byte_seconds).cut()
            elif len(waiting) > self.connections_max:
                max(waiting, key=Connection.waiting_seconds).cut()
            else:
                return


class Connection(asyncio.Protocol):
    """Sits between a transport and aiohttp's protocol and sees all bytes; the application marks requests in process."""

    def __init__(self, admission: Admission, protocol: asyncio.Protocol) -> None:
        self._admission = admission
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._is_idle = True
        self._unread_bytes: int | None = None
        self._waiting_since = self._loop.time()
        self.bytes_held = 0
        self.is_worked_on = False

    def waiting_seconds(self) -> float:
        """Seconds since its last step: connected, began a request, sent its head, was answered."""
        return self._loop.time() - self._waiting_since

    def byte_seconds(self) -> float:
        """Cost of holding its bytes; a small request in transit costs almost nothing."""
        return self.bytes_held * (self.waiting_seconds() + 1e-3)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request; make room for this connection."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by type
        self._protocol.connection_made(transport)
        self._admission.connections.add(self)
        self._cut_after(self._admission.idle_seconds)
        if self._admission.is_exceeded:
            self._admission.enforce()

    def data_received(self, data: bytes) -> None:
        """Count what arrives, and give the head of a request its time."""
        self.bytes_held += len(data)
        self._admission.bytes_held += len(data)
        if self._is_idle:
            self._is_idle = False
            self._cut_after(self._admission.read_seconds)
        self._protocol.data_received(data)
        if self._admission.is_exceeded:
            self._admission.enforce()

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        self._unread_bytes = 0
        self._protocol.pause_writing()
        if not self.is_worked_on:
            self._expect_reader()

    def resume_writing(self) -> None:
        """The client has read almost all."""
        self._unread_bytes = None
        self._protocol.resume_writing()
        if self._is_idle:
            self._release_bytes()
            self._cut_after(self._admission.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release its bytes."""
        self._forget()
        self._protocol.connection_lost(exc)

    def head_is_here(self) -> None:
        """The application has the head and bounds the time of the body itself from now on."""
        self._deadline = None
        self._waiting_since = self._loop.time()

    def work(self) -> None:
        """The request is complete and is processed."""
        self.is_worked_on = True

    def done(self) -> None:
        """The request is answered; its bytes are free, and those of the answer count until they are read."""
        self.is_worked_on, self._is_idle = False, True
        self._release_bytes()
        if self._unread_bytes is None:
            self._cut_after(self._admission.idle_seconds)
        else:
            self._expect_reader()

    def cut(self) -> None:
        """End the connection at once, without an answer: a slow client would not read it either."""
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    def _expect_reader(self) -> None:
        """Count what waits for the client, which has some time to read the next part of it."""
        assert self._transport is not None
        self._unread_bytes = unread = self._transport.get_write_buffer_size()
        self._release_bytes()
        self.bytes_held = unread
        self._admission.bytes_held += unread
        self._cut_after(self._admission.unread_seconds)
        if self._admission.is_exceeded:
            self._admission.enforce()

    def _cut_after(self, seconds: float) -> None:
        """Start the deadline of the next step of the client. One timer serves many requests: it is set again if a later
        deadline has time left."""
        self._waiting_since = self._loop.time()
        self._deadline = self._waiting_since + seconds
        if self not in self._admission.connections:
            return
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._deadline > self._loop.time():
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        elif self._transport is not None and self._transport.get_write_buffer_size() < (self._unread_bytes or 0):
            self._expect_reader()
        else:
            self.cut()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._release_bytes()
        self._admission.connections.discard(self)

    def _release_bytes(self) -> None:
        self._admission.bytes_held -= self.bytes_held
        self.bytes_held = 0


def connection_of(request: web.Request) -> Connection | None:
    """Return the guard of a request's connection; None if it is gone or not guarded."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, Connection) else None
