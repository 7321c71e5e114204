"""The extender's debug endpoint: it shows the memory to users whom the API server authorizes."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer

from atoll.cluster.ledger_dump import decode_memory
from atoll.cluster.request_history import decode_past_asks
from atoll.kube.authorization import TOKEN_LENGTH_MAX, PathAuthorizer
from atoll.kube.errors import Unanswered
from atoll.kube.mirror import ClusterMirror
from atoll.service.metrics import Metrics
from extender.app import ExtenderParts, build_app
from extender.binder import Binder
from tests.builders import make_allocation, make_pod, make_report
from tests.extender.test_app import FakeBinder, FakeMirror
from tests.fakes.clock import ManualClock


@dataclass
class Reviews:
    """The API server's reviews: which token is whose, and who may get what."""

    users: dict[str, str] = field(default_factory=lambda: {"good": "auditor", "other": "mallory"})
    allowed: tuple[tuple[str, str], ...] = (("auditor", "/debug/ledger"), ("auditor", "/debug/snapshot"))
    fails: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def create(self, path: str, body: Any) -> bytes:
        self.asked.append(body)
        if self.fails:
            raise Unanswered("down", path=path, sent=False)
        if path.endswith("/tokenreviews"):
            user = self.users.get(body["spec"]["token"])
            status = {"authenticated": True, "user": {"username": user, "groups": ["g"]}} if user else {}
            return json.dumps({"status": status}).encode()
        spec = body["spec"]
        is_allowed = (spec["user"], spec["nonResourceAttributes"]["path"]) in self.allowed
        return json.dumps({"status": {"allowed": is_allowed}}).encode()


@pytest.fixture
async def http() -> AsyncIterator[tuple[TestClient[Any, Any], Reviews]]:
    """An extender that remembers one pod, and the API server's reviews."""
    mirror, clock, reviews = FakeMirror(), ManualClock(), Reviews()
    mirror.ledger.put_report(make_report())
    mirror.ledger.put_pod(make_pod("a", uid="a", node="n1", allocation=make_allocation("n1", 0, 1)))
    parts = ExtenderParts(
        cast("ClusterMirror", mirror),
        cast("Binder", FakeBinder()),
        clock,
        Metrics("extender"),
        10.0,
        doorkeeper=PathAuthorizer(reviews),
    )
    async with TestClient(TestServer(build_app(parts))) as client:
        yield client, reviews


async def test_memory_is_told_to_whom_a_role_allows_it(http: tuple[TestClient[Any, Any], Reviews]) -> None:
    """The API server knows the token and the role; the answer can be compared with what it holds."""
    client, reviews = http
    answer = await client.get("/debug/ledger", headers={"Authorization": "Bearer good"})
    assert answer.status == 200
    assert decode_memory(await answer.read()).pods == {"a": "n1:0,1"}
    assert reviews.asked[1]["spec"]["nonResourceAttributes"] == {"path": "/debug/ledger", "verb": "get"}


async def test_past_asks_are_told_to_whom_a_role_allows_it(http: tuple[TestClient[Any, Any], Reviews]) -> None:
    """By which sizes sets are weighed is told to the same people, and to nobody else."""
    client, reviews = http
    answer = await client.get("/debug/snapshot", headers={"Authorization": "Bearer good"})
    assert decode_past_asks(await answer.read()).sizes == ((1, 1.0),)
    assert reviews.asked[1]["spec"]["nonResourceAttributes"] == {"path": "/debug/snapshot", "verb": "get"}
    assert (await client.get("/debug/snapshot")).status == 401
    assert (await client.get("/debug/snapshot", headers={"Authorization": "Bearer other"})).status == 403


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Basic good", 401),
        ("Bearer unknown", 401),
        ("Bearer other", 403),
        ("Bearer " + "x" * (TOKEN_LENGTH_MAX - 10), 401),
    ],
    ids=["none", "no-token", "empty-token", "another-scheme", "unknown-token", "no-role", "long-token"],
)
async def test_nobody_else_learns_anything(
    http: tuple[TestClient[Any, Any], Reviews], header: str, status: int
) -> None:
    """Without a token that the API server knows, and a role, nothing of the ledger is told."""
    client, _ = http
    try:
        answer = await client.get("/debug/ledger", headers={"Authorization": header})
    except ConnectionError:
        return
    assert answer.status in {status, 400}
    assert "n1" not in await answer.text()


async def test_door_stays_shut_while_nobody_can_be_asked(http: tuple[TestClient[Any, Any], Reviews]) -> None:
    """An API server that does not answer lets nobody in."""
    client, reviews = http
    reviews.fails = True
    answer = await client.get("/debug/ledger", headers={"Authorization": "Bearer good"})
    assert answer.status == 503
    assert "good" not in await answer.text()


async def test_extender_without_a_doorkeeper_has_no_such_door() -> None:
    """Where nobody can be asked at all there is nothing to see."""
    parts = ExtenderParts(
        cast("ClusterMirror", FakeMirror()), cast("Binder", FakeBinder()), ManualClock(), Metrics("extender"), 10.0
    )
    async with TestClient(TestServer(build_app(parts))) as client:
        assert (await client.get("/debug/ledger", headers={"Authorization": "Bearer good"})).status == 404
