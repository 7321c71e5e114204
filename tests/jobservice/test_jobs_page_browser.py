"""The page of jobs in a real browser: Debian's Chromium reads, clicks and types as people do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.async_api import Locator, expect

from atoll.jobs.states import JobStep
from tests.browsing import HOSTILE, Visit, enter, visiting
from tests.jobservice.page_harness import JobsPage, jobs_page

pytestmark = pytest.mark.long


@dataclass(kw_only=True)
class JobsVisit(Visit):
    """A tab on the page of jobs."""

    page: JobsPage

    def row(self, name: str) -> Locator:
        """Return the row of a job in the queue."""
        return self.tab.locator("#jobs tr", has=self.tab.get_by_role("link", name=name, exact=True))

    def gpu(self, device_id: int) -> Locator:
        """Return a GPU in the picture of the job's machine."""
        return self.tab.locator(f"#job-nodes button[data-gpu='{device_id}']")


@asynccontextmanager
async def visit(folder: Path, token: str = "ann") -> AsyncIterator[JobsVisit]:
    """Open the page and give a token."""
    async with jobs_page(folder) as page, visiting(page.url("/"), "", lambda tab: JobsVisit(tab, page=page)) as seen:
        await enter(seen, token)
        yield seen


async def test_keyboard_alone_leads_through_a_job(tmp_path: Path) -> None:
    """Enter on its name opens a job: state, cost, history, log, and where its GPUs are; Escape leads back."""
    async with visit(tmp_path) as seen:
        tab = seen.tab
        await seen.row("tune").get_by_role("link").focus()
        await tab.keyboard.press("Enter")
        await expect(tab.get_by_role("heading", name="Job tune")).to_be_focused()
        await expect(tab.locator("#job-message")).to_have_text("running: all pods run")
        await expect(tab.locator("#job-facts")).to_contain_text("GPU-hours")
        await expect(tab.locator("#job-events tr")).to_have_count(4)
        await expect(tab.locator("#job-log")).to_have_text("step 1\nstep 2\n")
        await expect(tab.locator("#job-gpus-text")).to_have_text("It holds GPUs 0, 3 of n1.")
        for device_id, name in ((0, "held by tenant-acme/tune-0"), (1, "held"), (2, "free")):
            await expect(seen.gpu(device_id)).to_have_accessible_name(f"GPU {device_id}, {name}")
        await seen.gpu(0).focus()
        await tab.keyboard.press("ArrowRight")
        await expect(seen.gpu(1)).to_be_focused()
        await tab.keyboard.press("Escape")
        await expect(tab.locator("#job")).to_be_hidden()
        await expect(tab.get_by_role("heading", name="Queue")).to_be_focused()
        assert seen.complaints == []


async def test_page_follows_the_jobs(tmp_path: Path) -> None:
    """A job that ends leaves the queue without a reload, and its open page says so and keeps the focus."""
    async with visit(tmp_path) as seen:
        await seen.row("tune").get_by_role("link").click()
        await expect(seen.gpu(0)).to_be_visible()
        await seen.tab.locator("#job-log-read").focus()
        seen.page.hold()
        await seen.page.service.clock.advance(60)
        await seen.page.step("tune", JobStep.SUCCEED, message="all pods succeeded")
        await expect(seen.row("tune")).to_have_count(0)
        await expect(seen.tab.locator("#job-message")).to_have_text("succeeded: all pods succeeded")
        await expect(seen.tab.locator("#job-gpus-text")).to_have_text("It holds no GPU now.")
        await expect(seen.tab.locator("#job-log-read")).to_be_focused()
        await seen.tab.locator("#kind").select_option("ended")
        await expect(seen.row("tune")).to_contain_text("succeeded")
        assert seen.complaints == []


async def test_time_line_shows_who_runs_and_who_waits(tmp_path: Path) -> None:
    """By type of GPU: a bar since the start, one to the estimated end, one for a job that waits; each opens its job."""
    async with visit(tmp_path) as seen:
        line = seen.tab.locator(".line", has=seen.tab.get_by_role("heading", name="nvidia-v100"))
        run, rest, wait = (line.locator(f".bar.{kind}") for kind in ("run", "rest", "wait"))
        await expect(line).to_contain_text("2 asked for by jobs that wait")
        for bars in (run, rest, wait):
            await expect(bars).to_have_count(1)
        boxes = [await bars.bounding_box() for bars in (run, rest, wait)]
        left, right, waiting = (box["x"] for box in boxes if box is not None)
        assert left <= right
        assert abs(waiting - right) < 20, "it waits from now on"
        await expect(wait).to_have_accessible_name("later: pending, 2 nvidia-v100, waits, for an unknown time")
        await wait.focus()
        await seen.tab.keyboard.press("Enter")
        await expect(seen.tab.get_by_role("heading", name="Job later")).to_be_focused()
        assert seen.complaints == []


async def test_jobs_of_other_tenants_are_neither_listed_nor_opened(tmp_path: Path) -> None:
    """Whoever knows the id of a job of another tenant learns that there is none."""
    async with visit(tmp_path) as seen:
        await expect(seen.row("tune")).to_be_visible()
        await expect(seen.row("secret")).to_have_count(0)
        await seen.tab.goto(seen.page.url(f"/#{seen.page.ids['secret']}"))
        await expect(seen.tab.locator("#job-message")).to_contain_text("there is no job")
        assert "secret" not in await seen.tab.locator("body").inner_text()


async def test_texts_of_jobs_stay_texts(tmp_path: Path) -> None:
    """A message, a label of the log and a name that look like code are shown letter by letter and run nothing."""
    async with visit(tmp_path) as seen:
        seen.page.service.logs.pods["tune-0"] = [HOSTILE.encode()]
        await seen.page.step("tune", JobStep.PREEMPT, message=HOSTILE)
        await expect(seen.row("tune")).to_contain_text(HOSTILE)
        await seen.row("tune").get_by_role("link").click()
        await expect(seen.tab.locator("#job-message")).to_have_text(f"preempted: {HOSTILE}")
        await expect(seen.tab.locator("#job-log")).to_have_text(HOSTILE)
        assert await seen.tab.locator("img").count() == 0
        assert seen.complaints == []


async def test_filter_finds_jobs_by_name_and_state(tmp_path: Path) -> None:
    """What is typed and what is chosen narrow the queue, and it says how many are left."""
    async with visit(tmp_path, "ops") as seen:
        await expect(seen.tab.locator("#jobs tr")).to_have_count(3)
        await seen.tab.get_by_label("Name, tenant").fill("acme")
        await expect(seen.tab.locator("#jobs tr")).to_have_count(2)
        await seen.tab.locator("#kind").select_option("waiting")
        await expect(seen.tab.locator("#jobs tr")).to_have_count(1)
        await expect(seen.tab.locator("#count")).to_have_text("1 job is like that.")
        assert seen.complaints == []
