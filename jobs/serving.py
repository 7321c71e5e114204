"""The process of the job service: database, API and, in the leader, the reconciler.

One replica leads; all of them answer requests.
"""

import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog
from fastapi import FastAPI

from atoll.api import names
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.election import LeaderElector
from atoll.kube.errors import LeadershipLost
from atoll.service.api_metrics import count_calls, register_watch_metrics
from atoll.service.clock import SystemClock
from atoll.service.http import add_health, application, serve
from atoll.service.metrics import Metrics
from atoll.service.runtime import supervise
from atoll.service.tls import TlsFiles, server_context
from jobs.api import ApiParts, build_api
from jobs.authentication import Authenticator, LocalUser, TokenReviewer
from jobs.cluster import JobCluster
from jobs.database import opened
from jobs.following import JobFollower
from jobs.listener import serving
from jobs.pod_logs import PodLogs
from jobs.reconciler import JobReconciler
from jobs.settings import EVERYTHING, JobServiceSettings, access_rules, render_settings
from jobs.store import service_id

log = structlog.get_logger(__name__)

LEASE: Final = "atoll-jobs"


class JobServiceExtension(Protocol):
    """Another part of this process, with routes of its own and work that only the leader does."""

    def add_routes(self, app: FastAPI) -> None:
        """Add routes to the API."""
        ...

    async def lead(self) -> None:
        """Work until cancelled, while this process leads."""
        ...


ExtensionOf = Callable[[ApiParts, SystemClock], JobServiceExtension]
"""Makes an extension once the database is migrated."""


async def serve_jobs(settings: JobServiceSettings, extensions: Sequence[ExtensionOf] = ()) -> None:
    """Run until cancelled. Raises SettingsError, DatabaseUnfit, ConfigurationError, CertificateError before it
    listens, and an ExceptionGroup if a part of the process fails."""
    clock, metrics = SystemClock(), Metrics("jobs")
    rules = EVERYTHING if settings.access is None else access_rules(settings.access)
    rendering = render_settings(settings.render)
    context = _tls(settings, clock)
    database = opened(settings.database.get_secret_value())
    try:
        async with await ApiClient.connect(settings.kubeconfig, user_agent="atoll-jobs") as client:
            count_calls(metrics, client)
            own_id = await database.write(lambda session: service_id(session, clock.now()))
            leader = _elector(client, clock)
            cluster = JobCluster(client, service_id=own_id, may_write=lambda: leader.is_leader)
            follower = JobFollower(
                client,
                database,
                JobReconciler(database, cluster, rendering, clock),
                clock,
                cluster=settings.cluster,
                service_id=own_id,
                workers=settings.workers,
                resync_seconds=settings.resync_seconds,
            )
            register_watch_metrics(metrics, follower.reflectors)
            metrics.gauge_of(
                "leading", "1 while this process is the leader and reconciles jobs", lambda: float(leader.is_leader)
            )
            metrics.gauge_of("queue_length", "Jobs that wait to be reconciled", lambda: float(len(follower.queue)))
            parts = ApiParts(
                database=database,
                authenticator=_authenticator(settings, client, clock),
                rules=rules,
                settings=settings,
                rendering=rendering,
                logs=PodLogs(client),
                now=clock.now,
                wake=lambda job_id: follower.queue.add(job_id) if leader.is_leader else None,
            )
            others = [one(parts, clock) for one in extensions]
            await _run(settings, parts, follower, others, leader, metrics, context)
    finally:
        database.close()


async def _run(
    settings: JobServiceSettings,
    parts: ApiParts,
    follower: JobFollower,
    extensions: Sequence[JobServiceExtension],
    leader: LeaderElector,
    metrics: Metrics,
    context: ssl.SSLContext | None,
) -> None:
    health = application()
    checks = {"resync": lambda: (follower.last_resync_error or None) if leader.is_leader else None}
    add_health(health, ready=checks, metrics=metrics)
    app = build_api(parts)
    for one in extensions:
        one.add_routes(app)
    async with serving(app, settings.host, settings.port, context) as port:
        scheme = "http" if context is None else "https"
        log.info("Serving", url=f"{scheme}://{settings.host}:{port}", cluster=settings.cluster)
        await supervise(
            health=serve(health, settings.health_host, settings.health_port),
            lead=_lead_term_by_term(leader, follower, extensions),
        )


async def _lead_term_by_term(
    leader: LeaderElector, follower: JobFollower, extensions: Sequence[JobServiceExtension]
) -> None:
    """Reconcile jobs, and do the extensions' work, while this process leads; wait again after leadership is lost."""
    while True:
        try:
            await leader.lead(
                lambda _term: supervise(jobs=follower.run(), **{type(one).__name__: one.lead() for one in extensions})
            )
        except LeadershipLost as error:
            log.warning("Lost leadership", err=str(error))


def _elector(client: ApiClient, clock: Clock) -> LeaderElector:
    identity = f"{socket.gethostname()}_{secrets.token_hex(8)}"
    return LeaderElector(client, names.SYSTEM_NAMESPACE, LEASE, identity, clock=clock)


def _authenticator(settings: JobServiceSettings, client: ApiClient, clock: Clock) -> Authenticator:
    if settings.insecure_local:
        log.warning("Authentication is off: everybody who can connect may do everything", host=settings.host)
        return LocalUser()
    return TokenReviewer(client, audience=settings.audience, now=clock.monotonic_seconds)


def _tls(settings: JobServiceSettings, clock: Clock) -> ssl.SSLContext | None:
    if settings.certificate is None or settings.key is None:
        return None
    return server_context(TlsFiles(settings.certificate, settings.key), monotonic_seconds=clock.monotonic_seconds)
