"""Metrics of API calls: the audit log's verbs, from bounded sets, one record per attempt."""

import asyncio

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from atoll.kube import paths
from atoll.kube.calls import OTHER, RESOURCES, SUBRESOURCES, UNANSWERED, ApiCall, code_of, resource_of, verb_of
from atoll.kube.client import ApiClient
from atoll.kube.errors import NotFound, Unanswered
from tests.fakes.api_server import FakeApiServer, answering

WORDS = {OTHER, *RESOURCES, *(f"{resource}/{sub}" for resource in RESOURCES for sub in SUBRESOURCES)}


@pytest.mark.parametrize(
    ("method", "path", "verb", "resource"),
    [
        ("GET", paths.pods(), "list", "pods"),
        ("GET", paths.pods("team"), "list", "pods"),
        ("GET", paths.pods("team", "p"), "get", "pods"),
        ("POST", paths.binding("team", "p"), "create", "pods/binding"),
        ("PATCH", paths.nodes("n1", "status"), "patch", "nodes/status"),
        ("PUT", paths.leases("atoll-system", "gpu-n1-0"), "update", "leases"),
        ("DELETE", paths.leases("atoll-system", "gpu-n1-0"), "delete", "leases"),
        ("GET", paths.namespaces(), "list", "namespaces"),
        ("GET", paths.namespaces("team"), "get", "namespaces"),
        ("GET", "/apis/example.test/v1/namespaces/team/pods2", "list", OTHER),
        ("GET", "/version", "list", OTHER),
        ("OPTIONS", "/", OTHER, OTHER),
    ],
)
def test_calls_are_named_as_the_audit_log_names_them(method: str, path: str, verb: str, resource: str) -> None:
    """Verb, resource and subresource come from method and path; a namespace or a name is never part of them."""
    assert (verb_of(method, path), resource_of(path)) == (verb, resource)


@given(path=st.text(max_size=80), status=st.integers())
def test_no_path_and_no_status_makes_a_new_series(path: str, status: int) -> None:
    """Whatever is asked for and whatever a peer answers, the labels come from finite sets."""
    assert resource_of(path) in WORDS
    assert code_of(status) in {OTHER, *map(str, range(100, 600))}


async def test_every_try_is_told_once(server: FakeApiServer, client: ApiClient) -> None:
    """A call that is repeated after 503 counts twice; one that is refused or cut counts with its code."""
    told: list[ApiCall] = []
    client.observer = told.append
    server.put(paths.pods("team", "p"), {})
    server.fail(answering(503, "ServiceUnavailable"))
    await client.get(paths.pods("team", "p"))
    with pytest.raises(NotFound):
        await client.get(paths.pods("team", "missing"))
    await server_stops_answering(server, client)

    assert [(call.verb, call.resource, call.code) for call in told] == [
        ("get", "pods", "503"),
        ("get", "pods", "200"),
        ("get", "pods", "404"),
        ("patch", "nodes/status", UNANSWERED),
    ]
    assert all(call.seconds >= 0 for call in told)


async def server_stops_answering(server: FakeApiServer, client: ApiClient) -> None:
    """Let one call wait until its time is over."""

    async def never(_request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    server.fail(never)
    with pytest.raises(Unanswered):
        await client.patch(paths.nodes("n1", "status"), {}, timeout_seconds=0.2)
