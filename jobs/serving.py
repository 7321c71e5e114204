"""The process of the job service: database, API and, in the leader, the reconciler.

One replica leads; all of them answer requests.
"""

import secrets
import socket
import ssl
from typing import Final

import structlog
from sqlalchemy.orm import Session

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
from jobs.api import build_api
from jobs.api_parts import ApiParts
from jobs.authentication import Authenticator, LocalUser, TokenReviewer
from jobs.chooser import LiveSnapshots
from jobs.cluster_store import ClusterTerms, get_cluster, list_clusters, register_cluster
from jobs.database import opened
from jobs.fleet import ClusterFleet
from jobs.links import ClusterLinks
from jobs.listener import serving
from jobs.pod_logs import PodLogs
from jobs.records import JobRecord
from jobs.settings import EVERYTHING, JobServiceSettings, access_rules, render_settings
from jobs.store import service_id

log = structlog.get_logger(__name__)

LEASE: Final = "atoll-jobs"


async def serve_jobs(settings: JobServiceSettings) -> None:
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
            links = ClusterLinks(client, folder=settings.kubeconfig_folder)
            source = LiveSnapshots(links, clock)

            async def client_of(record: JobRecord) -> ApiClient:
                return await links.client(await database.read(lambda session: get_cluster(session, record.cluster_id)))

            await database.write(lambda session: _register_home(session, settings, clock))
            fleet = ClusterFleet(
                database,
                links,
                source,
                rendering,
                clock,
                settings,
                service_id=own_id,
                may_write=lambda: leader.is_leader,
            )
            register_watch_metrics(metrics, fleet.watches)
            metrics.gauge_of(
                "leading", "1 while this process is the leader and reconciles jobs", lambda: float(leader.is_leader)
            )
            metrics.gauge_of("queue_length", "Jobs that wait to be reconciled", lambda: float(fleet.queue_length))
            parts = ApiParts(
                database=database,
                authenticator=_authenticator(settings, client, clock),
                rules=rules,
                settings=settings,
                rendering=rendering,
                logs=PodLogs(client_of),
                links=links,
                chooser=fleet.chooser,
                service_id=own_id,
                now=clock.now,
                wake=fleet.wake,
            )
            try:
                await _run(settings, parts, fleet, leader, metrics, context)
            finally:
                await links.close()
    finally:
        database.close()


async def _run(
    settings: JobServiceSettings,
    parts: ApiParts,
    fleet: ClusterFleet,
    leader: LeaderElector,
    metrics: Metrics,
    context: ssl.SSLContext | None,
) -> None:
    health = application()
    checks = {"resync": lambda: fleet.home_trouble() if leader.is_leader else None}
    add_health(health, ready=checks, metrics=metrics)
    async with serving(build_api(parts), settings.host, settings.port, context) as port:
        scheme = "http" if context is None else "https"
        log.info("Serving", url=f"{scheme}://{settings.host}:{port}", cluster=settings.cluster)
        await supervise(
            health=serve(health, settings.health_host, settings.health_port),
            lead=_lead_term_by_term(leader, fleet),
        )


async def _lead_term_by_term(leader: LeaderElector, fleet: ClusterFleet) -> None:
    """Reconcile jobs and queues while this process leads; wait again after leadership is lost."""
    while True:
        try:
            await leader.lead(lambda _term: fleet.run())
        except LeadershipLost as error:
            log.warning("Lost leadership", err=str(error))


def _register_home(session: Session, settings: JobServiceSettings, clock: Clock) -> None:
    """Register the cluster of the service's own kubeconfig, unless it is there."""
    known = [one.id for one in list_clusters(session)]
    if settings.cluster not in known:
        register_cluster(session, settings.cluster, ClusterTerms(kubeconfig=""), now=clock.now(), actor="the service")


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
