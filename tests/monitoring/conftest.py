"""Fixtures: the metrics registries of all parts, built by the parts' own code, without running parts."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import Metric

from agent.metrics import agent_metrics
from agent.node_agent import NodeAgent
from atoll.jobs.costs.prices import PriceTable
from atoll.kube.mirror import ClusterMirror
from atoll.ml.policy import MlPolicy
from atoll.service.api_metrics import count_calls, register_watch_metrics
from atoll.service.metrics import Metrics
from controllers.gpu_stats import GpuStatsPublisher
from controllers.metrics import controller_metrics
from controllers.page.serving import register_page_metrics
from controllers.runner import register_leadership_metrics
from extender.metrics import extender_metrics
from jobs.accounting import GpuAccounting
from jobs.fleet import ClusterFleet
from jobs.log_archive import LogArchive
from jobs.serving import register_job_metrics
from jobs.webhook_sender import WebhookSender
from tests.fakes.clock import ManualClock
from webhook.metrics import webhook_metrics
from webhook.serving import ServingCertificate

WATCH = SimpleNamespace(listings_count=1, undecodable_count=0, seconds_since_heard=lambda: 1.0)
AGENT = SimpleNamespace(
    observations_count=1,
    publications_count=1,
    failures_count=0,
    observation_seconds=0.1,
    evidence_is_complete=True,
    driver_problem="",
    devices=(),
    watches={"pod": WATCH},
    seconds_since_observation=lambda: 1.0,
)

FLEET = cast("ClusterFleet", SimpleNamespace(queue_length=0, unreachable_count=0, resync_age_seconds=lambda: 1.0))


def registries() -> Iterator[Metrics]:
    """Yield the metrics of each part."""
    parts = {name: Metrics(name) for name in ("extender", "webhook", "agent", "controllers", "jobs")}
    extender_metrics(parts["extender"])
    webhook_metrics(parts["webhook"], ServingCertificate())
    agent_metrics(parts["agent"], cast("NodeAgent", AGENT))
    controller_metrics(parts["controllers"])
    GpuStatsPublisher(parts["controllers"], cast("ClusterMirror", SimpleNamespace()), ManualClock())
    register_leadership_metrics(parts["controllers"], cast("Any", SimpleNamespace(is_leader=True)))
    register_page_metrics(parts["controllers"], cast("Any", SimpleNamespace(watchers=0, spent_seconds=0.0)))
    mirror = cast("ClusterMirror", SimpleNamespace(on_change=lambda _listener: None))
    accounting = GpuAccounting(
        mirror,
        cast("Any", None),
        ManualClock(),
        cluster="local",
        prices=PriceTable(),
        spot=(),
        tenant_of=str,
        wake=lambda _job: None,
    )
    register_job_metrics(parts["jobs"], lambda: True, FLEET, lambda: 0)
    accounting.register(parts["jobs"])
    WebhookSender(cast("Any", None), None, ManualClock(), policy=MlPolicy()).register(parts["jobs"])
    LogArchive("file:///logs/{tenant}/", bytes_max=1024, clock=ManualClock()).register(parts["jobs"])
    for name, metrics in parts.items():
        count_calls(metrics, cast("Any", SimpleNamespace(throttled_seconds=0.0)))
        if name != "agent":
            register_watch_metrics(metrics, {"pod": cast("Any", WATCH)})
        metrics.register_readiness(lambda: True)
    yield from parts.values()


@pytest.fixture(scope="session")
def families() -> dict[str, Metric]:
    """Return every metric of every part by name, counters with `_total`."""
    found = [family for metrics in registries() for family in metrics.registry.collect()]
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in found}
