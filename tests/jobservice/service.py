"""The job service's API without a socket, with names as tokens, and given logs."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from atoll.explain.snapshot import ClusterSnapshot
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.settings import RenderSettings
from jobs.api import build_api
from jobs.api_parts import ApiParts
from jobs.audit import AuditTrail
from jobs.authentication import Authenticator, Identity, NotIdentified
from jobs.chooser import NO_SNAPSHOT, ClusterChooser
from jobs.cluster_store import ClusterTerms, register_cluster
from jobs.database import Database
from jobs.limits import RateLimits
from jobs.log_archive import LogArchive
from jobs.pod_exec import ExecRefused, ExecResult, TerminalUser
from jobs.pod_logs import NoPods
from jobs.records import JobRecord, RegisteredCluster
from jobs.secrets import SecretBox
from jobs.settings import AccessRules, JobServiceSettings
from tests.fakes.clock import ManualClock
from tests.jobservice.world import SERVICE_ID, Faults, JobWorld, WorldApi

JOBS = "/api/clusters/local/jobs"
RULES = AccessRules.model_validate(
    {
        "rules": [
            {"user": "ann", "role": "member", "tenant": "acme"},
            {"user": "bob", "role": "member", "tenant": "acme", "project": "vision"},
            {"user": "vic", "role": "viewer", "tenant": "acme"},
            {"user": "amy", "role": "admin", "tenant": "acme"},
            {"group": "others", "role": "admin", "tenant": "other"},
            {"user": "two", "role": "member", "tenant": "acme"},
            {"user": "two", "role": "member", "tenant": "other"},
            {"user": "ops", "role": "operator"},
        ]
    }
)
SETTINGS = JobServiceSettings.model_validate({"access": "/nowhere"})


PRICES = PriceTable.model_validate(
    {
        "gpus": [
            {"gpu": "H100", "memory_gb": 80, "usd_per_hour": "4.00"},
            {"gpu": "A100", "memory_gb": 80, "usd_per_hour": "2.50"},
            {"gpu": "A100", "memory_gb": 40, "usd_per_hour": "1.80"},
            {"gpu": "A10G", "memory_gb": 24, "usd_per_hour": "1.00"},
        ]
    }
)


SECRET_KEY = b"MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="


class NameTokens:
    """Takes the token for a name; `NAME/GROUP` is somebody in a group."""

    async def identify(self, authorization: str) -> Identity | NotIdentified:
        """Return whoever the token names."""
        name, _, group = authorization.removeprefix("Bearer ").partition("/")
        return Identity(name, (group,) if group else ()) if name else NotIdentified(401, "a bearer token is needed")


class GivenLogs:
    """Gives out what a test put there, by pod."""

    def __init__(self) -> None:
        self.pods: dict[str, list[bytes]] = {}
        self.asked: list[tuple[str, int, bool]] = []
        self.fails: Exception | None = None

    async def read(self, record: JobRecord, *, pod: str | None, tail: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a pod."""
        self.asked.append((record.name, tail, follow))
        if self.fails is not None:
            raise self.fails
        name = pod or next(iter(self.pods), "")
        if name not in self.pods:
            raise NoPods(f"job {record.name} has no pods now: it is {record.state}")
        for chunk in self.pods[name]:
            yield chunk


class GivenCommands:
    """Runs nothing, and answers with what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.fails: Exception | None = None

    async def run(
        self, record: JobRecord, command: Sequence[str], *, pod: str | None, timeout_seconds: float
    ) -> ExecResult:
        """Return the words of the command, one a line, and 3."""
        self.asked.append(tuple(command))
        if self.fails is not None:
            raise self.fails
        return ExecResult(bytearray("\n".join(command).encode()), bytearray(b"warning"), 3)

    async def open_terminal(
        self, record: JobRecord, command: Sequence[str], *, pod: str | None, terminal: TerminalUser
    ) -> None:
        """Open none."""
        raise ExecRefused("no terminal here")


class GivenClusters:
    """Clusters in memory: their API servers, and what a snapshot of each shows."""

    def __init__(self, home: JobWorld) -> None:
        self.worlds = {"local": home}
        self.snapshots: dict[str, ClusterSnapshot | Exception] = {}

    async def client(self, cluster: RegisteredCluster) -> WorldApi:
        """Return the API server of a cluster."""
        return WorldApi(self.worlds[cluster.id], Faults())

    async def snapshot(self, cluster: RegisteredCluster) -> ClusterSnapshot:
        """Return the snapshot of a cluster."""
        found = self.snapshots.get(cluster.id, NO_SNAPSHOT)
        if isinstance(found, Exception):
            raise found
        return found


class JobService:
    """The API in this process."""

    def __init__(
        self,
        database: Database,
        *,
        settings: JobServiceSettings = SETTINGS,
        rendering: RenderSettings | None = None,
        authenticator: Authenticator | None = None,
        archive: LogArchive | None = None,
    ) -> None:
        rendering = rendering or RenderSettings()
        self.database = database
        self.clock = ManualClock()
        self.woken: list[str] = []
        self.logs = GivenLogs()
        self.commands = GivenCommands()
        self.world = JobWorld()
        self.links = GivenClusters(self.world)
        terms = ClusterTerms(kubeconfig="")
        database._run(
            lambda session: register_cluster(session, "local", terms, now=self.clock.now(), actor="the service"),
            writes=True,
        )
        parts = ApiParts(
            database=database,
            authenticator=authenticator or NameTokens(),
            rules=RULES,
            settings=settings,
            rendering=rendering,
            prices=PRICES,
            secrets=SecretBox(SECRET_KEY),
            audit=AuditTrail(database, self.clock),
            limits=RateLimits(settings.requests_per_second, settings.requests_burst, now=self.clock.monotonic_seconds),
            queue_limits=RateLimits(
                settings.gpu_jobs_per_second, settings.gpu_jobs_burst, now=self.clock.monotonic_seconds
            ),
            logs=self.logs,
            commands=self.commands,
            links=self.links,
            chooser=ClusterChooser(database, self.links, rendering, self.clock.now),
            service_id=SERVICE_ID,
            now=self.clock.now,
            wake=self.woken.append,
            archive=archive,
        )
        self.app = build_api(parts)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://localhost"
        )

    @classmethod
    @asynccontextmanager
    async def of(cls, database: Database, **options: Any) -> AsyncIterator["JobService"]:
        """Yield a service; its client is closed afterwards."""
        service = cls(database, **options)
        async with service.client:
            yield service

    async def call(self, method: str, path: str, *, by: str = "ann", **options: Any) -> httpx.Response:
        """Send a request in somebody's name."""
        headers = options.pop("headers", {}) | ({"Authorization": f"Bearer {by}"} if by else {})
        return await self.client.request(method, path, headers=headers, **options)

    async def submit(self, name: str = "tune", *, by: str = "ann", **fields: Any) -> httpx.Response:
        """Submit a small job."""
        job = {"name": name, "job_type": "batch", "container": {"image": "busybox:1"}} | fields
        return await self.call("POST", JOBS, by=by, json=job)
