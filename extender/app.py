"""HTTP face of the extender: decode, decide, encode. Every answer that kube-scheduler acts on is HTTP 200.

Until the ledger is complete and fresh every verb answers 503, which kube-scheduler retries; pods without a claim never
come here.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from atoll.cluster import pods
from atoll.cluster.ledger import Expectation
from atoll.cluster.objects import Pod
from atoll.cluster.requests import Rejection, Request, request_of
from atoll.cluster.selection import Candidate
from atoll.kube.mirror import ClusterMirror
from atoll.service.clock import Clock
from atoll.service.http import add_health, application
from atoll.service.metrics import Metrics
from extender import wire
from extender.binder import Binder
from extender.endings import Endings
from extender.verdicts import NodeVerdicts, Question, judge_nodes
from extender.victims import keep_helpful

BODY_BYTES_MAX = 8 * 1024 * 1024
BEST_SCORE = 10
"""Highest documented score; times the configured weight it outweighs every scoring plugin together."""

Verb = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the handlers stand on."""

    mirror: ClusterMirror
    binder: Binder
    clock: Clock
    metrics: Metrics
    expectation_seconds: float


@dataclass(frozen=True, slots=True)
class Judged:
    """The last answer of filter: it holds for prioritize too, as long as the ledger has not changed."""

    uid: str
    revision: int
    best: Candidate | None


class Handlers:
    """The four verbs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._judged = Judged("", 0, None)
        self._endings = Endings(parts.mirror.ledger, parts.clock)
        parts.mirror.on_change(self._endings.observe)
        self._seconds = parts.metrics.histogram(
            "call_seconds", "Time to answer a call of kube-scheduler", labels=["verb"]
        )
        self._rejected = parts.metrics.counter(
            "rejections_total", "Nodes refused to pods that fit nowhere", labels=["reason"]
        )
        self._binds = parts.metrics.counter("binds_total", "Bind calls", labels=["outcome"])

    def routes(self) -> dict[str, Verb]:
        """Return the handler of each verb."""
        return {"filter": self.filter, "prioritize": self.prioritize, "bind": self.bind, "preempt": self.preempt}

    async def filter(self, body: bytes) -> bytes:
        """Say which nodes can give the pod its GPUs now, and why the others cannot."""
        call = wire.read_filter(body)
        verdicts = self._judge(call)
        while not verdicts.feasible and await self._endings.made_room(call.node_names or (), self._request(call.pod)):
            verdicts = self._judge(call)
        self._expect(call.pod, verdicts.best if len(verdicts.feasible) == 1 else None)
        self._judged = Judged(call.pod.metadata.uid, self._parts.mirror.ledger.revision, verdicts.best)
        for reason, count in Counter(verdicts.rejected.values()).items():
            self._rejected.labels(reason).inc(count)
        return wire.filter_reply(verdicts.feasible, verdicts.rejected)

    async def prioritize(self, body: bytes) -> bytes:
        """Name the one best node. It is asked moments after filter for the names that filter left."""
        call = wire.read_filter(body)
        best = self._judged_before(call) or self._judge(call).best
        self._expect(call.pod, best)
        return wire.prioritize_reply(best.node if best else None, BEST_SCORE)

    async def bind(self, body: bytes) -> bytes:
        """Reserve and bind."""
        call = wire.read_bind(body)
        error = await self._parts.binder.bind(call)
        self._binds.labels("failed" if error else "bound").inc()
        return wire.bind_reply(error)

    async def preempt(self, body: bytes) -> bytes:
        """Keep the candidate nodes whose victims would really make room."""
        call = wire.read_preempt(body)
        candidates = call.node_name_to_meta_victims or {}
        now = self._parts.clock.monotonic_seconds()
        kept = keep_helpful(candidates, self._request(call.pod), self._parts.mirror.ledger, now)
        return wire.preempt_reply(kept)

    def timed(self, verb: str, handler: Verb) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Wrap a verb: 503 until ready, 400 for a body that cannot be read."""
        seconds = self._seconds.labels(verb)

        async def handle(request: web.Request) -> web.Response:
            reason = self._parts.mirror.unready_reason()
            if reason:
                return web.Response(status=503, text=f"not ready: {reason}\n")
            with seconds.time():
                try:
                    reply = await handler(await request.read())
                except wire.MalformedCall as error:
                    return web.Response(status=400, text=f"{error}\n")
            return web.Response(body=reply, content_type="application/json")

        return handle

    def _judged_before(self, call: wire.FilterCall) -> Candidate | None:
        """Return filter's best node if nothing changed and it is among the names; fewer names make no other better."""
        last = self._judged
        is_same = (last.uid, last.revision) == (call.pod.metadata.uid, self._parts.mirror.ledger.revision)
        return last.best if is_same and last.best and last.best.node in (call.node_names or ()) else None

    def _judge(self, call: wire.FilterCall) -> NodeVerdicts:
        uid = call.pod.metadata.uid
        question = Question(
            uid=uid,
            request=self._request(call.pod),
            now_seconds=self._parts.clock.monotonic_seconds(),
            failed_nodes=self._parts.binder.failed_nodes(uid),
            priority=call.pod.spec.priority,
        )
        return judge_nodes(call.node_names or (), question, self._parts.mirror.ledger)

    def _request(self, pod: Pod) -> Request | Rejection:
        return request_of(pod, self._parts.mirror.claim(pod.metadata.namespace, pods.claim_name(pod)))

    def _expect(self, pod: Pod, candidate: Candidate | None) -> None:
        """Count the set that the pod will probably get for the pods that are filtered before its bind arrives."""
        ledger = self._parts.mirror.ledger
        if candidate is None:
            ledger.unexpect(pod.metadata.uid)
            return
        devices = ledger.nodes[candidate.node].devices
        ids = tuple(devices[position].id for position in candidate.choice.positions)
        until = self._parts.clock.monotonic_seconds() + self._parts.expectation_seconds
        ledger.expect(pod.metadata.uid, Expectation(candidate.node, ids, until))


def build_app(parts: Parts) -> web.Application:
    """Return the application with the four verbs, health endpoints and metrics."""
    app = application(body_bytes_max=BODY_BYTES_MAX)
    handlers = Handlers(parts)
    for verb, handler in handlers.routes().items():
        app.router.add_post(f"/{verb}", handlers.timed(verb, handler))
    add_health(app, ready={"ledger": lambda: parts.mirror.unready_reason() or None}, metrics=parts.metrics)
    return app
