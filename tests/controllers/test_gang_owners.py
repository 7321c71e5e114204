"""Owners of a gang's pods: suspending and resuming them, and events for gangs that cannot be created yet."""

from pathlib import Path

import pytest

from atoll.api import names
from atoll.api.gangs import SuspendedOwner
from controllers.gangs.owners import path_of
from tests.controllers.gang_harness import GANGS, JOBS, cluster, settled, term
from tests.controllers.test_gangs import JOB, QUICK, add_owned, is_let_go
from tests.fakes.api_server import answering


@pytest.mark.asyncio
async def test_gangs_of_one_name_that_are_deleted_in_turn_leave_no_job_suspended(tmp_path: Path) -> None:
    """The second is gone before anybody looked at the end of the first: what the first had stopped is resumed."""
    slow = {**QUICK, "requeuingStrategy": {"backoffBaseSeconds": 3600}}
    job = f"{JOBS}/job"
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.put(job, JOB)
        made.add_gang("g", 2, waitForPodsReady=slow)
        add_owned(made, range(2))
        await settled(running, lambda: is_let_go(made, "g"))
        await settled(running, lambda: made.server.objects[job]["spec"].get("suspend"), seconds=20)
        for number in range(2):
            made.delete(f"g-{number}")
        await settled(running, lambda: made.reason("g") == "WaitForRequeue")
        for _ in range(2):
            made.server.remove(f"{GANGS}/g")
            made.add_gang("g", 2)
        made.server.remove(f"{GANGS}/g")
        await settled(running, lambda: made.server.objects[job]["spec"]["suspend"] is False)


@pytest.mark.parametrize(
    "version",
    ["batch/v1?watch=", "batch/v1#", "batch/..", "batch/v1%2f..", "batch/", "batch", "batch/v1/x", "batch/v٣"],
)
def test_an_owner_of_no_version_has_no_switch(version: str) -> None:
    """References are the user's: none leads to another path, or to an answer that is no object."""
    assert path_of("team", SuspendedOwner(api_version=version, kind="Job", name="j", uid="u")) is None
    assert path_of("team", SuspendedOwner(api_version="batch/v1", kind="Job", name="j", uid="u")) is not None


@pytest.mark.asyncio
async def test_a_gang_goes_whole_though_its_owner_reference_makes_no_sense(tmp_path: Path) -> None:
    """A version that no API server would serve does not keep the gang from being evicted: its pods go one by one."""
    odd = [{"kind": "Job", "apiVersion": "batch/v1?x=", "name": "job", "uid": "u", "controller": True}]
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_gang("g", 2, waitForPodsReady=QUICK)
        for number in range(2):
            made.change_pod(made.add_member("g", number), metadata={"ownerReferences": odd})
        await settled(running, lambda: is_let_go(made, "g"))
        await settled(running, lambda: any(path.endswith("/eviction") for _, path in running.api.writes), seconds=20)


@pytest.mark.asyncio
async def test_pods_are_told_that_some_of_them_are_missing(tmp_path: Path) -> None:
    """The sets of a gang that is made are known when all of its pods are there; until then an event says so."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.add_member("g", 0, annotations={names.GANG_SIZE: "2", names.POD_SET: "leader"})
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-0") in running.notes.recorded)
        assert f"{GANGS}/g" not in made.server.objects


@pytest.mark.asyncio
async def test_pods_are_told_that_their_gang_cannot_be_made(tmp_path: Path) -> None:
    """What they say is refused as a GpuGang: they wait, and an event names the reason."""
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.fail(answering(422, "Invalid"), times=1000, containing=f"POST {GANGS}")
        made.add_member("g", 0, annotations={names.GANG_SIZE: "1"})
        await settled(running, lambda: (names.REASON_GANG_WAITING, "g-0") in running.notes.recorded)
        assert made.is_gated("g-0")
