"""The API client: distinct errors, bounded time and rate, no retry of requests that might act twice."""

import asyncio
from pathlib import Path
from typing import Any

import aiohappyeyeballs
import msgspec
import pytest
from aiohttp import web

from atoll.cluster.objects import decode_pod
from atoll.kube import errors, paths
from atoll.kube.client import ApiClient
from tests.builders import pod_json
from tests.fakes.api_server import FakeApiServer, answering, cut_connection, hang
from tests.fakes.listening import kubeconfig
from tests.test_deep_objects import deep

POD = paths.pods("team", "p")


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        (401, "Unauthorized", errors.Unauthorized),
        (403, "Forbidden", errors.Forbidden),
        (404, "NotFound", errors.NotFound),
        (409, "AlreadyExists", errors.AlreadyExists),
        (409, "Conflict", errors.Conflict),
        (410, "Expired", errors.Gone),
        (422, "Invalid", errors.Invalid),
        (429, "TooManyRequests", errors.TooManyRequests),
        (500, "InternalError", errors.ServerError),
        (418, "Teapot", errors.ApiError),
        (302, "Found", errors.ApiError),
    ],
)
async def test_every_refusal_has_its_class(
    server: FakeApiServer, client: ApiClient, status: int, reason: str, expected: type[errors.ApiError]
) -> None:
    """A status becomes one class of ours, with the facts as attributes."""
    server.fail(answering(status, reason), times=10)

    with pytest.raises(errors.ApiError) as caught:
        await client.create(paths.pods("team"), {"metadata": {"name": "p"}})

    assert type(caught.value) is expected
    assert (caught.value.status, caught.value.reason, caught.value.path) == (status, reason, paths.pods("team"))


def refusal(causes: list[dict[str, str]], kind: str = "Pod") -> dict[str, object]:
    """Return the Status of a 422 as the API server words it."""
    details = {"kind": kind, "causes": causes} if kind else {}
    return {"kind": "Status", "code": 422, "reason": "Invalid", "message": "no", "details": details}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(refusal([{"field": "metadata.uid"}]), errors.Conflict, id="another uid"),
        pytest.param(refusal([{"field": "spec.x"}]), errors.Invalid, id="bad field"),
        pytest.param(refusal([], ""), errors.Invalid, id="no details"),
    ],
)
async def test_precondition_that_failed_is_a_conflict_also_when_it_comes_as_422(
    server: FakeApiServer,
    client: ApiClient,
    body: dict[str, object],
    expected: type[errors.ApiError],
) -> None:
    """The API server words some failed preconditions as invalid objects; callers see one class for all of them."""

    async def refuse(_request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=422)

    server.fail(refuse)

    with pytest.raises(errors.ApiError) as caught:
        await client.patch(POD, {})

    assert type(caught.value) is expected


async def test_body_that_is_not_a_status_is_cut(server: FakeApiServer, client: ApiClient) -> None:
    """A proxy's error page ends up shortened and on one line, not whole in our logs."""

    async def page(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="<html>\n" + "x" * 10_000)

    server.fail(page)

    with pytest.raises(errors.ServerError) as caught:
        await client.create(POD, {})

    assert len(caught.value.message) <= errors.MESSAGE_LENGTH_MAX
    assert "\n" not in caught.value.message


async def test_reads_wait_out_throttling_and_outages(server: FakeApiServer, client: ApiClient) -> None:
    """A GET is repeated after 429 (as long as Retry-After says), 503, 504 and cut connections."""
    stored = server.put(POD, {})
    server.fail(answering(429, "TooManyRequests", {"Retry-After": "0"}))
    server.fail(answering(503))
    server.fail(cut_connection)

    answer = await client.get(POD)

    assert msgspec.json.decode(answer) == stored


async def test_retry_after_beyond_the_deadline_is_not_waited_for(server: FakeApiServer, client: ApiClient) -> None:
    """When the server asks for more patience than the caller has, the refusal comes back at once."""
    server.fail(answering(429, "TooManyRequests", {"Retry-After": "30"}), times=5)

    with pytest.raises(errors.TooManyRequests) as caught:
        await client.get(POD, timeout_seconds=5)

    assert caught.value.retry_after_seconds == 30
    assert len(server.requests) == 1


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE"])
async def test_writes_are_not_repeated_by_themselves(server: FakeApiServer, client: ApiClient, method: str) -> None:
    """A write that failed is sent once only: repeating it is the caller's decision."""
    server.fail(answering(503), times=5)

    with pytest.raises(errors.ServerError):
        await client.request(method, POD, body={"metadata": {"name": "p"}})

    assert len(server.requests) == 1


async def test_write_is_repeated_when_told(server: FakeApiServer, client: ApiClient) -> None:
    """A caller who knows that a write is idempotent may have it repeated."""
    server.put(POD, {})
    server.fail(answering(429, "TooManyRequests"))

    await client.patch(POD, {"metadata": {"labels": {"a": "b"}}}, retry=True)

    assert server.objects[POD]["metadata"]["labels"] == {"a": "b"}


async def test_server_errors_other_than_unavailable_are_final(server: FakeApiServer, client: ApiClient) -> None:
    """A 500 may come from a broken webhook or object: repeating even a read would only add load."""
    server.fail(answering(500), times=5)

    with pytest.raises(errors.ServerError):
        await client.get(POD)

    assert len(server.requests) == 1


async def test_retry_budget_ends_repeating(server: FakeApiServer, client: ApiClient) -> None:
    """While every call fails, at most the budget's ten repetitions are made, however many calls there are."""
    server.fail(answering(503, "", {"Retry-After": "0"}), times=1000)

    for _ in range(8):
        with pytest.raises(errors.ServerError):
            await client.get(POD)

    assert len(server.requests) == 8 + 10


async def test_no_connection_means_not_sent(tmp_path: Path) -> None:
    """When nobody listens the server cannot have acted, and the error says so."""
    async with (
        FakeApiServer().running() as server,
    ):
        config = kubeconfig(tmp_path, server.url)

    async with await ApiClient.connect(config) as client:
        with pytest.raises(errors.Unanswered) as caught:
            await client.create(paths.pods("team"), {"metadata": {"name": "p"}})

    assert not caught.value.sent


@pytest.mark.parametrize("fault", [cut_connection, hang], ids=["connection cut", "no answer in time"])
async def test_lost_answer_means_outcome_unknown(server: FakeApiServer, client: ApiClient, fault: object) -> None:
    """When the request may have arrived the error says that the outcome is unknown."""
    server.fail(fault)  # type: ignore[arg-type]

    with pytest.raises(errors.Unanswered) as caught:
        await client.create(paths.pods("team"), {"metadata": {"name": "p"}}, timeout_seconds=0.2)

    assert caught.value.sent


async def test_waiting_for_the_rate_limit_is_part_of_the_time_limit(server: FakeApiServer, tmp_path: Path) -> None:
    """A call that never got its turn was never sent."""
    config = kubeconfig(tmp_path, server.url)
    server.put(POD, {})
    async with await ApiClient.connect(config, requests_per_second=0.001, burst=1) as client:
        await client.get(POD)

        with pytest.raises(errors.Unanswered) as caught:
            await client.get(POD, timeout_seconds=0.05)

    assert not caught.value.sent
    assert len(server.requests) == 1
    assert client.throttled_seconds > 0


@pytest.mark.parametrize("number", [1, 10], ids=["once", "again and again"])
async def test_a_socket_that_the_event_loop_refuses_was_never_sent(
    server: FakeApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """uvloop refuses a new socket whose number a connection that is being cut still has; the next one may do."""
    server.put(POD, {})
    connect, refused = aiohappyeyeballs.start_connection, []

    async def refuse(*arguments: Any, **options: Any) -> Any:
        if len(refused) < number:
            refused.append(arguments)
            raise RuntimeError("File descriptor 15 is used by transport <TCPTransport closed=False>")
        return await connect(*arguments, **options)

    monkeypatch.setattr("aiohappyeyeballs.start_connection", refuse)
    if number == 1:
        assert await client.get(POD)
        return
    with pytest.raises(errors.Unanswered, match="File descriptor 15") as caught:
        await client.create(paths.pods("team"), {})
    assert not caught.value.sent


async def test_closed_client_sends_nothing(server: FakeApiServer, client: ApiClient) -> None:
    """After close every call ends with Unanswered, not with a puzzling error of the HTTP library."""
    await client.close()

    with pytest.raises(errors.Unanswered) as caught:
        await client.get(POD)

    assert not caught.value.sent
    assert server.requests == []


async def test_list_reads_every_page(server: FakeApiServer, client: ApiClient) -> None:
    """A list comes whole, in order, with the version it is valid for."""
    for number in range(7):
        server.put(paths.pods("team", f"p{number}"), {})

    listing = await client.list(paths.pods(), lambda raw: msgspec.json.decode(raw)["metadata"]["name"], page_size=3)

    assert listing.items == [f"p{number}" for number in range(7)]
    assert listing.resource_version == str(server.version)
    assert len(server.requests) == 3


async def test_list_begins_again_when_its_token_expires(server: FakeApiServer, client: ApiClient) -> None:
    """A continue token that is too old costs one more list, not an error and not a torn result."""
    for number in range(4):
        server.put(paths.pods("team", f"p{number}"), {})
    server.fail(answering(410, "Expired"), containing="continue=2")

    listing = await client.list(paths.pods(), bytes, page_size=2)

    assert len(listing.items) == 4


async def test_answer_that_is_no_list_is_malformed(server: FakeApiServer, client: ApiClient) -> None:
    """A peer's nonsense is a typed error."""
    server.put(POD, {"metadata": {"uid": "u"}, "items": 7})

    with pytest.raises(errors.MalformedAnswer):
        await client.list(POD, bytes)


async def test_names_cannot_leave_their_path(server: FakeApiServer, client: ApiClient) -> None:
    """Slashes and question marks in a name stay part of the name."""
    with pytest.raises(errors.NotFound):
        await client.get(paths.pods("team", "../secrets/x?watch=true"))

    assert server.requests[0][1] == "/api/v1/namespaces/team/pods/../secrets/x?watch=true"
    assert server.requests[0][2] == {}


async def test_token_is_sent_and_read_again_after_401(server: FakeApiServer, tmp_path: Path) -> None:
    """A token file that was rotated is read again when the server refuses the old token, and the call succeeds."""
    token = tmp_path / "token"
    token.write_text("old\n")
    server.put(POD, {})
    config = kubeconfig(tmp_path, server.url, {"tokenFile": str(token)})
    async with await ApiClient.connect(config) as client:
        await client.get(POD)
        token.write_text("new\n")
        server.fail(answering(401, "Unauthorized"))

        await client.get(POD)

    assert [headers.get("Authorization") for headers in server.headers] == ["Bearer old", "Bearer old", "Bearer new"]


async def test_parallel_calls_share_one_session(server: FakeApiServer, client: ApiClient) -> None:
    """Many calls at once all get their own answer."""
    for number in range(50):
        server.put(paths.pods("team", f"p{number}"), {})

    answers = await asyncio.gather(*(client.get(paths.pods("team", f"p{number}")) for number in range(50)))

    names = [msgspec.json.decode(answer)["metadata"]["name"] for answer in answers]
    assert names == [f"p{number}" for number in range(50)]


async def test_pages_of_large_objects_are_smaller(
    server: FakeApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page beyond the bound is asked for again in smaller ones, so that no tenant's large pods end every list."""
    monkeypatch.setattr("atoll.kube.client.ANSWER_BYTES_MAX", 4_000)
    for number in range(40):
        note = "x" * (1_500 if number < 5 else 10)
        server.put(paths.pods("team", f"p{number:02}"), {"metadata": {"annotations": {"note": note}}})

    listing = await client.list(paths.pods("team"), msgspec.json.Decoder(dict[str, Any]).decode, page_size=16)

    assert [pod["metadata"]["name"] for pod in listing.items] == [f"p{number:02}" for number in range(40)]
    assert server.count("limit=16") > 1
    assert server.count("limit=") < 14


async def test_one_object_beyond_the_bound_is_an_error(
    server: FakeApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller pages end at one object; no loop follows."""
    monkeypatch.setattr("atoll.kube.client.ANSWER_BYTES_MAX", 1_000)
    server.put(POD, {"metadata": {"annotations": {"note": "x" * 2_000}}})

    with pytest.raises(errors.AnswerTooLarge):
        await client.list(paths.pods("team"), bytes, page_size=16)

    assert server.count("limit=") == 3


async def test_a_deep_object_does_not_fail_the_list(server: FakeApiServer, client: ApiClient) -> None:
    """Whoever may write one pod could hide all pods from everybody who lists them."""
    page = b'{"metadata":{"resourceVersion":"7"},"items":[' + deep(pod_json("p")) + b"]}"

    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=page)

    server.fail(answer)
    listing = await client.list(paths.pods(), decode_pod)

    assert [pod.metadata.name for pod in listing.items] == ["p"]
