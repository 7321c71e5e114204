"""Fixtures: a faulty API server with the status subresource, a client for it, and the mock of the driver's library."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
from aiohttp import web

from atoll.kube.client import ApiClient
from devcluster.mock_nvml import build
from devcluster.mock_nvml.library import environment
from tests.fakes.api_server import FakeApiServer, merge, status
from tests.fakes.listening import kubeconfig

hypothesis.settings.register_profile("unhurried", deadline=None, print_blob=True)
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def mock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the mock of the driver's library; return its path."""
    return build(tmp_path_factory.mktemp("mock-nvml"))


@pytest.fixture(scope="module")
def mock_environment(mock_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the machine file that the real bindings read in every process started from now on."""
    path = tmp_path_factory.mktemp("machine") / "machine"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(mock_library, path).items():
            patch.setenv(name, value)
        yield path


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer().running() as server:
        server.fail(_patch_status(server), times=100_000, containing="/status?")
        yield server


@pytest.fixture
async def client(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[ApiClient]:
    config = kubeconfig(tmp_path, server.url)
    async with await ApiClient.connect(config, requests_per_second=1000, burst=1000) as client:
        yield client


def _patch_status(server: FakeApiServer):
    """Handle merge patches of a status subresource: only the status changes; uid and version must match."""

    async def handle(request: web.Request) -> web.StreamResponse:
        path = request.path.removesuffix("/status")
        if path not in server.objects:
            return status(404, "NotFound", f"{path} not found")
        current, patch = server.objects[path], server.bodies[-1]
        for key in ("uid", "resourceVersion"):
            if patch.get("metadata", {}).get(key, current["metadata"][key]) != current["metadata"][key]:
                return status(409, "Conflict", f"{key} differs")
        merged = merge(current.get("status", {}), patch["status"])
        return web.json_response(server.put(path, {**current, "status": merged}))

    return handle
