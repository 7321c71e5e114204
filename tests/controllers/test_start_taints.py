"""The controllers remove a node's start taint once its GPUs are reported, and change nothing else of the node."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atoll.api import names
from controllers.settings import ControllersSettings
from tests.builders import report_json
from tests.controllers.gang_harness import GangHarness, cluster, settled, term
from tests.controllers.harness import HEARTBEATS, REPORTS, strip_version

KEY = "startup-taint.cluster-autoscaler.kubernetes.io/gpus"
START = {"key": KEY, "effect": "NoSchedule"}
OTHER = {"key": "team", "value": "a", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}
NODE = "/api/v1/nodes/new"


def add_tainted(made: GangHarness, *, counted: str = "8", report: dict[str, Any] | None = None) -> None:
    """Add a node with two taints, one of them of its start."""
    allocatable = {"cpu": "64", names.GPU_RESOURCE: counted}
    made.add_node("new")
    if report is None:
        made.server.remove(f"{REPORTS}/new")
    else:
        made.server.put(f"{REPORTS}/new", strip_version(report_json("new", **report)))
    made.server.put(
        NODE,
        {
            "metadata": {"name": "new", "uid": "uid-of-new", "labels": {"a": "b"}},
            "spec": {"taints": [START, OTHER]},
            "status": {"allocatable": allocatable},
        },
    )


def taints(made: GangHarness) -> list[dict[str, Any]]:
    """Return the node's taints."""
    found: list[dict[str, Any]] = made.server.objects[NODE]["spec"]["taints"]
    return found


async def test_the_taint_goes_when_the_report_comes(tmp_path: Path) -> None:
    """The other taint stays to the letter, and so does everything else."""
    async with cluster() as made:
        add_tainted(made)
        async with term(made, tmp_path, settings={"start_taint": KEY}) as running:
            for loop in running.loops:
                await loop.run_once()
            assert taints(made) == [START, OTHER]
            made.server.put(f"{REPORTS}/new", strip_version(report_json("new")))
            await settled(running, lambda: taints(made) == [OTHER])

    assert made.server.objects[NODE]["metadata"]["labels"] == {"a": "b"}


@pytest.mark.parametrize(
    "node",
    [
        {"report": None},
        {"report": {}, "counted": "0"},
        {"report": {"sick": range(8)}},
        {"report": {"node_uid": "uid-of-another"}},
    ],
    ids=["no report", "not counted yet", "no GPU to give out", "a report of another machine"],
)
async def test_the_taint_stays_while_no_gpu_can_be_given_out(tmp_path: Path, node: dict[str, Any]) -> None:
    """Whoever looks would take the node for one without GPUs."""
    async with cluster() as made:
        add_tainted(made, **node)
        async with term(made, tmp_path, settings={"start_taint": KEY}) as running:
            for loop in running.loops:
                await loop.run_once()

    assert taints(made) == [START, OTHER]


@pytest.mark.parametrize("setting", ["", f"{KEY}-of-others"])
async def test_no_other_taint_is_touched(tmp_path: Path, setting: str) -> None:
    """Without the setting, or with another key, the node is left alone."""
    async with cluster() as made:
        add_tainted(made, report={})
        async with term(made, tmp_path, settings={"start_taint": setting}) as running:
            for loop in running.loops:
                await loop.run_once()
            writes = [path for _, path in running.api.writes if "/nodes/" in path]

    assert (taints(made), writes) == ([START, OTHER], [])


async def test_a_silent_agent_leaves_the_taint(tmp_path: Path) -> None:
    """A report that nobody stands behind any more says nothing of today."""
    async with cluster() as made:
        add_tainted(made, report={})
        made.server.remove(f"{HEARTBEATS}/new")
        async with term(made, tmp_path, settings={"start_taint": KEY}) as running:
            for loop in running.loops:
                await loop.run_once()

    assert taints(made) == [START, OTHER]


@pytest.mark.parametrize("key", ["dedicated", "node.kubernetes.io/unschedulable", "gpu.scheduling"])
def test_taints_that_are_of_no_start_are_refused_as_a_setting(key: str) -> None:
    """The right and its policy would not allow them either."""
    with pytest.raises(ValidationError, match="its key must begin with"):
        ControllersSettings(start_taint=key)
