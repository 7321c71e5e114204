"""Debian's Chromium on a page of Atoll, and everything that it complained about or asked for."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from playwright.async_api import Page as Tab
from playwright.async_api import async_playwright, expect

from devcluster.build import report_to_stderr
from devcluster.paths import cache_root
from devcluster.system_programs import find_browser

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@dataclass
class Visit:
    """One tab."""

    tab: Tab
    complaints: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)


V = TypeVar("V", bound=Visit)


@asynccontextmanager
async def visiting(site: str, path: str, visit_of: Callable[[Tab], V]) -> AsyncIterator[V]:
    """Open a path of a site, which ends in a slash; afterwards no other site was asked for anything."""
    browser = find_browser(cache_root(), report=report_to_stderr)
    async with async_playwright() as playwright:
        environment: dict[str, str | float | bool] = {**os.environ, **browser.environment}
        chromium = await playwright.chromium.launch(
            executable_path=browser.program, env=environment, args=["--no-sandbox"]
        )
        seen = visit_of(await chromium.new_page(viewport={"width": 1100, "height": 900}))
        seen.tab.on("console", lambda message: seen.complaints.append(message.text))
        seen.tab.on("pageerror", lambda error: seen.complaints.append(str(error)))
        seen.tab.on("dialog", lambda dialog: seen.complaints.append(dialog.message))
        seen.tab.on("request", lambda request: seen.urls.append(request.url))
        await seen.tab.goto(site + path)
        yield seen
        await chromium.close()
        assert [url for url in seen.urls if not url.startswith(site)] == []


async def enter(seen: Visit, token: str) -> None:
    """Give the token that the page asks for, by keyboard."""
    await expect(seen.tab.locator("#token-form")).to_be_visible()
    seen.complaints.clear()  # the browser tells of the refusal without a token
    await seen.tab.get_by_label("Bearer token").fill(token)
    await seen.tab.keyboard.press("Enter")
    await expect(seen.tab.locator("#connection")).to_have_text("Live.")
