"""The real webhook process under clients that exhaust its resources, while other reviews are answered."""

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from controllers.certificates import KeyPair
from tests.fakes.api_server import FakeApiServer
from tests.fakes.listening import kubeconfig
from tests.webhook.test_process import (
    CLAIM,
    SECRET,
    authority,
    free_port,
    secret_of,
    send,
    wait_for_status,
)
from webhook.review import BODY_BYTES_MAX
from webhook.settings import WebhookSettings

CALL_SECONDS = 30
"""Six times the chart's webhook.timeoutSeconds, for a busy machine; the flood itself never ends before the test."""
MEMORY_KIB_MAX = 512 * 1024
"""The chart's limit for the webhook."""
HEAD = b"POST /mutate HTTP/1.1\r\nHost: atoll\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@dataclass(frozen=True, slots=True)
class RunningWebhook:
    """A process of its own, and the authority that it is trusted by."""

    pid: int
    values: WebhookSettings
    trusted: KeyPair

    def peak_memory_kib(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    async def listens(self) -> None:
        """Wait for the first answer: readiness comes a moment before it."""
        async with asyncio.timeout(20):
            while True:
                with suppress(aiohttp.ClientConnectorError):
                    return await self.answers_a_bystander()
                await asyncio.sleep(0.01)

    async def answers_a_bystander(self) -> None:
        """Ask about a pod over a connection of its own, while the flood lasts."""
        async with asyncio.timeout(CALL_SECONDS):
            assert (await send(self.values, trusting=self.trusted))["allowed"]


@pytest.fixture
async def webhook(tmp_path: Path) -> AsyncIterator[RunningWebhook]:
    async with FakeApiServer().running() as server:
        trusted = authority()
        server.put(SECRET, secret_of(trusted))
        server.put(CLAIM, {"spec": {"devices": {"count": 2}}})
        config = kubeconfig(tmp_path, server.url)
        values = WebhookSettings(port=free_port(), health_port=free_port())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "webhook", f"--kubeconfig={config}", "--host=127.0.0.1"),
            *(f"--port={values.port}", f"--health-port={values.health_port}", "--log-level=error"),
        )
        try:
            await wait_for_status(values, "/readyz", 200)
            webhook = RunningWebhook(process.pid, values, trusted)
            await webhook.listens()
            yield webhook
        finally:
            process.terminate()
            await process.wait()


@asynccontextmanager
async def held_connections(webhook: RunningWebhook, count: int, sent: bytes) -> AsyncIterator[None]:
    """Open so many connections, send this over each and no more; the webhook may cut them."""
    context = ssl.create_default_context(cadata=webhook.trusted.certificate.decode())
    writers: list[asyncio.StreamWriter] = []
    few = asyncio.Semaphore(32)

    async def hold() -> None:
        async with few:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", webhook.values.port, ssl=context)
                writers.append(writer)
                writer.write(sent)
                await writer.drain()

    await asyncio.gather(*(hold() for _ in range(count)))
    assert len(writers) >= 0.9 * count  # on a busy machine a handshake may take too long
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


@pytest.mark.parametrize(
    ("count", "sent"),
    [
        pytest.param(1024, HEAD % 100, id="heads-without-bodies"),
        pytest.param(1024, HEAD[:30], id="half-heads"),
        pytest.param(53, HEAD % BODY_BYTES_MAX + b" " * (BODY_BYTES_MAX - 1), id="bodies-that-lack-a-byte"),
    ],
)
async def test_a_bystander_is_answered_through_a_flood(webhook: RunningWebhook, count: int, sent: bytes) -> None:
    """With failurePolicy Fail an answer of 429, or an end for want of memory, would stop everybody's GPU pods."""

    async def ask_all_the_while() -> None:
        while True:
            await webhook.answers_a_bystander()

    asking = asyncio.ensure_future(ask_all_the_while())
    async with held_connections(webhook, count, sent):
        for _ in range(10):
            await webhook.answers_a_bystander()
        assert not asking.done(), asking
    asking.cancel()

    assert webhook.peak_memory_kib() < MEMORY_KIB_MAX
