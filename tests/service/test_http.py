"""The HTTP server: correct health, bounded bodies, metrics, and a clean stop."""

import asyncio
import contextlib
import socket

import aiohttp
import pytest
from aiohttp import web

from atoll.service.http import add_health, application, in_url, listening, serve
from atoll.service.metrics import Metrics


async def fetch(port: int, path: str, data: bytes | None = None) -> tuple[int, str]:
    url = f"http://127.0.0.1:{port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.request("POST" if data else "GET", url, data=data) as response,
    ):
        return response.status, await response.text()


async def test_readiness_tells_every_reason() -> None:
    """Who asks why a process is not ready gets all reasons at once, and 200 as soon as there are none."""
    reasons: dict[str, str | None] = {"pods": "not listed yet", "leases": None, "nodes": "heard 90 s ago"}
    app = application()
    add_health(app, ready={name: (lambda name=name: reasons[name]) for name in reasons})
    async with listening(app, "127.0.0.1", 0) as port:
        assert await fetch(port, "/livez") == (200, "ok\n")
        assert await fetch(port, "/readyz") == (503, "[-] pods: not listed yet\n[-] nodes: heard 90 s ago\n")
        reasons.clear()
        reasons.update(pods=None, leases=None, nodes=None)

        assert await fetch(port, "/readyz") == (200, "ok\n")


async def test_metrics_are_served_where_asked_for() -> None:
    """Prometheus finds our names; without metrics there is no such page."""
    metrics = Metrics("tester")
    metrics.counter("binds", "Binds").inc(3)
    app, bare = application(), application()
    add_health(app, metrics=metrics)
    add_health(bare)
    async with listening(app, "127.0.0.1", 0) as port, listening(bare, "127.0.0.1", 0) as bare_port:
        status, page = await fetch(port, "/metrics")
        assert (status, (await fetch(bare_port, "/metrics"))[0]) == (200, 404)

    assert "atoll_tester_binds_total 3.0" in page


async def test_body_beyond_the_bound_is_refused() -> None:
    """A client cannot make the server hold more than agreed."""

    async def read(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    app = application(body_bytes_max=1000)
    app.router.add_post("/", read)
    async with listening(app, "127.0.0.1", 0) as port:
        assert await fetch(port, "/", b"x" * 1000) == (200, "1000")
        assert (await fetch(port, "/", b"x" * 1001))[0] == 413


async def converse(port: int, sent: bytes) -> bytes:
    """Send these bytes and nothing more, and return all that the server says until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(20):
        said = await reader.read()
    writer.close()
    return said


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(b"1001\r\n\r\n", b"413", id="too-large-by-its-own-word"),
        pytest.param(b"9\r\n\r\nhalf", b"408", id="a-body-that-never-comes"),
    ],
)
async def test_a_request_that_is_not_here_is_nobodys_work(sent: bytes, status: bytes) -> None:
    """It is refused without the handler, takes none of the places of those that are worked on, and is let go."""

    async def never(_request: web.Request) -> web.Response:
        raise AssertionError

    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: "
    app = application(body_bytes_max=1000, in_flight_max=0, read_seconds=0.05)
    app.router.add_post("/", never)
    async with listening(app, "127.0.0.1", 0) as port:
        assert (await converse(port, head + sent)).split()[1] == status


async def test_requests_beyond_the_bound_are_sent_away() -> None:
    """A client that opens without end takes no memory without end; health is told meanwhile, and room comes back."""
    gate, arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(_request: web.Request) -> web.Response:
        arrived.release()
        await gate.wait()
        return web.Response(text="done")

    app = application(in_flight_max=2)
    app.router.add_get("/wait", wait)
    add_health(app)
    async with listening(app, "127.0.0.1", 0) as port:
        held = [asyncio.ensure_future(fetch(port, "/wait")) for _ in range(2)]
        for _ in held:
            await arrived.acquire()
        assert (await fetch(port, "/wait"))[0] == 429
        assert (await fetch(port, "/livez"))[0] == 200
        gate.set()
        assert [await each for each in held] == [(200, "done")] * 2
        assert await fetch(port, "/wait") == (200, "done")


async def test_serve_ends_cleanly_when_cancelled() -> None:
    """After cancellation the port is free again."""
    ports: asyncio.Queue[int] = asyncio.Queue()
    task = asyncio.create_task(serve(application(), "127.0.0.1", 0, on_listening=ports.put_nowait))
    port = await ports.get()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    async with listening(application(), "127.0.0.1", port) as again:
        assert again == port


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("*", {"127.0.0.1", "[::1]"}),
        ("0.0.0.0", {"127.0.0.1"}),
        ("::", {"[::1]"}),
        ("::1", {"[::1]"}),
        ("127.0.0.1", {"127.0.0.1"}),
    ],
)
async def test_a_host_says_which_families_can_connect(host: str, reached: set[str]) -> None:
    """`*` is every address of both families, as IPv6-only and dual-stack clusters need; anything else is one family."""
    app = application()
    add_health(app)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    answered = set()

    async with listening(app, host, free), aiohttp.ClientSession() as session:
        for address in ("127.0.0.1", "[::1]"):
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with session.get(f"http://{address}:{free}/livez") as answer:
                    answered.add(address if answer.status == 200 else "")

    assert answered == reached


@pytest.mark.parametrize(
    ("host", "shown"), [("::1", "[::1]"), ("10.0.0.1", "10.0.0.1"), ("atoll.example", "atoll.example")]
)
def test_a_host_in_a_url(host: str, shown: str) -> None:
    """IPv6 addresses stand in brackets, so that the port can be told from them."""
    assert in_url(host) == shown


async def test_taken_port_is_an_error() -> None:
    """Two servers on one port are a fault at start, not a mystery later."""
    async with listening(application(), "127.0.0.1", 0) as port:
        with pytest.raises(OSError, match="address already in use"):
            async with listening(application(), "127.0.0.1", port):
                pass


def test_metric_names_are_checked() -> None:
    """Names follow one form, and none is used twice."""
    metrics = Metrics("tester")
    metrics.gauge_of("age_seconds", "Age", lambda: 4.5)
    metrics.histogram("call_seconds", "Calls", labels=["verb"]).labels("bind").observe(0.003)

    page = metrics.page().decode()
    assert "atoll_tester_age_seconds 4.5" in page
    assert 'atoll_tester_call_seconds_bucket{le="0.005",verb="bind"} 1.0' in page
    with pytest.raises(ValueError, match="lower-case"):
        metrics.counter("Bad-Name", "x")
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.gauge("age_seconds", "Age")
