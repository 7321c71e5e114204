"""Calls about one pod that several reconcilers make."""

from typing import cast
from unittest.mock import AsyncMock, Mock

import pytest

from atoll.kube.errors import ApiError, Conflict, NotFound
from atoll.kube.mirror import ClusterMirror
from controllers.context import Context
from controllers.pod_calls import try_evict
from tests.builders import make_pod
from tests.fakes.clock import ManualClock


@pytest.mark.parametrize(
    ("refusal", "evictions"),
    [
        pytest.param(None, 1, id="evicted"),
        pytest.param(NotFound("gone", status=404, reason="NotFound", path="/"), 0, id="the pod is gone"),
        pytest.param(Conflict("other uid", status=409, reason="Conflict", path="/"), 0, id="another pod has its name"),
    ],
)
async def test_only_evictions_that_took_place_are_counted(refusal: ApiError | None, evictions: int) -> None:
    """Nothing is left to do in any of these cases."""
    metrics, api = Mock(), AsyncMock()
    api.create.side_effect = refusal
    context = Context(api, cast("ClusterMirror", Mock()), ManualClock(), Mock(), metrics, str)

    assert await try_evict(context, make_pod(), "its GPUs are gone") is None
    assert metrics.pods_evicted.inc.call_count == evictions
