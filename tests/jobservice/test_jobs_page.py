"""The page of jobs over HTTP: what its stream tells to whom, and the GPUs of a job."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from atoll.jobs.permissions import JobCaller, TenantGrant, TenantRole
from atoll.jobs.states import JobStep
from atoll.service.pages import PAGE_HEADERS
from jobs.page import routes
from jobs.page.board import ACTIVE_MAX
from jobs.page.routes import FILES, JOBS_BOARD, looks
from tests.jobservice.page_harness import JobsPage, jobs_page
from tests.jobservice.service import JOBS

ANN = JobCaller("ann", (TenantGrant(TenantRole.MEMBER, "acme", None),))


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[JobsPage]:
    """The page with three jobs."""
    async with jobs_page(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("by", "seen"),
    [("ann", {"tune", "later"}), ("oto/others", {"secret"}), ("ops", {"tune", "later", "secret"}), ("nobody", set())],
)
async def test_a_watcher_sees_the_jobs_of_their_tenants_alone(page: JobsPage, by: str, seen: set[str]) -> None:
    """As the list of the API; whoever has no role sees no cluster either."""
    async with page.stream(by) as events:
        kind, look = await anext(events)

    assert kind == "look"
    assert {job["name"] for job in look["active"]} == seen
    assert set(look["clusters"]) == (set() if by == "nobody" else {"local"})


async def test_a_change_is_told_without_being_asked_for(page: JobsPage) -> None:
    """A job that ends leaves the queue and is among the ended ones."""
    async with page.stream("ann") as events:
        await anext(events)
        await page.service.clock.advance(60)
        await page.step("tune", JobStep.SUCCEED)
        _, look = await anext(events)

    assert [job["name"] for job in look["active"]] == ["later"]
    assert [(job["name"], job["status"]) for job in look["ended"]] == [("tune", "succeeded")]


async def test_what_is_told_of_a_job_suffices_for_the_time_line(page: JobsPage) -> None:
    """Type and count of GPUs, since when it runs, how long it should take; a start that was asked for."""
    start = "2026-01-31T18:00:00Z"
    await page.submit("tonight", policy={"scheduled_start": start})
    async with page.stream("ann") as events:
        _, look = await anext(events)
    jobs = {job["name"]: job for job in look["active"]}
    tune, tonight = jobs["tune"], jobs["tonight"]

    assert (tune["gpu_type"], tune["gpu_count"], tune["seconds"]) == ("nvidia-v100", 2, 3600)
    assert tune["started_at"].startswith("2026-01-31T12:00:00")
    assert tonight["not_before"] == start


async def test_a_long_queue_is_cut_and_the_rest_counted(page: JobsPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser is not sent ten thousand jobs."""
    assert ACTIVE_MAX == 500
    monkeypatch.setattr("jobs.page.board.ACTIVE_MAX", 1)
    async with page.stream("ops") as events:
        _, look = await anext(events)

    assert (len(look["active"]), look["left_out"]) == (1, 2)


async def test_a_database_that_is_gone_is_said_and_its_return_too(
    page: JobsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream stays open meanwhile, and tells everything afterwards."""
    monkeypatch.setattr(routes, "LOOK_SECONDS", 0.0)
    parts, found = page.service.app.state.parts, []
    read = parts.database.read

    async def gone(_work: object) -> object:
        raise OperationalError("", {}, Exception("gone"))

    told = looks(parts, ANN, JOBS_BOARD)
    monkeypatch.setattr(parts.database, "read", gone)
    found.append(await anext(told))
    monkeypatch.setattr(parts.database, "read", read)
    found += [await anext(told), await anext(told)]
    await told.aclose()

    kinds = [one.partition(b"\n")[0] for one in found]
    assert kinds == [b"event: trouble", b"event: look", b"event: trouble"]
    assert found[2].endswith(b"data: \n\n")


async def test_the_gpus_of_a_job_are_shown_and_no_name_of_another_tenants_pod(page: JobsPage) -> None:
    """The machine with its islands: which GPUs the job's pods hold, and that another one is held."""
    shown = (await page.service.call("GET", f"{JOBS}/{page.ids['tune']}/gpus")).json()
    (node,) = shown["nodes"]
    gpus = {gpu["id"]: (gpu["state"], gpu["holders"]) for island in node["islands"] for gpu in island["gpus"]}

    assert (node["name"], shown["total"]) == ("n1", 1)
    assert (gpus[0], gpus[3]) == (("held", ["tenant-acme/tune-0"]),) * 2
    assert (gpus[1], gpus[2]) == (("held", []), ("free", []))
    assert "secret" not in str(shown)


async def test_a_job_without_pods_has_no_gpus(page: JobsPage) -> None:
    """Nothing is drawn for a job that waits."""
    shown = await page.service.call("GET", f"{JOBS}/{page.ids['later']}/gpus")

    assert (shown.status_code, shown.json()) == (200, {"nodes": [], "total": 0})


async def test_the_gpus_of_another_tenants_job_are_not_found(page: JobsPage) -> None:
    """Not even that there is such a job is told."""
    shown = await page.service.call("GET", f"{JOBS}/{page.ids['secret']}/gpus")

    assert shown.status_code == 404


async def test_a_cluster_that_does_not_answer_is_said(page: JobsPage) -> None:
    """The caller may try again."""
    page.service.links.snapshots["local"] = TimeoutError("no answer")
    shown = await page.service.call("GET", f"{JOBS}/{page.ids['tune']}/gpus")

    assert (shown.status_code, shown.headers["Retry-After"]) == (503, "2")


async def test_the_stream_needs_the_token_of_the_api(page: JobsPage) -> None:
    """The files hold no data and need none; each answer forbids what the page does not need."""
    async with httpx.AsyncClient() as client:
        refused = await client.get(page.url("/page/events"))
        files = {path: await client.get(page.url(path)) for path in FILES}
        other_site = await client.get(page.url("/"), headers={"Sec-Fetch-Site": "cross-site"})

    assert refused.status_code == 401
    assert other_site.status_code == 403
    assert {path for path, answer in files.items() if answer.status_code != 200} == set()
    for answer in files.values():
        assert {name: answer.headers.get(name) for name in PAGE_HEADERS} == PAGE_HEADERS


async def test_too_many_watchers_are_refused_and_make_room_when_they_go(
    page: JobsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream reads the database again and again."""
    monkeypatch.setattr(routes, "WATCHERS_MAX", 1)
    monkeypatch.setattr(routes, "LOOK_SECONDS", 0.01)
    headers = {"Authorization": "Bearer ann"}
    async with httpx.AsyncClient() as client:
        async with page.stream("ann") as events:
            await anext(events)
            refused = await client.get(page.url("/page/events"), headers=headers)
        for _ in range(200):
            async with client.stream("GET", page.url("/page/events"), headers=headers) as again:
                status = again.status_code
            if status == 200:
                break

    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
    assert status == 200


def test_files_load_nothing_from_elsewhere_and_hold_no_inline_code() -> None:
    """No address of another host, no inline script, style or handler, no sink that parses HTML."""
    for path, (file, _kind) in FILES.items():
        text = file.read_text()
        assert set(re.findall(r"https?://[^\s\"'>]+", text)) - {"http://www.w3.org/2000/svg"} == set(), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path
        assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", text), path
    assert set(FILES) == {
        "/",
        "/jobs.js",
        "/jobs.css",
        "/page.css",
        "/islands.js",
        "/stream.js",
        "/words.js",
        "/icon.svg",
    }
