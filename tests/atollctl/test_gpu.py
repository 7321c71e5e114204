"""`atoll gpu`: single GPUs are cordoned, uncordoned and declared healthy, by uuid, despite concurrent writes."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from atoll.api.node_status import GpuNodeStatusSpec
from atoll.api.times import format_microtime
from atollctl.__main__ import app
from atollctl.gpu import TargetMistake, cordoned, released, split_target, uncordoned
from tests.builders import report_json, uuid_of
from tests.fakes.api_server import FakeApiServer
from tests.fakes.listening import kubeconfig

PATH = "/apis/gpu.scheduling/v1/gpunodestatuses/n1"


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer().running() as server:
        body = report_json("n1")
        del body["metadata"]["resourceVersion"]
        server.put(PATH, body)
        yield server


async def atoll(server: FakeApiServer, folder: Path, *arguments: str) -> Result:
    config = str(kubeconfig(folder, server.url))
    return await asyncio.to_thread(CliRunner().invoke, app, ["gpu", *arguments, "--kubeconfig", config])


async def test_a_cordon_names_the_card_and_says_why(server: FakeApiServer, tmp_path: Path) -> None:
    """The entry holds the uuid of the card with that id, the reason and who did it; taking it back leaves nothing."""
    result = await atoll(server, tmp_path, "cordon", "n1/3", "--reason", "fan is loud")
    assert result.exit_code == 0, result.output
    (entry,) = server.objects[PATH]["spec"]["cordons"]
    assert (entry["uuid"], entry["reason"], bool(entry["by"])) == (uuid_of("n1", 3), "fan is loud", True)
    assert "fan is loud" in (await atoll(server, tmp_path, "list")).output.replace("\n", "")

    assert (await atoll(server, tmp_path, "uncordon", "n1/3")).exit_code == 0
    assert server.objects[PATH]["spec"]["cordons"] == []


def told(server: FakeApiServer, observed: datetime | None, **device: Any) -> None:
    """The report of n1, observed at a time, with facts of GPU 3."""
    body = report_json("n1", devices={3: device})
    del body["metadata"]["resourceVersion"]
    body["status"]["observedTime"] = format_microtime(observed) if observed else None
    server.put(PATH, body)


@pytest.mark.parametrize("behind", [timedelta(), timedelta(hours=1), timedelta(seconds=-30), None])
async def test_a_release_carries_the_moment_of_the_report(
    server: FakeApiServer, tmp_path: Path, behind: timedelta | None
) -> None:
    """What the report tells counts no more. The moment is the machine's own: on a clock that is an hour behind ours an
    error of the next hour would else be hidden."""
    observed = datetime.now(UTC) - behind if behind is not None else None
    told(server, observed)
    result = await atoll(server, tmp_path, "release", "n1/3", "--reason", "card was reseated")

    assert (result.exit_code, result.output) == (0, "GPU n1/3 is released: card was reseated\n")
    (entry,) = server.objects[PATH]["spec"]["releases"]
    assert entry["uuid"] == uuid_of("n1", 3)
    assert entry["time"] == format_microtime(observed) if observed else entry["time"].endswith("Z")


async def test_a_release_under_a_clock_that_is_ahead_is_refused(server: FakeApiServer, tmp_path: Path) -> None:
    """Once that clock is right, the release would hide whatever comes until the time that it named."""
    told(server, datetime.now(UTC) + timedelta(days=1))
    result = await atoll(server, tmp_path, "release", "n1/3", "--reason", "card was reseated")

    assert (result.exit_code, "the clock of node n1 is" in result.output) == (2, True)
    assert not server.objects[PATH]["spec"].get("releases")


async def test_a_release_says_what_is_still_wrong(server: FakeApiServer, tmp_path: Path) -> None:
    """An administrator's word heals no card that does not answer."""
    told(server, datetime.now(UTC), health={"state": "unhealthy", "reason": "GPU is lost"})
    result = await atoll(server, tmp_path, "release", "n1/3", "--reason", "card was reseated")

    assert (result.exit_code, "it is still quarantined: GPU is lost" in result.output) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("cordon", "n1", "--reason", "x"), "NODE/ID"),
        (("cordon", "n1/x", "--reason", "x"), "NODE/ID"),
        (("cordon", "n1/99", "--reason", "x"), "no GPU 99; it has 0, 1, 2"),
        (("cordon", "n9/0", "--reason", "x"), "no agent reports a node n9"),
        (("cordon", "n1/0", "--reason", " "), "must say why"),
    ],
)
async def test_a_mistake_is_told(server: FakeApiServer, tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    """A target that is none, and a cordon without a reason, change nothing and say what to write."""
    result = await atoll(server, tmp_path, *arguments)

    assert result.exit_code == 2
    assert told in result.output
    assert not server.objects[PATH].get("spec", {}).get("cordons")


def test_entries_of_others_stay() -> None:
    """One card has one entry; those of other cards are left alone."""
    spec = cordoned(cordoned(GpuNodeStatusSpec(), "a", "one", by="x"), "b", "two", by="y")
    spec = released(cordoned(spec, "a", "three", by="z"), "a", "2026-01-01T00:00:00Z", "well", by="z")

    assert [(one.uuid, one.reason) for one in spec.cordons] == [("b", "two"), ("a", "three")]
    assert [one.uuid for one in uncordoned(spec, "b").cordons] == ["a"]
    assert [one.uuid for one in uncordoned(spec, "a").releases] == ["a"]


def test_a_node_name_may_hold_dots() -> None:
    """Everything before the last slash is the node."""
    assert split_target("gpu-1.example.org/12") == ("gpu-1.example.org", 12)
    with pytest.raises(TargetMistake):
        split_target("/3")


def test_one_look_prints_the_report() -> None:
    """`atoll agent --once -o json` is the agent's report of this machine, here of one that is played."""
    flags = ["agent", "--once", "-o", "json", "--backend", "simulated", "--profile", "dgx1-v100"]
    result = CliRunner().invoke(app, flags)

    assert result.exit_code == 0
    assert '"deviceCount": 8' in result.output
