"""Joins a port and a socket file, so that a process inside one development cluster reaches the API server of another.

python relay.py ADDRESS ADDRESS: listens at the first, connects to the second; HOST:PORT, or the path of a socket.
"""

import asyncio
import sys
from contextlib import suppress

BYTES = 65536


async def _opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("/"):
        return await asyncio.open_unix_connection(address)
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(here: str, there: str) -> None:
    """Relay until killed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await _opened(there)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    if here.startswith("/"):
        server = await asyncio.start_unix_server(serve, here)
    else:
        host, _, port = here.rpartition(":")
        server = await asyncio.start_server(serve, host, int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
