"""Jobs that wait for their topology are offered a weaker one: in their record, their history and to webhooks."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.settings import RenderSettings
from atoll.jobs.states import JobStep
from jobs.cluster_store import drain_cluster
from jobs.database import opened
from jobs.offers import LOOK_SECONDS, TopologyOffers
from jobs.records import JobRecord
from jobs.settings import JobServiceSettings
from jobs.store import take_step
from tests.explain.situations import holder, situation
from tests.jobservice.made import NOW
from tests.jobservice.service import JOBS, JobService

WEBHOOKS = "/api/clusters/local/webhooks"
WAIT_SECONDS = 600
NVLINK = {"ext_ml_gpu_count": 2, "policy": {"topology": "nvlink"}}


def pairs(*held: int) -> ClusterSnapshot:
    """Return a machine with two pairs of GPUs that NVLink joins, some of them held."""
    pods = [holder(f"p{gpu}", "n1", gpu) for gpu in held]
    return situation({"n1": {"profile": "azure-nc96ads-a100-v4"}}, pods).snapshot


class OfferStage:
    """A service with webhooks, and the look after waiting jobs."""

    def __init__(self, service: JobService, seconds_max: float) -> None:
        self.service = service
        self.woken: list[str] = []
        self.offers = TopologyOffers(
            service.database,
            service.app.state.parts.chooser,
            RenderSettings(),
            service.clock,
            seconds_max=seconds_max,
            wake=self.woken.append,
        )

    async def admit(self, name: str = "tune", **fields: Any) -> str:
        """Submit a job whose pods wait for machines."""
        made = (await self.service.submit(name, **fields)).json()
        await self.step(made["id"], JobStep.SUBMIT, JobStep.ADMIT)
        return str(made["id"])

    async def step(self, job_id: str, *steps: JobStep) -> None:
        """Let a job take steps."""
        for asked in steps:
            await self.service.database.write(lambda session, asked=asked: take_step(session, job_id, asked, now=NOW))

    async def look(self, *held: int, after_seconds: float = 0) -> None:
        """Look at the jobs with some GPUs held."""
        self.service.links.snapshots["local"] = pairs(*held)
        await self.service.clock.advance(after_seconds)
        await self.offers.look()

    async def job(self, job_id: str) -> dict[str, Any]:
        """Return a job as the API shows it."""
        found: dict[str, Any] = (await self.service.call("GET", f"{JOBS}/{job_id}")).json()
        return found

    async def history(self, job_id: str) -> list[str]:
        """Return what happened to a job."""
        found = (await self.service.call("GET", f"{JOBS}/{job_id}/events")).json()
        return [one["what"] for one in found["items"]]

    async def told(self, webhook: dict[str, Any]) -> list[str]:
        """Return the events that a webhook is told, newest last."""
        found = (await self.service.call("GET", f"{WEBHOOKS}/{webhook['id']}/deliveries")).json()
        return sorted(one["event"] for one in found["items"])


@pytest.fixture(params=[0, WAIT_SECONDS])
async def stage(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[OfferStage]:
    """Yield a service that lets jobs wait for their topology, then one that fails them after ten minutes."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with JobService.of(database) as service:
        yield OfferStage(service, request.param)
    database.close()


async def test_an_offer_that_nobody_takes_is_sent_once_and_ends_the_job_if_a_setting_says_so(stage: OfferStage) -> None:
    """EDGE-7: record, history and webhook say it, a second look does not repeat it; without the setting it waits."""
    secret = {"url": "https://hooks.example.com/", "secret": "a secret of sixteen letters"}
    webhook = (await stage.service.call("POST", WEBHOOKS, json=secret)).json()
    job_id = await stage.admit(**NVLINK)
    await stage.look(0, 2)
    await stage.look(0, 2, after_seconds=WAIT_SECONDS - 1)
    waiting = await stage.job(job_id)
    history, events = await stage.history(job_id), await stage.told(webhook)
    await stage.look(0, 2, after_seconds=1)
    last = await stage.job(job_id)

    offer = waiting["topology_wait"]["offer"]
    assert (waiting["status"], offer["suggested"]) == ("admitted", "same_node")
    assert "waits for GPUs that others hold" in offer["reason"]
    assert history == ["create", "submit", "admit", "topology offer"]
    assert events == ["job.queued", "job.topology_relaxation_offer"]
    if stage.offers._seconds_max == 0:
        assert (last["status"], stage.woken) == ("admitted", [])
        return
    assert (last["status"], stage.woken) == ("failed", [job_id])
    assert last["message"].startswith("its topology nvlink cannot be met: ")
    assert last["message"].endswith(
        "nobody took the offer of topology same_node within 600 s: submit it again with policy.topology same_node"
    )
    assert await stage.told(webhook) == ["job.failed", "job.queued", "job.topology_relaxation_offer"]


async def test_a_job_whose_topology_becomes_free_or_that_takes_the_offer_goes_on(stage: OfferStage) -> None:
    """The time counts only while the topology is what it waits for, and begins anew with another topology."""
    freed, taker = await stage.admit("freed", **NVLINK), await stage.admit("taker", **NVLINK)
    await stage.look(0, 2)
    await stage.service.call("PATCH", f"{JOBS}/{taker}", json={"policy": {"topology": "same_node"}})
    await stage.look(0, after_seconds=WAIT_SECONDS)
    await stage.look(0, 2, after_seconds=WAIT_SECONDS)
    waits = {name: await stage.job(job_id) for name, job_id in (("freed", freed), ("taker", taker))}

    assert {one["status"] for one in waits.values()} == {"admitted"}
    assert waits["freed"]["topology_wait"]["offer"]["suggested"] == "same_node"
    assert waits["taker"]["topology_wait"] == {"asked": "same_node", "since": None, "offer": None}


async def test_only_jobs_that_wait_for_machines_get_offers(stage: OfferStage) -> None:
    """Not one in its queue, one that runs, one that is to leave, one without a topology, nor one of a drained or silent
    cluster; a job that runs has no offer any more."""
    ids = {name: await stage.admit(name, **NVLINK) for name in ("runs", "leaves", "pauses", "offered")}
    ids["any"] = await stage.admit("any", ext_ml_gpu_count=2)
    ids["queued"] = (await stage.service.submit("queued", **NVLINK)).json()["id"]
    await stage.step(ids["queued"], JobStep.SUBMIT)
    await stage.step(ids["runs"], JobStep.RUN)
    await stage.service.call("DELETE", f"{JOBS}/{ids['leaves']}")
    await stage.service.call("POST", f"{JOBS}/{ids['pauses']}/pause")
    stage.service.links.snapshots["local"] = TimeoutError()
    await stage.offers.look()
    silent = await stage.history(ids["offered"])
    await stage.look(0, 2)
    offered = {name for name, job_id in ids.items() if "topology offer" in await stage.history(job_id)}
    await stage.step(ids["offered"], JobStep.RUN)
    running = await stage.job(ids["offered"])
    late = await stage.admit("late", **NVLINK)
    await stage.service.database.write(lambda session: drain_cluster(session, "local", now=NOW, actor="ops"))
    await stage.look(0, 2)

    assert silent == ["create", "submit", "admit"]
    assert offered == {"offered"}
    assert running["topology_wait"] is None
    assert "topology offer" not in await stage.history(late)


async def test_a_job_that_cannot_be_read_holds_up_no_other(stage: OfferStage) -> None:
    """The others get their offers; the next look tries it again."""
    bad, good = await stage.admit("bad", **NVLINK), await stage.admit("good", **NVLINK)

    def spoil(session: Any) -> None:
        record = session.get(JobRecord, bad)
        record.document = record.document | {"policy": {"topology": "ring"}}

    await stage.service.database.write(spoil)
    await stage.look(0, 2)

    assert (await stage.job(good))["topology_wait"]["offer"] is not None


@pytest.mark.parametrize(("seconds", "fits"), [(0, True), (60, True), (59, False), (-1, False)])
def test_the_setting_is_refused_where_it_could_not_be_kept(seconds: float, fits: bool) -> None:
    """Waiting jobs are looked at each minute."""
    given = {"access": "/nowhere", "topology_wait_seconds": seconds}
    if fits:
        assert JobServiceSettings.model_validate(given).topology_wait_seconds == seconds
    else:
        with pytest.raises(ValidationError, match="topology_wait_seconds"):
            JobServiceSettings.model_validate(given)
    assert LOOK_SECONDS <= 60
