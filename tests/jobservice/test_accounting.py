"""The loop that records GPU time: from Leases and reports of an API server to sums and spent budgets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.orm import Session

from atoll.api import job_names, names
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.costs.spans import GpuAccount, GpuFact, TimeUse
from atoll.jobs.costs.usage import UsageKey, sum_usage
from atoll.jobs.settings import RenderSettings
from atoll.jobs.states import JobStep
from atoll.kube import paths
from atoll.kube.client import ApiClient
from atoll.kube.clock import end
from atoll.kube.mirror import ClusterMirror
from atoll.service.metrics import Metrics
from jobs.accounting import GpuAccounting
from jobs.accounts import UsageFilter, budgeted_ids, observe_gpus, spans_between
from jobs.database import Database, opened
from jobs.store import create_job, get_job, take_step
from tests.builders import lease_json, make_allocation, pod_json, report_json
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import ManualClock, until
from tests.fakes.listening import kubeconfig
from tests.jobservice.made import NOW, after, new_job

JOB_ID = "99999999-0000-4000-8000-000000000000"
PRICES = PriceTable.model_validate({"gpus": [{"gpu": "A100", "usd_per_hour": "3.60"}]})


class RecordedCluster:
    """A machine with eight A100, a job that holds one of them, and the loop that records it."""

    def __init__(self, client: ApiClient, server: FakeApiServer, database: Database) -> None:
        self.server, self.database, self.clock = server, database, ManualClock()
        self.mirror = ClusterMirror(client, self.clock)
        self.woken: list[str] = []
        self.metrics = Metrics("jobs")
        self.accounting = GpuAccounting(
            self.mirror,
            database,
            self.clock,
            cluster="local",
            prices=PRICES,
            spot=RenderSettings().spot_tolerations,
            tenant_of=lambda name: name.removeprefix("tenant-"),
            wake=self.woken.append,
        )
        self.accounting.register(self.metrics)

    def put(self, path: str, body: dict[str, Any]) -> None:
        """Put an object there."""
        self.server.put(path, body)

    async def seconds(self) -> dict[tuple[str, ...], dict[str, float]]:
        """Return GPU-seconds by job and state."""
        spans = await self.database.read(
            lambda session: spans_between(session, UsageFilter("local"), after(-10), after(999))
        )
        sums = sum_usage(spans, after(-10), after(999), (UsageKey.JOB,))
        return {
            key: {use.value: float(one.gpu_seconds(use)) for use in TimeUse if one.gpu_seconds(use)}
            for key, one in sums.items()
        }


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[RecordedCluster]:
    """A cluster whose watches are complete."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with FakeApiServer().running() as server:
        server.put(paths.nodes("n1"), {"kind": "Node", "metadata": {"name": "n1", "uid": "uid-of-n1"}})
        server.put(paths.gpunodestatuses("n1"), report_json("n1", "dgx-a100"))
        async with await ApiClient.connect(kubeconfig(tmp_path, server.url)) as client:
            found = RecordedCluster(client, server, database)
            task = asyncio.ensure_future(found.mirror.run())
            await until(found.mirror.is_ready)
            yield found
            await end(task)
    database.close()


async def test_the_lease_of_a_job_is_charged_until_it_is_gone_and_spends_its_budget(recorded: RecordedCluster) -> None:
    """Free, held by the job from the creation of its Lease, paused at ten cents, free again: to the second."""
    new = new_job(intent={"budget_cap": "0.10", "budget_action": "pause"})
    await recorded.database.write(lambda session: create_job(session, new, NOW, job_id=JOB_ID))
    await recorded.database.write(lambda session: take_step(session, JOB_ID, JobStep.SUBMIT, now=NOW))
    await recorded.accounting.look()
    await recorded.clock.advance(10)
    pod = pod_json(
        "p",
        namespace="tenant-acme",
        node="n1",
        allocation=make_allocation("n1", 0),
        phase="Running",
        labels={job_names.JOB_ID: JOB_ID},
    )
    recorded.put(paths.pods("tenant-acme", "p"), pod)
    lease = lease_json("n1", 0)
    lease["spec"]["holderIdentity"] = "tenant-acme/p/uid-of-p"
    lease["metadata"]["creationTimestamp"] = "2026-01-31T12:00:04Z"
    where = paths.leases(names.SYSTEM_NAMESPACE, lease["metadata"]["name"])
    recorded.put(where, lease)
    await until(lambda: recorded.mirror.ledger.leases and recorded.mirror.ledger.pods)
    await recorded.accounting.look()
    assert recorded.woken == []
    for _ in range(2):
        await recorded.clock.advance(50)
        await recorded.accounting.look()
    record = await recorded.database.read(lambda session: get_job(session, JOB_ID))
    recorded.server.remove(where)
    recorded.server.remove(paths.pods("tenant-acme", "p"))
    await until(lambda: not recorded.mirror.ledger.leases)
    await recorded.clock.advance(5)
    await recorded.accounting.look()

    assert await recorded.seconds() == {(JOB_ID,): {"used": 111}, ("",): {"unavailable": 8 * 115 - 111}}
    assert recorded.woken == [JOB_ID]
    assert record.pause_requested_by == "the job's budget"
    page = recorded.metrics
    page.refresh()
    assert 'atoll_jobs_gpus{use="unavailable"}' in page.page().decode()


async def test_a_budget_that_cannot_be_read_does_not_stop_the_others(recorded: RecordedCluster) -> None:
    """What was recorded of the one job became invalid; the next job's budget is acted upon, and the look ends."""
    ids = [str(uuid4()) for _ in range(2)]
    facts = {
        job_id: GpuFact(job_id, "n1", "nvidia-a100", TimeUse.USED, account, price_micros=3_600_000, held_since=NOW)
        for job_id in ids
        for account in (GpuAccount(namespace="tenant-acme", job_id=job_id, pod_uid=job_id),)
    }

    def prepare(session: Session) -> None:
        for number, job_id in enumerate(ids):
            new = new_job(f"tune-{number}", intent={"budget_cap": "0.01", "budget_action": "pause"})
            create_job(session, new, NOW, job_id=job_id)
            take_step(session, job_id, JobStep.SUBMIT, now=NOW)
        broken = get_job(session, ids[0])
        broken.document = broken.document | {"intent": {"budget_cap": -1}}
        for second in (0, 50):
            observe_gpus(session, "local", facts, after(second), tenant_of=lambda _name: "", gap_seconds=60)

    await recorded.database.write(prepare)
    assert set(await recorded.database.read(lambda session: budgeted_ids(session, "local"))) == set(ids)
    for job_id in ids:
        await recorded.accounting._spend(job_id)

    assert recorded.woken == [ids[1]]


async def test_the_loop_records_what_comes_and_nothing_while_the_watches_are_blind(
    recorded: RecordedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new Lease is recorded in one of the next rounds; what is not seen is not recorded."""
    task = asyncio.ensure_future(recorded.accounting.run())
    await until(lambda: recorded.accounting.gpus)
    recorded.put(paths.leases(names.SYSTEM_NAMESPACE, "gpu-n1-0"), lease_json("n1", 0))
    async with asyncio.timeout(20):
        while not recorded.accounting.gpus[TimeUse.RESERVED]:
            await recorded.clock.advance(1)
            await asyncio.sleep(0.01)
    await end(task)
    monkeypatch.setattr(recorded.mirror, "is_ready", lambda: False)
    before = await recorded.seconds()
    await recorded.clock.advance(30)
    await recorded.accounting.look()

    assert await recorded.seconds() == before
