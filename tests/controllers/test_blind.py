"""While the mirror may lack changes, nobody decides anything, and everybody looks again."""

from pathlib import Path
from typing import Any

import pytest

from controllers.gangs.forgotten import LOOK_SECONDS
from tests.controllers.gang_harness import cluster, settled, term

pytestmark = pytest.mark.asyncio

KEYS: dict[str, Any] = {
    "gangs": ("team", "g"),
    "gang-admission": "",
    "preemption": "",
    "wake": "",
    "machines": "n1",
    "reservations": "uid-of-nightly",
    "topologies": "hall",
    "start-taints": "n1",
}
"""A key for each reconciler that decides from what the mirror shows."""


async def test_who_may_lack_changes_writes_nothing_and_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch is silent: each reconciler says in how many seconds it looks again."""
    async with cluster("n1") as made:
        made.add_gang("g", 2)
        async with term(made, tmp_path, settings={"start_taint": "gpu.scheduling/start"}) as running:
            await settled(running, lambda: made.gang("g").get("status"))
            monkeypatch.setattr(running.mirror, "unready_reason", lambda: "the watch of pods is silent")
            for number in range(2):
                made.add_member("g", number)
            await settled(running, lambda: "uid-of-g-1" in running.mirror.pods.by_uid)
            before = list(running.api.writes)
            again = {name: await running.reconciler(name).reconcile(key) for name, key in KEYS.items()}

            assert all(0 < (seconds or 0) <= 60 for seconds in again.values()), again
            assert running.api.writes == before
            assert made.held() == 0


async def test_owners_that_a_gang_left_suspended_are_looked_for_again_and_again(tmp_path: Path) -> None:
    """The first look may have failed to resume one."""
    async with cluster("n1") as made, term(made, tmp_path) as running:
        assert await running.reconciler("forgotten-owners").reconcile("") == LOOK_SECONDS
