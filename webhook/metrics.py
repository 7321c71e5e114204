"""What the webhook counts.

In: nothing but the registry. Out: one frozen bundle of metrics. Separate, so that their names stand on one page.
"""

from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from atoll.service.metrics import Metrics


@dataclass(frozen=True, slots=True)
class WebhookMetrics:
    """The metrics of one webhook process."""

    reviews: Counter
    lookups: Counter
    seconds: Histogram


def webhook_metrics(metrics: Metrics) -> WebhookMetrics:
    """Register the webhook's metrics."""
    return WebhookMetrics(
        reviews=metrics.counter(
            "reviews",
            "Reviews by answer",
            labels=["answer"],
            values=("changed", "unchanged", "denied", "malformed", "ignored"),
        ),
        lookups=metrics.counter(
            "claim_lookups",
            "GpuClaims looked up, by source; failed: the API server did not answer",
            labels=["source"],
            values=("watch", "live", "failed"),
        ),
        seconds=metrics.histogram("review_seconds", "Time to answer one review"),
    )
