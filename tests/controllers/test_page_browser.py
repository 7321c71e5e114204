"""The page in a real browser: Debian's Chromium reads, clicks and types as people do."""

import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from playwright.async_api import expect

from atoll.api import names
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube.authorization import PathAuthorizer
from atoll.service.clock import SystemClock
from tests.browsing import Visit, visiting
from tests.builders import make_pod
from tests.controllers.page_harness import Page, served
from tests.controllers.test_page import HOSTILE, PageReviews, busy
from tests.explain.situations import CREATED, holder, situation, waiting

pytestmark = pytest.mark.long

NODES_SHOWN = 24


class StageClock(SystemClock):
    """Time passes as it does, on the day of the snapshots."""

    def now(self) -> datetime:
        return datetime(2026, 1, 31, 12, tzinfo=UTC)


@dataclass(kw_only=True)
class ClusterVisit(Visit):
    """A tab on the page of a cluster."""

    page: Page

    def gpu(self, node: str, device_id: int) -> Any:
        return self.tab.locator(f"button[data-node='{node}'][data-gpu='{device_id}']")


@asynccontextmanager
async def visit(snapshot: ClusterSnapshot, **options: Any) -> AsyncIterator[ClusterVisit]:
    """Open the page of a cluster."""
    async with (
        served(snapshot, StageClock(), **options) as page,
        visiting(page.url("/"), "", lambda tab: ClusterVisit(tab, page=page)) as seen,
    ):
        yield seen


async def see_change(visit: ClusterVisit, snapshot: ClusterSnapshot) -> None:
    """Let the cluster become another, and look at it at once."""
    visit.page.mirror.become(snapshot)
    visit.page.refresher.refreshed_seconds = -1e9
    visit.page.refresher.rest_seconds = 0.0
    await visit.page.refresher.refresh()


async def test_keyboard_alone_shows_the_set_of_a_pod() -> None:
    """Tab reaches a node, arrows move inside it, Enter shows the pod's whole set and says it, Escape ends it."""
    async with visit(busy().snapshot) as seen:
        await expect(seen.tab.get_by_text("Live.")).to_be_visible()
        await seen.tab.keyboard.press("Tab")
        await expect(seen.tab.get_by_text("Skip to the waiting pods")).to_be_focused()
        await seen.gpu("n1", 0).focus()
        await seen.tab.keyboard.press("ArrowRight")
        await expect(seen.gpu("n1", 1)).to_be_focused()
        await seen.tab.keyboard.press("Enter")
        await expect(seen.tab.locator("#chosen")).to_have_text("Pod team/a holds GPUs 0, 1 of n1.")
        for device_id, is_pressed in ((0, "true"), (1, "true"), (2, "false")):
            await expect(seen.gpu("n1", device_id)).to_have_attribute("aria-pressed", is_pressed)
        await seen.tab.keyboard.press("Tab")
        await expect(seen.gpu("n2", 0)).to_be_focused()
        await seen.tab.keyboard.press("Escape")
        await expect(seen.gpu("n1", 0)).to_have_attribute("aria-pressed", "false")
        assert seen.complaints == []


async def test_page_follows_the_cluster_and_keeps_the_focus() -> None:
    """A change shows without a reload; who stands on a GPU stays there, and the chosen set follows the pod."""
    found = busy()
    async with visit(found.snapshot) as seen:
        await seen.gpu("n1", 1).click()
        calm = replace(found.snapshot, pods=found.snapshot.pods[1:], leases=found.snapshot.leases[2:])
        await see_change(seen, calm)
        await expect(seen.gpu("n1", 1)).to_have_text("1")
        await expect(seen.gpu("n1", 1)).to_have_accessible_name("GPU 1, free")
        await expect(seen.gpu("n1", 1)).to_be_focused()
        await expect(seen.tab.locator("#chosen")).to_have_text("Pod team/a holds no GPU any more.")
        await expect(seen.tab.locator("#summary")).to_contain_text("14 free")
        await see_change(seen, replace(calm, pods=calm.pods[:1]))
        await expect(seen.tab.get_by_text("No pod waits for GPUs.")).to_be_visible()
        assert seen.complaints == []


async def test_nothing_stands_still_that_time_or_the_cluster_changes() -> None:
    """How long a pod waits grows although nothing else changes, and what is said of a chosen GPU is what it is now."""
    found = busy()
    metadata = msgspec.structs.replace(found.pod.metadata, creation_timestamp=CREATED)
    snapshot = replace(
        found.snapshot, pods=(*found.snapshot.pods[:-1], msgspec.structs.replace(found.pod, metadata=metadata))
    )
    async with visit(snapshot) as seen:
        await seen.tab.clock.install(time=datetime(2026, 1, 31, 11, 30, 10, tzinfo=UTC))
        await seen.tab.reload()
        row = seen.tab.locator("#waiting-list summary")
        await expect(row).to_contain_text(re.compile(r"8 GPUs, 1\d s\."))
        await seen.gpu("n1", 5).click()
        await expect(seen.tab.locator("#chosen")).to_contain_text("n1: GPU 5, free")

        await seen.tab.clock.run_for(20_000)
        await expect(row).to_contain_text(re.compile(r"8 GPUs, [34]\d s\."))

        pod, leases = holder("late", "n1", 5)
        grown = replace(snapshot, pods=(pod, *snapshot.pods), leases=(*snapshot.leases, *leases))
        await see_change(seen, grown)
        await seen.tab.clock.run_for(2000)
        await expect(seen.tab.locator("#chosen")).to_contain_text("n1: GPU 5, held by team/late")
        assert seen.complaints == []


async def test_waiting_pod_tells_what_would_help_and_where() -> None:
    """Opened by keyboard, the row says what would help; a proposal leads to the GPUs that it means."""
    async with visit(busy().snapshot) as seen:
        summary = seen.tab.locator("#waiting-list summary")
        await expect(summary).to_contain_text("team/p: 8 GPUs")
        await summary.focus()
        await seen.tab.keyboard.press("Enter")
        await expect(seen.tab.get_by_role("heading", name="What would help")).to_be_visible()
        button = seen.tab.get_by_role("button", name="when team/b ends")
        await button.first.focus()
        await seen.tab.keyboard.press("Enter")
        await expect(seen.gpu("n2", 0)).to_be_focused()
        await expect(seen.gpu("n2", 7)).to_have_attribute("aria-pressed", "true")
        await expect(seen.tab.locator("#chosen")).to_contain_text("Proposal: when team/b")
        assert seen.complaints == []


async def test_hostile_annotations_and_names_stay_text() -> None:
    """Markup in an annotation, a model or a reason is shown as it is: no element, no script, no dialog comes of it."""
    found = situation({"n1": {}}, [holder("a", "n1", 1)], waiting(8))
    evil = make_pod("evil", gpus=8, annotations={names.GANG: HOSTILE})
    report = found.snapshot.reports[0]
    assert report.status is not None
    devices = tuple(device.model_copy(update={"model": HOSTILE}) for device in report.status.devices)
    reports = (report.model_copy(update={"status": report.status.model_copy(update={"devices": devices})}),)
    async with visit(replace(found.snapshot, reports=reports, pods=(*found.snapshot.pods, evil))) as seen:
        row = seen.tab.locator("#waiting-list li", has_text="team/evil")
        await expect(row).to_contain_text("<img src=x onerror=alert(1)>")
        await row.locator("summary").click()
        await expect(row.locator(".answer")).not_to_contain_text("Asking what would help")
        await expect(seen.tab.locator(".node")).to_contain_text("</script>")
        await seen.tab.get_by_text("Totals by model").click()
        assert await seen.tab.locator("main img, main script, main iframe").count() == 0
        assert seen.complaints == []


async def test_policy_stops_what_no_code_of_ours_would_do() -> None:
    """Were there an injection after all, the browser would run no inline script and fetch nothing from elsewhere."""
    async with visit(busy().snapshot) as seen:
        await expect(seen.tab.get_by_text("Live.")).to_be_visible()
        for attempt in (
            "document.body.innerHTML = '<b>x</b>'",
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'alert(1)'}))",
        ):
            with pytest.raises(Exception, match=r"TrustedHTML|TrustedScript"):
                await seen.tab.evaluate(attempt)
        assert await seen.tab.evaluate("fetch('http://127.0.0.1:1/').then(() => 'sent', () => 'stopped')") == "stopped"
        assert any("Content Security Policy" in text for text in seen.complaints)
        seen.urls[:] = [url for url in seen.urls if ":1/" not in url]


async def test_a_thousand_nodes_stay_usable() -> None:
    """8,000 GPUs are told in pages: few elements, a search that finds a node and a pod, buttons that turn the page."""
    found = situation({f"node-{n}": {} for n in range(1000)}, [holder("needle", "node-777", 3)], waiting(8))
    async with visit(found.snapshot) as seen:
        await expect(seen.tab.locator("#range")).to_have_text("Nodes 1 to 24 of 1000", timeout=60_000)
        assert await seen.tab.locator("button.gpu").count() == 8 * NODES_SHOWN
        await seen.tab.get_by_role("button", name="Next nodes").click()
        await expect(seen.tab.locator("#range")).to_have_text("Nodes 25 to 48 of 1000")
        await seen.tab.get_by_label("Node, model or pod").fill("needle")
        await expect(seen.tab.locator(".node h3")).to_have_text(["node-777"])
        await expect(seen.tab.get_by_role("button", name="GPU 3, held by team/needle")).to_be_visible()
        await expect(seen.tab.locator("#summary")).to_contain_text("8000 GPUs on 1000 nodes")
        assert seen.complaints == []


CONTRASTS = """() => {
  const luminance = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && element.parentElement ? ground(element.parentElement) : colour;
  };
  return [...document.querySelectorAll("h1, h2, h3, p, .gpu, summary, legend, label, button")]
    .filter((element) => element.textContent.trim() && element.offsetParent && !element.disabled)
    .map((element) => {
      const [one, other] = [luminance(getComputedStyle(element).color), luminance(ground(element))];
      return [element.className || element.tagName, (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)];
    });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_can_be_read_and_nothing_moves_for_whom_motion_hurts(scheme: Any) -> None:
    """Contrast is at least 4.5 to 1 in both schemes; with reduced motion a change is shown without animation."""
    async with visit(busy().snapshot) as seen:
        await seen.tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await expect(seen.tab.get_by_text("Live.")).to_be_visible()
        assert [found for found in await seen.tab.evaluate(CONTRASTS) if found[1] < 4.5] == []
        await see_change(
            seen, replace(busy().snapshot, pods=busy().snapshot.pods[1:], leases=busy().snapshot.leases[2:])
        )
        await expect(seen.gpu("n1", 0)).to_have_class(re.compile("fresh"))
        assert await seen.tab.evaluate("document.getAnimations().length") == 0
        await seen.tab.emulate_media(color_scheme=scheme, reduced_motion="no-preference")
        await expect(seen.gpu("n1", 0)).to_have_css("animation-name", "fresh")


async def test_everything_has_a_name_and_a_place() -> None:
    """Screen readers find landmarks, headings in order, and a name on every control and every GPU."""
    async with visit(busy().snapshot) as seen:
        await expect(seen.tab.get_by_text("Live.")).to_be_visible()
        for role, name in (("main", None), ("region", "GPUs"), ("region", "Waiting pods"), ("search", None)):
            await expect(seen.tab.get_by_role(role, name=name)).to_be_visible()  # type: ignore[arg-type]
        levels = await seen.tab.evaluate(
            "[...document.querySelectorAll('h1,h2,h3,h4')].filter((h) => h.offsetParent).map((h) => +h.tagName[1])"
        )
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        for control in await seen.tab.get_by_role("button").all():
            await expect(control).to_have_accessible_name(re.compile(r"\w"))
        await expect(seen.gpu("n1", 6)).to_have_accessible_name(re.compile("cordoned"))
        await expect(seen.tab.get_by_role("group", name="nvlink-group-0 (8)").first).to_be_visible()


async def test_off_loopback_the_page_asks_for_a_token() -> None:
    """Without one it shows a form and no data; with one it goes live, and the token is in no address."""
    async with visit(busy().snapshot, authorizer=PathAuthorizer(PageReviews())) as seen:
        await expect(seen.tab.get_by_label("Bearer token")).to_be_visible()
        assert await seen.tab.locator(".node").count() == 0
        for token, is_let_in in (("other", False), ("good", True)):
            await seen.tab.get_by_label("Bearer token").fill(token)
            await seen.tab.keyboard.press("Enter")
            if not is_let_in:
                await expect(seen.tab.locator("#connection")).to_contain_text("mallory may not get /page")
        await expect(seen.tab.locator(".node")).to_have_count(2)
        await expect(seen.tab.get_by_label("Bearer token")).to_be_hidden()
        assert not any("good" in url for url in seen.urls)
