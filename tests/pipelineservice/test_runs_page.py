"""The page of runs over HTTP: what its stream tells to whom, and the graph of a run."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.jobs.permissions import JobCaller, TenantGrant, TenantRole
from atoll.service.pages import PAGE_HEADERS
from jobs.page import routes
from jobs.page.routes import PageBoard, looks
from pipelines.api import PIPELINES
from pipelines.page.board import read_runs, run_mark
from pipelines.page.routes import RUN_EVENTS, RUN_FILES
from tests.pipelineservice.page_harness import RunsPage, runs_page

CALLERS = {
    "ann": JobCaller("ann", (TenantGrant(TenantRole.MEMBER, "acme", None),)),
    "oto": JobCaller("oto", (TenantGrant(TenantRole.ADMIN, "other", None),)),
    "ops": JobCaller("ops", (TenantGrant(TenantRole.OPERATOR, None, None),)),
    "nobody": JobCaller("nobody", ()),
}


@pytest.fixture
async def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunsPage]:
    """The page with two runs."""
    monkeypatch.setattr(routes, "LOOK_SECONDS", 0.01)
    async with runs_page(tmp_path) as found:
        yield found


async def told(page: RunsPage, by: str) -> Any:
    """Return what the page lists for somebody."""
    database, now = page.service.database, page.service.clock.now()
    return json.loads((await database.read(lambda session: read_runs(session, CALLERS[by], now))).model_dump_json())


@pytest.mark.parametrize(
    ("by", "seen"), [("ann", {"nightly"}), ("oto", {"secret"}), ("ops", {"nightly", "secret"}), ("nobody", set())]
)
async def test_a_watcher_sees_the_runs_of_their_tenants_alone(page: RunsPage, by: str, seen: set[str]) -> None:
    """As the list of the API."""
    assert {run["pipeline"] for run in (await told(page, by))["active"]} == seen


async def test_each_change_of_a_step_is_told(page: RunsPage) -> None:
    """Not only those of the run itself; a run that ends is among the ended ones."""
    stream = looks(page.service.app.state.parts, CALLERS["ann"], PageBoard(run_mark, read_runs))
    marks = [json.loads((await anext(stream)).partition(b"data: ")[2])["active"][0]["mark"]]
    for change in (page.end("prepare"), page.give_job("train", b""), page.end("train")):
        await change
        marks.append(json.loads((await anext(stream)).partition(b"data: ")[2])["active"][0]["mark"])
    await page.end("body[0]", error="broken")
    look = json.loads((await anext(stream)).partition(b"data: ")[2])
    await stream.aclose()

    assert len({*marks}) == len(marks)
    assert (look["active"], look["ended"][0]["status"]) == ([], "failed")


async def test_more_runs_than_a_browser_is_sent_are_counted(page: RunsPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are listed."""
    monkeypatch.setattr("pipelines.page.board.ACTIVE_MAX", 1)
    look = await told(page, "ops")

    assert ([run["pipeline"] for run in look["active"]], look["left_out"]) == (["nightly"], 1)


async def test_a_run_shows_its_graph_as_it_was_when_it_began(page: RunsPage) -> None:
    """What each step waits for and who names it, also of steps that have no record yet."""
    await page.service.call("POST", PIPELINES, json={"name": "nightly", "steps": [{"name": "x", "step_type": "wait",
                            "config": {"duration": "1s"}}]})  # fmt: skip
    run = (await page.service.call("GET", f"{PIPELINES}/{page.pipeline}/executions/{page.run}")).json()
    listed = (await page.service.call("GET", f"{PIPELINES}/{page.pipeline}/executions")).json()

    assert {one["name"]: (one["step_type"], one["depends_on"], one["owners"]) for one in run["graph"]} == {
        "prepare": ("job", [], []),
        "judge": ("condition", ["prepare"], []),
        "pause": ("wait", [], ["judge"]),
        "train": ("job", [], ["judge"]),
        "each": ("loop", ["train"], []),
        "body": ("function", [], ["each"]),
    }
    assert listed["items"][0]["graph"] == []


async def test_the_stream_needs_a_token_and_the_files_do_not(page: RunsPage) -> None:
    """Each answer forbids what the page does not need."""
    async with httpx.AsyncClient() as client:
        refused = await client.get(page.url(RUN_EVENTS))
        files = {path: await client.get(page.url(path)) for path in RUN_FILES}

    assert refused.status_code == 401
    assert {answer.status_code for answer in files.values()} == {200}
    for answer in files.values():
        assert {name: answer.headers.get(name) for name in PAGE_HEADERS} == PAGE_HEADERS


def test_files_load_nothing_from_elsewhere_and_hold_no_inline_code() -> None:
    """No address of another host, no inline script, style or handler, no sink that parses HTML."""
    for path, (file, _kind) in RUN_FILES.items():
        text = file.read_text()
        assert set(re.findall(r"https?://[^\s\"'>]+", text)) - {"http://www.w3.org/2000/svg"} == set(), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path
        assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", text), path
    assert set(RUN_FILES) == {"/runs", "/runs.js", "/graph.js", "/usecases.js", "/runs.css"}
