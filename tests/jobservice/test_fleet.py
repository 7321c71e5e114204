"""The leader's work in all clusters: it begins in each by itself, and one that fails stops no other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy.orm import Session

from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.settings import RenderSettings
from atoll.kube.client import ApiClient
from atoll.kube.clock import end
from atoll.kube.mirror import ClusterMirror
from jobs.accounting import GpuAccounting
from jobs.chooser import LiveSnapshots
from jobs.cluster_store import ClusterTerms, get_cluster, register_cluster, remove_cluster
from jobs.database import Database, opened
from jobs.fleet import AGAIN_SECONDS, CLUSTERS_SECONDS, HEALTH_SECONDS, ClusterFleet
from jobs.links import ClusterLinks
from jobs.settings import JobServiceSettings
from jobs.store import create_job
from tests.fakes.api_server import FakeApiServer
from tests.fakes.clock import ManualClock, until
from tests.fakes.listening import kubeconfig
from tests.jobservice.made import NOW, new_job
from tests.jobservice.world import SERVICE_ID


class StartedFleet:
    """A fleet over the API servers of its own cluster, local, and of east, whose kubeconfig is missing at first."""

    def __init__(self, home: ApiClient, east: FakeApiServer, database: Database, folder: Path) -> None:
        self.database, self.clock, self.east, self._folder = database, ManualClock(), east, folder
        links = ClusterLinks(home, folder=folder)
        self.fleet = ClusterFleet(
            database,
            links,
            LiveSnapshots(links, self.clock),
            RenderSettings(),
            self.clock,
            JobServiceSettings.model_validate({"access": "/nowhere", "cluster": "local"}),
            service_id=SERVICE_ID,
            may_write=lambda: True,
            accounts=self._accounts,
            archive=None,
        )

    def _accounts(self, mirror: ClusterMirror, cluster: str) -> GpuAccounting:
        return GpuAccounting(
            mirror,
            self.database,
            self.clock,
            cluster=cluster,
            prices=PriceTable.model_validate({}),
            spot=(),
            tenant_of=lambda name: name,
            wake=self.fleet.wake,
        )

    def connect_east(self) -> None:
        """Write the kubeconfig that was missing."""
        kubeconfig(self._folder, self.east.url, name="east")

    async def register(self, *names: str) -> None:
        """Register clusters, each with a job."""

        def work(session: Session) -> None:
            for name in names:
                terms = ClusterTerms(kubeconfig="" if name == "local" else f"file:{name}")
                register_cluster(session, name, terms, now=NOW, actor="ops")
                create_job(session, replace(new_job(), cluster_id=name), NOW, job_id=str(uuid4()))

        await self.database.write(work)

    async def trouble(self, name: str) -> str:
        """Return what was recorded of the last look at a cluster."""
        return (await self.database.read(lambda session: get_cluster(session, name))).trouble

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """Work inside the block."""
        task = asyncio.ensure_future(self.fleet.run())
        try:
            yield
        finally:
            await end(task)
            await self.fleet.links.close()


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[FakeApiServer]:
    """The API server of the service's own cluster."""
    async with FakeApiServer().running() as server:
        yield server


@pytest.fixture
async def made(home: FakeApiServer, tmp_path: Path) -> AsyncIterator[StartedFleet]:
    """A fleet that does not work yet."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with (
        FakeApiServer().running() as east,
        await ApiClient.connect(kubeconfig(tmp_path, home.url), requests_per_second=1000, burst=1000) as client,
    ):
        yield StartedFleet(client, east, database, tmp_path)
    database.close()


def jobs_of(server: FakeApiServer) -> list[str]:
    """Return the Jobs there."""
    return [path for path in server.objects if "/jobs/" in path]


async def test_a_cluster_that_fails_stops_no_other_and_is_looked_at_again(
    made: StartedFleet, home: FakeApiServer
) -> None:
    """Jobs of the service's own cluster are created at the start; those of the other one as soon as it can be reached,
    and its health is told meanwhile."""
    await made.register("local", "east")
    async with made.leading():
        await until(lambda: jobs_of(home), timeout_seconds=30)
        async with asyncio.timeout(30):
            while "no such kubeconfig" not in await made.trouble("east"):  # noqa: ASYNC110 - it is in a database
                await asyncio.sleep(0.01)
        assert jobs_of(made.east) == []
        made.connect_east()
        await made.clock.advance(max(AGAIN_SECONDS, HEALTH_SECONDS))
        await until(lambda: jobs_of(made.east), timeout_seconds=30)

    assert len(jobs_of(home)) == len(jobs_of(made.east)) == 1


async def test_clusters_come_and_go_while_the_fleet_works(made: StartedFleet, home: FakeApiServer) -> None:
    """One that is registered gets its work within seconds; the work in one that is removed ends."""
    made.connect_east()
    await made.register("local")
    async with made.leading():
        await until(lambda: jobs_of(home), timeout_seconds=30)
        await made.register("east")
        await made.clock.advance(CLUSTERS_SECONDS)
        await until(lambda: jobs_of(made.east), timeout_seconds=30)
        await made.database.write(lambda session: remove_cluster(session, "east", force=True, now=NOW, actor="ops"))
        await made.clock.advance(CLUSTERS_SECONDS)
        await until(lambda: set(made.fleet.works) == {"local"}, timeout_seconds=30)

    assert made.fleet.works == {}
