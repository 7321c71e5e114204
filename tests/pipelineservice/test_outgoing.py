"""Calls of steps: private addresses are not reached, and secrets do not come back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.resolver import ThreadedResolver

from atoll.ml.uris import is_public
from pipelines.outgoing import CallFailed, CallRefused, OutgoingCall, OutgoingClient, forms_of, without

SECRET = "Bearer sesame-9f86d081"


def call(url: str, **fields: object) -> OutgoingCall:
    """Return a call of tenant acme."""
    return OutgoingCall(
        **({"method": "GET", "url": url, "tenant": "acme", "headers": {}, "secret_headers": {}, "body": None} | fields)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("nonsense", False),
    ],
)
def test_public_addresses(address: str, wanted: bool) -> None:
    """Loopback, private, link-local, shared and multicast addresses are none, nor what carries one of them."""
    assert is_public(address) is wanted


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """A service that sends back what it was asked, redirects /away, has no /gone, and sends too much from /much."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/away":
            return web.Response(status=302, headers={"Location": "/seen"})
        if request.path == "/gone":
            return web.Response(status=410)
        if request.path == "/much":
            return web.Response(body=b"x" * 100_000)
        return web.json_response({"headers": dict(request.headers), "said": (await request.text())})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://2130706433:{port}/",
        "http://0x7f.1:{port}/",
        "http://localhost:{port}/",
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "ftp://example.com/",
        "http://user:word@example.com/",
        "http:///nowhere",
        "nonsense",
    ],
)
async def test_private_hosts_are_not_reached(url: str) -> None:
    """Neither as numbers in any form, nor by a name that resolves to one."""
    async with served() as port:
        with pytest.raises((CallRefused, CallFailed)):
            await OutgoingClient().call(call(url.format(port=port)))


async def test_an_allowed_host_is_reached_and_redirects_are_not_followed() -> None:
    """The status of the redirect is the answer."""
    async with served() as port:
        client = OutgoingClient(allowed=("localhost",))
        found = await client.call(call(f"http://localhost:{port}/", method="POST", body={"a": 1}))
        moved = await client.call(call(f"http://localhost:{port}/away"))

        assert (found["status_code"], json.loads(found["body"]["said"])) == (200, {"a": 1})
        assert moved["status_code"] == 302
        with pytest.raises(CallFailed, match="larger than"):
            await client.call(call(f"http://localhost:{port}/much"))


async def test_a_secret_is_sent_and_does_not_come_back(tmp_path: Path) -> None:
    """The service sends its headers back; the output has none of the secret."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "token").write_text(SECRET + "\n")
    async with served() as port:
        client = OutgoingClient(allowed=("localhost",), secrets=tmp_path)
        found = await client.call(call(f"http://localhost:{port}/", secret_headers={"Authorization": "token"}))

    assert found["body"]["headers"]["Authorization"] == "***"
    assert SECRET not in json.dumps(found)


@pytest.mark.parametrize(
    ("secret", "told"),
    [
        ("Bearer tok-12345678", "tok-12345678"),
        ("Basic YW5uOm9wZW4tc2VzYW1l", "ann:open-sesame"),
        ("Basic YW5uOm9wZW4tc2VzYW1l", "open-sesame"),
        ("1234567890", 1234567890),
    ],
    ids=["token", "name and password", "password", "number"],
)
def test_what_a_service_reads_from_a_secret_does_not_come_back(secret: str, told: Any) -> None:
    """Many answer with the token, the user or the number that they found in the header, and not with the header."""
    assert without({"seen": told, "count": 3}, forms_of(secret)) == {"seen": "***", "count": 3}


def test_a_secret_that_begins_another_leaves_nothing_of_it() -> None:
    """The longest goes first, in keys too, whatever the order in which headers name them."""
    for secrets in (("sesame-1", "sesame-1-more"), ("sesame-1-more", "sesame-1")):
        assert without({"sesame-1-more": ["a sesame-1-more b sesame-1"]}, secrets) == {"***": ["a *** b ***"]}


@pytest.mark.parametrize(
    "addresses", [["8.8.8.8", "10.0.0.1"], ["2606:4700::1111", "::1"]], ids=["private", "loopback"]
)
async def test_a_name_with_one_private_address_is_not_reached(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All addresses that one answer holds are judged, and the name is asked once: there is no second answer."""
    asked: list[str] = []

    async def resolve(_self: object, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        asked.append(host)
        return [
            {"hostname": host, "host": one, "port": port, "family": family, "proto": 0, "flags": 0} for one in addresses
        ]

    monkeypatch.setattr(ThreadedResolver, "resolve", resolve)

    with pytest.raises(CallFailed, match=r"rebound\.example is not a public host"):
        await OutgoingClient().call(call("https://rebound.example/"))
    assert asked == ["rebound.example"]


async def test_no_error_shows_the_query_of_a_url() -> None:
    """It may be a signature; what the client library says of a server that talks nonsense has the whole URL."""

    async def talk_nonsense(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"nonsense\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(talk_nonsense, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CallFailed) as failed:
            await OutgoingClient(allowed=("localhost",)).call(call(f"http://localhost:{port}/?signature=hush"))

    assert f"localhost:{port}" in str(failed.value)
    assert "hush" not in str(failed.value)


@pytest.mark.parametrize("name", ["missing", "short"])
async def test_secrets_that_cannot_be_used_refuse_the_call(tmp_path: Path, name: str) -> None:
    """Before anything is sent, naming the secret and not its value."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "short").write_text("abc")

    with pytest.raises(CallRefused, match=f"secret {name}") as refused:
        await OutgoingClient(secrets=tmp_path).call(call("https://example.com/", secret_headers={"X": name}))
    assert "abc" not in str(refused.value)


async def test_secrets_are_not_sent_in_the_clear(tmp_path: Path) -> None:
    """Except to hosts that are allowed by name."""
    with pytest.raises(CallRefused, match="by https alone"):
        await OutgoingClient(secrets=tmp_path).call(call("http://example.com/", secret_headers={"X": "token"}))


async def test_a_call_to_nobody_fails() -> None:
    """As a failure that may be tried again."""
    reader = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = reader.sockets[0].getsockname()[1]
    reader.close()
    await reader.wait_closed()

    with pytest.raises(CallFailed):
        await OutgoingClient(allowed=("127.0.0.1",)).call(call(f"http://127.0.0.1:{port}/"))
