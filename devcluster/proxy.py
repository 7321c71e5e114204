"""TCP relays to a cluster's API server: from a socket of the host, and from the address that its pods are told.

A listening socket stays in the network namespace in which it was made. The owner opens one on the host's loopback
address and hands it to the supervisor inside, which accepts there and connects here. Bytes go through untouched: TLS is
between the client and the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

_CHUNK_BYTES = 1 << 16
_IP_FREEBIND = 15
"""Linux's option, which Python's socket module does not name."""


def early_listener(host: str, port: int) -> socket.socket:
    """A listening socket on an address that may come up later."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
    listener.bind((host, port))
    listener.listen()
    return listener


async def relay(listener: socket.socket, *, host: str, port: int) -> asyncio.Server:
    """Accept on the listener until the server is closed; each connection gets one of its own to host:port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
        for end in (writer, inner_writer):
            end.close()

    return await asyncio.start_server(connected, sock=listener)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the source ends, then end the target's side too; a broken connection is an end like any other."""
    with contextlib.suppress(OSError):
        while chunk := await source.read(_CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
    with contextlib.suppress(OSError):
        target.write_eof()
