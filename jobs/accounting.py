"""Looks at the GPUs of the cluster again and again, and records who holds them, what jobs cost, and spent budgets.

Reads the same watches as the controllers, folded into one ledger. Only the leader records. A look is taken at every
change of a Lease, and at least every few seconds; what it writes is decided in atoll.jobs.costs.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from atoll.cluster.objects import Pod
from atoll.cluster.pods import claim_name
from atoll.jobs.costs.evidence import PricedNodes, gpu_facts
from atoll.jobs.costs.prices import PriceTable, is_spot_node
from atoll.jobs.costs.spans import WHOLE_PPM, GpuFact, TimeUse
from atoll.jobs.policy import JobToleration
from atoll.jobs.states import IllegalStep
from atoll.kube.cache import Change
from atoll.kube.clock import Clock, within
from atoll.kube.mirror import ClusterMirror, WatchedKind
from atoll.service.metrics import Metrics, Series
from jobs.accounts import budgeted_ids, observe_gpus, settle_costs, spend
from jobs.database import Database
from jobs.errors import JobServiceError

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 15.0
"""Most time between two looks."""
SETTLE_SECONDS: Final = 1.0
"""The Leases of a pod come and go one by one; one look takes them together."""
GAP_SECONDS: Final = 60.0
"""Looks that are further apart, as after a restart, prove nothing of the time between them."""


class GpuAccounting:
    """Records the GPU time of one cluster; `run` as one task, while this process leads."""

    def __init__(
        self,
        mirror: ClusterMirror,
        database: Database,
        clock: Clock,
        *,
        cluster: str,
        prices: PriceTable,
        spot: tuple[JobToleration, ...],
        tenant_of: Callable[[str], str],
        wake: Callable[[str], None],
    ) -> None:
        self._mirror = mirror
        self._database = database
        self._clock = clock
        self._cluster = cluster
        self._prices = prices
        self._spot = spot
        self._tenant_of = tenant_of
        self._wake = wake
        self._changed = asyncio.Event()
        self._looked_seconds: float | None = None
        self._budget_failures_count = 0
        self.gpus: Counter[TimeUse] = Counter()
        """GPUs in each state at the last look."""
        mirror.on_change(self._observe)

    def register(self, metrics: Metrics) -> None:
        """Publish what was seen last."""
        gpus = Series(metrics.gauge("gpus", "GPUs by what their time goes into", labels=("use",)))
        metrics.before_page(
            lambda: gpus.tell({(use.value,): self.gpus[use] / WHOLE_PPM for use in TimeUse} if self.gpus else {})
        )
        metrics.counter_of(
            "budget_failures", "Spent budgets that could not be acted on", lambda: self._budget_failures_count
        )
        metrics.gauge_of(
            "usage_age_seconds", "Time since the GPUs were recorded; NaN before the first time", self._age_seconds
        )

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            self._changed.clear()
            try:
                await self.look()
            except SQLAlchemyError as error:
                log.warning("Could not record GPU time", err=str(error).partition("\n")[0])
            await self._clock.sleep(SETTLE_SECONDS)
            with suppress(TimeoutError):
                await within(self._clock, LOOK_SECONDS - SETTLE_SECONDS, self._changed.wait())

    async def look(self) -> None:
        """Record what is seen now, unless the watches are incomplete. Raises SQLAlchemy's errors."""
        if not self._mirror.is_ready():
            return
        facts, now = self._facts(), self._clock.now()
        await self._database.write(
            lambda session: observe_gpus(
                session, self._cluster, facts, now, tenant_of=self._tenant_of, gap_seconds=GAP_SECONDS
            )
        )
        self._looked_seconds = self._clock.monotonic_seconds()
        self.gpus = Counter()
        for fact in facts.values():
            self.gpus[fact.use] += fact.share_ppm
        for job_id in await self._database.read(lambda session: budgeted_ids(session, self._cluster)):
            await self._spend(job_id)
        await self._database.write(lambda session: settle_costs(session, self._cluster, now))

    async def _spend(self, job_id: str) -> None:
        """Act on the budget of one job. What prevents that holds up no other job; the next look tries again."""
        now = self._clock.now()
        try:
            decided = await self._database.write(lambda session: spend(session, job_id, now))
        except (JobServiceError, IllegalStep) as error:
            self._budget_failures_count += 1
            log.warning("Could not act on a budget", job=job_id, err=str(error))
            return
        if decided is not None:
            log.info("A budget is spent", job=job_id, action=decided.action.value, reason=decided.message)
            self._wake(job_id)

    def _facts(self) -> Mapping[str, GpuFact]:
        mirror = self._mirror
        spot = frozenset(
            node.metadata.name
            for node in mirror.nodes.store.values()
            if is_spot_node([(taint.key, taint.value) for taint in node.spec.taints], self._spot)
        )
        return gpu_facts(
            mirror.ledger,
            mirror.reports,
            PricedNodes(self._prices, spot),
            self._models_of,
            now_seconds=self._clock.monotonic_seconds(),
        )

    def _models_of(self, pod: Pod) -> tuple[str, ...]:
        claim = self._mirror.claim(pod.metadata.namespace, claim_name(pod))
        return claim.spec.devices.models if claim is not None else ()

    def _observe(self, kind: WatchedKind, _change: Change[Any]) -> None:
        if kind in (WatchedKind.LEASE, WatchedKind.NODE):
            self._changed.set()

    def _age_seconds(self) -> float:
        if self._looked_seconds is None:
            return float("nan")
        return self._clock.monotonic_seconds() - self._looked_seconds
