"""Metrics of the webhook."""

from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from atoll.service.metrics import Metrics
from webhook.serving import ServingCertificate


@dataclass(frozen=True, slots=True)
class WebhookMetrics:
    """The metrics of one webhook process."""

    reviews: Counter
    lookups: Counter
    seconds: Histogram


def webhook_metrics(metrics: Metrics, certificate: ServingCertificate) -> WebhookMetrics:
    """Register the webhook's metrics; once per process."""
    metrics.gauge_of(
        "certificate_end_timestamp_seconds", "When the certificate ends", lambda: certificate.ends_timestamp
    )
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
