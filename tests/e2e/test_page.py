"""The controllers' page on a running cluster, in Debian's Chromium; ATOLL_PICTURES=FOLDER keeps screenshots."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from controllers.settings import PageSettings
from tests.e2e.world import RealCluster

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BROWSE = Path(__file__).with_name("browse.py")
NAME = "browser"


def steps(world: RealCluster) -> dict[str, dict[str, Any]]:
    """Return what the browser has told so far, by step."""
    lines = world.cluster.logs(NAME).read_text().splitlines()
    told = [json.loads(line) for line in lines if line.startswith('{"step"')]
    return {one.pop("step"): one for one in told}


def test_browser_sees_who_holds_what_waits_and_follows(world: RealCluster, tmp_path: Path) -> None:
    """The set that is highlighted is the pod's, the proposals are there, and a release shows without a reload."""
    world.claim("machine", 8, models=["nvidia-h100"])
    world.claim("pair", 2, policy="island")
    world.pod("training", "machine")
    world.pod("serving", "pair")
    world.wait_running("training")
    world.wait_running("serving")
    world.pod("second", "machine")
    world.wait_rejected("second")
    held = world.allocation("training")
    assert held is not None
    holder, waiter = f"{world.namespace}/training", f"{world.namespace}/second"

    url = f"http://127.0.0.1:{PageSettings().port}/"
    world.cluster.spawn(NAME, [sys.executable, BROWSE, url, holder, waiter, tmp_path])
    world.wait(lambda: "watching" in steps(world) or exited(world), "the browser to have seen the cluster")
    assert not exited(world), world.cluster.logs(NAME).read_text()[-3000:]
    seen = steps(world)
    assert {tuple(gpu) for gpu in seen["chosen"]["gpus"]} == {(held.node, number) for number in held.device_ids}
    assert "waits for GPUs that others hold" in seen["proposals"]["headline"]
    assert any(f"when {holder} ends" in text for text in seen["proposals"]["texts"])

    world.delete("training")
    world.wait(lambda: exited(world), "the browser to have seen the release")
    assert world.cluster.wait_exit(NAME) == 0, world.cluster.logs(NAME).read_text()[-3000:]
    assert steps(world)["end"]["complaints"] == []
    world.wait_running("second")
    if folder := os.environ.get("ATOLL_PICTURES"):
        for picture in ("page.png", "page-dark.png"):
            shutil.copy(tmp_path / picture, folder)


def exited(world: RealCluster) -> bool:
    """Tell whether the browser's process has ended."""
    return not world.cluster.processes()[NAME].running
