"""Reads the controllers' page in a browser inside the cluster's network: `browse.py URL HOLDER WAITER FOLDER`.

Prints a JSON line per step; succeeds once the page shows the holder's GPUs as free without a reload.
"""

import json
import os
import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from devcluster.build import report_to_stderr
from devcluster.paths import cache_root
from devcluster.system_programs import find_browser

WAIT_MILLISECONDS = 120_000


def tell(step: str, **facts: object) -> None:
    """Print one step."""
    print(json.dumps({"step": step, **facts}), flush=True)


def browse(page: Page, holder: str, waiter: str, folder: Path) -> None:
    """Choose the holder's set, ask what would help the waiter, take pictures, and watch the set fall free."""
    page.get_by_role("button", name=f"held by {holder}").first.click()
    line = page.locator("#chosen")
    expect(line).to_contain_text(f"Pod {holder} holds")
    pressed = page.locator("button.gpu[aria-pressed=true]")
    chosen = pressed.evaluate_all("all => all.map((one) => [one.dataset.node, Number(one.dataset.gpu)])")
    tell("chosen", text=line.inner_text(), gpus=chosen)
    row = page.locator("#waiting-list li", has_text=waiter)
    row.locator("summary").click()
    expect(page.get_by_role("heading", name="What would help")).to_be_visible()
    tell(
        "proposals",
        headline=row.locator("summary").inner_text(),
        texts=row.locator(".answer ol > li").all_inner_texts(),
    )
    page.screenshot(path=folder / "page.png", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=folder / "page-dark.png", full_page=True)
    tell("watching")
    expect(line).to_have_text(f"Pod {holder} holds no GPU any more.")
    tell("gone", summary=page.locator("#summary").inner_text())


def main(url: str, holder: str, waiter: str, folder: str) -> None:
    """Open the page and go through the steps."""
    complaints: list[str] = []
    browser = find_browser(cache_root(), report=report_to_stderr)
    expect.set_options(timeout=WAIT_MILLISECONDS)
    with sync_playwright() as playwright:
        environment: dict[str, str | float | bool] = {**os.environ, **browser.environment}
        chromium = playwright.chromium.launch(executable_path=browser.program, env=environment, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1000, "height": 700})
        page.set_default_timeout(WAIT_MILLISECONDS)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        browse(page, holder, waiter, Path(folder))
        chromium.close()
    tell("end", complaints=complaints)


if __name__ == "__main__":
    main(*sys.argv[1:])
