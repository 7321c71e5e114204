"""The write guard: a former leader writes nothing, however long a write has waited."""

from pathlib import Path

import pytest

from atoll.kube import paths
from atoll.kube.client import ApiClient
from controllers.api import GuardedApi
from controllers.errors import NotLeading
from tests.fakes.api_server import FakeApiServer
from tests.fakes.listening import kubeconfig

POD = paths.pods("team", "p")


@pytest.mark.parametrize("write", ["create", "patch", "delete"])
async def test_write_that_waited_for_its_turn_is_not_sent_by_a_loser(tmp_path: Path, write: str) -> None:
    """A process that was stopped while its write waited for the rate limit wakes up when another one leads."""
    leading = [True]

    async def lose(_seconds: float) -> None:
        leading[0] = False

    async with FakeApiServer().running() as server:
        server.put(POD, {"spec": {}})
        config = kubeconfig(tmp_path, server.url)
        async with await ApiClient.connect(config, requests_per_second=0.01, burst=1, sleep=lose) as client:
            api = GuardedApi(client, lambda: leading[0])
            await api.get(POD)
            calls = {
                "create": lambda: api.create(paths.pods("team"), {"metadata": {"name": "q"}}),
                "patch": lambda: api.patch(POD, {"metadata": {"labels": {"a": "b"}}}),
                "delete": lambda: api.delete(POD),
            }
            with pytest.raises(NotLeading):
                await calls[write]()
        assert [method for method, _, _ in server.requests] == ["GET"]
