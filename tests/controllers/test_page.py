"""The page over HTTP: its content, its access control, its update rate, and safety against injection."""

import asyncio
import gc
import json
import math
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast
from unittest.mock import AsyncMock

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from structlog.testing import capture_logs

from atoll.api import names
from atoll.cluster.gangs.membership import gang_key
from atoll.explain.decision import index_snapshot
from atoll.explain.explanation import explain
from atoll.explain.overview import USE_UNKNOWN, Overview, WaitingLine
from atoll.explain.snapshot import ClusterSnapshot
from atoll.explain.wording import explanation_json, group_text, sentence
from atoll.kube.authorization import PathAuthorizer
from atoll.kube.client import ApiClient
from atoll.kube.mirror import ClusterMirror
from atoll.service.errors import SettingsError
from atoll.service.metrics import Metrics
from atoll.service.pages import PAGE_HEADERS
from atoll.service.settings import load
from controllers.page.app import FILES
from controllers.page.authorization import (
    PEER_REVIEWS_BURST,
    PEERS_MAX,
    REVIEWS_BURST,
    PageAuthorizer,
    host_name,
)
from controllers.page.refresher import LOOK_PARTS, QUESTIONS_MAX, QUIET_SECONDS_MAX, REST_SECONDS_MIN, snapshot_of
from controllers.page.serving import register_page_metrics, serve_page
from controllers.page.view import WAITING_MAX, view_changes, view_of
from controllers.settings import ControllersSettings, PageSettings
from tests.builders import make_pod, uuid_of
from tests.controllers.page_harness import LISTS, Page, SnapshotMirror, next_event, served
from tests.explain.situations import TAKEN_AT, Situation, holder, make_heartbeat, situation, waiting
from tests.explain.test_gangs import SITUATIONS as GANGS
from tests.explain.test_reservations import hall
from tests.fakes.clock import ManualClock, until

ILL = {"health": {"state": "unhealthy", "reason": "XID 48"}}
HOSTILE = "</script><img src=x onerror=alert(1)>\n\nevent: look\ndata: {}"


def busy() -> Situation:
    """Two machines: one with holders and a cordoned card, the other free; a pod that waits for more than there is."""
    nodes: dict[str, dict[str, Any]] = {"n1": {"cordoned": (6,)}, "n2": {}}
    return situation(nodes, [holder("a", "n1", 0, 1), holder("b", "n2", 0)], waiting(8, claim={"policy": "island"}))


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    """The page of that cluster."""
    async with served(busy().snapshot, ManualClock()) as found:
        yield found


async def test_stream_tells_the_cluster_first_and_then_what_changed(page: Page) -> None:
    """A watcher gets every node, who holds what and what waits; after a change only the node that changed."""
    async with page.client.get("/page/events") as stream:
        kind, first = await next_event(stream)
        assert (stream.content_type, kind, first["whole"]) == ("text/event-stream", "look", True)
        assert {node["name"] for node in first["nodes"]} == {"n1", "n2"}
        gpus = {gpu["id"]: gpu for node in first["nodes"] if node["name"] == "n1" for gpu in node["islands"][0]["gpus"]}
        assert (gpus[0]["state"], gpus[0]["holders"], gpus[6]["state"]) == ("held", ["team/a"], "cordoned")
        assert first["counts"] == {"cordoned": 1, "free": 12, "held": 3}
        (row,) = first["waiting"]
        assert row["reason"] == explain(index_snapshot(busy().snapshot), busy().pod).headline

        calm = replace(busy().snapshot, pods=busy().snapshot.pods[1:], leases=busy().snapshot.leases[2:])
        page.mirror.become(calm)
        clock = page.refresher._clock
        assert isinstance(clock, ManualClock)
        page.refresher.rest_seconds = 0.0
        await clock.advance(REST_SECONDS_MIN)
        await page.refresher.refresh()
        kind, second = await next_event(stream)
        assert (kind, second["whole"]) == ("look", False)
        assert [node["name"] for node in second["nodes"]] == ["n1"]
        assert second["counts"]["free"] == 14


async def test_gpus_whose_users_cannot_be_read_say_so() -> None:
    """Free or held, with or without another reason: that no foreign use is shown does not mean that there is none."""
    unread = [uuid_of("n1", device_id) for device_id in (0, 3, 6)]
    nodes = {"n1": {"devices": {6: ILL}, "status": {"evidence": {"usesUnread": unread}}}, "n2": {}}
    blind = situation(nodes, [holder("a", "n1", 0)], waiting(1)).snapshot

    async with served(blind, ManualClock()) as page, page.client.get("/page/events") as stream:
        _, look = await next_event(stream)

    (islands,) = [node["islands"] for node in look["nodes"] if node["name"] == "n1"]
    told = {gpu["id"]: (gpu["state"], gpu.get("reason", "")) for island in islands for gpu in island["gpus"]}
    assert (told[0], told[3]) == (("held", USE_UNKNOWN), ("free", USE_UNKNOWN))
    assert told[6] == ("quarantined", f"XID 48; {USE_UNKNOWN}")
    assert USE_UNKNOWN not in {reason for number, (_, reason) in told.items() if number not in {0, 3, 6}}


async def test_a_reservation_is_shown_as_the_holder_and_its_pod_is_told_what_it_waits_for() -> None:
    """GPUs that no pod uses are not free on the page; a pod that may not have them reads why."""
    snapshot = hall(0, 1, namespaces=["other"]).snapshot
    stranger = make_pod("stranger", gpus=1, annotations={names.RESERVATION: "nightly"})
    async with (
        served(replace(snapshot, pods=(stranger,)), ManualClock()) as page,
        page.client.get("/page/events") as stream,
    ):
        _, look = await next_event(stream)

    gpus = [gpu for node in look["nodes"] if node["name"] == "n2" for part in node["islands"] for gpu in part["gpus"]]
    held = {gpu["id"]: gpu["holders"] for gpu in gpus if gpu["state"] == "held"}
    assert held == {0: ["@reservation/nightly"], 1: ["@reservation/nightly"]}
    assert look["counts"] == {"free": 14, "held": 2}
    (row,) = look["waiting"]
    assert names.REJECT_RESERVATION_FOREIGN in row["reason"]


def test_an_overview_is_of_everything_that_the_mirror_has() -> None:
    """Each list under its own name; of storage classes that nobody watches it is known that they are not known."""
    lists: dict[str, Any] = {name: (name,) for name in LISTS.values()} | {"heartbeats": (make_heartbeat("n1"),)}
    snapshot = ClusterSnapshot(TAKEN_AT, **lists)
    without_gangs = ClusterMirror(cast("ApiClient", None), ManualClock())

    assert snapshot_of(cast("ClusterMirror", SnapshotMirror(snapshot)), TAKEN_AT) == snapshot
    assert snapshot_of(without_gangs, TAKEN_AT) == ClusterSnapshot(TAKEN_AT, storage_classes=None)


async def test_nobody_looks_while_nobody_watches(page: Page) -> None:
    """Without a watcher the cluster is never looked at, and after the last one has gone what was seen is forgotten."""
    clock = page.refresher._clock
    assert isinstance(clock, ManualClock)
    running = asyncio.ensure_future(page.refresher.run())
    await clock.advance(120.0)
    assert page.refresher.view is None

    page.refresher.watchers = 1
    await clock.advance(1.0)
    await asyncio.wait_for(page.refresher.changed(5.0), 10.0)
    assert page.refresher.view is not None
    page.refresher.watchers = 0
    await clock.advance(120.0)
    assert page.refresher.view is None
    running.cancel()


async def test_looks_rest_so_long_that_they_take_little_of_a_core(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a look takes, the next one begins no sooner than leaves it a twenty-fifth; an idle cluster rests."""
    clock = page.refresher._clock
    assert isinstance(clock, ManualClock)
    overviews = 0

    async def slow(work: Any) -> tuple[Any, float]:
        nonlocal overviews
        overviews += 1
        return work(), 3.0

    monkeypatch.setattr(page.refresher, "_work", slow)
    await page.refresher.refresh()
    for _ in range(3 * (LOOK_PARTS - 1) - 1):
        page.mirror.become(page.mirror.snapshot)
        await clock.advance(1.0)
        await page.refresher.refresh()
    assert overviews == 1
    await clock.advance(2.0)
    await page.refresher.refresh()
    assert overviews == 2

    monkeypatch.setattr(page.refresher, "rest_seconds", 0.0)
    await clock.advance(QUIET_SECONDS_MAX - 1)
    await page.refresher.refresh()
    assert overviews == 2, "nothing changed"
    await clock.advance(2.0)
    await page.refresher.refresh()
    assert overviews == 3, "an agent falls silent by time alone"


async def test_work_runs_beside_the_event_loop_without_the_collector(page: Page) -> None:
    """It is done in a thread of its own, where no full collection holds up the reconcilers; then all is as before."""
    (thread, was_collecting), spent = await page.refresher._work(lambda: (threading.current_thread(), gc.isenabled()))

    assert thread is not threading.main_thread()
    assert not was_collecting
    assert gc.isenabled()
    assert spent >= 0.0


async def test_each_piece_of_work_is_charged_its_own_time_of_a_core(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that the thread rests afterwards: what it has worked before does not count again."""
    ticks = iter((5.0, 7.5))
    monkeypatch.setattr("controllers.page.refresher.time.thread_time", lambda: next(ticks))

    assert await page.refresher._work(str) == ("", 2.5)
    assert page.refresher.spent_seconds == 2.5


async def test_metrics_tell_who_watches_and_what_it_costs(page: Page) -> None:
    """Watchers are those of this moment, and every look adds the time of a core that it took."""
    metrics = Metrics("controllers")
    register_page_metrics(metrics, page.refresher)
    value = metrics.registry.get_sample_value
    before = value("atoll_controllers_page_cpu_seconds_total")

    async with page.client.get("/page/events") as stream:
        await next_event(stream)
        assert value("atoll_controllers_page_watchers") == 1.0

    assert before == 0.0
    assert (value("atoll_controllers_page_cpu_seconds_total") or 0.0) > 0.0


async def test_a_served_page_tells_what_it_costs() -> None:
    """Its figures are among those of the controllers as soon as it is served."""
    metrics, mirror = Metrics("controllers"), cast("ClusterMirror", SnapshotMirror(busy().snapshot))
    serving = asyncio.ensure_future(serve_page(PageSettings(port=0), mirror, AsyncMock(), ManualClock(), metrics))
    await until(lambda: metrics.registry.get_sample_value("atoll_controllers_page_watchers") == 0.0)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_watchers_are_bounded_and_their_places_come_back() -> None:
    """One too many is told so; when one goes the next may come."""
    async with served(busy().snapshot, ManualClock(), watchers_max=2) as page, page.client.get("/page/events"):
        async with page.client.get("/page/events"), page.client.get("/page/events") as third:
            assert third.status == 503
            assert "others watch already" in await third.text()
            assert third.headers["Retry-After"]
        async with asyncio.timeout(20):
            while page.refresher.watchers > 1:  # noqa: ASYNC110 - the server notices by itself
                await asyncio.sleep(0.05)
        assert page.refresher.watchers == 1
        async with page.client.get("/page/events") as again:
            assert again.status == 200


async def test_question_is_answered_by_the_functions_of_explain(page: Page) -> None:
    """Headline and proposals are those of `atoll explain` on the same state; an unknown pod is 404."""
    found = busy()
    scene = index_snapshot(found.snapshot)
    told = explain(scene, found.pod)

    answer = await (await page.client.get("/page/pods/team/p")).json()

    assert (answer["subject"], answer["headline"]) == ("pod team/p", told.headline)
    assert [one["text"] for one in answer["proposals"]] == [
        sentence(one, scene, found.pod) for one in told.help.proposals
    ]
    assert answer["proposals"]
    groups = explanation_json(told, scene, found.pod)["groups"]
    assert answer["groupsLeftOut"] == 0
    assert [one["text"] for one in answer["groups"]] == [
        group_text(len(one["nodes"]), one["standing"], one["reason"], one["others"]) for one in groups
    ]
    assert [node.partition(":")[0] for one in answer["groups"] for node in one["nodes"]] == [
        node["node"] for one in groups for node in one["nodes"]
    ]
    assert (await page.client.get("/page/pods/team/nobody")).status == 404
    assert (await page.client.get("/page/pods/team/%3Cb%3E")).status == 404


async def test_member_of_a_gang_is_told_about_its_gang() -> None:
    """A member waits for its gang, so the gang's decision is explained."""
    snapshot = GANGS["others hold half of every rack"].found.snapshot
    async with served(snapshot, ManualClock()) as page:
        pod = next(pod for pod in snapshot.pods if gang_key(pod) is not None).metadata
        answer = await (await page.client.get(f"/page/pods/{pod.namespace}/{pod.name}")).json()
        assert answer["subject"].startswith("gang ")
        assert answer["headline"]


async def test_questions_are_answered_once_per_look_and_bounded(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question again costs nothing until the next look; too many at a time are sent away."""
    await page.refresher.refresh()
    asked, gate = 0, asyncio.Event()

    async def slow(work: Any) -> tuple[Any, float]:
        nonlocal asked
        asked += 1
        await gate.wait()
        return work(), 0.0

    monkeypatch.setattr(page.refresher, "_work", slow)
    calls = [asyncio.ensure_future(page.client.get("/page/pods/team/p")) for _ in range(QUESTIONS_MAX + 2)]
    async with asyncio.timeout(20):
        while sum(call.done() for call in calls) < 2:  # noqa: ASYNC110 - the server decides which
            await asyncio.sleep(0.01)
    gate.set()
    statuses = sorted([(await call).status for call in calls])
    assert statuses == [200] * QUESTIONS_MAX + [429, 429]
    assert asked == 1
    assert (await page.client.get("/page/pods/team/p")).status == 200
    assert asked == 1


async def test_trouble_is_told_and_ends(page: Page) -> None:
    """While the mirror is not complete the page says so instead of showing half a cluster."""
    page.mirror.reason = "list of pod objects is not complete yet: listing"
    async with page.client.get("/page/events") as stream:
        assert await next_event(stream) == ("trouble", page.mirror.reason)
        assert (await page.client.get("/page/pods/team/p")).status == 503
        page.mirror.reason = ""
        await page.refresher.refresh()
        assert await next_event(stream) == ("trouble", "")
        assert (await next_event(stream))[0] == "look"


async def test_a_mirror_that_goes_blind_is_told_at_once(page: Page) -> None:
    """Nothing changes any more when the watches break, so nobody waits for a change before it is said."""
    async with page.client.get("/page/events") as stream:
        await next_event(stream)
        page.mirror.reason = "pods were not heard for 60 s"

        await page.refresher.refresh()

        assert await asyncio.wait_for(next_event(stream), 5) == ("trouble", "pods were not heard for 60 s")


async def test_a_look_that_fails_ends_nothing(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that nobody foresaw is logged and told; the page and the process live on."""
    monkeypatch.setattr("controllers.page.refresher.overview", lambda _scene: 1 / 0)
    with capture_logs() as logged:
        async with page.client.get("/page/events") as stream:
            kind, text = await next_event(stream)
        assert [entry["event"] for entry in logged] == ["Failed to compute the overview"]
        assert kind == "trouble"
        assert "log of the controllers" in text


async def test_hostile_texts_stay_texts() -> None:
    """A reason or a model that holds markup and line breaks is one JSON string in one event."""
    found = situation({"n1": {"cordoned": (0,)}}, [holder("a", "n1", 1)], waiting(8))
    report = found.snapshot.reports[0]
    assert report.status is not None
    devices = (report.status.devices[0].model_copy(update={"model": HOSTILE}), *report.status.devices[1:])
    status = report.status.model_copy(update={"devices": devices})
    hostile = replace(found.snapshot, reports=(report.model_copy(update={"status": status}),))
    async with served(hostile, ManualClock()) as page, page.client.get("/page/events") as stream:
        raw = b"".join([await stream.content.readline(), await stream.content.readline()])
        assert raw.count(b"\n") == 2
        gpu = json.loads(raw.partition(b"data: ")[2])["nodes"][0]["islands"][0]["gpus"][0]
        assert gpu["model"] == HOSTILE


def test_waiting_list_is_cut_and_counted() -> None:
    """A thousand waiting pods are counted, and the oldest are shown."""
    from atoll.explain.overview import overview

    found = busy()
    many = tuple(make_pod(f"r{i}", gpus=8) for i in range(WAITING_MAX + 50))
    view = view_of(overview(index_snapshot(replace(found.snapshot, pods=many))))

    told = msgspec.json.decode(view_changes(None, view) or b"")
    assert (len(told["waiting"]), told["waitingCount"]) == (WAITING_MAX, WAITING_MAX + 50)
    assert view_changes(view, view) is None


def test_a_waiting_pod_is_shown_since_when_it_waits() -> None:
    """As a moment, which stays the same from view to view; nothing for a pod of which that is not known."""
    lines = tuple(WaitingLine("team/p", 1, seconds, "busy") for seconds in (90.0, math.inf))
    told = msgspec.json.decode(view_changes(None, view_of(Overview("2026-01-31T12:00:00Z", (), lines))) or b"")
    assert [one["since"] for one in told["waiting"]] == [
        datetime(2026, 1, 31, 11, 58, 30, tzinfo=UTC).timestamp(),
        None,
    ]


@pytest.mark.parametrize("path", [*FILES, "/page/events", "/page/pods/team/nobody", "/nothing", "/page/pods/x"])
async def test_every_answer_forbids_what_the_page_does_not_need(page: Page, path: str) -> None:
    """Scripts and styles of our own alone, no frames, no guessing of types, nothing kept; refusals included."""
    async with page.client.get(path) as answer:
        assert {name: answer.headers.get(name) for name in PAGE_HEADERS} == PAGE_HEADERS
    policy = PAGE_HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert (await page.client.post(path)).status in {404, 405}


async def test_who_is_sent_away_because_of_too_many_is_told_to_be_careful_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of requests at a time refuses before any handler is asked, and its answer carries the headers."""
    monkeypatch.setattr("controllers.page.app.IN_FLIGHT_MAX", 1)
    async with served(busy().snapshot, ManualClock()) as found, found.client.get("/page/events"):
        answer = await found.client.get("/")

        assert answer.status == 429
        assert {name: answer.headers[name] for name in PAGE_HEADERS} == PAGE_HEADERS


def test_files_load_nothing_from_elsewhere_and_hold_no_inline_code() -> None:
    """No address of another host, no inline script, style or handler, no sink that parses HTML."""
    for path, (file, _kind) in FILES.items():
        text = file.read_text()
        addresses = set(re.findall(r"https?://[^\s\"'>]+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path
        assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", text), path
    assert set(FILES) == {"/", "/page.js", "/page.css", "/islands.js", "/stream.js", "/words.js", "/icon.svg"}


@pytest.mark.parametrize(
    ("header", "status"),
    [("localhost:8083", 200), ("127.0.0.1", 200), ("[::1]:8083", 200), ("evil.example:8083", 421), ("10.0.0.1", 421)],
)
async def test_a_name_that_was_pointed_at_loopback_is_no_key(page: Page, header: str, status: int) -> None:
    """A web site cannot read the page through a name of its own that leads to 127.0.0.1."""
    async with page.client.get("/page/events", headers={"Host": header}) as answer:
        assert answer.status == status
    async with page.client.get("/page/events", headers={"Sec-Fetch-Site": "cross-site"}) as answer:
        assert answer.status == 403
    assert host_name("LOCALHOST:1") == "localhost"


class PageReviews:
    """The API server's reviews: `good` may get /page, `other` is known."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def create(self, path: str, body: Any) -> bytes:
        if path.endswith("/tokenreviews"):
            user = {"good": "viewer", "other": "mallory"}.get(body["spec"]["token"])
            return json.dumps(
                {"status": {"authenticated": user is not None, "user": {"username": user or ""}}}
            ).encode()
        self.paths.append(body["spec"]["nonResourceAttributes"]["path"])
        return json.dumps({"status": {"allowed": body["spec"]["user"] == "viewer"}}).encode()


@pytest.mark.parametrize(("token", "status"), [("", 401), ("unknown", 401), ("other", 403), ("good", 200)])
@pytest.mark.parametrize("path", ["/page/events", "/page/pods/team/p"])
async def test_off_loopback_a_role_opens_the_door(path: str, token: str, status: int) -> None:
    """Data is told to bearers whom the API server lets get /page, as with /debug/snapshot; the empty page to all."""
    reviews = PageReviews()
    async with served(busy().snapshot, ManualClock(), authorizer=PathAuthorizer(reviews)) as page:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with page.client.get(path, headers=headers) as answer:
            assert answer.status == status
        assert set(reviews.paths) <= {"/page"}
        assert (await page.client.get("/")).status == 200


async def test_strangers_cannot_flood_the_api_server() -> None:
    """Reviews of tokens are bounded: they cost the API server two questions each."""
    calls = PEER_REVIEWS_BURST + 3
    async with served(busy().snapshot, ManualClock(), authorizer=PathAuthorizer(PageReviews())) as page:
        bad = {"Authorization": "Bearer unknown"}
        statuses = [(await page.client.get("/page/pods/team/p", headers=bad)).status for _ in range(calls)]
    assert statuses == [401] * PEER_REVIEWS_BURST + [429] * 3


async def test_one_stranger_shuts_nobody_out() -> None:
    """Each peer has a budget of its own, a network of IPv6 counts as one peer, and all together are bounded."""
    reviews = PageReviews()
    authorizer = PageAuthorizer(PathAuthorizer(reviews), ManualClock().monotonic_seconds)

    async def status(address: str, token: str = "unknown") -> int:
        headers = {"Authorization": f"Bearer {token}"}
        refusal = await authorizer.refusal(make_mocked_request("GET", "/page/events", headers).clone(remote=address))
        return refusal.status if refusal is not None else 200

    flood = [await status(f"2001:db8::{number:x}") for number in range(100)]

    assert flood.count(401) == PEER_REVIEWS_BURST
    assert await status("10.0.0.7", "good") == 200
    many = [await status(f"10.1.{number // 256}.{number % 256}") for number in range(2 * PEERS_MAX)]
    assert many.count(401) == REVIEWS_BURST - PEER_REVIEWS_BURST - 1
    assert len(authorizer._peers) == PEERS_MAX


async def test_streams_end_when_the_server_stops() -> None:
    """Who watches does not keep the controllers from stopping."""
    async with served(busy().snapshot, ManualClock()) as page:
        stream = await page.client.get("/page/events")
        await next_event(stream)
        page.refresher.end()
        assert await asyncio.wait_for(stream.content.read(), 10.0) == b""


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--page-host", "0.0.0.0"], "not loopback"),
        (["--page-host", "10.0.0.1", "--page-tls-key", "key.pem"], "belong together"),
        (["--page-port", "70000"], "page.port"),
    ],
)
def test_unsafe_settings_are_refused(flags: list[str], word: str) -> None:
    """Off loopback tokens are shown to the page, so it takes a certificate."""
    with pytest.raises(SettingsError, match=word):
        load(ControllersSettings, flags, "ATOLL_CONTROLLERS", environment={})


def test_page_is_on_loopback_by_default_and_can_be_turned_off() -> None:
    """Nobody outside of the pod reaches it unless an administrator says so."""
    assert PageSettings().host == "127.0.0.1"
    values = load(ControllersSettings, ["--no-page-serve", "--page-host=0.0.0.0"], "ATOLL_CONTROLLERS", environment={})
    assert not values.page.serve
