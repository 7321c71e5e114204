"""HTTP face of the extender: decode, decide, encode. Every answer that kube-scheduler acts on is HTTP 200.

Until the ledger is complete and fresh every verb answers 503, which kube-scheduler retries; pods without a claim never
come here.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from atoll.api import names
from atoll.cluster import host_fit, pods
from atoll.cluster.budgets import DisruptionBudgets
from atoll.cluster.cells import TentativePlacement
from atoll.cluster.hints import refusal
from atoll.cluster.ledger import Ledger
from atoll.cluster.ledger_dump import encode_memory, ledger_dump_of
from atoll.cluster.objects import Pod
from atoll.cluster.request_history import encode_past_asks, request_history_of
from atoll.cluster.requests import Rejection, Request, Verdict
from atoll.cluster.selection import Candidate
from atoll.cluster.verdicts import FilterInput, NodeVerdicts, judge_nodes
from atoll.kube.authorization import PathAuthorizer
from atoll.kube.clock import Clock
from atoll.kube.errors import KubeError
from atoll.kube.mirror import ClusterMirror
from atoll.service.http import Check, add_health, application
from atoll.service.metrics import Metrics
from extender import wire
from extender.beyond_sample import BeyondSample
from extender.binder import Binder, CompletedBind
from extender.host_cpu import HostCpu
from extender.leader_watch import SchedulerLeaderWatch
from extender.metrics import SENT_ELSEWHERE, extender_metrics
from extender.node_backoff import NodeBackoff
from extender.nominations import Nominations
from extender.pending_releases import PendingReleases
from extender.reading import resolve_request
from extender.victims import Preemptor, choose_victims
from topology.demand import PRIOR, Demand

BODY_BYTES_MAX = 8 * 1024 * 1024
BEST_SCORE = 10
"""Highest documented score; times the configured weight it outweighs every scoring plugin together."""

Verb = Callable[[bytes], Awaitable[bytes]]


async def _no_budgets() -> DisruptionBudgets:
    return DisruptionBudgets()


@dataclass(frozen=True, slots=True)
class ExtenderParts:
    """What the handlers stand on."""

    mirror: ClusterMirror
    binder: Binder
    clock: Clock
    metrics: Metrics
    expectation_seconds: float
    budgets: Callable[[], Awaitable[DisruptionBudgets]] = _no_budgets
    """Lists the disruption budgets; asked only when kube-scheduler wants to preempt."""
    doorkeeper: PathAuthorizer | None = None
    """Says who may read the memory; without it nobody may."""
    scheduler_lease: str = names.SCHEDULER_LEADER_LEASE
    """Name of kube-scheduler's leader Lease."""
    node_hints: bool = True
    """Send pods to nodes that kube-scheduler's sample left out."""


@dataclass(frozen=True, slots=True)
class CachedVerdict:
    """The last answer of filter: it holds for prioritize too, as long as the ledger has not changed."""

    uid: str
    before_names: bytes
    revision: int
    demand: Demand
    best: Candidate | None


class ExtenderHandlers:
    """The four verbs."""

    def __init__(self, parts: ExtenderParts) -> None:
        self._parts = parts
        self._judged = CachedVerdict("", b"", 0, PRIOR, None)
        self._endings = PendingReleases(parts.mirror.ledger, parts.clock)
        self._refusals = NodeBackoff(parts.clock)
        self._beyond = BeyondSample(parts.mirror.ledger, parts.mirror.nodes.store, parts.clock, hints=parts.node_hints)
        parts.mirror.on_change(self._endings.observe)
        parts.mirror.on_change(self._refusals.observe)
        parts.mirror.on_change(self._beyond.observe)
        parts.mirror.on_change(HostCpu(parts.mirror.ledger.fleet).observe)
        parts.mirror.on_change(SchedulerLeaderWatch(parts.mirror, parts.scheduler_lease).observe)
        parts.mirror.on_change(Nominations(parts.mirror.ledger, parts.clock, self._request).observe)
        self._counted = extender_metrics(parts.metrics)
        parts.binder.observer = self._note_bound

    def routes(self) -> dict[str, Verb]:
        """Return the handler of each verb."""
        return {"filter": self.filter, "prioritize": self.prioritize, "bind": self.bind, "preempt": self.preempt}

    async def filter(self, body: bytes) -> bytes:
        """Say which nodes can give the pod its GPUs now, and why the others cannot."""
        call = wire.read_filter(body)
        if not pods.is_gpu_pod(call.pod):
            return wire.filter_reply(call.node_names or (), {})
        question = self._question(call.pod)
        verdicts = judge_nodes(call.node_names or (), question, self._parts.mirror.ledger)
        if better := self._beyond.better(call.pod, len(call.node_names or ()), question, verdicts.best):
            return self._send_elsewhere(call, better)
        while not verdicts.feasible and await self._endings.wait(call.node_names or (), self._request(call.pod)):
            verdicts = self._judge(call)
        uid, ledger = call.pod.metadata.uid, self._parts.mirror.ledger
        self._expect(uid, verdicts.best if len(verdicts.feasible) == 1 else None)
        self._judged = CachedVerdict(uid, wire.before_names(body), ledger.revision, ledger.demand, verdicts.best)
        self._counted.decisions.labels(verdicts.verdict.name.lower()).inc()
        if verdicts.rejected:
            for reason, count in Counter(verdicts.rejected.values()).items():
                self._counted.rejections.labels(reason).inc(count)
        return wire.filter_reply(verdicts.feasible, verdicts.rejected)

    def _send_elsewhere(self, call: wire.FilterCall, better: Candidate) -> bytes:
        """Refuse the sample for the better node, and count its GPUs as spoken for until the pod is sent there."""
        self._expect(call.pod.metadata.uid, better)
        self._counted.decisions.labels(SENT_ELSEWHERE).inc()
        return wire.filter_reply((), dict.fromkeys(call.node_names or (), refusal(better.node)))

    async def prioritize(self, body: bytes) -> bytes:
        """Name the one best node. It is asked moments after filter for the names that filter left."""
        uid, best = self._judged.uid, self._judged_before(body)
        if best is None:
            call = wire.read_filter(body)
            uid, best = call.pod.metadata.uid, self._judge(call).best
        self._expect(uid, best)
        return wire.prioritize_reply(best.node if best else None, BEST_SCORE)

    async def bind(self, body: bytes) -> bytes:
        """Reserve and bind."""
        call = wire.read_bind(body)
        error = await self._parts.binder.bind(call)
        self._counted.binds.labels("failed" if error else "bound").inc()
        return wire.bind_reply(error)

    async def show_memory(self, request: web.Request) -> web.Response:
        """Show what is held, to whom the API server lets read it."""
        now_seconds = self._parts.clock.monotonic_seconds()
        return await self._shown(request, lambda ledger: encode_memory(ledger_dump_of(ledger, now_seconds)))

    async def show_request_history(self, request: web.Request) -> web.Response:
        """Show the past requests by which sets are weighed, to whom the API server lets read it."""
        return await self._shown(request, lambda ledger: encode_past_asks(request_history_of(ledger)))

    async def _shown(self, request: web.Request, encode: Callable[[Ledger], bytes]) -> web.Response:
        keeper = self._parts.doorkeeper
        if keeper is None:
            return web.Response(status=404)
        refusal = await keeper.refusal(request.headers.get("Authorization", ""), request.path)
        if refusal is not None:
            return web.Response(status=refusal[0], text=refusal[1] + "\n")
        return web.Response(body=encode(self._parts.mirror.ledger), content_type="application/json")

    async def preempt(self, body: bytes) -> bytes:
        """Keep the candidate nodes whose victims would really make room, with all victims that this takes."""
        call = wire.read_preempt(body)
        candidates = call.candidates()
        if not pods.is_gpu_pod(call.pod):
            return wire.preempt_reply(candidates)
        if candidates and await self._spares_victims(call.pod):
            self._counted.preemptions.labels("spared").inc()
            return wire.preempt_reply({})
        budgets = await self._parts.budgets() if candidates else DisruptionBudgets()
        chosen = choose_victims(
            candidates,
            Preemptor(call.pod, self._request(call.pod)),
            self._parts.mirror.ledger,
            budgets=budgets,
            now_seconds=self._parts.clock.monotonic_seconds(),
        )
        self._counted.preemptions.labels("helped" if chosen else "helpless").inc()
        return wire.preempt_reply(chosen)

    async def _spares_victims(self, pod: Pod) -> bool:
        """Tell whether the pod fits on a node that kube-scheduler has not looked at, where it is to be sent."""
        if not self._beyond.may_spare(pod):
            return False
        feasible = self._judge(wire.FilterCall(pod, tuple(self._parts.mirror.ledger.nodes))).feasible
        fits = await asyncio.to_thread(self._beyond.free_nodes(pod, feasible).admits)
        return self._beyond.spares(pod, fits=fits)

    def timed(self, verb: str, handler: Verb) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Wrap a verb: 503 until ready, 400 for a body that cannot be read."""
        seconds = self._counted.seconds.labels(verb)

        async def answer(request: web.Request) -> web.Response:
            reason = self._parts.mirror.unready_reason()
            if reason:
                return web.Response(status=503, text=f"not ready: {reason}\n")
            with seconds.time():
                try:
                    reply = await handler(await request.read())
                except wire.MalformedCall as error:
                    return web.Response(status=400, text=f"{error}\n")
                except KubeError as error:
                    return web.Response(status=503, text=f"cannot ask the API server: {error}\n")
            return web.Response(body=reply, content_type="application/json")

        async def handle(request: web.Request) -> web.Response:
            response = await answer(request)
            self._counted.calls.labels(verb, str(response.status)).inc()
            return response

        return handle

    def _note_bound(self, bound: CompletedBind) -> None:
        self._counted.quality.labels(bound.policy).observe(bound.relative_quality)
        if bound.waited_seconds is not None:
            self._counted.waited.observe(bound.waited_seconds)

    def _judged_before(self, body: bytes) -> Candidate | None:
        """Return filter's best node if the call is about the same pod, nothing changed, and it is among the names.

        Fewer names make no other node better, so the thousands of others need not be read.
        """
        last, ledger = self._judged, self._parts.mirror.ledger
        if last.best is None or (last.revision, last.demand) != (ledger.revision, ledger.demand):
            return None
        return last.best if wire.is_followed_by(body, last.before_names, last.best.node) else None

    def _judge(self, call: wire.FilterCall) -> NodeVerdicts:
        return judge_nodes(call.node_names or (), self._question(call.pod), self._parts.mirror.ledger)

    def _question(self, pod: Pod) -> FilterInput:
        uid = pod.metadata.uid
        return FilterInput(
            uid=uid,
            request=self._request(pod),
            now_seconds=self._parts.clock.monotonic_seconds(),
            failed_nodes=self._parts.binder.failed_nodes(uid) | self._refusals.nodes(pod),
            priority=pod.spec.priority,
            cpu_milli=host_fit.needs(pod).get("cpu", 0),
        )

    def _request(self, pod: Pod) -> Request | Rejection:
        if self._refusals.pauses(pod):
            return Rejection(names.REJECT_REFUSED, Verdict.BUSY)
        return resolve_request(self._parts.mirror, pod)

    def _expect(self, uid: str, candidate: Candidate | None) -> None:
        """Count the set that the pod will probably get for the pods that are filtered before its bind arrives."""
        ledger = self._parts.mirror.ledger
        if candidate is None:
            ledger.drop_tentative(uid)
            return
        devices = ledger.nodes[candidate.node].devices
        ids = tuple(devices[position].id for position in candidate.choice.positions)
        until = self._parts.clock.monotonic_seconds() + self._parts.expectation_seconds
        ledger.put_tentative(uid, TentativePlacement(candidate.node, ids, until))


def build_app(parts: ExtenderParts) -> web.Application:
    """Return the application with the four verbs, health endpoints and metrics."""
    app = application(body_bytes_max=BODY_BYTES_MAX)
    handlers = ExtenderHandlers(parts)
    for verb, handler in handlers.routes().items():
        app.router.add_post(f"/{verb}", handlers.timed(verb, handler))
    app.router.add_get("/debug/ledger", handlers.show_memory)
    app.router.add_get("/debug/snapshot", handlers.show_request_history)
    add_health(app, ready=ready_checks(parts.mirror), metrics=parts.metrics)
    return app


def build_health_app(parts: ExtenderParts) -> web.Application:
    """Return the application with health and metrics alone, for whoever watches from outside of the pod."""
    app = application()
    add_health(app, ready=ready_checks(parts.mirror), metrics=parts.metrics)
    return app


def ready_checks(mirror: ClusterMirror) -> dict[str, Check]:
    """Return what must hold before kube-scheduler is answered."""
    return {"ledger": lambda: mirror.unready_reason() or None}
