"""The running service: every kind of change triggers a reconciliation, and failed starts are reported."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from atoll.api import job_names
from atoll.jobs.settings import RenderSettings
from atoll.kube.client import ApiClient
from atoll.kube.clock import end
from jobs.__main__ import main
from jobs.cluster import JobCluster
from jobs.database import Database, opened
from jobs.following import RECORDS_SECONDS, RESYNC_RETRY_SECONDS, JobFollower
from jobs.pod_logs import NoPods, PodLogs
from jobs.reconciler import JobReconciler
from jobs.records import JobRecord
from jobs.store import ask_to_cancel, create_job, get_job
from tests.fakes.api_server import FakeApiServer, answering
from tests.fakes.clock import ManualClock, until
from tests.fakes.listening import kubeconfig
from tests.jobservice.made import NOW, new_job

SERVICE_ID = "11111111-2222-3333-4444-555555555555"
JOBS = "/apis/batch/v1/namespaces/tenant-acme/jobs"
PODS = "/api/v1/namespaces/tenant-acme/pods"


class Following:
    """A follower over an API server with watches, and its database."""

    def __init__(self, client: ApiClient, server: FakeApiServer, database: Database) -> None:
        self.server, self.database, self.clock, self.client = server, database, ManualClock(), client
        cluster = JobCluster(client, name="local", service_id=SERVICE_ID)
        reconciler = JobReconciler(database, cluster, RenderSettings(), self.clock)
        self.follower = JobFollower(
            client,
            database,
            reconciler,
            self.clock,
            cluster="local",
            service_id=SERVICE_ID,
            workers=2,
            resync_seconds=300,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow inside the block."""
        task = asyncio.ensure_future(self.follower.run())
        try:
            await until(lambda: not self.follower.last_resync_error or task.done())
            yield
        finally:
            await end(task)

    async def give(self, name: str = "tune") -> str:
        """Record a job, and tell nobody."""
        job_id = str(uuid4())
        await self.database.write(lambda session: create_job(session, new_job(name), NOW, job_id=job_id))
        return job_id

    async def record(self, job_id: str) -> JobRecord:
        """Return a record."""
        return await self.database.read(lambda session: get_job(session, job_id))

    async def state(self, job_id: str, state: str) -> None:
        """Wait until a job is in a state."""
        async with asyncio.timeout(20):
            while (await self.record(job_id)).state != state:  # noqa: ASYNC110 - it is in a database
                await asyncio.sleep(0.01)


@pytest.fixture
async def following(tmp_path: Path) -> AsyncIterator[Following]:
    """A follower that does not run yet."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with FakeApiServer().running() as server:
        config = kubeconfig(tmp_path, server.url)
        async with await ApiClient.connect(config, requests_per_second=1000, burst=1000) as client:
            yield Following(client, server, database)
    database.close()


async def test_what_is_there_at_the_start_is_looked_at(following: Following) -> None:
    """A job that was recorded while nobody followed is created."""
    job_id = await following.give()
    async with following.running():
        await following.state(job_id, "admitted")

    assert f"{JOBS}/tune" in following.server.objects


async def test_a_watch_leads_to_a_look(following: Following) -> None:
    """A Job that completes is seen to without any time passing."""
    job_id = await following.give()
    async with following.running():
        await following.state(job_id, "admitted")
        await until(lambda: following.server.open_streams)
        found = following.server.objects[f"{JOBS}/tune"]
        following.server.put(
            f"{JOBS}/tune", found | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
        )
        await following.state(job_id, "succeeded")

    assert following.clock.monotonic_seconds() == 1000.0


async def test_what_another_replica_was_asked_for_is_found(following: Following) -> None:
    """A record that somebody else wrote, and a wish to cancel, are found by looking into the database."""
    async with following.running():
        job_id = await following.give()
        await following.clock.advance(RECORDS_SECONDS)
        await following.state(job_id, "admitted")
        await following.database.write(lambda session: ask_to_cancel(session, job_id, now=NOW, actor="ann"))
        await following.clock.advance(RECORDS_SECONDS)
        await until(lambda: f"{JOBS}/tune" not in following.server.objects)
        await following.clock.advance(2)
        await following.state(job_id, "cancelled")


async def test_a_resync_that_fails_is_told_and_tried_again(following: Following) -> None:
    """While the cluster cannot be listed the service says that it is not ready, and goes on when it can."""
    following.server.fail(answering(500, "InternalError"), containing="labelSelector")
    task = asyncio.ensure_future(following.follower._resync())
    await until(lambda: "500" in following.follower.last_resync_error)
    await following.clock.advance(RESYNC_RETRY_SECONDS)
    await until(lambda: not following.follower.last_resync_error)
    await end(task)


async def test_logs_are_of_the_jobs_own_pods(following: Following) -> None:
    """The first pod of the newest try is read; a pod of another job is none of this one's."""
    record = await following.record(await following.give())

    async def client_of(_record: JobRecord) -> ApiClient:
        return following.client

    logs = PodLogs(client_of)

    async def read(pod: str | None) -> bytes:
        async with aclosing(logs.read(record, pod=pod, tail=7, follow=False)) as chunks:
            return b"".join([chunk async for chunk in chunks])

    with pytest.raises(NoPods, match="job tune has no pods now: it is pending"):
        await read(None)
    for name, created in (("tune-old", "2026-01-01"), ("tune-b", "2026-01-02"), ("tune-a", "2026-01-02")):
        metadata = {"creationTimestamp": created, "labels": {job_names.JOB_ID: record.id}}
        following.server.put(f"{PODS}/{name}", {"kind": "Pod", "metadata": metadata})
        following.server.objects[f"{PODS}/{name}/log"] = {"metadata": {}, "of": name}

    assert b'"of": "tune-a"' in await read(None)
    assert b'"of": "tune-old"' in await read("tune-old")
    assert following.server.requests[-1][2] == {"tailLines": "7", "follow": "false"}
    assert following.server.requests[-2][2]["labelSelector"] == f"{job_names.JOB_ID}={record.id}"
    with pytest.raises(NoPods, match="job tune has no pod other"):
        await read("other")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give access, a file with rules, or insecure_local"),
        (["--insecure-local", "--port", "99999"], "port: "),
        (["--access", "/nowhere.yaml"], "cannot serve: cannot read access file /nowhere.yaml"),
        (["--insecure-local", "--database", "mysql://x"], "cannot serve: mysql://x is neither sqlite nor postgresql"),
        (["--insecure-local", "--kubeconfig", "/nowhere", "--database", "sqlite:///DB"], "cannot serve: "),
    ],
)
def test_a_service_that_cannot_start_says_why(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and one sentence that names what is wrong."""
    status = main([one.replace("DB", str(tmp_path / "jobs.db")) for one in arguments])

    assert status == 2
    assert told in capsys.readouterr().err
