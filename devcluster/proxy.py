"""TCP relays to a cluster's API server, from a socket of the host and from the Service address that pods use.

A listening socket stays in the network namespace that created it. The owner opens one on the host's loopback address
and passes it to the supervisor, which accepts connections of the host and connects inside the cluster. Bytes pass
unchanged: TLS is between the client and the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

_CHUNK_BYTES = 1 << 16
_IP_FREEBIND = 15
_IPV6_FREEBIND = 78
"""Options of Linux that Python's socket module does not define."""


def early_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket on an address that may not exist yet."""
    is_ipv6 = ":" in host
    listener = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(*((socket.IPPROTO_IPV6, _IPV6_FREEBIND) if is_ipv6 else (socket.IPPROTO_IP, _IP_FREEBIND)), 1)
    listener.bind((host, port))
    listener.listen()
    return listener


async def relay(listener: socket.socket, *, host: str, port: int) -> asyncio.Server:
    """Relay every connection on the listener to host:port until the server is closed."""

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
    """Copy until the source ends or breaks, then close the target."""
    with contextlib.suppress(OSError):
        while chunk := await source.read(_CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
    with contextlib.suppress(OSError):
        target.write_eof()
