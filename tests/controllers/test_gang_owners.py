"""Owners of a gang's pods: suspending and resuming them, and events for gangs that cannot be created yet."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atoll.api import names
from atoll.api.gangs import SuspendedOwner
from controllers.gangs.owners import path_of
from tests.controllers.gang_harness import GANGS, JOBS, GangHarness, cluster, settled, term
from tests.controllers.harness import strip_version
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


async def suspend_job(made: GangHarness, folder: Path) -> None:
    """Let a term suspend the Job of a gang for an hour, and end."""
    made.server.put(f"{JOBS}/job", JOB)
    made.add_gang("g", 2, waitForPodsReady={**QUICK, "requeuingStrategy": {"backoffBaseSeconds": 3600}})
    add_owned(made, range(2))
    async with term(made, folder) as running:
        await settled(running, lambda: is_let_go(made, "g"))
        await settled(running, lambda: made.server.objects[f"{JOBS}/job"]["spec"].get("suspend"), seconds=20)


@pytest.mark.parametrize("lost", ["gang", "remade", "status"])
async def test_what_was_suspended_for_a_gang_that_went_while_nobody_led_is_resumed(tmp_path: Path, lost: str) -> None:
    """The list of suspended owners goes with the gang, or with its status; the owners say it themselves."""
    users = {**JOB, "metadata": {"name": "users", "uid": "users-uid"}, "spec": {"suspend": True}}
    async with cluster() as made:
        made.server.put(f"{JOBS}/users", users)
        await suspend_job(made, tmp_path)
        for number in range(2):
            made.delete(f"g-{number}")
        gang = made.server.remove(f"{GANGS}/g")
        if lost == "remade":
            made.add_gang("g", 2)
        if lost == "status":
            made.server.put(f"{GANGS}/g", {key: gang[key] for key in gang if key != "status"})
        async with term(made, tmp_path) as running:
            await settled(running, lambda: made.server.objects[f"{JOBS}/job"]["spec"]["suspend"] is False)

    assert names.GANG_SUSPENDED not in made.server.objects[f"{JOBS}/job"]["metadata"]["labels"]
    assert made.server.objects[f"{JOBS}/users"]["spec"] == {"suspend": True}


async def test_what_is_suspended_for_a_gang_that_lists_it_stays_suspended(tmp_path: Path) -> None:
    """A new leader looks at it, and leaves it for the end of the gang's pause."""
    async with cluster() as made:
        await suspend_job(made, tmp_path)
        looked = made.server.count("jobs?")
        async with term(made, tmp_path) as running:
            await settled(running, lambda: made.server.count("jobs?") > looked)

    assert made.server.objects[f"{JOBS}/job"]["spec"]["suspend"] is True


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


RAY = "/apis/ray.io/v1/namespaces/team"


@pytest.mark.parametrize(
    ("shuts_down", "stopped", "left"),
    [(True, "rayjobs/job", "rayclusters/job"), (False, "rayclusters/job", "rayjobs/job")],
    ids=["RayJob", "its RayCluster"],
)
@pytest.mark.asyncio
async def test_a_ray_job_is_suspended_only_if_kuberay_bears_it(
    tmp_path: Path, shuts_down: bool, stopped: str, left: str
) -> None:
    """KubeRay declares a RayJob invalid, for good, that is suspended and not shut down after its work."""
    job = {"shutdownAfterJobFinishes": True} if shuts_down else {}
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.put(f"{RAY}/rayjobs/job", {"metadata": {"name": "job", "uid": "j"}, "spec": job})
        owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "job", "uid": "j", "controller": True}
        metadata = {"name": "job", "uid": "c", "ownerReferences": [owner]}
        made.server.put(f"{RAY}/rayclusters/job", {"metadata": metadata, "spec": {}})
        made.add_gang("g", 1, waitForPodsReady=QUICK)
        owned = {**owner, "kind": "RayCluster", "uid": "c"}
        made.change_pod(made.add_member("g", 0), metadata={"ownerReferences": [owned]})
        await settled(running, lambda: not made.is_gated("g-0"))
        await settled(running, lambda: made.server.objects[f"{RAY}/{stopped}"]["spec"].get("suspend"), seconds=20)

    assert "suspend" not in made.server.objects[f"{RAY}/{left}"]["spec"]


NESTED = b'{"metadata":{"uid":"u","name":"set"},"spec":{"suspend":false,"a":' + b"[" * 9000 + b"]" * 9000 + b"}}"
"""What the API server stores of a kind without a schema; a decoder that reads it whole runs out of its stack."""


@pytest.mark.parametrize("body", [NESTED, b'{"metadata":{"uid":"u"},"spec":[]}', b"[]"], ids=["nested", "odd", "list"])
@pytest.mark.asyncio
async def test_a_gang_goes_whole_though_its_owner_makes_no_sense(tmp_path: Path, body: bytes) -> None:
    """What the owner is besides its switch is the user's: its pods go one by one where it cannot be read."""
    owner = [{"kind": "JobSet", "apiVersion": "jobset.x-k8s.io/v1", "name": "set", "uid": "u", "controller": True}]

    def answer(_method: str, path: str, _body: object) -> web.Response | None:
        return web.Response(body=body, content_type="application/json") if path.endswith("/jobsets/set") else None

    async with cluster() as made, term(made, tmp_path) as running:
        made.server.intercept(answer)
        made.add_gang("g", 2, waitForPodsReady=QUICK)
        for number in range(2):
            made.change_pod(made.add_member("g", number), metadata={"ownerReferences": owner})
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


JOB_SETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"


def reference(api: str, kind: str, name: str) -> dict[str, Any]:
    """Return the reference of an object to its controller."""
    return {"apiVersion": api, "kind": kind, "name": name, "uid": f"uid-of-{name}", "controller": True}


def add_job_set(made: GangHarness, *, restart: int = 0) -> None:
    """Create a JobSet, its two Jobs, and one pod of each in a gang that states its size."""
    owner = reference("jobset.x-k8s.io/v1alpha2", "JobSet", "set")
    if not restart:
        made.server.put(f"{JOB_SETS}/set", {"metadata": {"name": "set", "uid": "uid-of-set"}, "spec": {}})
    for number in range(2):
        job = f"set-{number}-{restart}"
        made.server.put(
            f"{JOBS}/{job}", {"metadata": {"name": job, "uid": f"uid-of-{job}", "ownerReferences": [owner]}, "spec": {}}
        )
        name = made.add_member("g", 2 * restart + number, annotations={names.GANG_SIZE: "2"})
        made.change_pod(name, metadata={"ownerReferences": [reference("batch/v1", "Job", job)]})


@pytest.mark.asyncio
async def test_a_gang_of_a_job_set_outlives_its_jobs(tmp_path: Path) -> None:
    """The JobSet owns the gang. It restarts: its Jobs and their pods end in turn and come again under new uids. The
    gang stays the same object throughout."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_job_set(made)
        await settled(running, lambda: is_let_go(made, "g"))
        uid = made.gang("g")["metadata"]["uid"]
        (owner,) = made.gang("g")["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("JobSet", "set")
        for number in range(2):
            made.server.remove(f"{JOBS}/set-{number}-0")
            made.delete(f"g-{number}")
            await settled(running, lambda number=number: not made.leases_of(f"g-{number}"))  # type: ignore[misc]
            running.resync()
        add_job_set(made, restart=1)
        await settled(running, lambda: not made.is_gated("g-2") and not made.is_gated("g-3"))
        assert made.gang("g")["metadata"]["uid"] == uid


@pytest.mark.asyncio
async def test_a_gang_of_a_job_set_that_is_switched_off_stays_off(tmp_path: Path) -> None:
    """active is false: the JobSet is suspended, not its Jobs one by one, and is not resumed while the pods end."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_job_set(made)
        await settled(running, lambda: is_let_go(made, "g"))
        gang = made.gang("g")
        made.server.put(f"{GANGS}/g", strip_version({**gang, "spec": {**gang["spec"], "active": False}}))
        await settled(running, lambda: made.server.objects[f"{JOB_SETS}/set"]["spec"].get("suspend"))
        for number in range(2):
            made.server.remove(f"{JOBS}/set-{number}-0")
            made.delete(f"g-{number}")
            await settled(running, lambda number=number: not made.leases_of(f"g-{number}"))  # type: ignore[misc]
            running.resync()
        await settled(running, lambda: made.held() == 0)
        assert made.server.objects[f"{JOB_SETS}/set"]["spec"]["suspend"] is True
        assert made.gang("g")["metadata"]["uid"] == gang["metadata"]["uid"]


@pytest.mark.asyncio
async def test_a_gang_made_for_one_owner_is_made_anew_for_another(tmp_path: Path) -> None:
    """The same name for the pods of another owner: the old gang and its count of evictions are not theirs."""
    async with cluster() as made, term(made, tmp_path) as running:
        add_job_set(made)
        await settled(running, lambda: is_let_go(made, "g"))
        uid = made.gang("g")["metadata"]["uid"]
        for number in range(2):
            made.delete(f"g-{number}")
        other = reference("example.com/v1", "Training", "other")
        for number in range(2, 4):
            name = made.add_member("g", number, annotations={names.GANG_SIZE: "2"})
            made.change_pod(name, metadata={"ownerReferences": [other]})
        await settled(running, lambda: f"{GANGS}/g" in made.server.objects and made.gang("g")["metadata"]["uid"] != uid)
        await settled(running, lambda: not made.is_gated("g-2") and not made.is_gated("g-3"))
        assert made.gang("g")["metadata"]["ownerReferences"][0]["name"] == "other"


LWS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/team/leaderworkersets"
SETS = "/apis/apps/v1/namespaces/team/statefulsets"


@pytest.mark.asyncio
async def test_a_gang_of_a_leader_worker_set_belongs_to_it(tmp_path: Path) -> None:
    """Leaders come from one StatefulSet, the workers of a leader from another that the leader pod owns: all are the
    LeaderWorkerSet's."""
    top = reference("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "lws")
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.put(f"{LWS}/lws", {"metadata": {"name": "lws", "uid": "uid-of-lws"}, "spec": {}})
        made.server.put(
            f"{SETS}/lws", {"metadata": {"name": "lws", "uid": "uid-of-leaders", "ownerReferences": [top]}, "spec": {}}
        )
        leaders = {**reference("apps/v1", "StatefulSet", "lws"), "uid": "uid-of-leaders"}
        made.add_member("g", 0, annotations={names.GANG_SIZE: "2"})
        made.change_pod("g-0", metadata={"ownerReferences": [leaders]})
        leader = {**reference("v1", "Pod", "g-0"), "uid": made.pod("g-0")["metadata"]["uid"]}
        made.server.put(
            f"{SETS}/lws-0",
            {"metadata": {"name": "lws-0", "uid": "uid-of-lws-0", "ownerReferences": [leader]}, "spec": {}},
        )
        made.add_member("g", 1, annotations={names.GANG_SIZE: "2"})
        made.change_pod("g-1", metadata={"ownerReferences": [reference("apps/v1", "StatefulSet", "lws-0")]})
        await settled(running, lambda: is_let_go(made, "g"))
        owners = made.gang("g")["metadata"]["ownerReferences"]
    assert owners == [{key: value for key, value in top.items() if key != "controller"}]


@pytest.mark.asyncio
@pytest.mark.parametrize("refuses", [True, False], ids=["its owner may not be suspended", "its owner goes on"])
async def test_a_gang_is_evicted_whatever_its_owner_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refuses: bool
) -> None:
    """Nobody keeps GPUs from others by an owner that ignores its switch or whose write is refused."""
    monkeypatch.setattr("controllers.gangs.lifecycle.OWNER_STOPS_SECONDS", 0.5)
    async with cluster() as made, term(made, tmp_path) as running:
        made.server.put(f"{JOBS}/job", JOB)
        made.add_gang("g", 2, waitForPodsReady=QUICK)
        add_owned(made, range(2))
        await settled(running, lambda: is_let_go(made, "g"))
        if refuses:
            made.server.fail(answering(422, "Invalid"), times=1000, containing=f"PATCH {JOBS}/job")
        await settled(running, lambda: any(path.endswith("/eviction") for _, path in running.api.writes), seconds=20)
        assert bool(made.server.objects[f"{JOBS}/job"]["spec"].get("suspend")) is not refuses


@pytest.mark.asyncio
async def test_what_is_remembered_of_an_owner_says_nothing_of_another_with_its_uid(tmp_path: Path) -> None:
    """A tenant who names somebody's uid in a reference of his own does not decide who owns the other's gang."""
    async with cluster("n1", "n2") as made, term(made, tmp_path) as running:
        forged = {**reference("v1", "ConfigMap", "x"), "uid": "uid-of-set-0-0"}
        made.add_member("mine", 0, annotations={names.GANG_SIZE: "1"})
        made.change_pod("mine-0", metadata={"ownerReferences": [forged]})
        await settled(running, lambda: is_let_go(made, "mine", 1))
        add_job_set(made)
        await settled(running, lambda: is_let_go(made, "g"))
        assert [owner["kind"] for owner in made.gang("g")["metadata"]["ownerReferences"]] == ["JobSet"]
