"""The listener: requests are bounded, slow clients are disconnected, and stopping ends running requests."""

import asyncio
import contextlib
import socket
import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.service.tls import TlsFiles, server_context
from jobs import bounds, listener
from jobs.listener import serving
from tests.fakes.clock import ManualClock, until
from tests.service.certificates import Authority


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body."""
    message = await receive()
    assert not message["more_body"]
    text = str(len(message["body"])).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(text)).encode())]}
    )
    await send({"type": "http.response.body", "body": text})


async def call(port: int, data: bytes, *, ends: bool = False, address: str = "127.0.0.1") -> bytes:
    """Send bytes and return everything that is answered until the server has no more to say."""
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(data)
    if ends:
        writer.write_eof()
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        return head + await reader.readexactly(length)
    finally:
        writer.close()


def post(body: bytes, *, length: int | None = None) -> bytes:
    """Return a request with a body."""
    return (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (len(body) if length is None else length) + body
    )


async def test_a_request_is_answered() -> None:
    """The application sees the body in one piece, again and again on one connection."""
    async with serving(echo, "127.0.0.1", 0) as port:
        assert (await call(port, post(b"x" * 100_000))).endswith(b"\r\n\r\n100000")
        assert (await call(port, post(b""))).endswith(b"\r\n\r\n0")


async def test_all_addresses_are_those_of_both_families() -> None:
    """`*` answers to IPv4 and IPv6, as clusters of either family need."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    async with serving(echo, "*", free):
        for address in ("127.0.0.1", "::1"):
            assert (await call(free, post(b"x"), address=address)).startswith(b"HTTP/1.1 200 ")


async def test_a_large_body_is_refused() -> None:
    """Beyond a mebibyte the answer is 413, as a problem."""
    async with serving(echo, "127.0.0.1", 0) as port:
        answer = await call(port, post(b"x" * (1024 * 1024 + 1)))

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"application/problem+json" in answer
    assert b"the body is larger than 1048576 bytes" in answer


async def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not send what was promised is told so after a while."""
    monkeypatch.setattr(
        bounds.BoundedRequests.__init__,
        "__kwdefaults__",
        dict(bounds.BoundedRequests.__init__.__kwdefaults__, read_seconds=0.05),
    )
    async with serving(echo, "127.0.0.1", 0) as port:
        answer = await call(port, post(b"x", length=100))

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not arrive within 0.05 s" in answer


async def test_a_connection_that_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a request has its time too."""
    from atoll.service import connections

    monkeypatch.setattr(
        connections.Admission.__init__,
        "__kwdefaults__",
        dict(connections.Admission.__init__.__kwdefaults__, read_seconds=0.05),
    )
    async with serving(echo, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHo")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_the_api_is_served_over_tls(tmp_path: Path) -> None:
    """With a certificate nothing is answered in clear, and a body comes whole."""
    authority = Authority("atoll")
    authority.issue("127.0.0.1", tmp_path / "cert.pem", tmp_path / "key.pem")
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    context = server_context(files, monotonic_seconds=ManualClock().monotonic_seconds)
    trusting = ssl.create_default_context(cafile=authority.write_certificate(tmp_path / "ca.pem"))
    async with serving(echo, "127.0.0.1", 0, context) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(post(b"x" * 50_000))
        answer = await asyncio.wait_for(reader.readuntil(b"50000"), 10)
        writer.close()
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", port)
        plain_writer.write(post(b"x"))
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in await asyncio.wait_for(plain_reader.read(), 10)
        plain_writer.close()

    assert answer.startswith(b"HTTP/1.1 200 ")


@asynccontextmanager
async def busy(count: int) -> Any:
    """Yield a port behind which `count` requests are worked on, and what lets them end."""
    begun, may_end = 0, asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal begun
        begun += 1
        await may_end.wait()
        await echo(scope, receive, send)

    async with serving(slow, "127.0.0.1", 0) as port:
        calls = [asyncio.ensure_future(call(port, post(b"x"))) for _ in range(count)]
        await until(lambda: begun == count)
        yield port, may_end, calls


async def test_too_many_requests_at_a_time_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one beyond the bound is answered at once; the others end as they should."""
    monkeypatch.setattr(
        bounds.BoundedRequests.__init__,
        "__kwdefaults__",
        dict(bounds.BoundedRequests.__init__.__kwdefaults__, in_flight_max=3),
    )
    async with busy(3) as (port, may_end, calls):
        answer = await call(port, post(b"x"))
        may_end.set()
        ended = await asyncio.gather(*calls)

    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1" in answer.lower()
    assert all(one.endswith(b"\r\n\r\n1") for one in ended)


async def test_a_client_that_reads_no_answer_to_its_pings_gets_one_to_the_last() -> None:
    """What waits to be read does not grow with the pings; whoever reads again is told that the service is there."""
    all_here = asyncio.Event()

    async def terminal(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            all_here.set()

    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    sent = 48_000
    async with serving(terminal, "127.0.0.1", 0) as port:
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.connect(("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=plain, limit=4096)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + upgrade + key + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            writer.transport.pause_reading()  # type: ignore[attr-defined] # a transport of both directions
            for _ in range(100):
                writer.write((b"\x89\xfd\0\0\0\0" + b"x" * 125) * (sent // 100))
                await writer.drain()
            writer.write(b"\x89\x84\0\0\0\0last" + b"\x82\x80\0\0\0\0")
            await asyncio.wait_for(all_here.wait(), 30)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            answers = 0
            while (await reader.readexactly(2)) != b"\x8a\x04":
                answers += await reader.readexactly(125) == b"x" * 125
            assert await reader.readexactly(4) == b"last"
            writer.close()

    assert 0 < answers < sent


async def test_stopping_lets_requests_end_and_waits_for_none_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends in time is answered; one that does not is cut."""
    async with busy(1) as (_, may_end, calls):
        asyncio.get_running_loop().call_later(0.05, may_end.set)
    assert (await calls[0]).endswith(b"\r\n\r\n1")
    monkeypatch.setattr(listener, "STOP_SECONDS", 0.05)
    async with busy(1) as (_, _, calls):
        pass
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await calls[0]
