"""The page of runs in a real browser: Debian's Chromium reads, clicks and types as people do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.async_api import Locator, expect

from pipelines.page.routes import RUNS_PAGE
from tests.browsing import HOSTILE, Visit, enter, visiting
from tests.pipelines.made import step
from tests.pipelineservice.page_harness import RunsPage, runs_page

pytestmark = pytest.mark.long


@dataclass(kw_only=True)
class RunsVisit(Visit):
    """A tab on the page of runs."""

    page: RunsPage

    def row(self, name: str) -> Locator:
        """Return the row of a run in the list."""
        return self.tab.locator("#runs tr", has=self.tab.get_by_role("link", name=name, exact=True))

    def step(self, name: str) -> Locator:
        """Return a step in the graph."""
        return self.tab.locator(f"#graph button[data-step='{name}']")

    async def left_of(self, name: str) -> float:
        """Return where a step begins in the graph."""
        box = await self.step(name).bounding_box()
        assert box is not None
        return box["x"]


@asynccontextmanager
async def visit(folder: Path, token: str = "ann") -> AsyncIterator[RunsVisit]:
    """Open the page and give a token."""
    async with (
        runs_page(folder) as page,
        visiting(page.url("/"), RUNS_PAGE[1:], lambda tab: RunsVisit(tab, page=page)) as seen,
    ):
        await enter(seen, token)
        yield seen


async def test_keyboard_alone_leads_through_a_run(tmp_path: Path) -> None:
    """Enter opens a run, arrows move along its graph, Enter opens a step with its log, Escape leads back."""
    async with visit(tmp_path) as seen:
        tab = seen.tab
        await seen.page.give_job("prepare", b"line 1\nline 2\n")
        await seen.row("nightly/1").get_by_role("link").focus()
        await tab.keyboard.press("Enter")
        await expect(tab.get_by_role("heading", name="Run 1 of nightly")).to_be_focused()
        await expect(tab.locator("#run-message")).to_have_text("running")
        await expect(tab.locator("#run-facts")).to_contain_text("ann, by hand")
        await seen.step("prepare").focus()
        for name in ("judge", "pause", "train", "each", "body"):
            await tab.keyboard.press("ArrowDown" if name == "train" else "ArrowRight")
            await expect(seen.step(name)).to_be_focused()
        for _ in range(4):
            await tab.keyboard.press("ArrowLeft")
        await expect(seen.step("prepare")).to_be_focused()
        await tab.keyboard.press("Enter")
        await expect(tab.get_by_role("heading", name="Step prepare")).to_be_focused()
        await expect(tab.locator("#step-message")).to_have_text("▶ running")
        await expect(tab.locator("#step-log")).to_have_text("line 1\nline 2\n")
        await tab.keyboard.press("Escape")
        await expect(seen.step("prepare")).to_be_focused()
        await tab.keyboard.press("Escape")
        await expect(tab.locator("#run")).to_be_hidden()
        await expect(tab.get_by_role("heading", name="Runs", exact=True)).to_be_focused()
        assert seen.complaints == []


async def test_the_graph_follows_the_run(tmp_path: Path) -> None:
    """States change in word and colour without a reload, the focus stays; the bodies of a loop are one step of it."""
    async with visit(tmp_path) as seen:
        await seen.row("nightly/1").get_by_role("link").click()
        await expect(seen.step("prepare")).to_have_text("prepare▶ running")
        await expect(seen.step("train")).to_have_accessible_name("train: job, pending")
        await seen.step("prepare").focus()
        await seen.page.end("prepare", status="succeeded")
        await expect(seen.step("prepare")).to_have_text("prepare✓ succeeded")
        await expect(seen.step("pause")).to_have_text("pause- skipped")
        await expect(seen.step("train")).to_have_class("step running")
        await expect(seen.step("prepare")).to_be_focused()
        await seen.page.end("train")
        await seen.page.end("body[0]")
        await expect(seen.step("body")).to_have_accessible_name("body: function, running, 1 of 2 ended")
        await seen.page.end("body[1]", error="no such file")
        await expect(seen.tab.locator("#run-message")).to_contain_text("failed")
        await seen.step("body").click()
        await expect(seen.tab.locator("#step-message")).to_have_text("✗ failed: no such file")
        await expect(seen.row("nightly/1")).to_contain_text("failed")
        columns = [await seen.left_of(name) for name in ("prepare", "judge", "train", "each", "body")]
        assert columns == sorted({*columns})
        assert seen.complaints == []


async def test_the_time_line_shows_when_steps_ran(tmp_path: Path) -> None:
    """One bar for each step that has begun, from its start to its end; each opens its step."""
    async with visit(tmp_path) as seen:
        await seen.page.end("prepare", status="succeeded")
        await seen.page.end("train")
        await seen.row("nightly/1").get_by_role("link").click()
        bars = seen.tab.locator("#times .step")
        await expect(bars).to_have_text(["prepare", "train", "each", "body[0]"])
        boxes = [await bar.bounding_box() for bar in await bars.all()]
        prepare, train = boxes[:2]
        assert prepare is not None
        assert train is not None
        assert prepare["x"] + prepare["width"] <= train["x"] + 1
        await expect(bars.nth(1)).to_have_accessible_name("train: succeeded, took 10 s")
        await bars.nth(3).focus()
        await seen.tab.keyboard.press("Enter")
        await expect(seen.tab.get_by_role("heading", name="Step body[0]")).to_be_focused()
        await expect(seen.tab.locator("#step-log-text")).to_have_text("Only steps with a job have a log.")
        assert seen.complaints == []


async def test_runs_of_other_tenants_are_neither_listed_nor_opened(tmp_path: Path) -> None:
    """Whoever knows the ids of a run of another tenant learns that there is none."""
    async with visit(tmp_path, "oto/others") as seen:
        await expect(seen.row("secret/1")).to_be_visible()
        await expect(seen.row("nightly/1")).to_have_count(0)
        await seen.tab.goto(seen.page.url(f"{RUNS_PAGE}#{seen.page.pipeline}/{seen.page.run}"))
        await expect(seen.tab.locator("#run-message")).to_contain_text("there is no pipeline")
        assert "nightly" not in await seen.tab.locator("body").inner_text()


async def test_texts_of_steps_stay_texts(tmp_path: Path) -> None:
    """An error and a log that look like code are shown letter by letter and run nothing."""
    async with visit(tmp_path) as seen:
        await seen.page.begin("evil", steps=[step("a", kind="job")], description=HOSTILE)
        await seen.page.give_job("a", HOSTILE.encode())
        await seen.page.end("a", error=HOSTILE)
        await seen.row("evil/1").get_by_role("link").click()
        await seen.step("a").click()
        await expect(seen.tab.locator("#step-message")).to_have_text(f"✗ failed: {HOSTILE}")
        await expect(seen.tab.locator("#step-log")).to_have_text(HOSTILE)
        assert await seen.tab.locator("img").count() == 0
        assert seen.complaints == []


async def test_a_form_deploys_a_use_case(tmp_path: Path) -> None:
    """It has a field for each parameter of the template's schema; what the schema forbids is not sent."""
    async with visit(tmp_path) as seen:
        form = seen.tab.get_by_role("form", name="Deploy a use case")
        await form.get_by_label("Template").select_option("chatbot")
        await expect(seen.tab.locator("#template-text")).to_contain_text("Components: model_server, front.")
        names = await form.locator("#parameters [name]").evaluate_all("all => all.map((one) => one.name)")
        assert sorted(names) == ["front", "gpus", "model", "server"]
        gpus = form.get_by_label("gpus")
        await expect(gpus).to_have_attribute("placeholder", "1")
        await form.get_by_label("Name", exact=True).fill("helpdesk")
        await form.get_by_label("front").fill("front:1")
        await gpus.fill("99")
        await gpus.press("Enter")
        assert await gpus.evaluate("one => one.validity.rangeOverflow")
        await gpus.fill("2")
        await gpus.press("Enter")
        await expect(seen.tab.locator("#deploy-text")).to_have_text("helpdesk is deploying; its run is uc-helpdesk/1.")
        row = seen.tab.locator("#usecases tr", has_text="helpdesk")
        await expect(row).to_contain_text("deploying")
        await expect(seen.row("uc-helpdesk/1")).to_be_visible()
        shown = (await seen.page.service.call("GET", "/api/usecases/deployments")).json()["items"]
        assert [one["parameters"] for one in shown] == [{"front": "front:1", "gpus": 2}]
        assert seen.complaints == []


async def test_the_form_tells_why_a_use_case_is_refused(tmp_path: Path) -> None:
    """A viewer sees what is deployed, and learns that they may not deploy."""
    async with visit(tmp_path, "vic") as seen:
        form = seen.tab.get_by_role("form", name="Deploy a use case")
        await form.get_by_label("Template").select_option("chatbot")
        await form.get_by_label("Name", exact=True).fill("helpdesk")
        await form.get_by_label("Tenant").fill("acme")
        await form.get_by_label("front").fill("front:1")
        await form.get_by_role("button", name="Deploy").click()
        await expect(seen.tab.locator("#deploy-text")).to_have_text("vic may not deploy use cases in tenant acme")
        await expect(seen.tab.locator("#usecases-text")).to_have_text("None is deployed.")
