"""The process of the job service: database, API and, in the leader, the reconciler.

One replica leads; all of them answer requests.
"""

import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
from fastapi import FastAPI
from sqlalchemy.orm import Session

from atoll.api import names
from atoll.jobs.costs.prices import PriceTable
from atoll.jobs.settings import RenderSettings
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.election import LeaderElector
from atoll.kube.errors import LeadershipLost
from atoll.kube.mirror import ClusterMirror
from atoll.ml.policy import MlPolicy
from atoll.service.api_metrics import count_calls, register_watch_metrics
from atoll.service.clock import SystemClock
from atoll.service.http import add_health, application, in_url, serve
from atoll.service.metrics import Metrics
from atoll.service.runtime import supervise
from atoll.service.tls import TlsFiles, server_context
from jobs.accounting import GpuAccounting
from jobs.api import build_api
from jobs.api_parts import ApiParts
from jobs.audit import AuditTrail
from jobs.authentication import Authenticator, LocalUser, TokenReviewer
from jobs.chooser import LiveSnapshots
from jobs.cluster_store import ClusterTerms, get_cluster, list_clusters, register_cluster
from jobs.database import Database, opened
from jobs.fleet import ClusterFleet
from jobs.limits import RateLimits
from jobs.links import ClusterLinks
from jobs.listener import serving
from jobs.log_archive import LogArchive
from jobs.offers import TopologyOffers
from jobs.oidc import OidcIssuer, OidcTokens, fetch_json
from jobs.pod_exec import PodExec
from jobs.pod_logs import PodLogs
from jobs.records import JobRecord
from jobs.secrets import SecretBox
from jobs.settings import EVERYTHING, AccessRules, JobServiceSettings, access_rules, price_table, render_settings
from jobs.store import service_id
from jobs.webhook_sender import WebhookSender

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


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files of the settings say."""

    rules: AccessRules
    rendering: RenderSettings
    prices: PriceTable


@dataclass(frozen=True, slots=True)
class _Running:
    """What runs beside the API; the mirror in every replica, so that a new leader needs no list."""

    links: ClusterLinks
    fleet: ClusterFleet
    offers: TopologyOffers
    accounting: GpuAccounting
    mirror: ClusterMirror
    leader: LeaderElector
    archive: LogArchive | None


async def serve_jobs(settings: JobServiceSettings, extensions: Sequence[ExtensionOf] = ()) -> None:
    """Run until cancelled. Raises SettingsError, DatabaseUnfit, ConfigurationError, CertificateError before it
    listens, and an ExceptionGroup if a part of the process fails."""
    clock, metrics = SystemClock(), Metrics("jobs")
    rules = EVERYTHING if settings.access is None else access_rules(settings.access)
    files = _Files(rules, render_settings(settings.render), price_table(settings.prices))
    context, secrets_of_webhooks = _tls(settings, clock), SecretBox.of(settings.secret_key)
    database = opened(settings.database.get_secret_value())
    try:
        async with await ApiClient.connect(settings.kubeconfig, user_agent="atoll-jobs") as client:
            count_calls(metrics, client)
            own_id = await database.write(lambda session: service_id(session, clock.now()))
            await database.write(lambda session: _register_home(session, settings, clock))
            service = _working(settings, files, client, database, clock, own_id)
            audit = AuditTrail(database, clock)
            hosts = MlPolicy(hosts=settings.webhook_hosts)
            sender = WebhookSender(database, secrets_of_webhooks, clock, policy=hosts)
            leader, fleet, links = service.leader, service.fleet, service.links
            register_watch_metrics(metrics, fleet.watches)
            register_job_metrics(metrics, lambda: leader.is_leader, fleet, lambda: database.failures_count)
            service.accounting.register(metrics)
            sender.register(metrics)
            if service.archive is not None:
                service.archive.register(metrics)

            async def client_of(record: JobRecord) -> ApiClient:
                return await links.client(await database.read(lambda session: get_cluster(session, record.cluster_id)))

            parts = ApiParts(
                database=database,
                authenticator=_authenticator(settings, client, clock),
                rules=files.rules,
                settings=settings,
                rendering=files.rendering,
                prices=files.prices,
                secrets=secrets_of_webhooks,
                audit=audit,
                limits=RateLimits(settings.requests_per_second, settings.requests_burst, now=clock.monotonic_seconds),
                queue_limits=RateLimits(
                    settings.gpu_jobs_per_second, settings.gpu_jobs_burst, now=clock.monotonic_seconds
                ),
                logs=PodLogs(client_of),
                commands=PodExec(client_of),
                links=links,
                chooser=service.fleet.chooser,
                service_id=own_id,
                now=clock.now,
                wake=service.fleet.wake,
                archive=service.archive,
            )
            others = [one(parts, clock) for one in extensions]
            try:
                await _run(settings, parts, service, others, sender, metrics, context)
            finally:
                await links.close()
    finally:
        database.close()


def _working(
    settings: JobServiceSettings, files: _Files, client: ApiClient, database: Database, clock: Clock, own_id: str
) -> _Running:
    """Return what looks after jobs, queues and GPU time; each writes to a cluster only while this process leads."""
    leader, links = _elector(client, clock), ClusterLinks(client, folder=settings.kubeconfig_folder)

    def accounts(mirror: ClusterMirror, cluster: str) -> GpuAccounting:
        return GpuAccounting(
            mirror,
            database,
            clock,
            cluster=cluster,
            prices=files.prices,
            spot=files.rendering.spot_tolerations,
            tenant_of=settings.tenant_of,
            wake=fleet.wake,
        )

    archive = _archive(settings, clock)
    fleet = ClusterFleet(
        database,
        links,
        LiveSnapshots(links, clock),
        files.rendering,
        clock,
        settings,
        service_id=own_id,
        may_write=lambda: leader.is_leader,
        accounts=accounts,
        archive=archive,
    )
    mirror = ClusterMirror(client, clock)
    offers = TopologyOffers(
        database,
        fleet.chooser,
        files.rendering,
        clock,
        seconds_max=settings.topology_wait_seconds,
        wake=fleet.wake,
    )
    return _Running(links, fleet, offers, accounts(mirror, settings.cluster), mirror, leader, archive)


def register_job_metrics(
    metrics: Metrics, is_leading: Callable[[], bool], fleet: ClusterFleet, database_failures: Callable[[], int]
) -> None:
    """Publish what this process does."""
    metrics.gauge_of("leading", "1 while this process is the leader and reconciles jobs", lambda: float(is_leading()))
    metrics.gauge_of("queue_length", "Jobs that wait to be reconciled", lambda: float(fleet.queue_length))
    age = "Longest time since all active jobs of a cluster were looked at; NaN in a process that does not lead"
    metrics.gauge_of("resync_age_seconds", age, fleet.resync_age_seconds)
    metrics.gauge_of(
        "clusters_unreachable", "Clusters that did not answer at the last look", lambda: float(fleet.unreachable_count)
    )
    metrics.counter_of("database_failures", "Transactions that the database did not carry out", database_failures)


async def _run(
    settings: JobServiceSettings,
    parts: ApiParts,
    service: _Running,
    extensions: Sequence[JobServiceExtension],
    sender: WebhookSender,
    metrics: Metrics,
    context: ssl.SSLContext | None,
) -> None:
    health = application()
    checks = {"resync": lambda: service.fleet.home_trouble() if service.leader.is_leader else None}
    add_health(health, ready=checks, metrics=metrics)
    app = build_api(parts)
    for one in extensions:
        one.add_routes(app)
    async with serving(app, settings.host, settings.port, context) as port:
        scheme = "http" if context is None else "https"
        log.info("Serving", url=f"{scheme}://{in_url(settings.host)}:{port}", cluster=settings.cluster)
        await supervise(
            health=serve(health, settings.health_host, settings.health_port),
            mirror=service.mirror.run(),
            audit=parts.audit.run(),
            lead=_lead_term_by_term(service, extensions, sender),
        )


async def _lead_term_by_term(
    service: _Running, extensions: Sequence[JobServiceExtension], sender: WebhookSender
) -> None:
    """Reconcile jobs and queues, record GPU time, and do the extensions' work, while this process leads; wait again
    after leadership is lost."""
    while True:
        try:
            await service.leader.lead(
                lambda _term: supervise(
                    clusters=service.fleet.run(),
                    accounting=service.accounting.run(),
                    webhooks=sender.run(),
                    offers=service.offers.run(),
                    **{type(one).__name__: one.lead() for one in extensions},
                )
            )
        except LeadershipLost as error:
            log.warning("Lost leadership", err=str(error))


def _register_home(session: Session, settings: JobServiceSettings, clock: Clock) -> None:
    """Register the cluster of the service's own kubeconfig, unless it is there."""
    known = [one.id for one in list_clusters(session)]
    if settings.cluster not in known:
        register_cluster(session, settings.cluster, ClusterTerms(kubeconfig=""), now=clock.now(), actor="the service")


def _archive(settings: JobServiceSettings, clock: Clock) -> LogArchive | None:
    if not settings.log_archive:
        return None
    return LogArchive(settings.log_archive, bytes_max=settings.log_archive_bytes, clock=clock)


def _elector(client: ApiClient, clock: Clock) -> LeaderElector:
    identity = f"{socket.gethostname()}_{secrets.token_hex(8)}"
    return LeaderElector(client, names.SYSTEM_NAMESPACE, LEASE, identity, clock=clock)


def _authenticator(settings: JobServiceSettings, client: ApiClient, clock: Clock) -> Authenticator:
    if settings.insecure_local:
        log.warning("Authentication is off: everybody who can connect may do everything", host=settings.host)
        return LocalUser()
    reviewer = TokenReviewer(client, audience=settings.audience, now=clock.monotonic_seconds)
    if not settings.oidc_issuer:
        return reviewer
    issuer = OidcIssuer(
        settings.oidc_issuer,
        settings.oidc_audience,
        settings.oidc_user_claim,
        settings.oidc_groups_claim,
        settings.oidc_prefix,
    )
    return OidcTokens(issuer, reviewer, fetch=fetch_json, now=clock.monotonic_seconds)


def _tls(settings: JobServiceSettings, clock: Clock) -> ssl.SSLContext | None:
    if settings.certificate is None or settings.key is None:
        return None
    return server_context(TlsFiles(settings.certificate, settings.key), monotonic_seconds=clock.monotonic_seconds)
