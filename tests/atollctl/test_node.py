"""`atoll node`: states of machines, and the declaration that one is gone, under the user's own name and only if nothing
contradicts it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from atoll.api import names
from atoll.api.node_status import GONE_MAX, GoneMachine
from atoll.api.times import format_microtime
from atollctl.__main__ import app
from atollctl.node import with_declaration
from tests.builders import lease_json, report_json
from tests.controllers.harness import HEARTBEATS, LEASES, strip_version
from tests.fakes.api_server import FakeApiServer
from tests.fakes.listening import kubeconfig

REPORT, NODE = "/apis/gpu.scheduling/v1/gpunodestatuses/n1", "/api/v1/nodes/n1"
WHY = ("--reason", "power supply burnt out")


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    """A node n1 that was deleted: its report, an old heartbeat, and one GPU that is in doubt."""

    def review(method: str, path: str, _: Any) -> web.Response | None:
        is_review = method == "POST" and path.endswith("/selfsubjectreviews")
        return web.json_response({"status": {"userInfo": {"username": "jane"}}}) if is_review else None

    async with FakeApiServer().running() as server:
        server.intercept(review)
        body = strip_version(report_json("n1", node_uid="u1"))
        body["status"]["evidence"] = {"sequence": 41}
        server.put(REPORT, body)
        put_beat(server, timedelta(hours=1))
        put_lease(server, 0, "u1")
        yield server


def put_beat(server: FakeApiServer, age: timedelta) -> None:
    spec = {"leaseDurationSeconds": 180, "renewTime": format_microtime(datetime.now(UTC) - age)}
    server.put(f"{HEARTBEATS}/n1", {"metadata": {"name": "n1"}, "spec": spec})


def put_lease(server: FakeApiServer, device_id: int, node_uid: str) -> None:
    marks = {"gpu.scheduling/node-uid": node_uid, "gpu.scheduling/in-doubt": "no report"}
    body = strip_version(lease_json("n1", device_id, annotations=marks))
    server.put(f"{LEASES}/{body['metadata']['name']}", body)


def put_node(server: FakeApiServer, *, uid: str = "u1", ready: str) -> None:
    conditions = [{"type": "Ready", "status": ready}]
    server.put(NODE, {"metadata": {"name": "n1", "uid": uid}, "status": {"conditions": conditions}})


async def atoll(server: FakeApiServer, folder: Path, *arguments: str) -> Result:
    config = str(kubeconfig(folder, server.url))
    return await asyncio.to_thread(CliRunner().invoke, app, ["node", *arguments, "--kubeconfig", config])


async def test_the_list_says_where_a_machine_stands_and_what_moves_it_on(server: FakeApiServer, tmp_path: Path) -> None:
    """A deleted Node with a GPU in doubt, as JSON."""
    result = await atoll(server, tmp_path, "list", "-o", "json")

    assert result.exit_code == 0, result.output
    for word in ('"stands": "deleted"', '"gpus": "8"', '"inDoubt": "1"', "atoll node forget"):
        assert word in result.output


@pytest.mark.parametrize("may_list_pods", [True, False])
async def test_the_list_says_why_a_report_does_not_count(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, may_list_pods: bool
) -> None:
    """A heard agent, whose report shows a pod that the API server does not know. Whoever may not list pods is told."""

    def forbid(method: str, path: str, _: Any) -> web.Response | None:
        is_pods = (method, path) == ("GET", "/api/v1/pods") and not may_list_pods
        return web.json_response({"kind": "Status", "reason": "Forbidden"}, status=403) if is_pods else None

    monkeypatch.setattr("atollctl.node.RENEWAL_SECONDS", 0.0)
    server.intercept(forbid)
    put_node(server, ready="True")
    put_beat(server, timedelta(seconds=1))
    report = server.objects[REPORT]
    report["status"]["pods"] = [{"uid": "unknown", "live": True, "kubelet": True}]
    server.put(REPORT, strip_version(report))

    result = await atoll(server, tmp_path, "list", "-o", "json")

    assert result.exit_code == 0, result.output
    assert (f'"reason": "{names.REJECT_UNKNOWN_POD}"' in result.output) == may_list_pods
    assert ('"stands": "refused"' in result.output) == may_list_pods
    assert ("cannot tell which reports are refused" in result.output) != may_list_pods


@pytest.mark.parametrize("verb", ["release", "forget"])
async def test_a_word_says_who_why_when_and_of_which_machine(server: FakeApiServer, tmp_path: Path, verb: str) -> None:
    """The name is the one that the API server knows; nobody is impersonated, nothing is deleted."""
    result = await atoll(server, tmp_path, verb, "n1", *WHY)

    assert result.exit_code == 0, result.output
    (word,) = server.objects[REPORT]["spec"]["gone"]
    told = {key: word[key] for key in ("nodeUid", "by", "reason", "sequence", "forget")}
    assert told == {"nodeUid": "u1", "by": "jane", "reason": WHY[1], "sequence": 41, "forget": verb == "forget"}
    assert not any("Impersonate-User" in sent for sent in server.headers)
    assert not server.count("DELETE ")


async def test_a_word_on_a_machine_whose_report_is_gone_makes_the_object(server: FakeApiServer, tmp_path: Path) -> None:
    """The grace time is over, only Leases remember the machine: they name its uid."""
    del server.objects[REPORT]

    result = await atoll(server, tmp_path, "release", "n1", *WHY)

    assert result.exit_code == 0, result.output
    (word,) = server.objects[REPORT]["spec"]["gone"]
    assert (word["nodeUid"], word["sequence"]) == ("u1", 0)


async def test_of_two_machines_of_one_name_one_must_be_named(server: FakeApiServer, tmp_path: Path) -> None:
    """Leases of an earlier machine, while its successor works: the uid says which is meant."""
    put_lease(server, 1, "u0")
    vague = await atoll(server, tmp_path, "release", "n1", *WHY)
    put_node(server, ready="True")
    put_beat(server, timedelta())
    exact = await atoll(server, tmp_path, "release", "n1", "--uid", "u0", *WHY)

    assert (vague.exit_code, "choose one with --uid: u0, u1" in vague.output) == (2, True)
    assert exact.exit_code == 0, exact.output
    assert [word["nodeUid"] for word in server.objects[REPORT]["spec"]["gone"]] == ["u0"]


@pytest.mark.parametrize(
    ("arguments", "state", "told"),
    [
        (("release", "n1", *WHY), "ready", "its kubelet answers"),
        (("release", "n1", *WHY), "heard", "its agent is alive"),
        (("forget", "n1", *WHY), "not ready", "delete it first"),
        (("release", "n1", "--uid", "u9", *WHY), "", "no machine of that name had the uid u9; known: u1"),
        (("release", "n9", *WHY), "", "no such machine is known"),
        (("release", "n1", "--reason", " "), "", "must say how you know"),
    ],
)
async def test_a_word_that_cannot_be_is_refused(
    server: FakeApiServer, tmp_path: Path, arguments: tuple[str, ...], state: str, told: str
) -> None:
    """A machine that speaks is not gone; a word without reason or machine is none. Nothing is written."""
    if state == "heard":
        put_beat(server, timedelta(seconds=10))
    elif state:
        put_node(server, ready="True" if state == "ready" else "Unknown")

    result = await atoll(server, tmp_path, *arguments)

    assert result.exit_code == 2
    assert told in result.output
    assert not server.objects[REPORT]["spec"].get("gone")


def test_words_are_bounded_and_one_per_machine() -> None:
    """A newer word on a machine replaces the older; beyond the bound the oldest goes."""
    words = tuple(GoneMachine(node_uid=f"u{number}") for number in range(GONE_MAX))

    again = with_declaration(words, GoneMachine(node_uid="u0", sequence=9))
    more = with_declaration(words, GoneMachine(node_uid="new"))

    assert (len(again), again[-1].sequence) == (GONE_MAX, 9)
    assert (len(more), more[0].node_uid, more[-1].node_uid) == (GONE_MAX, "u1", "new")
