"""The whole webhook process against a small API server: waiting for its certificate, serving, reloading."""

import asyncio
import base64
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from atoll.api import names
from controllers.certificates import KeyPair, make_authority, make_serving
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import until
from tests.fakes.listening import kubeconfig
from webhook.__main__ import main, serve_webhook
from webhook.settings import WebhookSettings

SECRET = "/api/v1/namespaces/atoll-system/secrets/atoll-webhook-tls"
CLAIM = "/apis/gpu.scheduling/v1/namespaces/team/gpuclaims/two"
NOW = datetime.now(UTC)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def secret_of(authority: KeyPair) -> dict[str, Any]:
    pair = make_serving(authority, names=("127.0.0.1",), now=NOW, life=timedelta(days=9))
    data = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": authority.certificate}
    return {"data": {key: base64.b64encode(value).decode() for key, value in data.items()}}


def authority() -> KeyPair:
    return make_authority(now=NOW, life=timedelta(days=30))


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer().running() as running:
        yield running


@pytest.fixture
async def values(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[WebhookSettings]:
    """Run the webhook beside the test and give its settings."""
    values = WebhookSettings(
        kubeconfig=kubeconfig(tmp_path, server.url), host="127.0.0.1", port=free_port(), health_port=free_port()
    )
    task = asyncio.create_task(serve_webhook(values))
    yield values
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def status_of(values: WebhookSettings, path: str) -> tuple[int, str]:
    """Ask the health port; status 0 while nothing listens."""
    try:
        url = f"http://{values.health_host}:{values.health_port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()
    except aiohttp.ClientConnectionError:
        return 0, ""


async def wait_for_status(values: WebhookSettings, path: str, status: int) -> str:
    async with asyncio.timeout(20):
        while True:
            found, text = await status_of(values, path)
            if found == status:
                return text
            await asyncio.sleep(0.01)


async def send(values: WebhookSettings, *, trusting: KeyPair, claim: str = "two") -> dict[str, Any]:
    """Ask the webhook about a pod over a new TLS connection."""
    pod = {"metadata": {"name": "p", "annotations": {names.CLAIM: claim}}, "spec": {"containers": [{"name": "main"}]}}
    request = {
        "uid": "u",
        "operation": "CREATE",
        "resource": {"group": "", "resource": "pods"},
        "namespace": "team",
        "object": pod,
    }
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    context = ssl.create_default_context(cadata=trusting.certificate.decode())
    url = f"https://127.0.0.1:{values.port}/mutate"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, ssl=context) as answer:
        response: dict[str, Any] = (await answer.json())["response"]
        return response


async def wait_until_served(values: WebhookSettings, newer: KeyPair) -> None:
    async with asyncio.timeout(20):
        while True:
            with suppress(aiohttp.ClientConnectorCertificateError):
                assert (await send(values, trusting=newer))["allowed"]
                return
            await asyncio.sleep(0.01)


async def test_the_process_waits_serves_and_reloads(server: FakeApiServer, values: WebhookSettings) -> None:
    """Alive but not ready without a certificate; ready and serving with one; the next one without a restart."""
    assert "atoll-webhook-tls not there yet" in await wait_for_status(values, "/readyz", 503)
    assert (await status_of(values, "/livez"))[0] == 200

    first, second = authority(), authority()
    server.put(SECRET, secret_of(first))
    server.put(CLAIM, {"spec": {"devices": {"count": 2}}})
    await wait_for_status(values, "/readyz", 200)
    assert (await send(values, trusting=first))["allowed"]
    assert not (await send(values, trusting=first, claim="other"))["allowed"]

    server.put(SECRET, secret_of(second))

    await wait_until_served(values, second)
    page = await wait_for_status(values, "/metrics", 200)
    assert 'atoll_webhook_reviews_total{answer="denied"} 1.0' in page
    assert "atoll_webhook_certificate_end_timestamp_seconds" in page


async def test_only_the_one_secret_is_watched(server: FakeApiServer, values: WebhookSettings) -> None:
    """The account may read one Secret; a wider watch would be forbidden, and would show the authority's key."""
    await until(lambda: server.count("secrets") > 0)

    watched = [query for _, path, query in server.requests if "secrets" in path]
    assert {query["fieldSelector"] for query in watched} == {"metadata.name=atoll-webhook-tls"}


def test_bad_settings_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the setting."""
    assert main(["--port", "many"]) == 2
    assert "port" in capsys.readouterr().err
