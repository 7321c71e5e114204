"""The metrics of the extender. Every label's values are bounded."""

from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from atoll.cluster.requests import Verdict
from atoll.service.metrics import Metrics
from topology.device_requests import Policy

QUALITY_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
WAIT_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)

SENT_ELSEWHERE = "elsewhere"
"""The sample was refused for a node outside of it."""


@dataclass(frozen=True, slots=True)
class ExtenderMetrics:
    """The metrics of one extender process."""

    seconds: Histogram
    calls: Counter
    decisions: Counter
    rejections: Counter
    preemptions: Counter
    binds: Counter
    quality: Histogram
    waited: Histogram


def extender_metrics(metrics: Metrics) -> ExtenderMetrics:
    """Register the extender's metrics; once per process."""
    return ExtenderMetrics(
        seconds=metrics.histogram("call_seconds", "Time to answer a call of kube-scheduler", labels=("verb",)),
        calls=metrics.counter("calls", "Calls of kube-scheduler, by the HTTP status", labels=("verb", "code")),
        decisions=metrics.counter(
            "decisions",
            "Filter calls for GPU pods, by the verdict on the nodes asked about; elsewhere: another node suits better",
            labels=("outcome",),
            values=[*(verdict.name.lower() for verdict in Verdict), SENT_ELSEWHERE],
        ),
        rejections=metrics.counter("rejections", "Nodes refused to pods, by the text", labels=("reason",)),
        preemptions=metrics.counter(
            "preemptions",
            "Preempt calls: a candidate node can help, none can, or the pod fits elsewhere",
            labels=("outcome",),
            values=("helped", "helpless", "spared"),
        ),
        binds=metrics.counter("binds", "Bind calls, by outcome", labels=("outcome",), values=("bound", "failed")),
        quality=metrics.histogram(
            "placement_quality",
            "Ring bandwidth of the GPUs of a bound pod, relative to the best set of that size on the empty machine",
            labels=("policy",),
            values=Policy,
            buckets=QUALITY_BUCKETS,
        ),
        waited=metrics.histogram("pod_wait_seconds", "Age of a pod when it was bound", buckets=WAIT_BUCKETS),
    )
