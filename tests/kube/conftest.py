"""Fixtures for atoll.kube: a fake API server, a client for it, and a clock that tests move."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.kube.client import ApiClient
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import ManualClock
from tests.fakes.listening import kubeconfig


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer().running() as server:
        yield server


@pytest.fixture
async def client(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[ApiClient]:
    config = kubeconfig(tmp_path, server.url)
    async with await ApiClient.connect(config, requests_per_second=1000, burst=1000, sleep=no_wait) as client:
        yield client


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def no_wait(_seconds: float) -> None:
    """Replace the client's waits between attempts."""
