"""The controllers' process: a mirror that always watches, and reconcilers that run only while this process leads.

Runs until cancelled or, with `once`, until every key was reconciled once. A standby, and a leader that has lost its
Lease, keep the mirror and the pod terminations up to date, so that a take-over needs no list.
"""

import asyncio
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiohttp import web

from atoll.api import names
from atoll.kube.cache import Change
from atoll.kube.client import ApiClient
from atoll.kube.election import LeaderElector
from atoll.kube.errors import LeadershipLost
from atoll.kube.events import EventRecorder
from atoll.kube.mirror import ClusterMirror, WatchedKind
from atoll.service.api_metrics import count_calls, register_watch_metrics
from atoll.service.clock import SystemClock
from atoll.service.http import add_health, application, serve
from atoll.service.metrics import Metrics
from atoll.service.runtime import freeze_garbage, supervise, until_first
from controllers.api import GuardedApi
from controllers.claims import ClaimReconciler
from controllers.context import Context
from controllers.foreign import ForeignReconciler
from controllers.gangs.admission import ALL as WAITING_GANGS
from controllers.gangs.admission import AdmissionReconciler
from controllers.gangs.cache import GangCache, GangRules
from controllers.gangs.forgotten import ForgottenOwnerReconciler
from controllers.gangs.lifecycle import GangReconciler
from controllers.gpu_stats import GpuStatsPublisher
from controllers.health import HealthReconciler
from controllers.leases.orphans import OrphanReconciler
from controllers.leases.release import EvidenceReconciler, ReleaseReconciler
from controllers.leases.repair import MissingLeaseRepair, UnreadableLeaseRepair
from controllers.leases.terminations import PodTerminations
from controllers.loops import Loop
from controllers.machines import MachineDeclarations, MachineReconciler
from controllers.metrics import ControllerMetrics, controller_metrics
from controllers.page.serving import serve_page
from controllers.preemption import PreemptionReconciler
from controllers.renumbering import RenumberingReconciler
from controllers.requeue import RequeueReconciler
from controllers.reservations import ReservationReconciler
from controllers.settings import ControllersSettings
from controllers.start_taints import StartTaintReconciler
from controllers.stranded import StrandedReconciler
from controllers.topologies import TopologyReconciler
from controllers.webhook_certs import WebhookCertReconciler

log = structlog.get_logger(__name__)

COMPONENT = "gpu.scheduling/controllers"
REPAIR_DELAY_SECONDS = 0.25
"""Pods and Leases come by two watches: a bind's Leases may be seen a moment after its pod."""
WAKE_DELAY_SECONDS = 0.03
"""The Leases of one pod end one by one; whoever waits for all of them should not lose to whoever needs one."""
EVIDENCE_DELAY_SECONDS = 0.1
GANG_DELAY_SECONDS = 0.05
"""The pods of a gang are created, and become ready, by the dozen."""
ADMISSION_DELAY_SECONDS = 0.05
FOREIGN_DELAY_SECONDS = 1.0
RESERVATION_DELAY_SECONDS = 0.1
"""Nobody waits for this, and the pod that a report shows may be a moment behind it."""
PREEMPTION_DELAY_SECONDS = 0.1
"""One release frees several Leases; the pods that wait for islands are weighed once after it."""


@dataclass(slots=True)
class ControllerManager:
    """What lives as long as the process. `loops` are those of the current term; empty for a standby. `restored`: set
    when the API server was restored from a backup; the leader then builds everything of its term anew."""

    settings: ControllersSettings
    clock: SystemClock
    client: ApiClient
    mirror: ClusterMirror
    terminations: PodTerminations
    metrics: ControllerMetrics
    elector: LeaderElector
    identity: str
    loops: tuple[Loop[Any], ...] = ()
    restored: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change of the mirror: memory first, then whoever may act on it."""
        self.terminations.observe(kind, change)
        for loop in self.loops:
            loop.observe(kind, change)

    def context(self, events: EventRecorder) -> Context:
        """Return the surroundings of a term's reconcilers; their writes end with the leadership."""
        return Context(
            api=GuardedApi(self.client, lambda: self.elector.is_leader),
            mirror=self.mirror,
            clock=self.clock,
            events=events,
            metrics=self.metrics,
            new_token=lambda: secrets.token_hex(8),
        )


async def serve_controllers(settings: ControllersSettings) -> None:
    """Run until cancelled. Raises an ExceptionGroup when any part of the process ends by a fault."""
    clock = SystemClock()
    metrics = Metrics("controllers")
    client = await ApiClient.connect(
        settings.kubeconfig,
        user_agent="atoll-controllers",
        requests_per_second=settings.requests_per_second,
        burst=settings.burst,
    )
    async with client:
        process = build_manager(settings, clock, client, metrics)
        mirror = process.mirror
        app = health_app(mirror, metrics)
        if settings.once:
            await until_first(mirror.run(), process.elector.lead(lambda _term: _lead_once(process)))
            return
        await supervise(
            mirror=mirror.run(),
            http=serve(app, settings.health_host, settings.health_port),
            page=serve_page(settings.page, mirror, client, clock, metrics),
            lead=lead_term_by_term(process),
        )


def build_manager(
    settings: ControllersSettings, clock: SystemClock, client: ApiClient, metrics: Metrics
) -> ControllerManager:
    mirror = ClusterMirror(client, clock, with_gangs=True)
    identity = f"{socket.gethostname()}_{secrets.token_hex(8)}"
    elector = LeaderElector(
        client,
        names.SYSTEM_NAMESPACE,
        names.CONTROLLERS_LEADER_LEASE,
        identity,
        clock=clock,
        lease_duration_seconds=settings.lease_duration_seconds,
        renew_deadline_seconds=settings.renew_deadline_seconds,
        retry_seconds=settings.retry_seconds,
    )
    count_calls(metrics, client)
    register_watch_metrics(metrics, {kind.value: watch for kind, watch in mirror.reflectors.items()})
    GpuStatsPublisher(metrics, mirror, clock)
    register_leadership_metrics(metrics, elector)
    process = ControllerManager(
        settings, clock, client, mirror, PodTerminations(mirror), controller_metrics(metrics), elector, identity
    )
    mirror.on_change(process.observe)
    mirror.on_rewind(process.restored.set)
    return process


def health_app(mirror: ClusterMirror, metrics: Metrics) -> web.Application:
    """Return the application with health and metrics; a standby is ready too, as soon as it could take over."""
    app = application()
    add_health(app, ready={"mirror": lambda: mirror.unready_reason() or None}, metrics=metrics)
    return app


def register_leadership_metrics(metrics: Metrics, elector: LeaderElector) -> None:
    """Show whether this process leads."""
    metrics.gauge_of("leading", "1 while this process leads", lambda: float(elector.is_leader))


async def lead_term_by_term(process: ControllerManager) -> None:
    """Lead, and be a standby again when leadership was lost: by then every reconciler of the term has ended."""
    while True:
        try:
            await process.elector.lead(lambda _term: _lead(process))
        except LeadershipLost as error:
            log.warning("Lost leadership", err=str(error))


async def _lead(process: ControllerManager) -> None:
    """One term of leadership, with a new memory whenever the API server was restored: whatever reconcilers remember is
    ordered by versions that have gone back."""
    while True:
        process.restored.clear()
        await until_first(_reconcile(process), process.restored.wait())
        if not process.restored.is_set():
            return
        log.warning("Reconciling anew, since the API server was restored")


async def _reconcile(process: ControllerManager) -> None:
    """Run all reconcilers, built anew."""
    settings, clock = process.settings, process.clock
    await process.mirror.synced()
    freeze_garbage()
    events = EventRecorder(process.client, COMPONENT, process.identity, clock)
    authority = WebhookCertReconciler(
        process.client, clock, extra_names=settings.webhook_names, may_write=lambda: process.elector.is_leader
    )
    certificates = {"authority": authority.run()} if settings.keep_certificates else {}
    process.loops = build_loops(process.context(events), process.terminations, settings)
    log.info("Reconciling", loops=[loop.name for loop in process.loops])
    try:
        await supervise(
            events=events.run(),
            **certificates,
            resync=_resync(process),
            **{loop.name: loop.run() for loop in process.loops},
        )
    finally:
        process.loops = ()
        process.metrics.end_term()


async def _lead_once(process: ControllerManager) -> None:
    await process.mirror.synced()
    events = EventRecorder(process.client, COMPONENT, process.identity, process.clock)
    for loop in build_loops(process.context(events), process.terminations, process.settings):
        await loop.run_once()
    await events.flush()


async def _resync(process: ControllerManager) -> None:
    while True:
        for loop in process.loops:
            loop.resync()
        await process.clock.sleep(process.settings.resync_seconds)


def build_loops(
    context: Context, terminations: PodTerminations, settings: ControllersSettings
) -> tuple[Loop[Any], ...]:
    """Return the reconcilers of one term, each in its loop, in the order in which they hear of a change."""
    clock, metrics = context.clock, context.metrics
    request = EvidenceReconciler(context)
    evidence = Loop(request, clock, metrics)

    def ask(node: str, version: int) -> None:
        if request.want(node, version):
            evidence.add_after(node, EVIDENCE_DELAY_SECONDS)

    declarations = MachineDeclarations(context)
    reservations = ReservationReconciler(context)
    release = Loop(ReleaseReconciler(context, terminations, ask, declarations, reservations.heirs), clock, metrics)
    machines = MachineReconciler(
        context, declarations, release.add, forget_after_seconds=settings.forget_nodes_after_seconds
    )
    wake = RequeueReconciler(
        context,
        wakes_per_second=settings.wakes_per_second,
        burst=settings.wakes_burst,
        hints=settings.node_hints,
    )
    cache = _gang_cache(context, settings) if context.mirror.gangs is not None else None
    return (
        release,
        evidence,
        Loop(OrphanReconciler(context), clock, metrics),
        Loop(MissingLeaseRepair(context), clock, metrics, delay_seconds=REPAIR_DELAY_SECONDS),
        Loop(UnreadableLeaseRepair(context), clock, metrics),
        Loop(RenumberingReconciler(context), clock, metrics),
        Loop(_stranded(context, settings), clock, metrics),
        Loop(machines, clock, metrics),
        Loop(HealthReconciler(context), clock, metrics),
        Loop(wake, clock, metrics, delay_seconds=WAKE_DELAY_SECONDS),
        Loop(ForeignReconciler(context), clock, metrics, delay_seconds=FOREIGN_DELAY_SECONDS),
        Loop(PreemptionReconciler(context, settings, cache), clock, metrics, delay_seconds=PREEMPTION_DELAY_SECONDS),
        Loop(reservations, clock, metrics, delay_seconds=RESERVATION_DELAY_SECONDS),
        Loop(ClaimReconciler(context, interval_seconds=settings.claim_status_seconds), clock, metrics),
        *((Loop(StartTaintReconciler(context, settings.start_taint), clock, metrics),) if settings.start_taint else ()),
        *(_gang_loops(context, cache) if cache is not None else ()),
    )


def _stranded(context: Context, settings: ControllersSettings) -> StrandedReconciler:
    evicts, after_seconds = settings.stranded_pods == "evict", settings.stranded_after_seconds
    return StrandedReconciler(context, evicts=evicts, after_seconds=after_seconds)


def _gang_cache(context: Context, settings: ControllersSettings) -> GangCache:
    rules = GangRules(
        policy=settings.wait_for_pods_ready.policy(),
        bounds=settings.wait_for_pods_ready.bounds(),
        strict_order=settings.gang_order == "strict",
        preemption=settings.preemption,
        preemption_delay_seconds=settings.preemption_delay_seconds,
        preemption_timeout_seconds=settings.preemption_timeout_seconds,
        hold_after_seconds=settings.gang_hold_after_seconds,
        hold_seconds=settings.gang_hold_seconds,
    )
    return GangCache(context.mirror, context.clock, rules)


def _gang_loops(context: Context, cache: GangCache) -> tuple[Loop[Any], ...]:
    """Return the loops of gangs: each by itself, and all that wait against each other."""
    admission = Loop(
        AdmissionReconciler(context, cache), context.clock, context.metrics, delay_seconds=ADMISSION_DELAY_SECONDS
    )
    gangs = Loop(
        GangReconciler(context, cache, lambda: admission.add(WAITING_GANGS)),
        context.clock,
        context.metrics,
        delay_seconds=GANG_DELAY_SECONDS,
    )
    forgotten = Loop(ForgottenOwnerReconciler(context), context.clock, context.metrics)
    return gangs, admission, forgotten, Loop(TopologyReconciler(context), context.clock, context.metrics)
